#!/usr/bin/env bash
# Checks the formatting of all tracked C and C++ sources with clang-format 14 (Debian 12). --fix formats them.
# With file names as arguments only those are looked at.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
fix=0
if [[ ${1:-} == --help ]]; then
  echo "usage: tools/check_format.sh [--fix] [FILES]   check (or fix) the formatting of tracked sources"
  exit 0
elif [[ ${1:-} == --fix ]]; then
  fix=1
  shift
fi
if ! command -v clang-format-14 > /dev/null; then
  echo "error: clang-format-14 is not installed" >&2
  exit 1
fi
if (($#)); then
  files=("$@")
else
  # Without git (a source archive) every source is looked at.
  mapfile -t files < <(git ls-files '*.c' '*.cc' '*.h' '*.cu' '*.cuh' 2> /dev/null ||
    find src include tests bench examples -name '*.c' -o -name '*.cc' -o -name '*.h')
fi
existing=()
for file in "${files[@]}"; do [[ -f $file ]] && existing+=("$file"); done
if ((${#existing[@]} == 0)); then
  echo "error: no sources to check" >&2
  exit 1
fi
if ((fix)); then
  clang-format-14 --style=file:.clang-format -i "${existing[@]}"
else
  clang-format-14 --style=file:.clang-format --dry-run --Werror "${existing[@]}"
  echo "format: ${#existing[@]} files ok"
fi
