#!/usr/bin/env bash
# clang-tidy with the list in .clang-tidy over the sources given, or all of src/. Needs a configured build
# directory (default build/release, BUILD=... chooses) and clang-tidy-16, which ./test does not install; 14 has no
# std::source_location.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
build=${BUILD:-build/release}
if ! command -v clang-tidy-16 > /dev/null; then
  echo "error: clang-tidy-16 is not installed (Debian: clang-tidy-16)" >&2
  exit 1
fi
if [[ ! -f $build/compile_commands.json ]]; then
  echo "error: $build/compile_commands.json is missing" >&2
  echo "hint: cmake --preset release" >&2
  exit 1
fi
if (($#)); then files=("$@"); else mapfile -t files < <(git ls-files 'src/*.cc'); fi
# The warning flags are the compiler's business: clang does not know all of GCC's.
printf '%s\0' "${files[@]}" |
  xargs -0 -n 1 -P "$(nproc)" clang-tidy-16 -p "$build" --quiet --extra-arg=-Wno-unknown-warning-option \
    2> >(grep -vE '^[0-9]+ warnings? generated' >&2)
