"""The small trained model with learned sinks (assets/sinks-6m): loads, knows its text, needs its sinks, generates and streams."""
import json
import os
import shutil
import struct
import sys
import unittest

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
from helpers import SOURCE_DIR, CliTest  # noqa: E402

MODEL = os.path.join(SOURCE_DIR, "assets", "sinks-6m")
VERSE = ("And it came to pass, that the LORD spake unto Moses, saying, Speak unto the children of Israel, that they bring me an "
         "offering: of every man that giveth it willingly with his heart ye shall take my offering.\n")


def without_sinks(folder):
    """A copy whose sink logits are far below every score."""
    copy = shutil.copytree(MODEL, os.path.join(folder, "no-sinks"))
    path = os.path.join(copy, "model.safetensors")
    with open(path, "r+b") as file:
        (size,) = struct.unpack("<Q", file.read(8))
        header = json.loads(file.read(size))
        for name, entry in header.items():
            if name.endswith(".sinks"):
                assert entry["dtype"] == "BF16"
                begin, end = entry["data_offsets"]
                file.seek(8 + size + begin)
                file.write(struct.pack("<H", 0xc2c8) * ((end - begin) // 2))  # -100
    return copy


class TrainedModelTest(CliTest):
    def perplexity(self, model):
        return self.json("perplexity", model, "--text-file", self.write("verse.txt", VERSE))["perplexity"]

    def generate(self, *options):
        return self.json("generate", MODEL, "--prompt", "In the beginning", "--max-tokens", "300", *options)

    def test_it_knows_its_text_and_needs_its_sinks(self):
        with_sinks = self.perplexity(MODEL)
        self.assertLess(with_sinks, 12)  # 4096 for a guess
        self.assertGreater(self.perplexity(without_sinks(self.dir)), 1.02 * with_sinks)

    def test_it_generates_the_same_in_any_chunks(self):
        whole = self.generate("--window", "100000")
        self.assertEqual(whole["completion_tokens"], 300)
        self.assertEqual(self.generate("--chunk-tokens", "1", "--page-tokens", "7", "--window", "100000")["token_ids"], whole["token_ids"])

    def test_it_streams(self):
        stream = self.generate("--sink-tokens", "4", "--window", "60")
        self.assertEqual(stream["kept_tokens_max"], 64)
        self.assertEqual(stream["completion_tokens"], 300)
        self.assertEqual(self.generate("--sink-tokens", "4", "--window", "60", "--chunk-tokens", "1")["token_ids"], stream["token_ids"])


if __name__ == "__main__":
    unittest.main()
