"""Text to train on: a tokenizer made from it, its tokens on the device, and the same batches for every run."""
import lzma
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

SEPARATOR = "<|endoftext|>"
HELD_OUT = 0.02  # of the tokens, at the end


def read_books(path):
    """The books of a text file (.txt, .txt.xz), or those of all such files in a folder."""
    path = Path(path)
    files = sorted(f for f in path.iterdir() if f.name.endswith((".txt", ".txt.xz"))) if path.is_dir() else [path]
    if not files:
        raise ValueError(f"{path} holds no .txt or .txt.xz file")
    texts = [(lzma.decompress(f.read_bytes()) if f.suffix == ".xz" else f.read_bytes()).decode() for f in files]
    return [book.strip() for text in texts for book in text.split(SEPARATOR) if book.strip()]


def make_tokenizer(books, vocabulary):
    """A byte-level BPE of `vocabulary` tokens, the separator being number 0."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(vocab_size=vocabulary, special_tokens=[SEPARATOR], show_progress=False,
                                  initial_alphabet=pre_tokenizers.ByteLevel.alphabet())
    tokenizer.train_from_iterator(books, trainer)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=SEPARATOR, bos_token=SEPARATOR,
                                   pad_token=SEPARATOR)


class Tokens:
    """One long row of tokens: those to train on and, at its end, those held out."""

    def __init__(self, books, tokenizer, device):
        rows = tokenizer.backend_tokenizer.encode_batch(books)
        stream = [token for row in rows for token in [tokenizer.eos_token_id, *row.ids]]
        split = int(len(stream) * (1 - HELD_OUT))
        self.training = torch.tensor(stream[:split], device=device)
        self.held_out = torch.tensor(stream[split:], device=device)

    def batches(self, steps, rows, length, seed):
        """`steps` batches of `rows` pieces of `length` + 1 tokens from random places, the same for the same seed."""
        generator = torch.Generator().manual_seed(seed)
        begins = torch.randint(len(self.training) - length, (steps, rows, 1), generator=generator)
        places = torch.arange(length + 1, device=self.training.device)
        for begin in begins.to(self.training.device):
            yield self.training[begin + places]

    def held_out_rows(self, length):
        count = (len(self.held_out) - 1) // length
        places = torch.arange(length + 1, device=self.held_out.device)
        return self.held_out[places + length * torch.arange(count, device=places.device).view(-1, 1)]
