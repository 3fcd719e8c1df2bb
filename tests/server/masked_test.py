"""Log-probabilities of echoed prompts in a batch of unequal lengths, against one explicit mask over the whole text.

As a program, `masked_test.py MODEL --sink-tokens 1024 --window 7168 --lengths 8191 8192 8193 8200 9000 --text-file FILE`
does the same for a real model (a directory in the Hugging Face layout) and prints the largest differences."""
import argparse
import os
import random
import sys
import unittest

try:
    import numpy
except ImportError:
    numpy = None
if numpy is not None:
    import masked_reference

from helpers import Server, ServerTest


def ask(server, prompts, **fields):
    """The log-probabilities of each prompt's tokens but its first; all of them in one request."""
    body = {"prompt": prompts, "max_tokens": 1, "echo": True, "logprobs": 0, "temperature": 0, **fields}
    choices = server.post("/v1/completions", body)["choices"]
    return [choice["logprobs"]["token_logprobs"][1:len(prompt)] for choice, prompt in zip(choices, prompts)]


@unittest.skipIf(numpy is None, "the Python package numpy is not installed")
class Masked(ServerTest):
    ARGS = ("--compute", "fp32", "--page-tokens", "8", "--max-num-batched-tokens", "48", "--quiet")
    SINKS, WINDOW = 16, 112

    @classmethod
    def setUpClass(cls):
        super().setUpClass()
        cls.reference = masked_reference.Llama(cls.model)
        rng = random.Random(5)
        both = cls.SINKS + cls.WINDOW
        cls.prompts = [[rng.randrange(250) for _ in range(count)] for count in (both - 1, both, both + 1, both + 8, 7 * both)]

    def worst(self, got, **mask):
        want = [self.reference.logprobs(numpy.array(prompt), **mask) for prompt in self.prompts]
        return max(numpy.abs(numpy.array(a) - b).max() for a, b in zip(got, want))

    def test_windows(self):
        for positions in ("in-cache", "absolute"):
            mask = {"sink_tokens": self.SINKS, "window": self.WINDOW, "positions": positions}
            got = ask(self.server, self.prompts, **mask)
            self.assertLess(self.worst(got, **mask), 2e-4, positions)
            # The comparison can tell: one key more or less, or the other positions.
            for change in ({"window": self.WINDOW + 1}, {"sink_tokens": self.SINKS - 1}, {"window": 0, "sink_tokens": 0},
                           {"positions": "absolute" if positions == "in-cache" else "in-cache"}):
                self.assertGreater(self.worst(got, **{**mask, **change}), 2e-3, (positions, change))

    def test_everything(self):
        self.assertLess(self.worst(ask(self.server, self.prompts), window=0), 2e-4)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model")
    parser.add_argument("--text-file", required=True)
    parser.add_argument("--sink-tokens", type=int, default=1024)
    parser.add_argument("--window", type=int, default=7168)
    parser.add_argument("--lengths", type=int, nargs="+", default=[8191, 8192, 8193, 8200, 9000])
    parser.add_argument("--compute", nargs="+", default=["fp32", "fast"])
    parser.add_argument("--positions", nargs="+", default=["in-cache", "absolute"])
    arguments = parser.parse_args()
    reference = masked_reference.Llama(arguments.model)
    with open(arguments.text_file, encoding="utf-8") as file:
        text = file.read()
    wanted = {}
    for compute in arguments.compute:
        server = Server(arguments.model, "--compute", compute, "--quiet", "--max-num-seqs", "8")
        ids = server.post("/tokenize", {"prompt": text})["tokens"][:max(arguments.lengths)]
        prompts = [ids[:length] for length in arguments.lengths]
        for positions in arguments.positions:
            mask = {"sink_tokens": arguments.sink_tokens, "window": arguments.window, "positions": positions}
            if positions not in wanted:  # what a token sees lies before it, so the longest text holds the others
                wanted[positions] = reference.logprobs(numpy.array(ids), **mask)
            for prompt, got in zip(prompts, ask(server, prompts, **mask)):
                apart = numpy.abs(numpy.array(got) - wanted[positions][:len(prompt) - 1])
                print(f"{compute:5} {positions:9} {len(prompt):6} tokens: largest difference {apart.max():.2e}, mean {apart.mean():.2e}, "
                      f"of the last 10 tokens {apart[-10:].max():.2e}", flush=True)
        server.stop()
        server.close()


if __name__ == "__main__":
    if len(sys.argv) > 1 and not sys.argv[1].startswith("-") and os.path.exists(sys.argv[1]):
        main()
    else:
        unittest.main()
