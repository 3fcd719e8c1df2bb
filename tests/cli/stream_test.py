"""Long runs: bounded memory, options that change the result, Ctrl-C, closed pipes, progress, bench."""
import json
import os
import pty
import random
import signal
import subprocess
import sys
import time
import unittest

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
from helpers import BINARY, CliTest, copy_model, write_tokens  # noqa: E402


class Stream(CliTest):
    @classmethod
    def setUpClass(cls):
        super().setUpClass()
        rng = random.Random(3)
        ids = [rng.randrange(320) for _ in range(6000)]
        cls.long = write_tokens(os.path.join(cls.dir, "long.st"), ids)
        cls.endless = write_tokens(os.path.join(cls.dir, "endless.st"), ids * 500)

    def perplexity(self, *args):
        return self.json("perplexity", self.model, "--tokens", self.long, *args)

    def test_streams_past_the_context(self):
        self.refused(1, "more than the 4096", "perplexity", self.model, "--tokens", self.long, hint="--window")
        found = self.perplexity("--sink-tokens", "4", "--window", "60")
        self.assertEqual((found["tokens"], found["scored_tokens"]), (6000, 5999))
        self.assertEqual(found["kept_tokens_max"], 64)

    def test_memory_bound(self):
        for sinks, window, chunk, page in ((4, 60, 32, 16), (0, 100, 1, 7), (17, 33, 50, 64)):
            found = self.perplexity("--sink-tokens", str(sinks), "--window", str(window), "--chunk-tokens", str(chunk),
                                    "--page-tokens", str(page), "--max-tokens", "3000", "--compute", "fp32")
            pages = -(-sinks // page) + -(-(window + chunk - 2) // page) + 1
            per_token = 3 * 2 * 3 * 16 * 4  # layers, keys and values, heads, head size, float32
            self.assertEqual(found["kept_tokens_max"], sinks + window)
            self.assertLessEqual(found["kv_bytes_max"], pages * page * per_token)
            self.assertGreaterEqual(found["kv_bytes_max"], (sinks + window) * per_token)

    def test_options_change_the_result(self):
        window = ("--window", "60")
        variants = [window, ("--window", "61"), (*window, "--sink-tokens", "4"), (*window, "--compute", "fp32"),
                    (*window, "--sink-tokens", "4", "--positions", "absolute"), (*window, "--max-tokens", "5000")]
        results = [self.perplexity(*variant)["mean_nll"] for variant in variants]
        self.assertEqual(len(set(results)), len(results), results)

    def test_options_that_never_change_the_result(self):
        base = self.perplexity("--window", "60", "--sink-tokens", "4")
        for option in (("--chunk-tokens", "33"), ("--page-tokens", "5"), ("--threads", "1"),
                       ("--positions", "in-cache"), ("--device", "cpu"), ("--compute", "fast")):
            found = self.perplexity("--window", "60", "--sink-tokens", "4", *option)
            self.assertEqual((found["mean_nll"], found["curve"]), (base["mean_nll"], base["curve"]), option)

    def interrupt(self, *args, number=signal.SIGINT):
        """Sends a signal after half a second of work; returns what came of it and how long the end took."""
        with subprocess.Popen([BINARY, *args], stdout=subprocess.PIPE, stderr=subprocess.PIPE,
                              stdin=subprocess.DEVNULL) as process:
            time.sleep(0.7)
            self.assertIsNone(process.poll(), "it ended before the signal")
            process.send_signal(number)
            start = time.monotonic()
            out, err = process.communicate(timeout=60)
        return process.returncode, out, err, time.monotonic() - start

    def test_ctrl_c_perplexity(self):
        code, out, err, seconds = self.interrupt("perplexity", self.model, "--tokens", self.endless, "--window", "512")
        self.assertEqual((code, out), (130, b""), err)
        self.assertRegex(err.decode().splitlines()[-1], "^error: ")
        self.assertLess(seconds, 10)

    def test_ctrl_c_logits_leaves_nothing(self):
        os.makedirs(self.path("out"))
        for number, expected in ((signal.SIGINT, 130), (signal.SIGTERM, 143)):
            code, out, err, _ = self.interrupt("logits", self.model, "--tokens", self.endless, "--window", "512",
                                               "--out", self.path("out/l.safetensors"), number=number)
            self.assertEqual((code, out), (expected, b""), err)
            self.assertEqual(os.listdir(self.path("out")), [])

    def test_ctrl_c_generate_keeps_what_there_is(self):
        tokens = write_tokens(self.path("prompt.st"), [1, 2, 3])
        args = ("generate", self.model, "--tokens", tokens, "--max-tokens", "100000000", "--window", "64")
        code, out, err, _ = self.interrupt(*args, "--json")
        self.assertEqual(code, 130, err)
        found = json.loads(out)
        self.assertEqual(found["finish_reason"], "cancelled")
        self.assertEqual(found["completion_tokens"], len(found["token_ids"]))
        self.assertGreater(found["completion_tokens"], 0)
        code, out, _, _ = self.interrupt(*args)
        self.assertEqual(code, 130)
        self.assertRegex(out.decode(), r"^\d+( \d+)*\n$")

    def test_closed_pipe(self):
        tokens = write_tokens(self.path("prompt.st"), [1, 2, 3])
        with subprocess.Popen([BINARY, "generate", self.model, "--tokens", tokens, "--max-tokens", "100000000",
                               "--window", "64"], stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
            self.assertTrue(process.stdout.read(10))
            process.stdout.close()
            error = process.stderr.read().decode()
            self.assertEqual(process.wait(timeout=60), 1)
        self.assertRegex(error, "^error: cannot write to standard output: ")

    def test_full_and_closed_stdout(self):
        for redirection in (">/dev/full", ">&-"):
            done = subprocess.run(["sh", "-c", f'exec "$0" info {redirection}', BINARY], stderr=subprocess.PIPE,
                                  check=False)
            self.assertEqual(done.returncode, 1, redirection)
            self.assertIn(b"error: cannot write to standard output", done.stderr)

    def test_progress_bar_on_a_terminal_only(self):
        args = ("perplexity", self.model, "--tokens", self.endless, "--window", "64", "--max-tokens", "60000", "--json")
        quiet = self.basin(*args)
        self.assertEqual(quiet.returncode, 0)
        self.assertNotIn(b"\r", quiet.stderr)
        ours, theirs = pty.openpty()
        with subprocess.Popen([BINARY, *args], stdout=subprocess.PIPE, stderr=theirs) as process:
            os.close(theirs)
            shown = b""
            while True:
                try:
                    part = os.read(ours, 4096)
                except OSError:  # the terminal is gone
                    break
                if not part:
                    break
                shown += part
            out = process.stdout.read()
        os.close(ours)
        self.assertEqual(json.loads(out)["tokens"], 60000)
        self.assertRegex(shown.decode(), r"\r\[#*\.+\] reading  \d+/59999 tokens  \d+%  \d+/s  ETA \d+ s")
        self.assertTrue(shown.endswith(b"\r\x1b[K"), "the bar is removed at the end")

    def test_bench(self):
        small = copy_model(self.path("small"), max_position_embeddings=100)
        found = self.json("bench", small)
        ceilings, prefill, decode = found["ceilings"], found["prefill"], found["decode"]
        self.assertEqual((prefill["tokens"], found["compute"]), (100, "fast"))
        self.assertEqual((decode["depth"], decode["tokens"]), (32, 64))
        deep = self.json("bench", small, "--depth", "90")["decode"]
        self.assertEqual((deep["depth"], deep["tokens"]), (50, 50), "what the context has room for")
        self.assertGreater(ceilings["read_gb_per_s"], 0.1)
        self.assertGreater(ceilings["fp32_fma_gflop_per_s"], 0.1)
        for part in (prefill, decode):
            self.assertAlmostEqual(part["tokens_per_s"] * part["seconds"], part["tokens"], places=6)
        self.assertAlmostEqual(prefill["percent_of_fp32_fma"],
                               100 * prefill["gflop_per_s"] / ceilings["fp32_fma_gflop_per_s"], places=6)
        self.assertGreater(prefill["percent_of_fp32_fma"], 0)  # int8 products pass 100
        self.assertGreater(decode["percent_of_read"], 0)


if __name__ == "__main__":
    unittest.main()
