"""The shared library shows exactly the functions that its header declares."""
import re
import subprocess
import sys
from pathlib import Path

header = Path(__file__).resolve().parents[3] / "include/basin/attention" / sys.argv[2]
declared = set(re.findall(r"^(?:const char\*|void|int32_t|basin_status) (basin_\w+)\(", header.read_text(), re.M))
lines = subprocess.run(["nm", "--dynamic", "--defined-only", "--format=posix", sys.argv[1]], capture_output=True,
                       text=True, check=True).stdout.splitlines()
shown = {line.split()[0].split("@")[0] for line in lines if line.split()[1] != "A"}  # A: the version's own name
if not declared or shown != declared:
    sys.exit(f"shown but not declared: {sorted(shown - declared)}; declared but not shown: {sorted(declared - shown)}")
print(f"{header.name}: {len(shown)} functions")
