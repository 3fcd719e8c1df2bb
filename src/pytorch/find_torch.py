"""Prints the folder of the installed torch without importing it: inside pip's isolated builds it cannot be imported."""
import sys
import sysconfig
from pathlib import Path

for path in [*sys.path, sysconfig.get_path("platlib"), sysconfig.get_path("purelib")]:
    folder = Path(path) / "torch"
    if (folder / "include" / "torch" / "headeronly").is_dir():
        print(folder)
        sys.exit(0)
sys.exit(1)
