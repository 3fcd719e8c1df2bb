#!/usr/bin/env python3
"""Fetches a training text of 8 MB (public domain) into data/: the King James Bible and Jane Austen's six novels.

They come from Debian's bible-kjv-text, read by the program of bible-kjv, and from r-cran-janeaustenr. One paragraph or
chapter a line, books separated by <|endoftext|>. The last pages of Pride and Prejudice come last.
"""
import argparse
import re
import subprocess
import sys
import tempfile
import zlib
from pathlib import Path

from fetch_novel import FetchError, read_lazy_object

ROOT = Path(__file__).resolve().parent.parent
DEFAULT = ROOT / "data" / "corpus.txt"
PACKAGES = ("bible-kjv", "bible-kjv-text", "r-cran-janeaustenr")
NOVELS = ("northangerabbey", "sensesensibility", "mansfieldpark", "emma", "persuasion", "prideprejudice")
SEPARATOR = "<|endoftext|>"
LEAST_BYTES = 7_500_000


def unpack(packages, folder):
    for package in packages:
        subprocess.run(["dpkg-deb", "-x", str(package), folder], check=True, stdin=subprocess.DEVNULL)


def bible_books(folder):
    """Each book as text, one chapter a line."""
    command = [folder / "usr/bin/bible", "-p", folder / "usr/lib", "-f", "gen1:1-rev22:21"]
    verses = subprocess.run(command, check=True, capture_output=True, encoding="latin-1", stdin=subprocess.DEVNULL).stdout
    books = {}
    for line in verses.splitlines():
        verse = re.fullmatch(r"(.*?[A-Za-z])(\d+):\d+ (.*)", line)
        if verse is None:
            raise FetchError(f"bible printed a line that is no verse: {line[:60]!r}")
        book, chapter, text = verse.groups()
        books.setdefault(book, {}).setdefault(chapter, []).append(text.strip())
    if len(books) != 66:
        raise FetchError(f"the Bible has 66 books; bible printed {len(books)}")
    return ["\n".join(" ".join(chapter) for chapter in book.values()) for book in books.values()]


def novels(folder):
    """Each novel as text, one paragraph a line."""
    data = next(folder.glob("**/Rdata.rdx")).parent
    for name in NOVELS:
        paragraphs = "\n".join(read_lazy_object(data, name)).split("\n\n")
        lines = (" ".join(paragraph.split()) for paragraph in paragraphs)
        yield "\n".join(line for line in lines if line)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=DEFAULT, help="file to write")
    parser.add_argument("--deb", type=Path, nargs="*", help="use these package files instead of downloading them")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        if not args.deb:
            print(f"corpus: downloading {', '.join(PACKAGES)} (4 MB)", flush=True)
            command = ["apt-get", "-o", "APT::Sandbox::User=root", "download", "-qq", *PACKAGES]
            subprocess.run(command, cwd=folder, check=True, stdin=subprocess.DEVNULL)
        unpack(args.deb or sorted(folder.glob("*.deb")), folder)
        text = f"\n{SEPARATOR}\n".join([*bible_books(folder), *novels(folder)]) + "\n"
    if len(text.encode()) < LEAST_BYTES:
        raise FetchError(f"the text has {len(text.encode()):,} bytes; at least {LEAST_BYTES:,} were expected")
    args.out.parent.mkdir(parents=True, exist_ok=True)
    args.out.write_text(text, encoding="utf-8")
    print(f"corpus: wrote {args.out.name} ({len(text.encode()):,} bytes)")


if __name__ == "__main__":
    try:
        main()
    except (FetchError, OSError, KeyError, zlib.error, subprocess.CalledProcessError) as error:
        sys.exit(f"error: {error}")
