"""What the command line tests share: the program, golden files, safetensors in the standard library only."""
import array
import json
import math
import os
import shutil
import struct
import subprocess
import tempfile
import unittest

BINARY = os.environ["BASIN_BINARY"]
SOURCE_DIR = os.environ.get(
    "BASIN_SOURCE_DIR", os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__)))))
GOLDEN_DIR = os.environ.get("BASIN_GOLDEN_DIR", os.path.join(SOURCE_DIR, "tests", "golden"))
TYPE_CODES = {"F32": "f", "I32": "i", "I64": "q"}


def golden_model(name):
    return os.path.join(GOLDEN_DIR, "models", name)


def read_safetensors(path):
    """{name: (shape, array)} of the float32, int32 and int64 tensors."""
    with open(path, "rb") as file:
        (header_bytes,) = struct.unpack("<Q", file.read(8))
        header = json.loads(file.read(header_bytes))
        data = file.read()
    tensors = {}
    for name, entry in header.items():
        if name != "__metadata__" and entry["dtype"] in TYPE_CODES:
            values = array.array(TYPE_CODES[entry["dtype"]])
            values.frombytes(data[entry["data_offsets"][0]:entry["data_offsets"][1]])
            tensors[name] = (entry["shape"], values)
    return tensors


def write_tokens(path, ids, dtype="I64", shape=None, name="input_ids"):
    data = array.array(TYPE_CODES[dtype], ids).tobytes()
    entry = {"dtype": dtype, "shape": [len(ids)] if shape is None else shape, "data_offsets": [0, len(data)]}
    header = json.dumps({name: entry}).encode()
    with open(path, "wb") as file:
        file.write(struct.pack("<Q", len(header)) + header + data)
    return path


def max_difference(a, b):
    """The largest |a - b|; inf when a value is not finite."""
    assert len(a) == len(b)
    worst = 0.0
    for x, y in zip(a, b):
        if not math.isfinite(x):
            return math.inf
        worst = max(worst, abs(x - y))
    return worst


def byte_alphabet():
    """The printable character that byte-level BPE writes for each of the 256 bytes."""
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    names, extra = {}, 0
    for byte in range(256):
        if byte in plain:
            names[byte] = chr(byte)
        else:
            names[byte] = chr(256 + extra)
            extra += 1
    return [names[byte] for byte in range(256)]


MERGES = [("h", "e"), ("l", "l"), ("he", "ll"), ("hell", "o"), ("\u0120", "t"), ("\u0120t", "he")]
SPECIAL = {"<|endoftext|>": 300, "<|im_start|>": 301, "<|im_end|>": 302}


def write_tokenizer(directory, chat=True, bos=False):
    """A byte-level BPE tokenizer that fits the 320 tokens of the golden models."""
    vocabulary = {name: byte for byte, name in enumerate(byte_alphabet())}
    for left, right in MERGES:
        vocabulary[left + right] = len(vocabulary)
    special = SPECIAL if chat else {"<|endoftext|>": 300}
    added = [{"id": number, "content": name, "single_word": False, "lstrip": False, "rstrip": False,
              "normalized": False, "special": True} for name, number in special.items()]
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    definition = {
        "version": "1.0", "truncation": None, "padding": None, "added_tokens": added, "normalizer": None,
        "pre_tokenizer": byte_level, "post_processor": None, "decoder": byte_level,
        "model": {"type": "BPE", "dropout": None, "unk_token": None, "continuing_subword_prefix": None,
                  "end_of_word_suffix": None, "fuse_unk": False, "byte_fallback": False, "ignore_merges": False,
                  "vocab": vocabulary, "merges": [f"{left} {right}" for left, right in MERGES]}}
    settings = {"eos_token": "<|im_end|>" if chat else "<|endoftext|>", "add_bos_token": bos}
    if bos:
        settings["bos_token"] = "<|endoftext|>"
    with open(os.path.join(directory, "tokenizer.json"), "w", encoding="utf-8") as file:
        json.dump(definition, file)
    with open(os.path.join(directory, "tokenizer_config.json"), "w", encoding="utf-8") as file:
        json.dump(settings, file)


def copy_model(directory, name="llama_tiny", **config):
    """The golden model's weights in `directory`, with changed keys in its config (None removes a key)."""
    os.makedirs(directory, exist_ok=True)
    shutil.copy(os.path.join(golden_model(name), "model.safetensors"), directory)
    with open(os.path.join(golden_model(name), "config.json"), encoding="utf-8") as file:
        settings = json.load(file)
    settings.update(config)
    settings = {key: value for key, value in settings.items() if key not in config or value is not None}
    with open(os.path.join(directory, "config.json"), "w", encoding="utf-8") as file:
        json.dump(settings, file)
    return directory


class CliTest(unittest.TestCase):
    """Runs the program in a temporary directory of its own."""

    @classmethod
    def setUpClass(cls):
        cls.folder = tempfile.TemporaryDirectory(prefix="basin-cli-")
        cls.dir = cls.folder.name
        cls.model = golden_model("llama_tiny")
        cls.golden_tokens = os.path.join(cls.model, "golden.safetensors")

    @classmethod
    def tearDownClass(cls):
        cls.folder.cleanup()

    def path(self, name):
        return os.path.join(self.dir, name)

    def write(self, name, data):
        with open(self.path(name), "wb") as file:
            file.write(data.encode() if isinstance(data, str) else data)
        return self.path(name)

    def basin(self, *args, **options):
        options.setdefault("timeout", 300)
        return subprocess.run([BINARY, *args], capture_output=True, check=False, stdin=subprocess.DEVNULL, **options)

    def ok(self, *args, **options):
        done = self.basin(*args, **options)
        self.assertEqual(done.returncode, 0, f"{args}: {done.stderr.decode(errors='replace')}")
        return done

    def json(self, *args, **options):
        """The one object that --json puts on stdout."""
        done = self.ok(*args, "--json", **options)
        self.assertEqual(done.stdout.count(b"\n"), 1, done.stdout)
        return json.loads(done.stdout)

    def refused(self, code, message, *args, hint=None, **options):
        """Checks the exit code, the shape of the message, and that stdout stays empty."""
        done = self.basin(*args, **options)
        lines = done.stderr.decode().splitlines()
        context = f"{args}: exit {done.returncode}, {lines}"
        self.assertEqual(done.returncode, code, context)
        self.assertEqual(done.stdout, b"", context)
        self.assertIn(len(lines), (1, 2), context)
        self.assertTrue(lines[0].startswith("error: "), context)
        self.assertIn(message, lines[0], context)
        if len(lines) == 2:
            self.assertTrue(lines[1].startswith("hint: "), context)
        if hint is not None:
            self.assertEqual(len(lines), 2, context)
            self.assertIn(hint, lines[1], context)
        return done
