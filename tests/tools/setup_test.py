"""tools/setup.sh names what is missing, and says how to go on when it cannot install."""
import shutil
import subprocess
import tempfile
import unittest
from pathlib import Path

from helpers import ROOT

LISTED = {line.split()[0] for line in (ROOT / "tools/packages.txt").read_text().splitlines()
          if line.strip() and not line.startswith("#")}


class Packages(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.bin = Path(folder.name)
        for tool in ("bash", "sed", "awk", "wc", "env"):
            (self.bin / tool).symlink_to(shutil.which(tool))
        self.command("dpkg-query", "exit 1")  # nothing is installed
        self.log = self.bin / "log"

    def command(self, name, script):
        path = self.bin / name
        path.write_text(f"#!{shutil.which('bash')}\n{script}\n")
        path.chmod(0o755)

    def install(self, user, install=1):
        self.command("id", f"echo {user}")
        script = f'set -euo pipefail; root={ROOT}; install={install}; source "$root/tools/setup.sh"; install_packages all'
        return subprocess.run([self.bin / "bash", "-c", script], env={"PATH": str(self.bin), "LOG": str(self.log)},
                              capture_output=True, text=True)

    def record(self, name, then=""):
        self.command(name, f'echo "{name} $*" >> "$LOG"\n{then}')

    def test_root_needs_no_sudo(self):
        self.record("apt-get")
        done = self.install(user=0)
        self.assertEqual(done.returncode, 0, done.stderr)
        update, install = self.log.read_text().splitlines()
        self.assertIn("update", update)
        self.assertLessEqual(LISTED, set(install.split()))

    def test_a_user_goes_through_sudo(self):
        self.record("apt-get")
        self.record("sudo", then='"$@"')
        done = self.install(user=1000)
        self.assertEqual(done.returncode, 0, done.stderr)
        self.assertEqual([line.split()[0] for line in self.log.read_text().splitlines()],
                         ["sudo", "apt-get", "sudo", "apt-get"])

    def test_a_user_without_sudo_is_told_what_is_missing(self):
        self.record("apt-get")
        done = self.install(user=1000)
        self.assertEqual(done.returncode, 1)
        first, second = done.stderr.splitlines()
        self.assertTrue(first.startswith("error: "), first)
        self.assertLessEqual(LISTED, set(first.split()))
        self.assertRegex(second, "^hint: .*root")
        self.assertFalse(self.log.exists())

    def test_no_install_installs_nothing(self):
        self.record("apt-get")
        done = self.install(user=0, install=0)
        self.assertEqual(done.returncode, 1)
        self.assertIn("--no-install", done.stderr)
        self.assertFalse(self.log.exists())


class Configure(unittest.TestCase):
    def configure(self, folder, *options):
        script = f'set -euo pipefail; root={folder}; source {ROOT}/tools/setup.sh; configure release "$@"'
        return subprocess.run(["bash", "-c", script, "bash", *options], capture_output=True, text=True)

    def test_a_folder_configured_without_the_program_gets_it_back(self):
        with tempfile.TemporaryDirectory() as folder:
            root = Path(folder)
            (root / "build").mkdir()
            (root / "CMakePresets.json").write_text((ROOT / "CMakePresets.json").read_text())
            (root / "CMakeLists.txt").write_text(
                "cmake_minimum_required(VERSION 3.25)\nproject(probe LANGUAGES NONE)\n"
                "option(BASIN_BUILD_PROGRAM \"\" ON)\noption(BASIN_BUILD_TESTS \"\" ON)\n")
            subprocess.run(["cmake", "--preset", "release", "-DBASIN_BUILD_PROGRAM=OFF"], cwd=root, check=True,
                           capture_output=True)
            done = self.configure(folder, "-DBASIN_BUILD_TESTS=OFF")
            self.assertEqual(done.returncode, 0, done.stderr)
            cache = (root / "build/release/CMakeCache.txt").read_text()
            self.assertIn("BASIN_BUILD_PROGRAM:BOOL=ON", cache)
            self.assertIn("BASIN_BUILD_TESTS:BOOL=OFF", cache)

    def test_a_failure_is_told(self):
        with tempfile.TemporaryDirectory() as folder:
            (Path(folder) / "build").mkdir()
            done = self.configure(folder)
            self.assertNotEqual(done.returncode, 0)
            self.assertIn("preset", done.stderr)


if __name__ == "__main__":
    unittest.main()
