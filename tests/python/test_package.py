"""The wheel: built from a clean tree, it holds what it should, imports without a GPU, and says what is missing."""
import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
USE = """
import basin, torch
q = torch.randn(1, 4, 2, 16, requires_grad=True)
basin.flash_attn_func(q, q, q, causal=True, learnable_sink=torch.zeros(2)).sum().backward()
print(basin.__file__, q.grad.isfinite().all().item(), basin.cuda_missing())
"""


def environment(**more):
    clean = {name: value for name, value in os.environ.items() if not name.startswith(("BASIN_", "PYTHONPATH"))}
    return {**clean, **more}


def pip(*arguments):
    launcher = ["-C", "cmake.define.CMAKE_CXX_COMPILER_LAUNCHER=ccache"] if shutil.which("ccache") else []
    return subprocess.run([sys.executable, "-m", "pip", *arguments, "--no-deps", "--no-build-isolation", "-q", *launcher,
                           "-C", "cmake.define.BASIN_CUDA=OFF", str(ROOT)], capture_output=True, text=True,
                          env=environment())


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    folder = tmp_path_factory.mktemp("wheel")
    done = pip("wheel", "-w", str(folder))
    assert done.returncode == 0, done.stdout + done.stderr
    (file,) = folder.glob("*.whl")
    return file


def test_its_name_and_what_it_holds(wheel):
    assert wheel.name.startswith("basin_attention-0.1.0-py3-none-") and wheel.name.endswith("x86_64.whl")
    names = zipfile.ZipFile(wheel).namelist()
    sources = {f"basin/{file.name}" for file in (ROOT / "python/basin").glob("*.py")}
    assert {name for name in names if name.startswith("basin/")} == sources | {"basin/basin_torch.so", "basin/basin_probe.so"}


def test_it_works_where_it_is_unpacked(wheel, tmp_path):
    zipfile.ZipFile(wheel).extractall(tmp_path)
    done = subprocess.run([sys.executable, "-c", USE], capture_output=True, text=True, cwd=tmp_path,
                          env=environment(PYTHONPATH=str(tmp_path)))
    assert done.returncode == 0, done.stderr
    assert str(tmp_path) in done.stdout and "True basin was built without its CUDA kernels" in done.stdout


def test_sources_alone_say_what_to_do(tmp_path):
    done = subprocess.run([sys.executable, "-c", "import basin"], capture_output=True, text=True, cwd=tmp_path,
                          env=environment(PYTHONPATH=str(ROOT / "python")))
    assert done.returncode != 0 and "pip install ." in done.stderr


def test_without_torch_the_build_says_so(tmp_path):
    done = subprocess.run(["cmake", "-S", str(ROOT), "-B", str(tmp_path / "build"), "-G", "Ninja", "-DBASIN_TORCH=ON",
                           "-DBASIN_BUILD_PROGRAM=OFF", f"-DBASIN_TORCH_ROOT={tmp_path}"], capture_output=True, text=True,
                          env=environment())
    assert done.returncode != 0 and "Basin needs torch 2.10 or later" in done.stderr
