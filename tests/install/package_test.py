"""Makes the Debian packages, unpacks them into an empty root, and uses what lies there."""
import os
import shutil
import subprocess
import tempfile
import unittest
from pathlib import Path

BUILD = Path(os.environ["BASIN_BUILD_DIR"])
VERSION = os.environ["BASIN_VERSION"]
SOURCE = Path(os.environ["BASIN_SOURCE_DIR"])
MODEL = SOURCE / "tests/golden/models/llama_tiny"


def run(*command, **variables):
    """In an environment that knows nothing of the build."""
    return subprocess.run([str(word) for word in command], capture_output=True, text=True,
                          env={"PATH": os.environ["PATH"], "LC_ALL": "C.UTF-8", **variables})


@unittest.skipUnless((BUILD / "CPackConfig.cmake").exists(), "not on Debian: cmake/package.cmake has said so")
class Package(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        cls.folder = Path(tempfile.mkdtemp(prefix="basin_package."))
        cls.addClassCleanup(shutil.rmtree, cls.folder)
        cls.checked(os.environ["CPACK_COMMAND"], "--config", BUILD / "CPackConfig.cmake", "-B", cls.folder)
        cls.packages = {cls.field(file, "Package"): file for file in cls.folder.glob("*.deb")}
        cls.root = cls.folder / "root"
        for file in cls.packages.values():  # into one root: no file may be in both
            before = {path for path in cls.root.rglob("*") if not path.is_dir()}
            listed = {cls.root / line.split()[5][2:] for line in cls.checked("dpkg-deb", "-c", file).splitlines()
                      if not line.startswith("d")}
            if before & listed:
                raise AssertionError(f"both packages have {before & listed}")
            cls.checked("dpkg-deb", "-x", file, cls.root)

    @classmethod
    def checked(cls, *command):
        done = run(*command)
        if done.returncode != 0:
            raise AssertionError(f"{command}\n{done.stdout}{done.stderr}")
        return done.stdout

    @classmethod
    def field(cls, file, name):
        return cls.checked("dpkg-deb", "-f", file, name).strip()

    def test_two_packages_that_say_what_they_need(self):
        self.assertEqual(set(self.packages), {"basin", "basin-attention-dev"})
        for name, file in self.packages.items():
            self.assertEqual(self.field(file, "Version"), VERSION)
            self.assertEqual(self.field(file, "Architecture"), self.checked("dpkg", "--print-architecture").strip())
            for needed in ("libc6", "libstdc++6"):
                self.assertIn(needed, self.field(file, "Depends"))
            self.assertRegex(self.field(file, "Description"), r"\A[^\n]*engine[^\n]*\n [A-Z][^\n]*\n [a-z]", "a line, and what it says")
            notices = (self.root / "usr/share/doc" / name / "copyright").read_text()
            self.assertIn("Apache License", notices)
            self.assertIn("PCRE2", notices)
        for name in ("libpcre2", "libfmt", "libboost"):  # linked statically
            self.assertNotIn(name, self.field(self.packages["basin"], "Depends"))

    def test_every_library_it_loads_is_of_a_package_it_names(self):
        depends = self.field(self.packages["basin"], "Depends")
        loaded = [line.split()[2] for line in self.checked("ldd", self.root / "usr/bin/basin").splitlines() if "=> /" in line]
        self.assertTrue(loaded)
        for library in loaded:
            owner = run("dpkg-query", "-S", os.path.realpath(library)).stdout.split(":")[0]
            self.assertIn(owner, depends, library)

    def test_the_program_generates_what_the_one_of_the_build_does(self):
        program = self.root / "usr/bin/basin"
        self.assertIn(VERSION, self.checked(program, "--version"))
        self.assertLess(program.stat().st_size, (BUILD / "src/cli/basin").stat().st_size)  # stripped
        arguments = ["generate", MODEL, "--tokens", MODEL / "golden.safetensors", "--max-tokens", "8", "--sink-tokens", "4",
                     "--window", "16"]
        self.assertEqual(self.checked(program, *arguments), self.checked(BUILD / "src/cli/basin", *arguments))

    def test_the_library_is_found_where_it_was_unpacked(self):
        libraries = self.root / "usr/lib"
        flags = run("pkg-config", "--cflags", "--libs", "basin-attention-c", PKG_CONFIG_LIBDIR=str(libraries / "pkgconfig"))
        self.assertEqual(flags.returncode, 0, flags.stderr)
        program = self.folder / "by_hand"
        self.checked(os.environ["CC"], "-std=c99", SOURCE / "examples/attention/by_hand.c", "-o", program, *flags.stdout.split(),
                     "-lm")
        done = run(program, LD_LIBRARY_PATH=str(libraries))
        self.assertEqual((done.returncode, done.stderr), (0, ""))


if __name__ == "__main__":
    unittest.main()
