"""basin convert, against the `gguf` and `safetensors` packages: what they write is read, and they read what is written."""
import json
import os
import resource
import struct
import subprocess
import sys
import unittest

import gguf
import numpy as np
import safetensors
import safetensors.numpy

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
from helpers import BINARY, CliTest, copy_model, max_difference, read_safetensors, write_tokenizer  # noqa: E402

QUANTISED = ("q8_0", "q4_0", "q4_1", "q5_0", "q5_1", "q4_k", "q5_k", "q6_k", "mxfp4")
# Where the package has a quantiser, and it is ggml's reference.
WITH_REFERENCE = ("f32", "f16", "bf16", "q8_0", "q4_0", "q4_1", "q5_0", "q5_1", "mxfp4")
WORD = {"f32": np.uint32, "f16": np.uint16}


def ggml_type(name):
    return gguf.GGMLQuantizationType[name.upper()]


def runnable_targets():
    info = subprocess.run([BINARY, "info", "--json"], capture_output=True, check=True)
    return json.loads(info.stdout)["cpu"]["targets_here"]


def random_blocks(name, count, random):
    """Any bytes, but for factors that are finite."""
    elements, size = gguf.GGML_QUANT_SIZES[ggml_type(name)]
    blocks = random.integers(0, 256, (count, size), dtype=np.uint8)
    for at in {"q6_k": (208,), "mxfp4": ()}.get(name, (0, 2) if name in ("q4_1", "q5_1", "q4_k", "q5_k") else (0,)):
        factors = random.normal(0, 0.02, count).astype(np.float16)
        blocks[:, at:at + 2] = factors.view(np.uint8).reshape(count, 2)
    return blocks, elements


class Convert(CliTest):
    def write_gguf(self, name, tensors, extra=lambda writer: None):
        """tensors: {name: array}, or {name: (bytes, type)} for blocks."""
        path = self.path(name)
        writer = gguf.GGUFWriter(path, "none")
        extra(writer)
        for key, value in tensors.items():
            if isinstance(value, tuple):
                writer.add_tensor(key, value[0], raw_dtype=ggml_type(value[1]))
            else:
                writer.add_tensor(key, value)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        return path

    def tensors(self, path):
        return {tensor.name: tensor for tensor in gguf.GGUFReader(path).tensors}

    def test_quantised_bytes_are_those_of_the_reference(self):
        random = np.random.default_rng(1)
        matrix = random.normal(0, 1, (48, 512)).astype(np.float32)
        matrix *= np.exp2(random.integers(-12, 6, (48, 1))).astype(np.float32)
        matrix[3] = 0
        matrix[4, ::2] = 0
        matrix[5] = np.round(random.normal(0, 1, 512) * 4) / 4  # many equal magnitudes and halves
        matrix += 0.0  # no -0: which zero is the least of several, the reference leaves to the compiler
        source = self.write_gguf("source.gguf", {"m.weight": matrix})
        for name in WITH_REFERENCE:
            with self.subTest(type=name):
                out = self.path(f"{name}.gguf")
                self.ok("convert", source, out, "--type", name)
                written = self.tensors(out)["m.weight"]
                self.assertEqual(written.tensor_type, ggml_type(name))
                expected = gguf.quantize(matrix, ggml_type(name))
                got = np.asarray(written.data).view(np.uint8).ravel()
                np.testing.assert_array_equal(got, np.asarray(expected).view(np.uint8).ravel())

    def test_widening_every_type_is_exact(self):
        random = np.random.default_rng(2)
        tensors, expected = {}, {}
        for name in QUANTISED:
            blocks, elements = random_blocks(name, 96, random)
            raw = blocks.reshape(3, -1)
            tensors[f"{name}.weight"] = (raw, name)
            expected[f"{name}.weight"] = gguf.dequantize(raw, ggml_type(name)).reshape(3, 32 * elements)
        source = self.write_gguf("blocks.gguf", tensors)
        for target in runnable_targets():
            self.ok("convert", source, self.path("wide.gguf"), "--type", "f32", env={**os.environ, "BASIN_CPU": target})
            for name, tensor in self.tensors(self.path("wide.gguf")).items():
                got = np.asarray(tensor.data).view(np.uint32)
                np.testing.assert_array_equal(got, expected[name].view(np.uint32), f"{target} {name}")

    def test_errors_of_the_k_types(self):
        random = np.random.default_rng(3)
        matrix = random.normal(0, 0.02, (64, 2048)).astype(np.float32)
        matrix[7] = np.abs(matrix[7])
        matrix[8] = -np.abs(matrix[8]) - 1
        matrix[9] = 0
        source = self.write_gguf("source_k.gguf", {"m.weight": matrix})
        # For comparison: a step of the range -2.6 to 2.6 deviations in 15 parts has an error of 0.10 deviations.
        for name, most in (("q4_k", 0.085), ("q5_k", 0.042), ("q6_k", 0.021)):
            with self.subTest(type=name):
                out = self.path(f"{name}.gguf")
                self.ok("convert", source, out, "--type", name)
                tensor = self.tensors(out)["m.weight"]
                self.assertEqual(tensor.tensor_type, ggml_type(name))
                got = gguf.dequantize(np.asarray(tensor.data), ggml_type(name))
                error = np.sqrt(np.mean((got - matrix) ** 2, axis=1)) / 0.02
                self.assertLess(np.delete(error, 8).max(), most)
                self.assertLess(error[8], 0.6)  # far from 0 beside its range: a step of q6_k is 1 / 32
                self.assertEqual(error[9], 0)

    def test_same_type_copies_bits_and_metadata(self):
        random = np.random.default_rng(4)

        def metadata(writer):
            writer.add_uint8("x.u8", 255)
            writer.add_int16("x.i16", -2)
            writer.add_uint64("x.u64", 2**63 + 1)
            writer.add_float64("x.f64", 0.1)
            writer.add_bool("x.bool", True)
            writer.add_string("x.text", "sinks \u20ac")
            writer.add_array("x.texts", ["a", "", "\u00e9"])
            writer.add_array("x.numbers", [1, -2, 3])
            writer.add_custom_alignment(64)

        tensors = {"z.weight": random_blocks("q5_1", 16, random)[0].reshape(2, -1), "a.weight": None,
                   "n.weight": random.normal(size=33).astype(np.float32), "ids": np.arange(6, dtype=np.int32)}
        tensors["z.weight"] = (tensors["z.weight"], "q5_1")
        tensors["a.weight"] = (random_blocks("q5_1", 4, random)[0].reshape(2, -1), "q5_1")
        source = self.write_gguf("same.gguf", tensors, metadata)
        out = self.path("again.gguf")
        report = self.json("convert", source, out, "--type", "q5_1")
        self.assertEqual((report["tensors"], report["converted"]), (4, 0))
        before, after = gguf.GGUFReader(source), gguf.GGUFReader(out)
        self.assertEqual([t.name for t in before.tensors], [t.name for t in after.tensors])
        for old, new in zip(before.tensors, after.tensors):
            self.assertEqual(old.tensor_type, new.tensor_type)
            self.assertEqual(list(old.shape), list(new.shape))
            np.testing.assert_array_equal(old.data, new.data)
        for key, field in before.fields.items():
            if key.startswith("x."):
                self.assertEqual(field.types, after.fields[key].types, key)
                self.assertEqual(field.contents(), after.fields[key].contents(), key)
        self.assertEqual(after.fields["general.file_type"].contents(), 9)
        self.assertNotIn("general.alignment", after.fields)  # the writer aligns to 32, the default

    def test_vectors_become_f32_and_routers_stay_exact(self):
        half = np.arange(64, dtype=np.float16) / 7
        source = self.write_gguf("mixed.gguf", {
            "blk.0.attn_norm.weight": half, "blk.0.ffn_gate_inp.weight": half.reshape(2, 32),
            "blk.0.ffn_up_exps.weight": np.ones((2, 3, 32), np.float16)})
        self.ok("convert", source, self.path("mixed_out.gguf"), "--type", "q4_0")
        out = self.tensors(self.path("mixed_out.gguf"))
        np.testing.assert_array_equal(out["blk.0.attn_norm.weight"].data, half.astype(np.float32))
        np.testing.assert_array_equal(out["blk.0.ffn_gate_inp.weight"].data, half.reshape(2, 32))
        self.assertEqual(out["blk.0.ffn_up_exps.weight"].tensor_type, ggml_type("q4_0"))
        self.assertEqual(list(out["blk.0.ffn_up_exps.weight"].shape), [32, 3, 2])

    def test_what_cannot_be_is_refused_by_name_and_leaves_nothing(self):
        matrix = np.ones((2, 96), np.float32)
        source = self.write_gguf("odd.gguf", {"good.weight": matrix, "w.weight": matrix})
        before = sorted(os.listdir(self.dir))
        self.refused(1, "'good.weight' has rows of 96", "convert", source, self.path("x.gguf"), "--type", "q6_k", hint="q8_0")
        self.refused(1, "safetensors has no dtype for q8_0", "convert", source, self.path("x"), "--type", "q8_0")
        self.refused(1, "'none' is not supported", "convert", source, self.path("x"), "--type", "f32")
        self.refused(1, "is the model itself", "convert", source, source, "--type", "f32")
        self.refused(1, "absent.gguf does not exist", "convert", self.path("absent.gguf"), self.path("x.gguf"), "--type", "f32")
        self.refused(1, "cannot write", "convert", source, self.path("none/x.gguf"), "--type", "f32")
        for value, name in ((70000, "f16"), (1e9, "q8_0"), (float("nan"), "q4_1"), (float("inf"), "f32"), (3.4e38, "bf16")):
            with self.subTest(value=value, type=name):
                bad = matrix.copy()
                bad[1, 40] = value
                path = self.write_gguf("bad.gguf", {"good.weight": matrix, "w.weight": bad.astype(np.float32)})
                if name == "f32":  # copied as it is
                    self.ok("convert", path, self.path("inf.gguf"), "--type", name)
                    os.remove(self.path("inf.gguf"))
                else:
                    self.refused(1, "'w.weight' holds", "convert", path, self.path("x.gguf"), "--type", name)
        os.remove(self.path("bad.gguf"))
        self.assertEqual(sorted(os.listdir(self.dir)), before)

    def test_files_of_version_2_and_a_link_as_target(self):
        source = self.write_gguf("v3.gguf", {"w.weight": np.ones((2, 32), np.float32)})
        with open(source, "rb") as file:
            data = bytearray(file.read())
        data[4:8] = struct.pack("<I", 2)
        self.write("v2.gguf", bytes(data))
        self.write("target.gguf", b"old")
        os.symlink("target.gguf", self.path("link.gguf"))
        self.ok("convert", self.path("v2.gguf"), self.path("link.gguf"), "--type", "q8_0")
        self.assertTrue(os.path.islink(self.path("link.gguf")))
        self.assertEqual(self.tensors(self.path("target.gguf"))["w.weight"].tensor_type, ggml_type("q8_0"))


class ConvertSafetensors(CliTest):
    def logits(self, model):
        out = self.path("logits.safetensors")
        self.ok("logits", model, "--tokens", self.golden_tokens, "--out", out)
        return read_safetensors(out)["logits"][1]

    def test_a_model_in_shards_becomes_one_file(self):
        self.ok("convert", self.model, self.path("plain"), "--type", "f32")  # exact: the golden is bf16
        tensors = safetensors.numpy.load_file(self.path("plain/model.safetensors"))
        source = copy_model(self.path("shards"), torch_dtype="float32")
        os.remove(os.path.join(source, "model.safetensors"))
        names = sorted(tensors)
        halves = {"model-00001-of-00002.safetensors": names[::2], "model-00002-of-00002.safetensors": names[1::2]}
        for shard, part in halves.items():
            safetensors.numpy.save_file({name: tensors[name] for name in part}, os.path.join(source, shard))
        with open(os.path.join(source, "model.safetensors.index.json"), "w", encoding="utf-8") as file:
            json.dump({"weight_map": {name: shard for shard, part in halves.items() for name in part}}, file)
        self.write("shards/tokenizer_config.json", "{}")
        self.assertEqual(self.logits(source), self.logits(self.model))

        out = self.path("whole/of/it")
        report = self.json("convert", source, out, "--type", "f32")
        self.assertEqual((report["tensors"], report["converted"]), (len(tensors), 0))
        self.assertEqual(sorted(os.listdir(out)), ["config.json", "model.safetensors", "tokenizer_config.json"])
        written = safetensors.numpy.load_file(os.path.join(out, "model.safetensors"))
        self.assertEqual(sorted(written), names)
        for name in names:
            np.testing.assert_array_equal(written[name], tensors[name])
        self.assertEqual(self.logits(out), self.logits(self.model))

        # Once more to the same place is the same; another configuration there is not replaced.
        self.ok("convert", source, out, "--type", "f32")
        self.write("whole/of/it/config.json", "{}")
        self.refused(1, "config.json is there already", "convert", source, out, "--type", "f32")

    def test_bf16_and_f16_copies_run(self):
        whole = self.logits(self.model)
        for name in ("bf16", "f16"):
            out = self.path(f"{name}/model.safetensors")
            self.ok("convert", self.model, out, "--type", name)
            with open(self.path(f"{name}/config.json"), encoding="utf-8") as file:
                config = json.load(file)
            self.assertIn(config.get("torch_dtype", config.get("dtype", "absent")),
                          ("absent", "bfloat16" if name == "bf16" else "float16"))
            with safetensors.safe_open(out, framework="numpy") as file:
                self.assertEqual(file.metadata()["format"], "pt")
                self.assertEqual(file.get_slice("model.norm.weight").get_dtype(), "F32")
                self.assertEqual(file.get_slice("model.embed_tokens.weight").get_dtype(), name.upper())
            difference = max_difference(self.logits(out), whole)
            self.assertLess(difference, 1e-4)  # the golden is bf16, and f16 lacks only its smallest numbers

    def test_f8_with_block_scales_becomes_bf16(self):
        random = np.random.default_rng(5)
        values = random.integers(0, 126, (32, 48), dtype=np.uint8)
        scales = np.exp2(random.integers(-4, 4, (2, 2))).astype(np.float32)
        header = {"w.weight": {"dtype": "F8_E4M3", "shape": [32, 48], "data_offsets": [0, 1536]},
                  "w.weight_scale_inv": {"dtype": "F32", "shape": [2, 2], "data_offsets": [1536, 1552]}}
        text = json.dumps(header).encode()
        os.makedirs(self.path("f8"))
        self.write("f8/model.safetensors", struct.pack("<Q", len(text)) + text + values.tobytes() + scales.tobytes())
        config = {"quantization_config": {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [16, 24]}}
        self.write("f8/config.json", json.dumps(config))
        self.ok("convert", self.path("f8"), self.path("f8_out"), "--type", "f32")
        with open(self.path("f8_out/config.json"), encoding="utf-8") as file:
            self.assertEqual(json.load(file), {})
        got = safetensors.numpy.load_file(self.path("f8_out/model.safetensors"))
        exponent, fraction = (values >> 3).astype(np.int32), (values & 7).astype(np.float32)
        plain = np.where(exponent == 0, np.ldexp(fraction, -9), np.ldexp(8 + fraction, exponent - 10))
        np.testing.assert_array_equal(got["w.weight"], plain * np.kron(scales, np.ones((16, 24))))
        self.assertEqual(sorted(got), ["w.weight"])

    def test_between_the_formats_and_back(self):
        """Names, row order, configuration and tokenizer: the logits, the tokens and the tensors stay what they were."""
        for family in ("llama_tiny", "qwen3_tiny"):
            with self.subTest(family=family):
                source = copy_model(self.path(family), family, torch_dtype="bfloat16")
                write_tokenizer(source, bos=family == "llama_tiny")
                there, back = self.path(f"{family}.gguf"), self.path(f"{family}_back")
                self.ok("convert", source, there, "--type", "bf16")
                self.ok("convert", there, back, "--type", "bf16")
                for tensors in ("first", "again"):
                    self.ok("convert", source if tensors == "first" else back, self.path(f"{family}_{tensors}"), "--type", "f32")
                first = safetensors.numpy.load_file(self.path(f"{family}_first/model.safetensors"))
                again = safetensors.numpy.load_file(self.path(f"{family}_again/model.safetensors"))
                if "lm_head.weight" not in again:
                    first.pop("lm_head.weight", None)  # tied
                self.assertEqual(sorted(first), sorted(again))
                for name, value in first.items():
                    np.testing.assert_array_equal(value, again[name], name)
                expected = self.logits(source)
                self.assertLess(max_difference(self.logits(there), expected), 1e-4)
                self.assertEqual(self.logits(back), expected)
                reader = gguf.GGUFReader(there)
                self.assertEqual(reader.fields["tokenizer.ggml.pre"].contents(), "gpt-2")
                self.assertEqual(reader.fields["general.file_type"].contents(), 32)
                self.assertEqual(len(reader.fields["tokenizer.ggml.tokens"].contents()), 320)
                text = "hello the cat <|im_end|> 12"
                tokens = self.json("tokenize", source, "--text", text)
                for model in (there, back):
                    self.assertEqual(self.json("tokenize", model, "--text", text), tokens)

    def raw_tensors(self, path):
        """{name: (dtype, shape, bytes)}, bf16 included."""
        with open(path, "rb") as file:
            header = json.loads(file.read(struct.unpack("<Q", file.read(8))[0]))
            data = file.read()
        return {name: (entry["dtype"], entry["shape"], data[slice(*entry["data_offsets"])])
                for name, entry in header.items() if name != "__metadata__"}

    def as_f32(self, model, name):
        self.ok("convert", model, self.path(name), "--type", "f32")
        return safetensors.numpy.load_file(self.path(f"{name}/model.safetensors"))

    def test_gpt_oss_between_the_formats_and_back(self):
        """Experts that are stored transposed and alternate, biases, sinks, windows and YaRN."""
        source = copy_model(self.path("oss"), "gpt_oss_tiny")
        write_tokenizer(source)
        there, back = self.path("oss.gguf"), self.path("oss_back")
        self.ok("convert", source, there, "--type", "same")
        self.ok("convert", there, back, "--type", "same")
        first, again = self.as_f32(source, "oss_first"), self.as_f32(back, "oss_again")
        self.assertEqual(sorted(first), sorted(again))
        for name, value in first.items():
            np.testing.assert_array_equal(value, again[name], name)
        expected = self.logits(source)
        self.assertEqual(self.logits(there), expected)
        self.assertEqual(self.logits(back), expected)
        self.assertEqual(self.raw_tensors(os.path.join(back, "model.safetensors"))["lm_head.weight"],
                         self.raw_tensors(os.path.join(source, "model.safetensors"))["lm_head.weight"])
        reader = gguf.GGUFReader(there)
        for key, value in (("general.architecture", "gpt-oss"), ("gpt-oss.expert_count", 4), ("gpt-oss.expert_used_count", 2),
                           ("gpt-oss.expert_feed_forward_length", 64), ("gpt-oss.attention.sliding_window", 16),
                           ("gpt-oss.rope.scaling.type", "yarn"), ("gpt-oss.rope.scaling.original_context_length", 64)):
            self.assertEqual(reader.fields[key].contents(), value, key)
        self.assertNotIn("gpt-oss.attention.sliding_window_pattern", reader.fields)
        tensors = {tensor.name: tensor for tensor in reader.tensors}
        self.assertEqual(tensors["blk.0.ffn_gate_exps.bias"].tensor_type, ggml_type("f32"))
        self.assertEqual(tensors["blk.0.attn_sinks.weight"].tensor_type, ggml_type("f32"))
        # What the package reads of an expert is what the checkpoint has, transposed and every second column.
        wide = first["model.layers.1.mlp.experts.gate_up_proj"]
        for name, start in (("gate", 0), ("up", 1)):
            stored = np.asarray(tensors[f"blk.1.ffn_{name}_exps.weight"].data)
            got = gguf.dequantize(stored, ggml_type("bf16")).reshape(4, 64, 64)
            np.testing.assert_array_equal(got, wide[:, :, start::2].transpose(0, 2, 1), name)
            bias = np.asarray(tensors[f"blk.1.ffn_{name}_exps.bias"].data).reshape(4, 64)
            np.testing.assert_array_equal(bias, first["model.layers.1.mlp.experts.gate_up_proj_bias"][:, start::2])

    def test_mxfp4_experts_stay_bit_for_bit(self):
        source = copy_model(self.path("mx"), "gpt_oss_mxfp4_tiny")
        there, back = self.path("mx.gguf"), self.path("mx_back")
        self.ok("convert", source, there, "--type", "same")
        self.ok("convert", there, back, "--type", "same")
        first = self.raw_tensors(os.path.join(source, "model.safetensors"))
        again = self.raw_tensors(os.path.join(back, "model.safetensors"))
        self.assertEqual(sorted(first), sorted(again))
        blocks = [name for name in first if name.endswith(("_blocks", "_scales"))]
        self.assertEqual(len(blocks), 4 * 4)
        for name in blocks:
            self.assertEqual(first[name], again[name], name)
        with open(os.path.join(back, "config.json"), encoding="utf-8") as file:
            self.assertEqual(json.load(file)["quantization_config"]["quant_method"], "mxfp4")
        expected = self.logits(source)
        self.assertEqual(self.logits(there), expected)
        self.assertEqual(self.logits(back), expected)
        # As the package dequantises them, which is what the checkpoint's blocks mean.
        values = np.array([0, .5, 1, 1.5, 2, 3, 4, 6, -0.0, -.5, -1, -1.5, -2, -3, -4, -6], np.float32)
        _, shape, data = first["model.layers.2.mlp.experts.down_proj_blocks"]
        elements = np.frombuffer(data, np.uint8).reshape(*shape[:3], 16)
        elements = np.stack([elements & 15, elements >> 4], -1).reshape(*shape[:3], 32)
        scales = np.frombuffer(first["model.layers.2.mlp.experts.down_proj_scales"][2], np.uint8).reshape(*shape[:3], 1)
        plain = np.ldexp(values[elements], scales.astype(np.int32) - 127).reshape(shape[0], shape[1], -1)
        tensors = {tensor.name: tensor for tensor in gguf.GGUFReader(there).tensors}
        stored = tensors["blk.2.ffn_down_exps.weight"]
        self.assertEqual(stored.tensor_type, ggml_type("mxfp4"))
        np.testing.assert_array_equal(gguf.dequantize(np.asarray(stored.data), ggml_type("mxfp4")).reshape(plain.shape), plain)
        # Every value of MXFP4 has a bf16, in the other layout.
        wide = self.path("mx_bf16")
        self.ok("convert", there, wide, "--type", "bf16")
        with open(os.path.join(wide, "config.json"), encoding="utf-8") as file:
            self.assertNotIn("quantization_config", json.load(file))
        down = self.as_f32(wide, "mx_f32")["model.layers.2.mlp.experts.down_proj"]
        np.testing.assert_array_equal(down.transpose(0, 2, 1), plain)
        self.assertLess(max_difference(self.logits(wide), expected), 1e-4)

    def test_gemma_between_the_formats_and_back(self):
        source = copy_model(self.path("gemma"), "gemma3_tiny")
        there, back = self.path("gemma.gguf"), self.path("gemma_back")
        self.ok("convert", source, there, "--type", "bf16")
        self.ok("convert", there, back, "--type", "bf16")
        first, again = self.as_f32(source, "gemma_first"), self.as_f32(back, "gemma_again")
        first.pop("lm_head.weight", None)
        self.assertEqual(sorted(first), sorted(again))
        tensors = {tensor.name: tensor for tensor in gguf.GGUFReader(there).tensors}
        norm = first["model.layers.0.pre_feedforward_layernorm.weight"]
        np.testing.assert_array_equal(np.asarray(tensors["blk.0.ffn_norm.weight"].data), norm + np.float32(1))
        for name, value in first.items():
            if "norm" in name:
                # One added and taken away again: what lies below its last bit is gone.
                np.testing.assert_array_equal((value + np.float32(1)) - np.float32(1), again[name], name)
            else:
                np.testing.assert_array_equal(value, again[name], name)
        expected = self.logits(source)
        self.assertEqual(self.logits(there), expected)
        self.assertEqual(self.logits(back), expected)
        with open(os.path.join(back, "config.json"), encoding="utf-8") as file:
            config = json.load(file)
        with open(os.path.join(source, "config.json"), encoding="utf-8") as file:
            given = json.load(file)
        for key in ("layer_types", "sliding_window", "query_pre_attn_scalar", "hidden_activation", "tie_word_embeddings"):
            self.assertEqual(config[key], given[key], key)
        self.assertIs(type(config["query_pre_attn_scalar"]), int)
        fields = gguf.GGUFReader(there).fields
        for key, value in (("general.architecture", "gemma3"), ("gemma3.attention.sliding_window", 16),
                           ("gemma3.rope.freq_base", 1e6), ("gemma3.rope.freq_base_swa", 1e4)):
            self.assertEqual(fields[key].contents(), value, key)

    def test_same_keeps_types(self):
        self.ok("convert", self.model, self.path("kept.gguf"), "--type", "q8_0")
        self.ok("convert", self.path("kept.gguf"), self.path("kept_again.gguf"), "--type", "same")
        self.assertEqual(self.logits(self.path("kept_again.gguf")), self.logits(self.path("kept.gguf")))
        self.assertEqual(gguf.GGUFReader(self.path("kept_again.gguf")).fields["general.file_type"].contents(), 7)
        self.refused(1, "safetensors has no dtype for q8_0", "convert", self.path("kept.gguf"), self.path("kept"), "--type", "same",
                     hint="bf16")

    def test_what_a_format_cannot_say_is_refused(self):
        for name, change, what in (("gemma3_tiny", {"query_pre_attn_scalar": 99}, "scale of scores"),
                                   ("gpt_oss_tiny", {"swiglu_limit": 5.0}, "swiglu_limit"),
                                   ("gpt_oss_tiny", {"layer_types": ["full_attention", "sliding_attention"] * 2}, "regular order")):
            with self.subTest(what=what):
                odd = copy_model(self.path(what.replace(" ", "_")), name, **change)
                self.refused(1, what, "convert", odd, self.path("odd_config.gguf"), "--type", "bf16")
                self.assertFalse(os.path.exists(self.path("odd_config.gguf")))

    def test_what_does_not_translate_is_refused_by_name(self):
        sparse = copy_model(self.path("sparse"), "deepseekv32_tiny")
        self.refused(1, "'deepseek_v32' cannot be translated", "convert", sparse, self.path("sparse.gguf"), "--type", "f32", hint="gpt_oss")
        scaled = copy_model(self.path("scaled"), "llama3_rope_tiny")
        self.refused(1, "llama3", "convert", scaled, self.path("scaled.gguf"), "--type", "f32")
        odd = copy_model(self.path("odd"))
        write_tokenizer(odd)
        with open(self.path("odd/tokenizer.json"), encoding="utf-8") as file:
            tokenizer = json.load(file)
        tokenizer["pre_tokenizer"] = {"type": "Sequence", "pretokenizers": [
            {"type": "Digits", "individual_digits": False}, tokenizer["pre_tokenizer"]]}
        self.write("odd/tokenizer.json", json.dumps(tokenizer))
        self.refused(1, "pre-tokeniser", "convert", odd, self.path("odd.gguf"), "--type", "f32", hint="smollm")
        self.assertFalse(os.path.exists(self.path("odd.gguf")))

    def test_a_full_disk_leaves_nothing(self):
        source = copy_model(self.path("source"))
        out = os.path.join(self.dir, "new", "deep")
        self.refused(1, "File too large", "convert", source, out, "--type", "f16",
                     preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096)))
        self.assertFalse(os.path.exists(os.path.join(self.dir, "new")))
        self.assertIn(b"converted to f16 or f32, ", self.ok("convert", source, out, "--type", "f16").stdout)
        self.assertIn(b"converted to f32, ", self.ok("convert", source, self.path("f32"), "--type", "f32").stdout)

    def test_bytes_stay_bytes(self):
        tensors = {"w_blocks": np.arange(64, dtype=np.uint8).reshape(2, 2, 16), "w_scales": np.full((2, 2), 120, np.uint8)}
        safetensors.numpy.save_file(tensors, self.path("bytes.safetensors"))
        self.ok("convert", self.path("bytes.safetensors"), self.path("bytes_out.safetensors"), "--type", "bf16")
        got = safetensors.numpy.load_file(self.path("bytes_out.safetensors"))
        for name, value in tensors.items():
            np.testing.assert_array_equal(got[name], value)


if __name__ == "__main__":
    unittest.main()
