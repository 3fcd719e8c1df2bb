"""Token ids against the `tokenizers` package, on tokenizers trained here.

BASIN_ENCODE_TOOL is the driver of tests/text/encode_tool.cc. BASIN_BINARY, when it names a file, is checked as well.
"""

import json
import os
import random
import subprocess
import tempfile
import unittest
from pathlib import Path

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
TAIL = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
QWEN = CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}" + TAIL
LLAMA = CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}" + TAIL
GPT4O = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+" + CONTRACTIONS + "?"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*" + CONTRACTIONS + "?"
    r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
SPECIALS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]

SENTENCES = [
    "It is a truth universally acknowledged, that a single man in possession of a good fortune wasn't lost.",
    "Съешь же ещё этих мягких французских булок, да выпей чаю. ІЇЄҐ ѣ",
    "Ξεσκεπάζω την ψυχοφθόρα βδελυγμία. ΐ ΰ",
    "敏捷的棕色狐狸跳过了懒狗。 私はガラスを食べられます。 다람쥐 헌 쳇바퀴에 타고파 ㅎㅎ",
    "نص حكيم له سر قاطع وذو شأن عظيم مكتوب على ثوب أخضر ١٢٣٤٥ עטלף אבק נס דרך מזגן",
    "ऋषियों को सताने वाले दुष्ट राक्षसों १२३ ก็ไม่มีใคร ๔๕๖ ქართული հայերեն አማርኛ ᠮᠣᠩᠭᠣᠯ",
    "Zażółć gęślą jaźń; Árvíztűrő tükörfúrógép; déjà vu; cafe\u0301 a\u030a\u0323 \u1e9b\u0323 \u212b \u2126",
    "👩‍👩‍👧‍👦 🏳️‍🌈 👍🏽 🇩🇪🇫🇷 ☃️ 🤷🏿‍♀️ e\u20dd",
    "int main() {\r\n\tfor (int i = 0; i < 10; ++i) { x[i] += 3.14159e-10; }\r\n}\r\n\r\n\r\n    return;\n \n  \n",
    "We'll WE'LL we'Ve I'M they'd it'\u017f 'S 's''s don’t 'tis 'llama 're-re",
    "a\u00a0b\u0085c\u3000d\u180ee\u200bf\u2028g\u2029h\u202fi\u205fj\u1680k\u2003l\ufeffm\u00adn \u180e x \u200b y",
    "\x00\x01\x02\x04\x06\x13\x14\x16\x1b[31mred\x1b[0m\x1c\x1d\x1e\x1f\x7f\x80\x9f bell\x07 vt\x0bff\x0c",
    "1234567 0x1F 3,141,592 ½ ² ₃ Ⅷ ⅻ 〇一二三 ①⑳ ٣٫١٤ 𝟘𝟙𝟚 ꩐ 𞥐 ৳৫ ໑໒ \U00010d40\U0001e4f0\U00011f50 \U00016ff4",
    "Newer letters: \ua7cb \U00011f12 \U0001e4d0\U0001e5d0 \U00031350\U0002ebf0 \U000105c0x \U0001df25",
    "\U0010ffff\U000e0001\ufffe\ufffd \ue000 \u0378 \ud7ff\U00010000",
    "<|im_start|>user\nHello<|im_end|>\n<|endoftext|><|im_start|><|im_start|> <|im_end <|im|> |im_end|>",
    "before  <pad-both>\t\u3000after <tool>x</tool><tool></tool>  <left>  <left><right>   end caf\u00e9 cafe\u0301!",
    "", " ", "  ", "\n", "\r\n", "\t", " \n ", "a", "é", "\u0301", " \u0301a", "'", "''", "   a   ", "\n\n\na\n\n",
]


def random_texts(count, seed):
    rng = random.Random(seed)
    spaces = " \t\n\r\u00a0\u0085\u3000\u180e\u200b\u2028\u1680\x0b\x0c\x1c"
    pools = [
        lambda: chr(rng.randrange(0x20, 0x7F)),
        lambda: chr(rng.randrange(0x80, 0x800)),
        lambda: chr(rng.choice([rng.randrange(0x800, 0xD800), rng.randrange(0xE000, 0x10000)])),
        lambda: chr(rng.randrange(0x10000, 0x20000)),
        lambda: chr(rng.randrange(0x20000, 0x110000)),
        lambda: rng.choice(spaces),
        lambda: rng.choice("aeou") + chr(rng.randrange(0x300, 0x370)) * rng.randrange(1, 4),
        lambda: rng.choice("0123456789٠١٢३४५½²Ⅷ") * rng.randrange(1, 6),
        lambda: rng.choice(["'s", "'LL", "'Re", "\r\n", "\n \n", "    ", "<|im_end|>", "<tool>", " <left>", "<pad-both> "]),
        lambda: rng.choice(["the", " and", "hello", " World", "THE", "ing"]),
    ]
    for _ in range(count):
        weights = [rng.random() ** 3 for _ in pools]
        yield "".join(f() for f in rng.choices(pools, weights, k=rng.randrange(1, 120)))


def byte_level(**options):
    return pre_tokenizers.ByteLevel(add_prefix_space=options.get("prefix", False), use_regex=options.get("regex", False))


def split(pattern, behavior="isolated", invert=False):
    return pre_tokenizers.Split(Regex(pattern) if not pattern.startswith("=") else pattern[1:], behavior, invert)


def sequence(*steps):
    return pre_tokenizers.Sequence(list(steps))


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
    "chained": dict(pre=sequence(split(r"\p{N}{1,3}"), split(r"[一-龥぀-ゟ゠-ヿ]+"), split(r"[!-/:-~]?\p{L}+|\s+(?!\S)|\s+"),
                                 byte_level())),
}


def train(family, directory):
    spec = FAMILIES[family]
    tokenizer = Tokenizer(models.BPE(**spec.get("model", {})))
    if spec.get("nfc"):
        tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = spec["pre"]
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet() if spec.get("alphabet", True) else []
    trainer = trainers.BpeTrainer(vocab_size=1200, special_tokens=SPECIALS, initial_alphabet=alphabet, show_progress=False)
    # Special tokens stay out of the corpus: a merge that spells one would be refused.
    corpus = [text.replace("<", "") for text in SENTENCES * 3 + list(random_texts(150, 1))]
    tokenizer.train_from_iterator(corpus, trainer)
    tokenizer.add_tokens(["<tool>", "</tool>", AddedToken("<left>", lstrip=True), AddedToken("<right>", rstrip=True),
                          AddedToken("cafe\u0301", normalized=True), AddedToken("<tool", normalized=False)])
    tokenizer.add_special_tokens([AddedToken("<pad-both>", lstrip=True, rstrip=True)])
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
                if family in ("gpt2", "llama3"):  # nothing is normalised, stripped or dropped
                    if not any(t in text for t in ("<left>", "<right>", "<pad-both>")):
                        self.assertEqual(answer["text"], text)

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

if __name__ == "__main__":
    unittest.main()
