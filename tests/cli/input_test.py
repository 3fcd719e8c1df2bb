"""Files that are missing, broken or hostile: exit code 1, one clear error, nothing written, never a crash."""
import json
import os
import random
import resource
import shutil
import struct
import sys
import unittest

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
from helpers import CliTest, copy_model, write_tokens, write_tokenizer  # noqa: E402


class Inputs(CliTest):
    def logits_refused(self, message, model, tokens, *args, hint=None):
        """`logits` fails with 1, and its folder holds what it held before."""
        out = self.path("never")
        os.makedirs(out, exist_ok=True)
        done = self.refused(1, message, "logits", model, "--tokens", tokens, "--out", os.path.join(out, "l"), *args,
                            hint=hint)
        self.assertEqual(os.listdir(out), [])
        return done

    def test_missing_model(self):
        for args in (("info",), ("bench",), ("generate", "--prompt", "x"), ("tokenize", "--text", "x")):
            self.refused(1, "nowhere", args[0], self.path("nowhere"), *args[1:])

    def test_missing_files(self):
        self.refused(1, "none.txt", "generate", self.model, "--prompt-file", self.path("none.txt"))
        self.refused(1, "none.txt", "perplexity", self.model, "--text-file", self.path("none.txt"))
        self.refused(1, "none.txt", "tokenize", self.model, "--text-file", self.path("none.txt"))
        self.refused(1, "none.st", "perplexity", self.model, "--tokens", self.path("none.st"))
        self.refused(1, self.dir, "perplexity", self.model, "--text-file", self.dir)

    def test_directory_without_a_model(self):
        os.makedirs(self.path("empty"), exist_ok=True)
        for args in (("info",), ("generate", "--prompt", "x"), ("tokenize", "--text", "x")):
            self.refused(1, "empty", args[0], self.path("empty"), *args[1:])

    def test_file_that_is_no_model(self):
        name = self.write("model.bin", b"x" * 100)
        self.refused(1, "model.bin", "info", name)
        self.refused(1, "model.bin", "tokenize", name, "--text", "x")

    def test_unknown_architecture(self):
        folder = copy_model(self.path("mamba"), model_type="mamba", architectures=["MambaForCausalLM"])
        for args in (("info",), ("generate", "--prompt", "x")):
            self.refused(1, "mamba", args[0], folder, *args[1:], hint="llama")

    def test_no_tokenizer(self):
        text = self.write("t.txt", "some text")
        self.refused(1, "no tokenizer", "generate", self.model, "--prompt", "x", hint="--tokens")
        self.refused(1, "no tokenizer", "perplexity", self.model, "--text-file", text, hint="--tokens")
        self.refused(1, "tokenizer.json", "tokenize", self.model, "--text", "x")
        for command in (("serve", "--port", "0"), ("chat",), ("generate", "--chat", "--prompt", "x")):  # take no --tokens
            done = self.refused(1, "no tokenizer", command[0], self.model, *command[1:], hint="tokenizer.json")
            self.assertNotIn(b"--tokens", done.stderr, command)

    def test_token_files(self):
        for name, arguments, message in (
                ("wrong_name.st", {"ids": [1, 2], "name": "tokens"}, "no tensor named input_ids"),
                ("wrong_type.st", {"ids": [1.0, 2.0], "dtype": "F32"}, "int32 or int64"),
                ("two_dimensions.st", {"ids": [1, 2], "shape": [1, 2]}, "int32 or int64 with one"),
                ("outside.st", {"ids": [1, 320]}, "outside the vocabulary of 320"),
                ("negative.st", {"ids": [1, -1]}, "not a token id"),
                ("negative32.st", {"ids": [1, -1], "dtype": "I32"}, "outside the vocabulary"),
                ("huge.st", {"ids": [1, 1 << 40]}, "not a token id")):
            self.logits_refused(message, self.model, write_tokens(self.path(name), **arguments))
        empty = write_tokens(self.path("empty.st"), [])
        self.logits_refused("empty", self.model, empty)
        self.refused(1, "empty", "generate", self.model, "--tokens", empty)

    def test_broken_token_files(self):
        with open(self.golden_tokens, "rb") as file:
            good = file.read()
        for size in (0, 4, 7, 8, 20, 200, len(good) - 1):
            self.logits_refused("short", self.model, self.write("short", good[:size]))
        self.logits_refused("absurd", self.model, self.write("absurd", struct.pack("<Q", 1 << 62) + good[8:]))

    def test_truncated_weights(self):
        folder = copy_model(self.path("cut"))
        weights = os.path.join(folder, "model.safetensors")
        size = os.path.getsize(weights)
        for part in (0, 5, 9, 100, size // 2, size - 1):
            shutil.copy(os.path.join(self.model, "model.safetensors"), weights)
            os.truncate(weights, part)
            self.refused(1, "model.safetensors", "info", folder)
            self.logits_refused("model.safetensors", folder, self.golden_tokens)

    def test_damaged_headers_never_crash(self):
        folder = copy_model(self.path("damaged"))
        weights = os.path.join(folder, "model.safetensors")
        with open(weights, "rb") as file:
            good = file.read()
        (header_bytes,) = struct.unpack("<Q", good[:8])
        rng = random.Random(7)
        for _ in range(60):
            bad = bytearray(good)
            for _ in range(rng.randrange(1, 4)):
                bad[rng.randrange(8 + header_bytes)] = rng.randrange(256)
            with open(weights, "wb") as file:
                file.write(bad)
            done = self.basin("info", folder)
            self.assertIn(done.returncode, (0, 1), done.stderr)
            if done.returncode == 1:
                self.assertTrue(done.stderr.startswith(b"error: "), done.stderr)
                self.assertEqual(done.stdout, b"")

    def test_bad_gguf(self):
        magic = b"GGUF"
        for name, data in (("empty.gguf", b""), ("magic.gguf", b"GGML" + bytes(60)),
                           ("version.gguf", magic + struct.pack("<IQQ", 99, 0, 0)),
                           ("counts.gguf", magic + struct.pack("<IQQ", 3, 1 << 60, 1 << 60)),
                           ("bare.gguf", magic + struct.pack("<IQQ", 3, 0, 0)),
                           ("cut.gguf", magic + struct.pack("<IQQ", 3, 1, 1) + struct.pack("<Q", 1 << 50))):
            path = self.write(name, data)
            self.refused(1, name, "info", path)
            self.refused(1, name, "tokenize", path, "--text", "x")

    def test_config_is_checked(self):
        for name, changes in (("heads", {"num_attention_heads": 0}), ("huge", {"hidden_size": 1 << 50}),
                              ("text", {"num_hidden_layers": "three"}), ("act", {"hidden_act": "gelu"}),
                              ("none", {"vocab_size": None})):
            folder = copy_model(self.path("config_" + name), **changes)
            self.refused(1, "", "info", folder)
        folder = copy_model(self.path("config_json"))
        for text in ("", "{", "[]", "nonsense", "[" * 100000):
            self.write(os.path.join("config_json", "config.json"), text)
            self.refused(1, "config.json", "info", folder)

    def test_text_files(self):
        folder = copy_model(self.path("texts"))
        write_tokenizer(folder)
        empty, bad = self.write("empty.txt", b""), self.write("bad.txt", b"good, then \xff")
        for command, flag in (("generate", "--prompt-file"), ("perplexity", "--text-file"),
                              ("tokenize", "--text-file")):
            self.refused(1, "empty.txt is empty", command, folder, flag, empty)
            self.refused(1, "bad.txt is not UTF-8: invalid byte at offset 11", command, folder, flag, bad)
        one = self.write("one.txt", "a")
        self.refused(1, "nothing to score", "perplexity", folder, "--text-file", one)

        self.refused(1, "/dev/zero has more than 268435456 bytes", "tokenize", folder, "--text-file", "/dev/zero")

    def test_why_a_model_cannot_be_found(self):
        for args in (("info",), ("tokenize", "--text", "x")):
            self.refused(1, "nowhere does not exist", args[0], self.path("nowhere"), *args[1:])
            self.refused(1, "File name too long", args[0], "a" * 300, *args[1:])
            loop = self.path("loop.gguf")
            if not os.path.lexists(loop):
                os.symlink("loop.gguf", loop)
            self.refused(1, "symbolic links", args[0], loop, *args[1:])

    def test_chat_needs_a_format(self):
        folder = copy_model(self.path("no_chat"))
        write_tokenizer(folder, chat=False)
        self.ok("generate", folder, "--prompt", "hello", "--max-tokens", "2")
        self.refused(1, "has no chat template", "generate", folder, "--prompt", "hello", "--chat")

    def test_context_without_a_window(self):
        folder = copy_model(self.path("small_context"), max_position_embeddings=64)
        write_tokenizer(folder)
        text = self.write("long.txt", "0123456789" * 7)
        flags = "--sink-tokens 4 --window 60"
        self.refused(1, "more than the 64", "generate", folder, "--prompt-file", text, hint=flags)
        self.refused(1, "more than the 64", "perplexity", folder, "--text-file", text, hint="--max-tokens 64")
        self.logits_refused("more than the 64", folder, self.golden_tokens, hint=flags)
        self.ok("perplexity", folder, "--text-file", text, "--max-tokens", "64")
        self.ok("perplexity", folder, "--text-file", text, *flags.split())
        self.refused(1, "64", "perplexity", folder, "--text-file", text, "--sink-tokens", "4", "--window", "61",
                     hint="--window 60")
        self.ok("perplexity", folder, "--text-file", text, "--sink-tokens", "4", "--window", "61", "--positions",
                "absolute")
        self.refused(1, "trained context", "perplexity", folder, "--text-file", text, "--sink-tokens", "64", "--window",
                     "1", hint="fewer sink tokens than 64")
        short = ("generate", folder, "--prompt", "0123456789" * 6, "--max-tokens")
        done = self.json(*short, "50")
        self.assertEqual((done["finish_reason"], done["prompt_tokens"]), ("length", 60))
        self.assertIn(done["completion_tokens"], (4, 5))
        for form in ((), ("--json",)):
            note = self.ok(*short, "50", *form).stderr.decode()
            self.assertRegex(note, rf"^note: .* 64 tokens is full after {done['completion_tokens']} of 50 .*{flags}.*\n$")
        self.assertEqual(self.ok(*short, "3").stderr, b"")
        self.assertEqual(self.ok(*short, "50", *flags.split()).stderr, b"")

    def test_unwritable_output(self):
        tokens = self.golden_tokens
        for out in (self.path("no/such/folder/l"), self.dir, "/dev/null", "/proc/basin"):
            self.refused(1, "cannot write", "logits", self.model, "--tokens", tokens, "--out", out)
        # The place is checked before the model is read.
        self.refused(1, "cannot write", "logits", self.path("nowhere"), "--tokens", tokens, "--out", self.dir)

    def test_a_limit_on_file_sizes_is_a_write_error(self):
        folder = self.path("limited")
        os.makedirs(folder)
        self.refused(1, "File too large", "logits", self.model, "--tokens", self.golden_tokens, "--out",
                     os.path.join(folder, "l"),
                     preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096)))
        self.assertEqual(os.listdir(folder), [])

    def test_logits_that_are_not_finite(self):
        folder = copy_model(self.path("nan"))
        weights = os.path.join(folder, "model.safetensors")
        with open(weights, "rb") as file:
            data = bytearray(file.read())
        (header_bytes,) = struct.unpack("<Q", data[:8])
        begin, end = json.loads(data[8:8 + header_bytes])["model.norm.weight"]["data_offsets"]
        data[8 + header_bytes + begin:8 + header_bytes + end] = b"\xc0\x7f" * ((end - begin) // 2)  # NaN in bf16
        with open(weights, "wb") as file:
            file.write(data)
        for args in (("perplexity",), ("perplexity", "--json")):
            self.refused(1, "not finite", args[0], folder, "--tokens", self.golden_tokens, *args[1:])
        self.refused(1, "NaN", "generate", folder, "--tokens", self.golden_tokens, "--json")

    def test_old_output_survives_a_failure(self):
        kept = self.write("kept.safetensors", "precious")
        bad = write_tokens(self.path("bad.st"), [1, 2, 999])
        self.refused(1, "999", "logits", self.model, "--tokens", bad, "--out", kept)
        with open(kept, encoding="utf-8") as file:
            self.assertEqual(file.read(), "precious")
        self.ok("logits", self.model, "--tokens", self.golden_tokens, "--out", kept)
        self.assertGreater(os.path.getsize(kept), 1000)
        self.assertEqual([name for name in os.listdir(self.dir) if name.startswith("kept.safetensors.")], [])

    def test_bad_cpu_target(self):
        for value in ("sse9", ""):
            environment = {**os.environ, "BASIN_CPU": value}
            done = self.basin("logits", self.model, "--tokens", self.golden_tokens, "--out", self.path("o"),
                              env=environment)
            self.assertIn(done.returncode, (0, 1) if value == "" else (1,))
            if done.returncode == 1:
                self.assertIn(b"BASIN_CPU", done.stderr)

    def test_info(self):
        build = self.json("info")
        self.assertEqual(set(build), {"version", "cpu", "backends", "architectures"})
        self.assertIn("llama", build["architectures"])
        self.assertEqual(build["backends"], ["cpu"])
        for name, layers in (("llama_tiny", 3), ("qwen3_tiny", 3)):
            folder = os.path.join(os.path.dirname(self.model), name)
            with open(os.path.join(folder, "config.json"), encoding="utf-8") as file:
                config = json.load(file)
            model = self.json("info", folder)
            self.assertEqual(set(model), {"architecture", "parameters", "context", "layers", "weight_bytes"})
            self.assertEqual(model["architecture"], config["model_type"])
            self.assertEqual(model["context"], config["max_position_embeddings"])
            self.assertEqual(model["layers"], [{"window": None, "sink_logit": False}] * layers)
            self.assertEqual(model["weight_bytes"], 2 * model["parameters"])
            self.assertIn(str(model["parameters"]), self.ok("info", folder).stdout.decode())
            # The file beside its config.json names the same model.
            self.assertEqual(self.json("info", os.path.join(folder, "model.safetensors")), model)


if __name__ == "__main__":
    unittest.main()
