"""Token ids of GGUF files with SentencePiece's BPE against the `sentencepiece` package, on models trained here.

BASIN_ENCODE_TOOL is the driver of tests/text/encode_tool.cc.
"""

import io
import json
import os
import struct
import subprocess
import sys
import tempfile
import unittest
from pathlib import Path

import sentencepiece

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent / "fuzz")]
from corpus import SENTENCES, random_texts  # noqa: E402
from make_seeds import gguf, key, string, strings  # noqa: E402

# Gemma has its white space, its HTML tags and some special tokens among the user's symbols.
SYMBOLS = ["\n", "\n\n", "\n\n\n", "▁▁", "▁▁▁", "▁▁▁▁", "<b>", "</b>", "<bb>", "[x]"]


def train(prefix, symbols, fallback=True):
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(SENTENCES * 3 + list(random_texts(150, 1))), model_writer=model, vocab_size=4000,
        model_type="bpe", byte_fallback=fallback, add_dummy_prefix=prefix, normalization_rule_name="identity",
        remove_extra_whitespaces=False, character_coverage=0.98, user_defined_symbols=symbols, control_symbols=["<turn>"],
        hard_vocab_limit=False, minloglevel=3)
    processor = sentencepiece.SentencePieceProcessor()
    processor.LoadFromSerializedProto(model.getvalue())
    return processor


def kind(processor, token, symbols):
    if processor.IsControl(token):
        return 3
    if processor.IsUnknown(token):
        return 2
    if processor.IsByte(token):
        return 6
    return 4 if processor.IdToPiece(token) in symbols else 1


def numbers(name, code, kind_of, values):
    return key(name, 9, struct.pack(f"<IQ{len(values)}{code}", kind_of, len(values), *values))


def write_gguf(processor, path, prefix, symbols):
    """As the public converter does it: white space in the user's symbols is plain."""
    ids = range(processor.GetPieceSize())
    kinds = [kind(processor, token, symbols) for token in ids]
    pieces = [processor.IdToPiece(token) for token in ids]
    pieces = [piece.replace("▁", " ") if k == 4 else piece for piece, k in zip(pieces, kinds)]
    path.write_bytes(gguf([
        key("tokenizer.ggml.model", 8, string("llama")),
        key("tokenizer.ggml.pre", 8, string("default")),
        strings("tokenizer.ggml.tokens", pieces),
        numbers("tokenizer.ggml.scores", "f", 6, [processor.GetScore(token) for token in ids]),
        numbers("tokenizer.ggml.token_type", "i", 5, kinds),
        key("tokenizer.ggml.bos_token_id", 4, struct.pack("<I", processor.bos_id())),
        key("tokenizer.ggml.eos_token_id", 4, struct.pack("<I", processor.eos_id())),
        key("tokenizer.ggml.unknown_token_id", 4, struct.pack("<I", processor.unk_id())),
        key("tokenizer.ggml.add_space_prefix", 7, struct.pack("<?", prefix)),
    ]))


def encode(path, texts):
    lines = "".join(json.dumps({"text": text, "special": False}) + "\n" for text in texts)
    done = subprocess.run([os.environ["BASIN_ENCODE_TOOL"], str(path)], input=lines, capture_output=True, text=True, check=True)
    return [json.loads(line) for line in done.stdout.split("\n") if line]


class Oracle(unittest.TestCase):
    def compare(self, prefix, symbols, fallback=True):
        # SentencePiece puts its space before the text; GGUF's readers, before every stretch between tokens.
        texts = SENTENCES + list(random_texts(400, 2)) + [
            "<b>bold</b> <bb> [x]\n\n\n\n    code\n  </b", "<0x0A> <turn> <s> </s> <unk>", "▁▁a ▁ b▁", "\n\n  \n x",
            "\n".join(SENTENCES), " ".join(random_texts(50, 3))]
        processor = train(prefix, symbols, fallback)
        with tempfile.TemporaryDirectory() as name:
            path = Path(name) / "model.gguf"
            write_gguf(processor, path, prefix, symbols)
            answers = encode(path, texts)
        self.assertEqual(len(answers), len(texts))
        for text, answer in zip(texts, answers):
            expected = processor.EncodeAsIds(text)
            self.assertEqual(answer["ids"], expected, repr(text))
            if fallback and "▁" not in text:
                self.assertEqual(answer["text"], text)

    def test_gemma(self):
        self.compare(prefix=False, symbols=SYMBOLS)

    def test_llama2(self):
        self.compare(prefix=True, symbols=[])

    def test_without_byte_tokens(self):
        self.compare(prefix=False, symbols=[], fallback=False)


if __name__ == "__main__":
    unittest.main()
