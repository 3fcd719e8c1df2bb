"""basin probe on a golden model: the files of a report, going on after a kill, refusals."""
import array
import base64
import json
import os
import random
import re
import shutil
import struct
import subprocess
import time
import unittest

from helpers import BINARY, CliTest, copy_model, golden_model, write_tokens


class Probe(CliTest):
    def setUp(self):
        self.tokens = write_tokens(self.place("tokens.safetensors"), [(i * 37 + 11) % 300 for i in range(120)])

    def place(self, name):
        """A path that no other test uses."""
        return self.path(f"{self._testMethodName}_{name}")

    def probe(self, *arguments):
        return subprocess.run([BINARY, "probe", *arguments], capture_output=True, text=True)

    def test_a_report_has_all_its_files(self):
        out = self.place("report")
        done = self.probe(golden_model("llama_tiny"), "--tokens", self.tokens, "--out", out, "--target", "0.5", "--json")
        self.assertEqual(done.returncode, 0, done.stderr)
        self.assertEqual(json.loads(done.stdout)["tokens"], 120)
        names = set(os.listdir(out))
        self.assertLessEqual({"report.html", "summary.txt", "summary.json", "data.npz", "figures"}, names)
        self.assertNotIn("layers", names)
        with open(os.path.join(out, "summary.json"), encoding="utf-8") as file:
            summary = json.load(file)
        self.assertEqual(summary["schema"], "basin.probe.model/1")
        self.assertLess(summary["largest_row_error"], 1e-5)
        # Prediction and measurement side by side, of every pair that hides something.
        measured = summary["advice"]["measured"]
        self.assertGreater(len(measured), 1)
        for row in measured:
            self.assertEqual("retained" in row, row["window"] > 0)
            self.assertGreater(row["perplexity"], 1)
            if row["window"] > 0:
                self.assertTrue(0 < row["retained"] < 1 and row["output_error"] > 0, row)
        with open(os.path.join(out, "report.html"), encoding="utf-8") as file:
            page = file.read()
        data = json.loads(re.search(r'<script id="data" type="application/json">(.*?)</script>', page, re.S)[1])
        self.assertEqual(len(data["maps"]["layers"]), len(summary["layers"]))
        self.assertEqual(re.findall(r'(?:src|href)="http', page), [])
        self.assertTrue({"maps.svg", "heads.svg", "advice.svg"} <= set(os.listdir(os.path.join(out, "figures"))))

    def expect_killed_run_goes_on(self, names, *arguments):
        """A run that is killed after its first layer and started again writes the same bytes as one that is not."""
        whole, cut = self.place("whole"), self.place("cut")
        self.assertEqual(self.probe(*arguments, "--out", whole).returncode, 0)
        process = subprocess.Popen([BINARY, "probe", *arguments, "--out", cut], stdout=subprocess.DEVNULL,
                                   stderr=subprocess.DEVNULL)
        state = os.path.join(cut, "layers", "state.safetensors")
        while process.poll() is None and not os.path.exists(state):
            time.sleep(0.001)
        process.kill()
        process.wait()
        written = len([name for name in os.listdir(os.path.join(cut, "layers")) if re.fullmatch(r"layer_\d+\.npz", name)])
        done = self.probe(*arguments, "--out", cut)
        self.assertEqual(done.returncode, 0, done.stderr)
        before = int(re.search(r"went on after (\d+) of \d+ layers", done.stderr)[1])
        self.assertGreaterEqual(before, max(1, written - 1), "more than one layer was lost")
        for name in names:
            with open(os.path.join(whole, name), "rb") as a, open(os.path.join(cut, name), "rb") as b:
                self.assertEqual(a.read(), b.read(), name)

    def test_figures_without_pictures_are_said(self):
        """rsvg-convert is not there, or fails and leaves half a picture."""
        tools = self.place("tools")
        os.mkdir(tools)
        for script, reason in [(None, "rsvg-convert is not installed"),
                               ('#!/bin/sh\nfor last; do case $last in --output=*) echo half > "${last#--output=}";; esac; done\nexit 1\n',
                                "rsvg-convert failed on")]:
            if script is not None:
                with open(os.path.join(tools, "rsvg-convert"), "w", encoding="utf-8") as file:
                    file.write(script)
                os.chmod(os.path.join(tools, "rsvg-convert"), 0o755)
            # Nothing but these tools and what the shell has built in.
            out = self.place(f"report_{script is not None}")
            done = subprocess.run([BINARY, "probe", golden_model("llama_tiny"), "--tokens", self.tokens, "--out", out, "--no-advice"],
                                  capture_output=True, text=True, env={**os.environ, "PATH": tools})
            self.assertEqual(done.returncode, 0, done.stderr)
            self.assertIn(f"figures are SVG only: {reason}", done.stderr)
            figures = os.listdir(os.path.join(out, "figures"))
            self.assertIn("maps.svg", figures)
            self.assertEqual([name for name in figures if not name.endswith(".svg")], [])

    def test_a_killed_run_goes_on_and_gives_the_same_bytes(self):
        self.expect_killed_run_goes_on(("data.npz", "summary.json", "report.html"), golden_model("llama_tiny"), "--tokens",
                                       self.tokens, "--no-advice")

    def test_a_damaged_state_names_the_folder_to_remove(self):
        arguments = (golden_model("llama_tiny"), "--tokens", self.tokens, "--no-advice", "--out", self.place("cut"))
        process = subprocess.Popen([BINARY, "probe", *arguments], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        state = self.place("cut") + "/layers/state.safetensors"
        while process.poll() is None and not os.path.exists(state):
            time.sleep(0.001)
        process.kill()
        process.wait()
        os.truncate(state, os.path.getsize(state) - 4)
        done = self.probe(*arguments)
        self.assertEqual(done.returncode, 1, done.stderr)
        self.assertIn(state, done.stderr)
        self.assertIn(f"remove {os.path.dirname(state)}", done.stderr)
        shutil.rmtree(os.path.dirname(state))
        self.assertEqual(self.probe(*arguments).returncode, 0)

    def test_layers_of_another_run_are_not_mixed_in(self):
        out = self.place("report")
        os.makedirs(os.path.join(out, "layers"))
        with open(os.path.join(out, "layers", "run.json"), "w", encoding="utf-8") as file:
            file.write("{}")
        done = self.probe(golden_model("llama_tiny"), "--tokens", self.tokens, "--out", out)
        self.assertEqual(done.returncode, 1)
        self.assertIn("another run", done.stderr)

    def test_a_sparse_model_writes_its_selections_and_studies_them(self):
        for name in ("deepseekv32_tiny", "glmmoedsa_tiny"):
            out, again = self.place(name), self.place(name + "_trace")
            done = self.probe(golden_model(name), "--tokens", self.tokens, "--out", out, "--compute", "fp32", "--json")
            self.assertEqual(done.returncode, 0, done.stderr)
            report = json.loads(done.stdout)
            self.assertEqual((report["layers"], report["topk"], report["queries"]), (3, 24, 96))
            names = set(os.listdir(out))
            self.assertLessEqual({"report.html", "summary.txt", "summary.json", "counts.csv", "data.npz", "trace.npz"}, names)
            self.assertNotIn("layers", names)
            with open(os.path.join(out, "summary.json"), encoding="utf-8") as file:
                for layer in json.load(file)["layers"]:
                    self.assertTrue(0.3 < layer["attention_mass"] < 1.0, layer["attention_mass"])
            self.assertIn("attention_mass.svg", os.listdir(os.path.join(out, "figures")))
            with open(os.path.join(out, "summary.txt"), encoding="utf-8") as file:
                self.assertIn("of the attention over all keys", file.read())
            # The trace alone gives the same study.
            done = self.probe("--trace", os.path.join(out, "trace.npz"), "--out", again)
            self.assertEqual(done.returncode, 0, done.stderr)
            with open(os.path.join(out, "counts.csv"), "rb") as a, open(os.path.join(again, "counts.csv"), "rb") as b:
                self.assertEqual(a.read(), b.read())
        model, out = golden_model("deepseekv32_tiny"), self.place("refused")
        for arguments, message in [(("--topk", "5"), "this model selects 24 keys by itself"), (("--window", "50"), "--window"),
                                   (("--max-tokens", "25"), "quer")]:
            done = self.probe(model, "--tokens", self.tokens, "--out", out, *arguments)
            self.assertEqual(done.returncode, 1, done.stderr)
            self.assertIn(message, done.stderr)
        for flags in (("--index-fp8",), ("--index-sink-tokens", "4"), ("--index-window", "1")):
            done = self.probe(golden_model("llama_tiny"), "--tokens", self.tokens, "--out", out, *flags)
            self.assertEqual(done.returncode, 1, done.stderr)
            self.assertIn(f"{flags[0]}: this model has no indexer", done.stderr)
        done = self.probe(model, "--tokens", self.tokens, "--out", out, "--index-sink-tokens", "20", "--index-window", "5")
        self.assertEqual(done.returncode, 1, done.stderr)
        self.assertIn("24 keys that this model selects", done.stderr)

    def test_selections_that_must_hold_sink_tokens_are_studied(self):
        out = self.place("report")
        done = self.probe(golden_model("deepseekv32_tiny"), "--tokens", self.tokens, "--out", out, "--index-sink-tokens", "4",
                          "--index-window", "6")
        self.assertEqual(done.returncode, 0, done.stderr)
        with open(os.path.join(out, "summary.json"), encoding="utf-8") as file:
            for layer in json.load(file)["layers"]:
                self.assertEqual(layer["sink_kept_1_4_16_64"][:2], [1.0, 1.0])

    def test_a_killed_run_of_a_sparse_model_goes_on(self):
        self.expect_killed_run_goes_on(("trace.npz", "counts.csv", "report.html"), golden_model("glmmoedsa_tiny"), "--tokens",
                                       self.tokens, "--index-fp8")

    def test_latent_attention_without_an_indexer_has_maps(self):
        out = self.place("report")
        done = self.probe(golden_model("deepseekv3_tiny"), "--tokens", self.tokens, "--out", out, "--target", "0.5")
        self.assertEqual(done.returncode, 0, done.stderr)
        with open(os.path.join(out, "summary.json"), encoding="utf-8") as file:
            self.assertLess(json.load(file)["largest_row_error"], 1e-5)

    def make_rows(self, layer, tokens=60, topk=6):
        """Rows as a server records them: unordered, padded with -1 behind."""
        shuffled = random.Random(layer)
        rows = []
        for t in range(tokens):
            row = shuffled.sample(range(t + 1), min(topk, t + 1))
            rows += row + [-1] * (topk - len(row))
        return rows

    def write_layers(self, path, layers, topk=6):
        """safetensors with topk/layer_0, topk/layer_1, ..."""
        header, data = {}, b""
        for i, rows in enumerate(layers):
            values = array.array("i", rows).tobytes()
            header[f"topk/layer_{i}"] = {"dtype": "I32", "shape": [len(rows) // topk, topk],
                                         "data_offsets": [len(data), len(data) + len(values)]}
            data += values
        text = json.dumps(header).encode()
        with open(path, "wb") as file:
            file.write(struct.pack("<Q", len(text)) + text + data)
        return path

    def test_payloads_of_servers_give_the_study_of_the_same_rows(self):
        layers = [self.make_rows(i) for i in range(3)]
        together = array.array("i", [key for t in range(60) for rows in layers for key in rows[6 * t:6 * t + 6]]).tobytes()
        header = "{'descr': '<i4', 'fortran_order': False, 'shape': (60, 3, 6), }"
        npy = b"\x93NUMPY\x01\x00" + struct.pack("<H", len(header) + 1) + header.encode() + b"\n" + together
        payload = base64.b64encode(together).decode()
        answer = {"text": "x", "meta_info": {"id": "1", "indexer_topk": payload}}
        flags = ("--layers", "3", "--topk", "6")
        made = {"rows.safetensors": (None, ()), "raw.txt": (payload, flags), "lines.txt": (f"{payload[:70]}\n{payload[70:]}\n", flags),
                "answer.json": (json.dumps(answer), flags), "batch.json": (json.dumps([answer], indent=1), flags),
                "vllm.txt": (base64.b64encode(npy).decode(), ()),
                "vllm.json": (json.dumps({"choices": [{"indexer_topk": base64.b64encode(npy).decode()}]}), flags)}
        seen = set()
        for name, (text, arguments) in made.items():
            path = self.place(name)
            if text is None:
                self.write_layers(path, layers)
            else:
                with open(path, "w", encoding="ascii") as file:
                    file.write(text)
            out = self.place(name + "_out")
            done = self.probe("--trace", path, "--out", out, *arguments)
            self.assertEqual(done.returncode, 0, f"{name}: {done.stderr}")
            with open(os.path.join(out, "counts.csv"), encoding="ascii") as file:
                seen.add(file.read())
        self.assertEqual(len(seen), 1)
        for name, arguments, message in (("raw.txt", (), "add --layers L and --topk K"), ("answer.json", ("--layers", "3"), "--topk"),
                                         ("raw.txt", ("--layers", "7", "--topk", "6"), "no whole number of tokens"),
                                         ("vllm.txt", ("--layers", "4"), "not what the flags say"),
                                         ("rows.safetensors", flags, "leave --layers and --topk out"),
                                         ("raw.txt", (*flags, "--from-query", "60"), "positions 0 to 59"),
                                         ("raw.txt", (*flags, "--to-query", "60"), "positions 0 to 59")):
            done = self.probe("--trace", self.place(name), "--out", self.place("refused"), *arguments)
            self.assertEqual(done.returncode, 1, name)
            self.assertIn(message, done.stderr)
            self.assertFalse(os.path.exists(self.place("refused")))

    def test_the_first_bad_row_of_a_trace_is_named_and_nothing_is_written(self):
        for query, slot, value, message in ((30, 2, 31, "layer 1, query 30 at position 30: key 31 comes after the query"),
                                            (3, 0, -1, "layer 1, query 3 at position 3: it has 3 keys; it must have 4"),
                                            (50, 1, -7, "layer 1, query 50 at position 50: key -7 is negative")):
            layers = [self.make_rows(i) for i in range(3)]
            layers[1][6 * query + slot] = value
            layers[2][6 * 20] = 99
            path, out = self.write_layers(self.place("bad.safetensors"), layers), self.place("out")
            done = self.probe("--trace", path, "--out", out)
            self.assertEqual(done.returncode, 1)
            self.assertIn(message, done.stderr)
            self.assertFalse(os.path.exists(out))

    def test_refusals(self):
        model, out = golden_model("llama_tiny"), self.place("report")
        for arguments, code, message in [
                ((model, "--tokens", self.tokens), 2, "--out"),
                (("--out", out), 2, "MODEL or --trace"),
                ((model, "--out", out), 2, "--text-file"),
                (("--trace", "x.npz", "--window", "5", "--out", out), 2, "--window has no meaning"),
                ((model, "--tokens", self.tokens, "--layers", "3", "--out", out), 2, "--layers belongs to --trace"),
                ((model, "--tokens", self.tokens, "--target", "1.5", "--out", out), 2, "--target"),
                ((model, "--tokens", self.tokens, "--window", "9", "--allow-beyond-context", "--out", out), 2,
                 "exclude each other")]:
            with self.subTest(arguments=arguments):
                done = self.probe(*arguments)
                self.assertEqual(done.returncode, code, done.stderr)
                self.assertIn(message, done.stderr)

    def test_beyond_the_context_only_when_asked(self):
        model = copy_model(self.place("short"), max_position_embeddings=64)
        out = self.place("report")
        done = self.probe(model, "--tokens", self.tokens, "--out", out)
        self.assertEqual(done.returncode, 1)
        self.assertIn("--allow-beyond-context", done.stderr)
        done = self.probe(model, "--tokens", self.tokens, "--out", out, "--allow-beyond-context")
        self.assertEqual(done.returncode, 0, done.stderr)
        streamed = self.place("streamed")
        done = self.probe(model, "--tokens", self.tokens, "--out", streamed, "--sink-tokens", "2", "--window", "30")
        self.assertEqual(done.returncode, 0, done.stderr)
        with open(os.path.join(streamed, "summary.json"), encoding="utf-8") as file:
            self.assertIn("first 2 + last 30", json.load(file)["reading"])


if __name__ == "__main__":
    unittest.main()
