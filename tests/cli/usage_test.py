"""What argv alone decides: help, version, and every refusal with exit code 2. No model is read."""
import os
import sys
import unittest

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
from helpers import CliTest  # noqa: E402

COMMANDS = ("generate", "perplexity", "logits", "tokenize", "convert", "info", "bench", "probe")
# Every sub-command that runs a model, with what it needs besides MODEL. The model does not exist: argv comes first.
RUNS = {
    "generate": ("--prompt", "x"),
    "perplexity": ("--text-file", "t"),
    "logits": ("--tokens", "t", "--out", "o"),
    "bench": (),
}


class Usage(CliTest):
    def test_help(self):
        text = self.ok("--help").stdout.decode()
        for command in COMMANDS:
            self.assertIn(f"\n  {command} ", text)
            self.assertIn("Usage: basin " + command, self.ok(command, "--help").stdout.decode())

    def test_version(self):
        self.assertRegex(self.ok("--version").stdout.decode(), r"^basin \d+\.\d+\.\d+\n$")

    def test_common_flags_are_listed(self):
        for command in RUNS:
            text = self.ok(command, "--help").stdout.decode()
            for flag in ("--sink-tokens", "--window", "--positions", "--chunk-tokens", "--page-tokens", "--threads",
                         "--device", "--compute", "--index-fp8", "--index-sink-tokens", "--index-window"):
                self.assertIn(flag, text)

    def test_no_command(self):
        self.refused(2, "subcommand", hint="--help")

    def test_unknown_command(self):
        self.refused(2, "'frobnicate' is not a command", "frobnicate", hint="--help")
        self.refused(2, "'' is not a command", "")

    def test_bench_serve_is_a_command_of_its_own(self):
        self.refused(2, "--url is missing", "bench", "serve")
        self.refused(2, "must begin with http://", "bench", "serve", "--url", "localhost:8000")
        self.refused(2, "--sink-tokens without --window", "bench", "serve", "--url", "http://localhost", "--sink-tokens", "4")

    def test_convert_needs_a_type_it_knows(self):
        self.refused(2, "--type", "convert", "in.gguf", "out.gguf")
        self.refused(2, "--type is 'q3_k'", "convert", "in.gguf", "out.gguf", "--type", "q3_k")
        self.refused(2, "OUT", "convert", "in.gguf", "--type", "f32")
        self.refused(2, "OUT is empty", "convert", "in.gguf", "", "--type", "f32")

    def test_unknown_flag(self):
        for command, needs in RUNS.items():
            self.refused(2, "--frobnicate", command, "none", *needs, "--frobnicate", hint=f"basin {command} --help")

    def test_flag_of_another_command(self):
        self.refused(2, "--window", "tokenize", "none", "--text", "x", "--window", "4")
        self.refused(2, "--temperature", "perplexity", "none", "--text-file", "t", "--temperature", "1")

    def test_missing_model(self):
        for command, needs in RUNS.items():
            self.refused(2, "MODEL", command, *needs)

    def test_missing_input(self):
        self.refused(2, "--prompt, --prompt-file, --tokens", "generate", "none")
        self.refused(2, "--text-file, --tokens", "perplexity", "none")
        self.refused(2, "--text, --text-file", "tokenize", "none")
        self.refused(2, "--tokens", "logits", "none", "--out", "o")
        self.refused(2, "--out", "logits", "none", "--tokens", "t")

    def test_missing_value(self):
        self.refused(2, "--prompt", "generate", "none", "--prompt")

    def test_conflicts(self):
        self.refused(2, "--prompt and --tokens exclude", "generate", "none", "--prompt", "x", "--tokens", "t")
        self.refused(2, "exclude", "generate", "none", "--prompt", "x", "--prompt-file", "t")
        self.refused(2, "exclude", "perplexity", "none", "--text-file", "x", "--tokens", "t")
        self.refused(2, "exclude", "tokenize", "none", "--text", "x", "--text-file", "t")
        self.refused(2, "--chat and --tokens", "generate", "none", "--tokens", "t", "--chat")
        self.refused(2, "--system without --chat", "generate", "none", "--prompt", "x", "--system", "y")

    def test_given_twice(self):
        self.refused(2, "--window is given more than once", "generate", "none", "--prompt", "x", "--window", "4",
                     "--window", "5")

        self.refused(2, "--out is given more than once", "logits", "none", "--tokens", "t", "--out", "a", "--out", "b")
        self.refused(2, "--tokens is given more than once", "logits", "none", "--out", "o", "--tokens", "a",
                     "--tokens=b")

    def test_flags_take_no_value(self):
        for value in ("3", "true", "false", "no", ""):
            self.refused(2, "--json takes no value", "info", f"--json={value}")
            self.refused(2, "--chat takes no value", "generate", "none", "--prompt", "x", f"--chat={value}")
            self.refused(2, "--no-special takes no value", "tokenize", "none", "--text", "x", f"--no-special={value}")

    def test_an_equals_sign_brings_a_value(self):
        self.refused(2, "--window is ''", "generate", "none", "--prompt", "x", "--window=")
        self.refused(2, "--window is '=4'", "generate", "none", "--prompt", "x", "--window==4")
        self.refused(2, "--out is empty", "logits", "none", "--tokens", "t", "--out=")
        self.refused(2, "--prompt is empty", "generate", "none", "--prompt=")
        self.refused(1, "none does not exist", "generate", "none", "--prompt=--window", "--max_tokens=4")

    def test_bad_numbers(self):
        for flag, values in {
                "--window": ("0", "-1", "4.5", "", "four", "99999999999999999999", "0k", "k", "4 ", "0x10"),
                "--sink-tokens": ("-1", "x"),
                "--chunk-tokens": ("0", "-4"),
                "--page-tokens": ("0", "4000000"),
                "--threads": ("0", "-1", "4097"),
        }.items():
            for command, needs in RUNS.items():
                for value in values:
                    self.refused(2, f"{flag} is '{value}'", command, "none", *needs, flag, value)

    def test_bad_sampling(self):
        for flag, value in (("--temperature", "-1"), ("--temperature", "nan"), ("--temperature", "inf"),
                            ("--temperature", "hot"), ("--top-k", "-1"), ("--top-p", "0"), ("--top-p", "1.5"),
                            ("--min-p", "-0.1"), ("--min-p", "2"), ("--repetition-penalty", "0"), ("--seed", "-1"),
                            ("--max-tokens", "0"), ("--max-tokens", "-3")):
            self.refused(2, "", "generate", "none", "--prompt", "x", flag, value)

    def test_bad_words(self):
        for command, needs in RUNS.items():
            self.refused(2, "in-cache or absolute", command, "none", *needs, "--positions", "relative")
            self.refused(2, "fp32 or fast", command, "none", *needs, "--compute", "fp64")
            self.refused(2, "cpu or cuda", command, "none", *needs, "--device", "tpu")

    def test_cuda_is_not_in_this_build(self):
        for command, needs in RUNS.items():
            self.refused(2, "--device cuda", command, "none", *needs, "--device", "cuda", hint="--device cpu")

    def test_sink_tokens_need_a_window(self):
        for command, needs in RUNS.items():
            self.refused(2, "--sink-tokens 4 without --window", command, "none", *needs, "--sink-tokens", "4",
                         hint="--window")

    def test_empty_arguments(self):
        for command, needs in {**RUNS, "info": (), "tokenize": ("--text", "x")}.items():
            self.refused(2, "MODEL is empty", command, "", *needs)
        self.refused(2, "--prompt is empty", "generate", "none", "--prompt", "")
        self.refused(2, "--text is empty", "tokenize", "none", "--text", "")
        self.refused(2, "--prompt-file is empty", "generate", "none", "--prompt-file", "")
        self.refused(2, "--out is empty", "logits", "none", "--tokens", "t", "--out", "")

    def test_invalid_utf8_in_argv(self):
        for bad in (b"caf\xe9", b"\xff", b"\xc0\xaf", b"\xed\xa0\x80", b"ok \xf0\x9f\x98"):
            self.refused(2, "not UTF-8", "generate", "none", "--prompt", bad)
            self.refused(2, "not UTF-8", "tokenize", "none", "--text", bad)
        self.refused(2, "--system is not UTF-8", "generate", "none", "--prompt", "x", "--chat", "--system", b"\x80")

    def test_message_stays_on_one_line(self):
        self.refused(2, "\\x0a", "generate", "none", "--prompt", "x", "--window", "4\n5")
        self.refused(2, "\\xff", "generate", "none", "--prompt", "x", "--window", b"\xff")
        # Nothing that a terminal obeys: ESC, and the C1 controls, of which U+009B begins a sequence too.
        self.refused(2, "\\x1b[31m", "generate", "none", "--prompt", "x", "--window", "\x1b[31m")
        self.refused(2, "\\xc2\\x9b31m\u00e9\u00a0", "generate", "none", "--prompt", "x", "--window",
                     "\u009b31m\u00e9\u00a0")


if __name__ == "__main__":
    unittest.main()
