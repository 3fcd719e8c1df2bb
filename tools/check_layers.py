#!/usr/bin/env python3
"""Checks that includes follow the layer order: a file includes its own layer or lower ones, never a sibling."""
import argparse
import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
INCLUDE = re.compile(r'^\s*#\s*include\s*"([^"]+)"', re.M)

# What each layer may include besides itself. Written out, so that a new arrow is a visible change here.
BASE = {"base"}
VOCABULARY = BASE | {"tensor"}
LEAF = VOCABULARY | {"attention/words"}
ATTENTION = LEAF | {"attention/reference", "attention/cpu"}
MODELS = ATTENTION | {"attention", "ops", "kv", "weights", "text"}
ALLOWED = {
    "base": set(),
    "tensor": BASE,
    "attention/words": VOCABULARY,      # spec, selection, mask, softmax_state, checks
    "attention/reference": VOCABULARY,  # and spec.h and selection.h of the words, below
    "attention/cpu": LEAF,
    "attention/cuda": LEAF,
    "attention": ATTENTION,             # support, attention, the C interface
    "attention/cuda_c_api": LEAF | {"attention", "attention/cuda"},
    "pytorch": ATTENTION | {"attention", "attention/cuda"},
    "ops": VOCABULARY,
    "kv": LEAF,
    "weights": BASE,
    "text": BASE | {"weights"},
    "models": MODELS,
    "engine": MODELS | {"models"},
    "probe": MODELS | {"models"},       # a sibling of engine
    "server": MODELS | {"models", "engine"},
    "cli": MODELS | {"models", "engine", "probe", "server"},
}
WORDS = {"spec", "selection", "mask", "softmax_state", "checks"}
SUFFIXES = {".h", ".hpp", ".cc", ".cpp", ".cu", ".cuh"}


def layer(path):
    """The layer of a path below src/ or include/basin/, e.g. attention/cpu/kernel.cc; None when there is none."""
    parts = path.split("/")
    if len(parts) < 2:
        return None
    module = parts[0]
    if module == "attention":
        stem = parts[1].split(".")[0]
        if len(parts) > 2 or stem in {"reference", "cpu", "cuda", "cuda_c_api"}:
            module = f"attention/{stem}"
        elif stem in WORDS:
            module = "attention/words"
    return module if module in ALLOWED else None


def check_file(root, file):
    """Complaints about one file below root."""
    relative = file.relative_to(root).as_posix()
    own_path = re.sub(r"^(src|include/basin)/", "", relative)
    own = layer(own_path)
    if own is None:
        return [f"{relative}: belongs to no layer; add it to tools/check_layers.py and to docs/architecture.md"]
    complaints = []
    for included in INCLUDE.findall(file.read_text(encoding="utf-8", errors="replace")):
        path = included[len("basin/"):] if included.startswith("basin/") else included
        other = layer(path)
        if other is None:
            complaints.append(f'{relative}: includes "{included}", which is in no layer')
        elif own == "attention/reference" and other == "attention/words":
            # The reference has its own mask and its own softmax, so that it can judge the others.
            if path not in ("attention/spec.h", "attention/selection.h"):
                complaints.append(f'{relative}: includes "{included}"; of the attention words only spec.h and selection.h are allowed')
        elif other != own and other not in ALLOWED[own]:
            complaints.append(f'{relative}: layer {own} includes "{included}" of layer {other}; '
                              f"allowed: {', '.join(sorted(ALLOWED[own])) or 'none'}")
    return complaints


def check(root):
    files = [file for folder in ("src", "include/basin") for file in sorted((root / folder).rglob("*"))
             if file.suffix in SUFFIXES]
    if not files:
        return ["no sources found below src/ and include/basin/"]
    return [complaint for file in files for complaint in check_file(root, file)]


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--root", type=Path, default=ROOT)
    found = check(parser.parse_args().root.resolve())
    print("\n".join(found) or "layers: ok")
    sys.exit(1 if found else 0)
