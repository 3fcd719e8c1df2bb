"""Token ids against the `tokenizers` package, on tokenizers trained here.

BASIN_ENCODE_TOOL is the driver of tests/text/encode_tool.cc. BASIN_BINARY, when it names a file, is checked as well.
"""

import json
import os
import struct
import subprocess
import sys
import tempfile
import unittest
from pathlib import Path

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent / "fuzz")]
from corpus import SENTENCES, random_texts  # noqa: E402
from make_seeds import gguf, key, string, strings  # noqa: E402

CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
TAIL = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
QWEN = CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}" + TAIL
LLAMA = CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}" + TAIL
GPT4O = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+" + CONTRACTIONS + "?"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*" + CONTRACTIONS + "?"
    r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
DEEPSEEK_LLM = [
    r"[\r\n]",
    r"\s?[A-Za-z\x{b5}\x{c0}-\x{d6}\x{d8}-\x{f6}\x{f8}-\x{1ba}\x{1bc}-\x{1bf}\x{1c4}-\x{293}\x{295}-\x{2af}"
    r"\x{370}-\x{373}\x{376}\x{377}\x{37b}-\x{37d}\x{37f}\x{386}\x{388}-\x{38a}\x{38c}\x{38e}-\x{3a1}"
    r"\x{3a3}-\x{3f5}\x{3f7}-\x{481}\x{48a}-\x{52f}\x{531}-\x{556}\x{10a0}-\x{10c5}\x{13a0}-\x{13f5}"
    r"\x{13f8}-\x{13fd}\x{1c90}-\x{1cba}\x{1cbd}-\x{1cbf}\x{1d00}-\x{1d2b}\x{1d6b}-\x{1d77}"
    r"\x{1d79}-\x{1d9a}\x{1e00}-\x{1f15}\x{1f18}-\x{1f1d}\x{1f20}-\x{1f45}\x{1f48}-\x{1f4d}"
    r"\x{1f50}-\x{1f57}\x{1f59}\x{1f5b}\x{1f5d}\x{1f5f}-\x{1f7d}\x{1f80}-\x{1fb4}\x{1fb6}-\x{1fbc}\x{1fbe}"
    r"\x{1fc2}-\x{1fc4}\x{1fc6}-\x{1fcc}\x{1fd0}-\x{1fd3}\x{1fd6}-\x{1fdb}\x{1fe0}-\x{1fec}"
    r"\x{1ff2}-\x{1ff4}\x{1ff6}-\x{1ffc}\x{2102}\x{2107}\x{210a}-\x{2113}\x{2115}\x{2119}-\x{211d}\x{2124}"
    r"\x{2126}\x{2128}\x{212a}-\x{212d}\x{212f}-\x{2134}\x{2139}\x{213c}-\x{213f}\x{2145}-\x{2149}\x{214e}"
    r"\x{2183}\x{2184}\x{2c00}-\x{2c7b}\x{2c7e}-\x{2ce4}\x{2ceb}-\x{2cee}\x{2cf2}\x{2cf3}\x{a640}-\x{a66d}"
    r"\x{a680}-\x{a69b}\x{a722}-\x{a76f}\x{a771}-\x{a787}\x{a78b}-\x{a78e}\x{ab70}-\x{abbf}"
    r"\x{fb00}-\x{fb06}\x{fb13}-\x{fb17}\x{ff21}-\x{ff3a}\x{ff41}-\x{ff5a}\x{10400}-\x{1044f}"
    r"\x{104b0}-\x{104d3}\x{104d8}-\x{104fb}\x{10c80}-\x{10cb2}\x{10cc0}-\x{10cf2}\x{118a0}-\x{118df}"
    r"\x{1e900}-\x{1e943}"
    r"]+",
    r"\s?[!-/:-~！-／：-～‘-‟　-。]+",
    r"\s+$",
    r"[一-龥ࠀ-一가-퟿]+",
]
DEEPSEEK_CODER = [r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", r"[一-龥ࠀ-一가-퟿]+"]
DEEPSEEK_V3 = [
    r"\p{N}{1,3}",
    "[一-龥぀-ゟ゠-ヿ]+",
    "[!\"#$%&'()*+,\\-./:;<=>?@\\[\\\\\\]^_`{|}~][A-Za-z]+|[^\r\n\\p{L}\\p{P}\\p{S}]?[\\p{L}\\p{M}]+"
    "| ?[\\p{P}\\p{S}]+[\r\n]*|\\s*[\r\n]+|\\s+(?!\\S)|\\s+",
]
SPECIALS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]

def byte_level(**options):
    return pre_tokenizers.ByteLevel(add_prefix_space=options.get("prefix", False), use_regex=options.get("regex", False))


def split(pattern, behavior="isolated", invert=False):
    return pre_tokenizers.Split(Regex(pattern) if not pattern.startswith("=") else pattern[1:], behavior, invert)


def sequence(*steps):
    return pre_tokenizers.Sequence(list(steps))


def metaspace(scheme, split_words=False):
    return pre_tokenizers.Metaspace(replacement="▁", prepend_scheme=scheme, split=split_words)


TO_META = normalizers.Replace(" ", "▁")
FROM_META = decoders.Replace("▁", " ")
FALLBACK = [decoders.ByteFallback(), decoders.Fuse()]
STRIP = decoders.Strip(" ", 1, 0)

FAMILIES = {
    "gpt2": dict(pre=byte_level(regex=True)),
    "gpt2_prefix_space": dict(pre=byte_level(regex=True, prefix=True)),
    "qwen": dict(pre=sequence(split(QWEN), byte_level()), nfc=True),
    "llama3": dict(pre=sequence(split(LLAMA), byte_level()), model=dict(ignore_merges=True), bos="<|im_start|>"),
    "gpt4o": dict(pre=sequence(split(GPT4O), byte_level())),
    "smollm": dict(pre=sequence(pre_tokenizers.Digits(individual_digits=True), byte_level(regex=True)), alphabet=False),
    "unknown": dict(pre=byte_level(regex=True), alphabet=False, model=dict(unk_token="<|endoftext|>")),
    "fused_unknown": dict(pre=byte_level(regex=True), alphabet=False, model=dict(unk_token="<|endoftext|>", fuse_unk=True)),
    "digit_runs": dict(pre=sequence(pre_tokenizers.Digits(individual_digits=False), byte_level(prefix=True))),
    "removed": dict(pre=sequence(split(r"\s+", "removed"), byte_level())),
    "kept_only": dict(pre=sequence(split(r"\p{L}+|\d", "removed", True), byte_level())),
    "merged_with_previous": dict(pre=sequence(split("= ", "merged_with_previous"), byte_level())),
    "merged_with_next": dict(pre=sequence(split(r"[ \n.]", "merged_with_next"), byte_level(regex=True))),
    "contiguous": dict(pre=sequence(split(r"\S", "contiguous"), byte_level())),
    "deepseek_llm": dict(pre=sequence(*map(split, DEEPSEEK_LLM), pre_tokenizers.Digits(individual_digits=False), byte_level())),
    "deepseek_coder": dict(pre=sequence(*map(split, DEEPSEEK_CODER), pre_tokenizers.Digits(individual_digits=True), byte_level())),
    "deepseek_v3": dict(pre=sequence(*map(split, DEEPSEEK_V3), byte_level())),
    "ends_of_lines": dict(pre=sequence(split(r"\s$|\S$|x"), byte_level())),
    # Tokens in characters, as converted from SentencePiece; Llama 2's files came in two forms.
    "llama2": dict(pre=None, normalizer=[normalizers.Prepend("▁"), TO_META], decoder=[FROM_META, *FALLBACK, STRIP], fallback=True,
                   model=dict(unk_token="<unk>", fuse_unk=True)),
    "llama2_metaspace": dict(pre=metaspace("first"), decoder=[FROM_META, *FALLBACK, STRIP], fallback=True,
                             model=dict(unk_token="<unk>", fuse_unk=True)),
    "gemma": dict(pre=split("= ", "merged_with_previous"), normalizer=[TO_META], decoder=[FROM_META, *FALLBACK], fallback=True,
                  model=dict(unk_token="<unk>", fuse_unk=True)),
    "metaspace_words": dict(pre=metaspace("always", True), decoder=[decoders.Metaspace()], model=dict(unk_token="<unk>")),
    "metaspace_fused": dict(pre=metaspace("never", True), decoder=[decoders.Metaspace(prepend_scheme="never")],
                            model=dict(unk_token="<unk>", fuse_unk=True)),
    "metaspace_dropped": dict(pre=metaspace("never"), normalizer=[normalizers.NFC()], decoder=[FROM_META]),
    "chained": dict(pre=sequence(split(r"\p{N}{1,3}"), split(r"[一-龥぀-ゟ゠-ヿ]+"), split(r"[!-/:-~]?\p{L}+|\s+(?!\S)|\s+"),
                                 byte_level())),
}


def with_byte_tokens(tokenizer):
    document = json.loads(tokenizer.to_str())
    document["model"]["byte_fallback"] = True
    vocabulary = document["model"]["vocab"]
    vocabulary |= {f"<0x{byte:02X}>": len(vocabulary) + byte for byte in range(256)}
    return Tokenizer.from_str(json.dumps(document))


# The families that GGUF files name.
GGUF_NAMES = {"gpt2": "gpt-2", "smollm": "smollm", "qwen": "qwen2", "llama3": "llama-bpe", "gpt4o": "gpt-4o",
              "deepseek_llm": "deepseek-llm", "deepseek_coder": "deepseek-coder", "deepseek_v3": "deepseek-v3"}


def write_gguf(tokenizer, name, path):
    document = json.loads(tokenizer.to_str())
    added = {token["id"]: token for token in document["added_tokens"]}
    size = tokenizer.get_vocab_size()
    types = [1 if number not in added else 3 if added[number]["special"] else 4 for number in range(size)]
    path.write_bytes(gguf([
        key("tokenizer.ggml.model", 8, string("gpt2")),
        key("tokenizer.ggml.pre", 8, string(name)),
        strings("tokenizer.ggml.tokens", [tokenizer.id_to_token(number) for number in range(size)]),
        key("tokenizer.ggml.token_type", 9, struct.pack(f"<IQ{size}i", 5, size, *types)),
        strings("tokenizer.ggml.merges", [" ".join(merge) for merge in document["model"]["merges"]]),
        key("tokenizer.ggml.bos_token_id", 4, struct.pack("<I", 1)),
    ]))


def train(family, directory, extras=True):
    spec = FAMILIES[family]
    tokenizer = Tokenizer(models.BPE(**spec.get("model", {})))
    if spec.get("nfc"):
        tokenizer.normalizer = normalizers.NFC()
    if "normalizer" in spec:
        tokenizer.normalizer = normalizers.Sequence(spec["normalizer"])
    if spec["pre"] is not None:
        tokenizer.pre_tokenizer = spec["pre"]
    characters = "decoder" in spec
    tokenizer.decoder = decoders.Sequence(spec["decoder"]) if characters else decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet() if spec.get("alphabet", not characters) else []
    specials = SPECIALS + ["<unk>"] if characters else SPECIALS
    # Of characters only some have a token, so that the others are unknown or fall back to bytes.
    limit = dict(limit_alphabet=300, max_token_length=12) if characters else {}
    trainer = trainers.BpeTrainer(vocab_size=1200, special_tokens=specials, initial_alphabet=alphabet, show_progress=False,
                                  **limit)
    # Special tokens stay out of the corpus: a merge that spells one would be refused.
    corpus = [text.replace("<", "") for text in SENTENCES * 3 + list(random_texts(150, 1))]
    tokenizer.train_from_iterator(corpus, trainer)
    if spec.get("fallback"):
        tokenizer = with_byte_tokens(tokenizer)
    if extras:  # white space and normalisation of added tokens are what a GGUF file cannot say
        tokenizer.add_tokens(["<tool>", "</tool>", AddedToken("<left>", lstrip=True), AddedToken("<right>", rstrip=True),
                              AddedToken("cafe\u0301", normalized=True), AddedToken("<tool", normalized=False)])
        tokenizer.add_special_tokens([AddedToken("<pad-both>", lstrip=True, rstrip=True)])
    else:
        tokenizer.add_tokens([AddedToken(token, normalized=False) for token in ("<tool>", "</tool>", "<tool")])
    if spec.get("bos"):
        tokenizer.post_processor = processors.TemplateProcessing(
            single=f"{spec['bos']} $A", special_tokens=[(spec["bos"], tokenizer.token_to_id(spec["bos"]))])
    tokenizer.save(str(directory / "tokenizer.json"))
    return tokenizer


class Oracle(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        cls.texts = SENTENCES + list(random_texts(400, 2)) + ["\n".join(SENTENCES), " ".join(random_texts(50, 3))]

    def encode(self, directory, special):
        lines = "".join(json.dumps({"text": text, "special": special}) + "\n" for text in self.texts)
        done = subprocess.run([os.environ["BASIN_ENCODE_TOOL"], str(directory)], input=lines, capture_output=True,
                              text=True, check=False)
        self.assertEqual(done.returncode, 0, done.stderr)
        return [json.loads(line) for line in done.stdout.split("\n") if line]

    def compare(self, family, special):
        with tempfile.TemporaryDirectory() as name:
            tokenizer = train(family, Path(name))
            tokenizer.encode_special_tokens = not special
            answers = self.encode(name, special)
            self.assertEqual(len(answers), len(self.texts))
            for text, answer in zip(self.texts, answers):
                expected = tokenizer.encode(text, add_special_tokens=False).ids
                self.assertEqual(answer["ids"], expected, f"{family}: {text!r}")
                if family in ("llama2", "llama2_metaspace", "gemma"):  # only there every token is decoded as it should be
                    self.assertEqual(answer["text"], tokenizer.decode(expected, skip_special_tokens=False), f"{family}: {text!r}")
                if family in ("gpt2", "llama3"):  # nothing is normalised, stripped or dropped
                    if not any(t in text for t in ("<left>", "<right>", "<pad-both>")):
                        self.assertEqual(answer["text"], text)

    def compare_gguf(self, family):
        with tempfile.TemporaryDirectory() as name:
            tokenizer = train(family, Path(name), extras=False)
            path = Path(name) / "model.gguf"
            write_gguf(tokenizer, GGUF_NAMES[family], path)
            for special in (True, False):
                tokenizer.encode_special_tokens = not special
                for text, answer in zip(self.texts, self.encode(path, special), strict=True):
                    expected = tokenizer.encode(text, add_special_tokens=False).ids
                    self.assertEqual(answer["ids"], expected, f"{family}: {text!r}")

    def test_program(self):
        program = os.environ.get("BASIN_BINARY", "")
        if not Path(program).is_file():
            self.skipTest("no basin program in this build")
        with tempfile.TemporaryDirectory() as name:
            tokenizer = train("llama3", Path(name))
            for text in ("Hello <|im_end|> wörld 1234", "🤷🏿‍♀️ \u180e\u3000x", SENTENCES[8]):
                path = Path(name) / "text.txt"
                path.write_bytes(text.encode())
                for special in (True, False):
                    command = [program, "tokenize", name, "--text-file", str(path), "--json"]
                    done = subprocess.run(command + ([] if special else ["--no-special"]), capture_output=True, check=False)
                    self.assertEqual(done.returncode, 0, done.stderr)
                    answer = json.loads(done.stdout)
                    tokenizer.encode_special_tokens = not special
                    self.assertEqual(answer["bos_added"], special)  # --no-special leaves BOS out as well
                    self.assertEqual(answer["token_ids"], tokenizer.encode(text, add_special_tokens=special).ids)


def add_cases():
    for family in FAMILIES:
        for special in (True, False):
            name = f"test_{family}_{'special' if special else 'plain'}"
            setattr(Oracle, name, lambda self, f=family, s=special: self.compare(f, s))


add_cases()
for gguf_family in GGUF_NAMES:
    setattr(Oracle, f"test_gguf_{gguf_family}", lambda self, f=gguf_family: self.compare_gguf(f))

if __name__ == "__main__":
    unittest.main()
