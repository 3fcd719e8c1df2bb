"""`basin logits` against every golden model of the supported families, dense and streaming, in any chunking."""
import glob
import json
import os
import re
import sys
import unittest

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
from helpers import GOLDEN_DIR, CliTest, max_difference, read_safetensors  # noqa: E402

TOLERANCE = 2e-3


def models():
    for config in sorted(glob.glob(os.path.join(GOLDEN_DIR, "models", "*", "config.json"))):
        with open(config, encoding="utf-8") as file:
            if json.load(file)["model_type"] in ("llama", "qwen3", "gpt_oss", "gemma3_text", "deepseek_v3"):
                yield os.path.dirname(config)


class GoldenLogits(CliTest):
    def logits(self, model, *args):
        out = self.path("logits.safetensors")
        done = self.json("logits", model, "--tokens", os.path.join(model, "golden.safetensors"), "--out", out, *args)
        tensors = read_safetensors(out)
        self.assertEqual(list(tensors), ["logits"])
        return done, tensors["logits"]

    def test_dense_and_streaming(self):
        cases = 0
        for model in models():
            golden = read_safetensors(os.path.join(model, "golden.safetensors"))
            for key, (shape, expected) in golden.items():
                streaming = re.fullmatch(r"logits_(absolute|incache)_(\d+)_(\d+)", key)
                if key != "logits" and not streaming:
                    continue
                args = []
                if streaming:
                    mode = {"absolute": "absolute", "incache": "in-cache"}[streaming[1]]
                    args = ["--positions", mode, "--sink-tokens", streaming[2], "--window", streaming[3]]
                with self.subTest(model=os.path.basename(model), key=key):
                    done, (found_shape, found) = self.logits(model, *args)
                    self.assertEqual(found_shape, shape)
                    self.assertEqual(done["compute"], "fp32")
                    self.assertLessEqual(max_difference(found, expected), TOLERANCE)
                    if streaming:
                        self.assertEqual(done["kept_tokens_max"], min(shape[0], int(streaming[2]) + int(streaming[3])))
                    # The same bits in any chunking, paging and threading.
                    for chunk, page, threads in ((1, 1, 1), (7, 16, 2), (64, 64, 1)):
                        same = self.logits(model, *args, "--chunk-tokens", str(chunk), "--page-tokens", str(page),
                                           "--threads", str(threads))[1]
                        self.assertEqual(same[1].tobytes(), found.tobytes())
                cases += 1
        self.assertGreaterEqual(cases, 2, f"no golden models in {GOLDEN_DIR}")

    def test_of_sparse_models(self):
        """With equal scores taken in order: selections.safetensors (tools/make_selection_golden.py)."""
        models = [os.path.dirname(path) for path in glob.glob(os.path.join(GOLDEN_DIR, "models", "*", "selections.safetensors"))]
        if not models:
            self.skipTest(f"no selections.safetensors in {GOLDEN_DIR}")
        for model in models:
            shape, expected = read_safetensors(os.path.join(model, "selections.safetensors"))["logits"]
            found_shape, found = self.logits(model)[1]
            self.assertEqual(found_shape, shape)
            self.assertLessEqual(max_difference(found, expected), TOLERANCE)
            for options in (("--chunk-tokens", "1"), ("--chunk-tokens", "7", "--page-tokens", "1", "--threads", "1")):
                self.assertEqual(self.logits(model, *options)[1][1].tobytes(), found.tobytes())
            for flags in (("--index-fp8",), ("--index-sink-tokens", "3"), ("--index-window", "4")):
                self.assertNotEqual(self.logits(model, *flags)[1][1].tobytes(), found.tobytes())
            self.assertEqual(self.logits(model, "--index-sink-tokens", "0", "--index-window", "0")[1][1].tobytes(), found.tobytes())
            text = self.json("generate", model, "--tokens", os.path.join(model, "golden.safetensors"), "--max-tokens", "40")
            self.assertEqual(len(text["token_ids"]), 40)

    def test_greedy(self):
        for model in models():
            golden = read_safetensors(os.path.join(model, "golden.safetensors"))
            if "greedy" not in golden:
                continue
            greedy, margin = golden["greedy"][1], golden["greedy_margin"][1]
            done = self.json("generate", model, "--tokens", os.path.join(model, "golden.safetensors"), "--max-tokens",
                             str(len(greedy)), "--compute", "fp32")
            for i, token in enumerate(greedy):
                if margin[i] <= 0.02:  # a near tie: what follows may differ
                    break
                self.assertEqual(done["token_ids"][i], token, f"{model}, token {i}")

    def test_options_change_the_logits(self):
        model = next(models())
        results = [self.logits(model, *args)[1][1].tobytes() for args in (
            (), ("--compute", "fast"), ("--window", "16"), ("--window", "17"), ("--window", "16", "--sink-tokens", "4"),
            ("--window", "16", "--sink-tokens", "4", "--positions", "absolute"))]
        self.assertEqual(len(set(results)), len(results))
        # A window of at least the length is no window, to the bit.
        self.assertEqual(self.logits(model, "--window", "128")[1][1].tobytes(), results[0])


if __name__ == "__main__":
    unittest.main()
