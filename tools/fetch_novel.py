#!/usr/bin/env python3
"""Fetches the text of Pride and Prejudice (public domain) into data/.

It comes from Debian's r-cran-janeaustenr, whose data are R objects in a lazy-load database. They are decoded
here by a small reader of R's XDR serialisation; R itself is not needed.
"""
import argparse
import bz2
import gzip
import lzma
import os
import struct
import subprocess
import sys
import tempfile
import zlib
from pathlib import Path

PACKAGE = "r-cran-janeaustenr"
VERSION = "1.0.0-1"
NOVEL = "prideprejudice"
ROOT = Path(__file__).resolve().parent.parent
DEFAULT = ROOT / "data" / "pride_and_prejudice.txt"
LEAST_BYTES, MOST_BYTES = 600_000, 800_000
FIRST_LINE = "PRIDE AND PREJUDICE"

# R's type numbers (R Internals, section 1.8), those that a data set of text can hold.
SYMSXP, LISTSXP, CHARSXP, LGLSXP, INTSXP, REALSXP, STRSXP, VECSXP = 1, 2, 9, 10, 13, 14, 16, 19
NILVALUE, REFERENCE = 254, 255
HAS_ATTRIBUTES, HAS_TAG = 1 << 9, 1 << 10


class FetchError(Exception):
    pass


class XdrReader:
    """Reads one R object: text, numbers, vectors and lists. Of the attributes only names are used."""

    def __init__(self, data):
        self.data = data
        self.offset = 0
        self.symbols = []

    def take(self, count):
        if count < 0 or count > len(self.data) - self.offset:
            raise FetchError(f"R data end early: {count} bytes wanted at {self.offset} of {len(self.data)}")
        piece = self.data[self.offset:self.offset + count]
        self.offset += count
        return piece

    def integer(self):
        return struct.unpack(">i", self.take(4))[0]

    def count(self, item_bytes):
        count = self.integer()
        if count < 0 or count * item_bytes > len(self.data) - self.offset:
            raise FetchError(f"R vector of {count} items does not fit into its data")
        return count

    def read(self):
        """The whole object. A vector with names becomes a dict."""
        if self.take(2) != b"X\n":
            raise FetchError("R data are not in XDR format")
        version = self.integer()
        self.take(8)  # the versions of R that wrote it and that can read it
        if version == 3:
            self.take(self.integer())  # native encoding
        elif version != 2:
            raise FetchError(f"R serialisation version {version}; versions 2 and 3 are known")
        return self.item()

    def item(self):
        flags = self.integer()
        kind = flags & 0xFF
        if kind == NILVALUE:
            return None
        if kind == REFERENCE:
            index = (flags >> 8) or self.integer()
            if not 0 < index <= len(self.symbols):
                raise FetchError(f"R data refer to symbol {index} of {len(self.symbols)}")
            return self.symbols[index - 1]
        if kind == SYMSXP:
            self.symbols.append(self.item())
            return self.symbols[-1]
        if kind == CHARSXP:
            length = self.integer()
            return None if length == -1 else self.take(length).decode("utf-8")
        if kind == LISTSXP:
            return self.pairs(flags)
        if kind in (LGLSXP, INTSXP):
            count = self.count(4)
            value = list(struct.unpack(f">{count}i", self.take(4 * count)))
        elif kind == REALSXP:
            count = self.count(8)
            value = list(struct.unpack(f">{count}d", self.take(8 * count)))
        elif kind in (STRSXP, VECSXP):
            value = [self.item() for _ in range(self.count(4))]
        else:
            raise FetchError(f"R object of type {kind} before offset {self.offset} is not known")
        names = (self.item() or {}).get("names") if flags & HAS_ATTRIBUTES else None
        return dict(zip(names, value)) if names else value

    def pairs(self, flags):
        result = {}
        while flags & 0xFF == LISTSXP:
            if flags & HAS_ATTRIBUTES:
                self.item()
            tag = self.item() if flags & HAS_TAG else None
            result[tag] = self.item()
            flags = self.integer()
        if flags & 0xFF != NILVALUE:
            raise FetchError("R list does not end with nil")
        return result


def inflate(blob, compression):
    """One object of Rdata.rdb: its length in 4 bytes, big-endian, then (types 2, 3) a letter, then the data."""
    if len(blob) < 5:
        raise FetchError("an object of Rdata.rdb is cut short")
    length = struct.unpack(">I", blob[:4])[0]
    if compression == 1:
        data = zlib.decompress(blob[4:])
    elif compression in (2, 3):
        letter, body = blob[4:5], blob[5:]
        if letter == b"Z":
            data = lzma.decompress(body)
        elif letter == b"2":
            data = bz2.decompress(body)
        elif letter == b"0":
            data = body
        else:
            raise FetchError(f"compression {letter!r} of Rdata.rdb is not known")
    else:
        raise FetchError(f"compression type {compression} of Rdata.rdx is not known")
    if len(data) != length:
        raise FetchError(f"an object of Rdata.rdb has {len(data)} bytes; its header says {length}")
    return data


def read_lazy_object(folder, name):
    """Object `name` of the lazy-load database Rdata.rdx + Rdata.rdb in `folder`."""
    index_blob = (folder / "Rdata.rdx").read_bytes()
    index = XdrReader(gzip.decompress(index_blob) if index_blob[:2] == b"\x1f\x8b" else
                      zlib.decompress(index_blob)).read()
    if name not in index["variables"]:
        raise FetchError(f"{name} is not among {', '.join(sorted(index['variables']))}")
    offset, length = index["variables"][name]
    with open(folder / "Rdata.rdb", "rb") as database:
        database.seek(offset)
        blob = database.read(length)
    if len(blob) != length:
        raise FetchError(f"Rdata.rdb ends inside {name}")
    return XdrReader(inflate(blob, index["compressed"][0])).read()


def looks_right(text):
    return text.startswith(FIRST_LINE) and LEAST_BYTES <= len(text.encode()) <= MOST_BYTES


def download(folder):
    command = ["apt-get", "-o", "APT::Sandbox::User=root", "download", "-qq", f"{PACKAGE}={VERSION}"]
    if subprocess.run(command, cwd=folder, stdin=subprocess.DEVNULL).returncode != 0:
        print(f"warning: {PACKAGE} {VERSION} is not available; trying the version that is", file=sys.stderr)
        if subprocess.run(command[:-1] + [PACKAGE], cwd=folder, stdin=subprocess.DEVNULL).returncode != 0:
            raise FetchError(f"apt-get could not download {PACKAGE}; run apt-get update first")
    return next(Path(folder).glob("*.deb"))


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=DEFAULT, help="file to write")
    parser.add_argument("--deb", type=Path, help="use this package file instead of downloading it")
    args = parser.parse_args()
    if args.out.exists() and looks_right(args.out.read_text(encoding="utf-8")):
        print(f"novel: {args.out.name} is here")
        return
    with tempfile.TemporaryDirectory() as folder:
        if args.deb is None:
            print(f"novel: downloading {PACKAGE} {VERSION} (1.6 MB)", flush=True)
        deb = (args.deb or download(folder)).resolve()
        subprocess.run(["dpkg-deb", "-x", str(deb), folder], check=True, stdin=subprocess.DEVNULL)
        data = next(Path(folder).glob("**/Rdata.rdx"), None)
        if data is None:
            raise FetchError(f"{deb.name} holds no Rdata.rdx")
        lines = read_lazy_object(data.parent, NOVEL)
    text = "\n".join(lines) + "\n"
    if not looks_right(text):
        raise FetchError(f"{NOVEL} is not the text expected: {len(text.encode())} bytes, begins {text[:40]!r}")
    args.out.parent.mkdir(parents=True, exist_ok=True)
    part = args.out.with_name(f"{args.out.name}.{os.getpid()}.part")
    part.write_text(text, encoding="utf-8")
    os.replace(part, args.out)
    print(f"novel: wrote {args.out.name} ({len(text.encode()):,} bytes)")


if __name__ == "__main__":
    try:
        main()
    except (FetchError, OSError, KeyError, zlib.error, subprocess.CalledProcessError) as error:
        sys.exit(f"error: {error}")
