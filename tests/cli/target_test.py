"""The program on every CPU target that this machine runs, forced by BASIN_CPU, and that the variable decides."""
import os
import sys
import unittest

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
from helpers import CliTest, max_difference, read_safetensors  # noqa: E402


def forced(target):
    return {**os.environ, "BASIN_CPU": target}


class Targets(CliTest):
    @classmethod
    def setUpClass(cls):
        super().setUpClass()
        cls.all = ("generic", "avx2", "avx512_bf16", "amx")

    def here(self):
        return self.json("info")["cpu"]["targets_here"]

    def logits(self, target, *args):
        out = self.path(f"{target}.safetensors")
        self.ok("logits", self.model, "--tokens", self.golden_tokens, "--out", out, *args, env=forced(target))
        return read_safetensors(out)["logits"][1]

    def test_the_variable_decides(self):
        here = self.here()
        self.assertIn("generic", here)
        for target in here:
            self.assertEqual(self.json("info", env=forced(target))["cpu"]["target"], target)
        # Their arithmetic differs but for amx, which promises the bits of avx512_bf16; so equal bits would mean that the same kernels ran.
        found = {target: self.logits(target, "--compute", "fast").tobytes() for target in here}
        if "amx" in here:
            self.assertEqual(found["amx"], found["avx512_bf16"])
        self.assertEqual(len(set(found.values())), len(set(here) - {"amx"}), "two targets gave the same bits")
        for target in here:
            self.assertEqual(self.logits(target, "--compute", "fast", "--chunk-tokens", "9").tobytes(), found[target])

    def test_logits_and_perplexity(self):
        expected = read_safetensors(self.golden_tokens)["logits"][1]
        perplexities = []
        for target in self.here():
            self.assertLessEqual(max_difference(self.logits(target), expected), 2e-3, target)
            for compute in ("fp32", "fast"):
                perplexities.append(self.json("perplexity", self.model, "--tokens", self.golden_tokens, "--compute",
                                              compute, env=forced(target))["mean_nll"])
        self.assertLess(max(perplexities) - min(perplexities), 1e-2)

    def test_other_values_are_refused(self):
        for target in self.all:
            if target not in self.here():
                self.refused(1, f"BASIN_CPU={target}", "info", env=forced(target), hint="BASIN_CPU")
        self.refused(1, "BASIN_CPU=sse9 is not a target", "info", env=forced("sse9"), hint="generic")


if __name__ == "__main__":
    unittest.main()
