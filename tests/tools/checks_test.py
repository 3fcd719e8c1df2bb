"""Every check of tools/ passes good input and fails bad input."""
import os
import subprocess
import tempfile
import unittest
from pathlib import Path

from helpers import ROOT, load

layers = load("check_layers")
symbols = load("check_kernel_symbols")
docs = load("check_docs")


class Folder(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.root = Path(folder.name)

    def write(self, path, text, mode=0o644):
        file = self.root / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
        file.chmod(mode)
        return file


class Layers(Folder):
    def complaints(self, path, include):
        self.write(path, f'#include <vector>\n#include "{include}"\n')
        return layers.check(self.root)

    def test_lower_layers_and_the_own_one_may_be_included(self):
        for path, include in [("src/ops/a.cc", "ops/b.h"), ("src/kv/a.cc", "basin/attention/spec.h"),
                              ("src/models/a.cc", "weights/gguf.h"), ("src/cli/a.cc", "engine/stream.h"),
                              ("include/basin/attention/mask.h", "basin/attention/spec.h"),
                              ("src/attention/reference/forward.cc", "basin/attention/spec.h"),
                              ("src/attention/cuda/sm90/a.cuh", "attention/cuda/sm90/b.cuh")]:
            self.assertEqual(self.complaints(path, include), [], (path, include))

    def test_higher_layers_and_siblings_may_not(self):
        for path, include in [("src/base/a.cc", "basin/tensor/view.h"), ("src/ops/a.cc", "kv/cache.h"),
                              ("src/kv/a.cc", "ops/rope.h"),
                              ("src/ops/cpu/a.h", "attention/cpu/pack.h"), ("src/weights/a.cc", "text/tokenizer.h"),
                              ("src/engine/a.cc", "cli/args.h"), ("src/models/a.cc", "engine/stream.h"),
                              ("src/attention/cpu/a.cc", "attention/reference/rows.h"),
                              ("src/attention/reference/a.cc", "attention/cpu/lanes.h"),
                              ("src/attention/cuda/sm90/a.cuh", "basin/attention/cpu.h"),
                              ("src/attention/cpu/a.cc", "basin/attention/cuda.h"),
                              ("src/attention/reference/a.cc", "basin/attention/mask.h"),
                              ("include/basin/attention/spec.h", "basin/attention/cpu.h")]:
            with self.subTest(path=path, include=include):
                found = self.complaints(path, include)
                self.assertEqual(len(found), 1, found)
                self.assertIn(include, found[0])
                (self.root / path).unlink()

    def test_unknown_modules_and_an_empty_tree_are_refused(self):
        self.assertIn("no sources", layers.check(self.root)[0])
        self.assertIn("no layer", self.complaints("src/misc/a.cc", "basin/base/error.h")[0])

    def test_finds_relative_includes(self):
        self.assertEqual(len(self.complaints("src/ops/a.cc", "b.h")), 1)


class KernelSymbols(unittest.TestCase):
    def complaints(self, *lines):
        return symbols.check_symbols("k.o", "avx2", lines)

    def test_symbols_of_the_target_pass(self):
        self.assertEqual(self.complaints("_ZN5basin3ops4avx26matmulEPf T 0 10", "_ZL5local t 0 4"), [])

    def test_a_weak_symbol_fails(self):
        for kind in "WVu":
            self.assertIn("weak", self.complaints(f"_ZN5basin3ops4avx23maxEff {kind} 0 10")[0])

    def test_a_symbol_outside_the_target_fails(self):
        self.assertIn("outside", self.complaints("_ZN5basin3ops6matmulEPf T 0 10")[0])
        self.assertIn("outside", self.complaints("_ZN5basin3ops7generic6matmulEPf T 0 10")[0])

    def test_a_build_without_kernels_fails(self):
        with tempfile.TemporaryDirectory() as folder:
            self.assertIn("no kernel objects", symbols.check(Path(folder))[0][0])

    def test_a_real_object_with_an_inline_function_fails(self):
        with tempfile.TemporaryDirectory() as folder:
            objects = Path(folder) / "basin_x_avx2.dir"
            objects.mkdir()
            source = objects / "k.cc"
            source.write_text("inline int shared(int x) { return x + 1; }\n"
                              "namespace avx2 { int (*f)(int) = shared; }\n")
            subprocess.run(["g++", "-c", str(source), "-o", str(objects / "k.cc.o")], check=True)
            found, count = symbols.check(Path(folder))
            self.assertEqual(count, 1)
            self.assertTrue(any("weak" in line and "shared" in line for line in found), found)


class Docs(Folder):
    def complaints(self, text):
        self.write("README.md", text)
        return docs.check(self.root, self.basin)[0]

    def setUp(self):
        super().setUp()
        self.basin = self.write("bin/basin", '#!/bin/sh\n[ "$1" = info ] || [ "$1" = --help ] || exit 2\n'
                                             "echo '  --json  one object'\n", 0o755)
        self.write("run", "#!/bin/sh\necho '--short  less'\n", 0o755)
        self.write("docs/other.md", "# A heading\n")
        self.write("CMakePresets.json", '{"configurePresets": [{"name": "dev"}]}')

    def test_good_documents_pass(self):
        self.assertEqual(self.complaints(
            "[a](docs/other.md#a-heading) `docs/other.md` [w](https://example.org)\n"
            "```sh\nbasin info M --json   # why\n./run --short && cmake --preset dev\nbuild/dev/example\n```\n"
            "```\nbasin nonsense: not a sh block\n```\n"), [])

    def test_bad_links_and_paths_fail(self):
        for text, word in [("[a](docs/missing.md)", "no such file"), ("[a](docs/other.md#nothing)", "no such heading"),
                           ("`src/missing.cc`", "no such path"), ("see /" + "root/x", "machine")]:
            self.assertIn(word, "".join(self.complaints(text)), text)

    def test_tests_exist(self):
        self.write("tests/a_test.cc", "TEST_F(Batch, AnswersAreThose) {}\n")
        self.write("tests/b_test.py", "class Life(Base):\n    def test_a_client_goes(self): pass\n")
        for name in ("Batch.AnswersAreThose", "Batch.Answers...", "Life.test_a_client_goes", "Life.test_a..."):
            self.assertEqual(self.complaints(f"`{name}`"), [], name)
        for name in ("Batch.Answers", "Batch.AnswersAreThese", "Batches.AnswersAreThose", "Life.test_a", "Death.test_a_client_goes"):
            self.assertIn("no such test", "".join(self.complaints(f"`{name}`")), name)

    def test_bad_commands_fail(self):
        for line, word in [("basin info --nothing", "no flag --nothing"), ("basin explode M", "not a command"),
                           ("./missing", "no such file"), ("tools/missing", "no such file"), ("./run --long", "no flag --long"),
                           ("./CMakePresets.json", "not executable"), ("cmake --preset fast", "no preset"),
                           ("frobnicate x", "not a command"), ("cd x && basin info --no", "no flag --no")]:
            self.assertIn(word, "".join(self.complaints(f"```sh\n{line}\n```\n")), line)


class Format(Folder):
    def run_check(self, *arguments):
        return subprocess.run([ROOT / "tools" / "check_format.sh", *map(str, arguments)], capture_output=True, text=True)

    def test_a_badly_formatted_file_fails_and_can_be_fixed(self):
        file = self.write("a.cc", "int  f( ){return 1 ;}\n")
        self.assertNotEqual(self.run_check(file).returncode, 0)
        self.assertEqual(self.run_check("--fix", file).returncode, 0)
        self.assertEqual(self.run_check(file).returncode, 0)

    def test_nothing_to_check_fails(self):
        self.assertNotEqual(self.run_check(self.root / "missing.cc").returncode, 0)


if __name__ == "__main__":
    os.environ.setdefault("LC_ALL", "C.UTF-8")
    unittest.main()
