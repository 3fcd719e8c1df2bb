"""Installs the library, builds a project outside the tree against it, and runs that on every CPU target."""
import os
import shutil
import subprocess
import tempfile
import unittest
from pathlib import Path

CMAKE = os.environ["CMAKE_COMMAND"]
VERSION = os.environ["BASIN_VERSION"]
CUDA = os.environ["BASIN_CUDA"] == "ON"
TARGETS = os.environ["BASIN_CPU_TARGETS"].split(",")
SOURCE = Path(__file__).resolve().parent / "consumer"
ROOT = SOURCE.parents[2]


def run(*command, **variables):
    return subprocess.run([str(word) for word in command], capture_output=True, text=True,
                          env={**os.environ, **variables})


class Consumer(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        cls.folder = Path(tempfile.mkdtemp(prefix="basin_install."))
        cls.addClassCleanup(shutil.rmtree, cls.folder)
        # Moved after it was installed: nothing in the package may name the folder it was installed to.
        cls.run_checked(CMAKE, "--install", os.environ["BASIN_BUILD_DIR"], "--prefix", cls.folder / "first")
        cls.prefix = (cls.folder / "first").rename(cls.folder / "prefix")
        # A copy, so that no relative path leads back into the tree.
        shutil.copytree(SOURCE, cls.folder / "source")
        cls.build = cls.folder / "build"
        done = cls.configure(cls.build, VERSION)
        if done.returncode != 0:
            raise AssertionError(done.stdout + done.stderr)
        cls.run_checked(CMAKE, "--build", cls.build)

    @classmethod
    def run_checked(cls, *command):
        done = run(*command)
        if done.returncode != 0:
            raise AssertionError(f"{command}\n{done.stdout}{done.stderr}")

    @classmethod
    def configure(cls, build, version):
        return run(CMAKE, "-S", cls.folder / "source", "-B", build, f"-DCMAKE_PREFIX_PATH={cls.prefix}",
                   f"-DWANTED_VERSION={version}", "-DCMAKE_FIND_USE_PACKAGE_REGISTRY=OFF")

    def test_probe_runs_on_every_target(self):
        ran = 0
        for program in ("probe", "probe_c"):
            for target in TARGETS:
                with self.subTest(program=program, target=target):
                    done = run(self.build / program, BASIN_CPU=target)
                    if "this CPU lacks it" in done.stderr:
                        continue
                    self.assertEqual((done.returncode, done.stdout, done.stderr), (0, target + "\n", ""))
                    ran += 1
        self.assertGreaterEqual(ran, 2)

    @unittest.skipUnless(CUDA, "built without CUDA")
    def test_cuda_is_found_from_cpp_and_c(self):
        sizes = [run(self.build / program) for program in ("probe_cuda", "probe_cuda_c")]
        for done in sizes:
            self.assertEqual((done.returncode, done.stderr), (0, ""))
        self.assertEqual(sizes[0].stdout, sizes[1].stdout)
        self.assertGreater(int(sizes[0].stdout), 0)

    def test_the_examples_are_a_project_of_their_own(self):
        source, build = self.folder / "examples", self.folder / "examples_build"
        shutil.copytree(ROOT / "examples", source)
        self.run_checked(CMAKE, "-S", source, "-B", build, f"-DCMAKE_PREFIX_PATH={self.prefix}",
                         "-DCMAKE_FIND_USE_PACKAGE_REGISTRY=OFF")
        self.run_checked(CMAKE, "--build", build)
        for program in ("basin_example_by_hand", "basin_example_by_hand_c"):
            done = run(build / program)
            self.assertEqual((done.returncode, done.stderr), (0, ""), program)
            self.assertIn("O = (0.5000, 0.2500)  lse = 1.0986  lse_with_sink = 1.3863\n", done.stdout)

    def test_the_examples_build_by_pkg_config(self):
        sanitize = ["-fsanitize=address,undefined", "-lfmt"] if os.environ["BASIN_SANITIZE"] == "ON" else []
        path = {"PKG_CONFIG_LIBDIR": str(self.prefix / "lib/pkgconfig"), "LD_LIBRARY_PATH": str(self.prefix / "lib")}
        for package, compiler, source in (("basin-attention", [os.environ["CXX"], "-std=c++20"], "by_hand.cc"),
                                          ("basin-attention-c", [os.environ["CC"], "-std=c99"], "by_hand.c")):
            with self.subTest(package=package):
                self.assertEqual(run("pkg-config", "--modversion", package, **path).stdout, VERSION + "\n")
                flags = run("pkg-config", "--cflags", "--libs", package, **path)
                self.assertEqual(flags.returncode, 0, flags.stderr)
                program = self.folder / package
                self.run_checked(*compiler, ROOT / "examples/attention" / source, "-o", program, *flags.stdout.split(), "-lm",
                                 *sanitize)
                done = run(program, **path)
                self.assertEqual((done.returncode, done.stderr), (0, ""))
                self.assertIn("O = (0.5000, 0.2500)  lse = 1.0986  lse_with_sink = 1.3863\n", done.stdout)

    def test_another_version_is_refused(self):
        major, minor, _ = VERSION.split(".")
        for version in (f"{int(major) + 1}.0", f"{major}.{int(minor) + 1}"):
            done = self.configure(self.folder / version, version)
            self.assertNotEqual(done.returncode, 0)
            self.assertIn("that is compatible", done.stderr)

    def test_the_library_alone_needs_no_packages_of_the_program(self):
        absent = [f"-DCMAKE_DISABLE_FIND_PACKAGE_{name}=ON"
                  for name in ("CLI11", "nlohmann_json", "GTest", "rapidcheck", "benchmark")]
        common = [CMAKE, "-S", ROOT, "--preset", "library"]
        alone = run(*common, "-B", self.folder / "alone", *absent)
        self.assertEqual(alone.returncode, 0, alone.stderr)
        for unwanted in ("BASIN_BUILD_TESTS", "BASIN_BUILD_BENCH"):
            refused = run(*common, "-B", self.folder / unwanted, f"-D{unwanted}=ON")
            self.assertNotEqual(refused.returncode, 0)
            self.assertIn("BASIN_BUILD_PROGRAM=OFF", refused.stderr)

    def test_headers_are_those_of_the_public_layers(self):
        layers = {path.name for path in (self.prefix / "include/basin").iterdir()}
        self.assertEqual(layers, {"base", "tensor", "attention"})
        for header in ("cuda.h", "cuda_c_api.h"):
            self.assertEqual((self.prefix / "include/basin/attention" / header).exists(), CUDA, "as its library")
        for header in (self.prefix / "include/basin").rglob("*.h"):
            text = header.read_text()
            for line in text.splitlines():
                if line.startswith("#include \""):
                    self.assertTrue((self.prefix / "include" / line.split('"')[1]).exists(), f"{header}: {line}")

    def test_the_program_is_installed(self):
        done = run(self.prefix / "bin/basin", "--version")
        self.assertEqual(done.returncode, 0, done.stderr)
        self.assertIn(VERSION, done.stdout)


if __name__ == "__main__":
    unittest.main()
