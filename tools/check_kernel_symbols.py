#!/usr/bin/env python3
"""Checks that objects compiled per CPU target leak no code into each other or into the rest.

Such an object may be full of AVX-512. If it emitted an inline function of a shared header (a weak symbol), the
linker could keep that copy for everybody, and the program would die on an older CPU.
"""
import argparse
import re
import subprocess
import sys
from pathlib import Path

TARGETS = ("generic", "avx2", "avx512_bf16", "amx")
FOLDER = re.compile(r"basin_\w+?_(" + "|".join(TARGETS) + r")\.dir$")
# Weak by nature and without code of ours: the personality routine's reference and type descriptors' labels.
ALLOWED_WEAK = {"DW.ref.__gxx_personality_v0"}


def mangled_namespace(target):
    """How a namespace of that name looks inside a mangled C++ name: its length, then the name."""
    return f"{len(target)}{target}"


def check_symbols(name, target, nm_lines):
    """Complaints about one object. nm_lines: output of `nm --defined-only --format=posix`."""
    complaints = []
    for line in nm_lines:
        parts = line.split()
        if len(parts) < 2:
            continue
        symbol, kind = parts[0], parts[1]
        if kind in "WVuwv":
            if symbol not in ALLOWED_WEAK:
                complaints.append(f"{name}: weak symbol {symbol}: a shared inline function built for {target}")
        elif kind.isupper() and mangled_namespace(target) not in symbol:
            complaints.append(f"{name}: symbol {symbol} lies outside namespace {target}")
    return complaints


def check(build):
    complaints, objects = [], 0
    for folder in sorted(build.rglob("basin_*.dir")):
        match = FOLDER.match(folder.name)
        if not match:
            continue
        for item in sorted(folder.rglob("*.o")):
            objects += 1
            done = subprocess.run(["nm", "--defined-only", "--format=posix", str(item)], capture_output=True,
                                  text=True, check=True)
            complaints += check_symbols(f"{folder.name}/{item.name}", match[1], done.stdout.splitlines())
    if objects == 0:
        complaints.append(f"no kernel objects below {build}: build first")
    return complaints, objects


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("build", type=Path, help="build directory")
    found, count = check(parser.parse_args().build)
    print("\n".join(found) or f"kernel symbols: {count} objects ok")
    sys.exit(1 if found else 0)
