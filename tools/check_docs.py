#!/usr/bin/env python3
"""Checks the documents: links, paths and tests exist, and the commands in ```sh blocks exist with the flags they use."""
import argparse
import json
import re
import shlex
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
LINK = re.compile(r"!?\[[^\]]*\]\(([^)\s]+)(?:\s+\"[^\"]*\")?\)")
FENCE = re.compile(r"^```(\w*)\n(.*?)^```", re.M | re.S)
# `src/...` and the like in backquotes; a trailing `:12` or a glob is not a path to look up.
PATH = re.compile(r"`((?:\./)?(?:src|include|tests|tools|docs|cmake|bench|examples|python|\.ci)/[\w./+-]*)`")
# `Suite.Test` of CTest or unittest; with dots behind it the beginning of a name.
TEST = re.compile(r"`([A-Z]\w+)\.([A-Z]\w*|test_\w+)(\.\.\.)?`")
MACHINE_PATH = re.compile(r"(?<![\w.])/(?:root|home|work)/\w")
KNOWN = {"c++", "cpack", "git", "cd", "cmake", "ctest", "python3", "export", "sudo", "apt-get"}


def documents(root):
    return sorted([*root.glob("*.md"), *(root / "docs").rglob("*.md"), *(root / "examples").rglob("*.md")])


def anchors(text):
    """Anchors of the headings, as GitHub makes them."""
    result = set()
    for heading in re.findall(r"^#+\s+(.*)$", FENCE.sub("", text), re.M):
        result.add(re.sub(r"[^\w\- ]", "", heading.strip().lower()).replace(" ", "-"))
    return result


def check_links(root, document, text):
    prose = FENCE.sub("", text)
    complaints = []
    for target in LINK.findall(prose):
        if re.match(r"[a-z]+:", target):
            continue
        name, _, anchor = target.partition("#")
        file = document if not name else document.parent / name
        if not file.exists():
            complaints.append(f"link to {target}: no such file")
        elif anchor and file.suffix == ".md" and anchor not in anchors(file.read_text(encoding="utf-8")):
            complaints.append(f"link to {target}: no such heading")
    for path in PATH.findall(prose):
        if not (root / path).exists():
            complaints.append(f"`{path}`: no such path")
    if MACHINE_PATH.search(text):
        complaints.append(f"a path of somebody's machine: {MACHINE_PATH.search(text)[0]}...")
    return complaints


def test_sources(root):
    return "\n".join(file.read_text(encoding="utf-8") for file in sorted((root / "tests").rglob("*")) if file.suffix in (".cc", ".cu", ".py"))


def check_tests(sources, text):
    complaints = []
    for suite, name, dots in TEST.findall(FENCE.sub("", text)):
        end = "" if dots else r"\b"
        compiled = re.search(rf"\({suite},\s*{name}{end}", sources)
        in_class = re.search(rf"^class {suite}\b", sources, re.M) and re.search(rf"def {name}{end}", sources)
        if not compiled and not in_class:
            complaints.append(f"`{suite}.{name}{dots}`: no such test")
    return complaints


def commands(text):
    """The command lines of all ```sh blocks, with continued lines joined."""
    for language, block in FENCE.findall(text):
        if language != "sh":
            continue
        for line in block.replace("\\\n", " ").splitlines():
            words = shlex.split(line, comments=True)
            if words:
                yield words


class Helps:
    """Help texts of programs, asked for once each."""

    def __init__(self, root, basin):
        self.root, self.basin, self.cache = root, basin, {}

    def of(self, *command):
        if command not in self.cache:
            done = subprocess.run([*command, "--help"], capture_output=True, text=True, stdin=subprocess.DEVNULL)
            self.cache[command] = done.stdout if done.returncode == 0 else None
        return self.cache[command]

    def lacks(self, words, *command):
        """Complaints about flags in `words` that the help of `command` does not name."""
        help_text = self.of(*command)
        shown = " ".join([Path(command[0]).name, *command[1:]])
        if help_text is None:
            return [f"`{shown}` is not a command (its --help fails)"]
        known = set(re.findall(r"(?<![\w-])--?[a-zA-Z][\w-]*", help_text))
        return [f"`{shown}` has no flag {flag}" for flag in
                (word.split("=")[0] for word in words if re.match(r"--?[a-zA-Z]", word)) if flag not in known]


def check_command(root, words, helps):
    while words and re.fullmatch(r"[A-Z_]+=.*", words[0]):
        words = words[1:]
    if not words:
        return []
    for operator in ("&&", "|", ";"):
        if operator in words:
            at = words.index(operator)
            return check_command(root, words[:at], helps) + check_command(root, words[at + 1:], helps)
    if ">" in words:
        words = words[:words.index(">")]
    program = words[0]
    if program == "basin" or program.endswith("/basin"):
        if helps.basin is None:
            return []
        if len(words) == 1 or words[1].startswith("-"):
            return helps.lacks(words[1:], str(helps.basin))
        size = 3 if words[1:3] == ["bench", "serve"] else 2  # the one command of two words
        return helps.lacks(words[size:], str(helps.basin), *words[1:size])
    if program.startswith("build/"):  # what the lines before it built
        return []
    if program.startswith("./") or "/" in program:
        if not (root / program).is_file():
            return [f"{program}: no such file"]
        if not (root / program).stat().st_mode & 0o100:
            return [f"{program}: not executable"]
        return helps.lacks(words[1:], str(root / program)) if len(words) > 1 else []
    if program == "cmake" and "--preset" in words:
        presets = json.loads((root / "CMakePresets.json").read_text(encoding="utf-8"))["configurePresets"]
        wanted = words[words.index("--preset") + 1]
        return [] if wanted in {preset["name"] for preset in presets} else [f"no preset {wanted}"]
    return [] if program in KNOWN else [f"{program}: not a command this check knows"]


def check(root, basin):
    helps, complaints, sources = Helps(root, basin), [], test_sources(root)
    found = documents(root)
    if not found:
        return ["no documents found"], 0
    for document in found:
        text = document.read_text(encoding="utf-8")
        problems = check_links(root, document, text) + check_tests(sources, text)
        for words in commands(text):
            problems += check_command(root, words, helps)
        complaints += [f"{document.relative_to(root)}: {problem}" for problem in problems]
    return complaints, len(found)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--root", type=Path, default=ROOT)
    parser.add_argument("--basin", type=Path, help="the program; without it `basin` lines are not checked")
    args = parser.parse_args()
    found, count = check(args.root.resolve(), args.basin and args.basin.resolve())
    print("\n".join(found) or f"docs: {count} documents ok" + ("" if args.basin else " (basin commands not checked)"))
    sys.exit(1 if found else 0)
