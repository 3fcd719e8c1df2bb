#!/bin/sh
# Runs the compiler given as arguments and fails where ptxas had to serialise wgmma instructions, which it calls information
# (C7510 to C7518). C7519 (it inserted an arrive itself) is normal and not shown.
output=$("$@" 2>&1)
status=$?
printf '%s\n' "$output" | grep -v -e '(C7519)' -e '^$'
if printf '%s\n' "$output" | grep -q '(C751[0-8])'; then
  echo "error: ptxas serialises wgmma instructions (above): the kernel would wait for each of them" >&2
  exit 1
fi
exit $status
