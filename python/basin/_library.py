"""Loads the compiled operators, and says in words what is missing."""
import os
from pathlib import Path

__version__ = "0.1.0"
_OLDEST_TORCH = (2, 10)

try:
    import torch
except ImportError as error:
    raise ImportError("basin needs PyTorch, and torch cannot be imported. Install torch 2.10 or later.") from error


def _folders():
    """Where the libraries may lie. BASIN_TORCH_LIBRARIES names the folder of a build tree."""
    if named := os.environ.get("BASIN_TORCH_LIBRARIES"):
        return [Path(named)]
    import basin
    return [Path(folder) for folder in basin.__path__]  # an editable install has two: sources and libraries


def _find(name):
    return next((folder / name for folder in _folders() if (folder / name).is_file()), None)


def _load_cpu():
    version = tuple(int("".join(c for c in part if c.isdigit()) or 0) for part in torch.__version__.split(".")[:2])
    if version < _OLDEST_TORCH:
        raise ImportError(f"basin needs torch 2.10 or later, and this is torch {torch.__version__}.")
    path = _find("basin_torch.so")
    if path is None:
        looked = ", ".join(str(folder) for folder in _folders())
        raise ImportError(f"basin_torch.so is not in {looked}. The package was not built: run `pip install .` in a checkout "
                          "of Basin, or set BASIN_TORCH_LIBRARIES to the folder that holds it.")
    try:
        torch.ops.load_library(str(path))
    except OSError as error:
        raise ImportError(f"{path} does not fit torch {torch.__version__} on this machine: {error}") from error


def _load_cuda():
    """None when CUDA tensors are served, else one sentence that says what is missing."""
    path = _find("basin_torch_cuda.so")
    if path is None:
        return "basin was built without its CUDA kernels (no nvcc was found, or BASIN_CUDA was OFF)"
    if torch.version.cuda is None:
        return f"torch {torch.__version__} was built without CUDA"
    try:
        torch.ops.load_library(str(path))
    except OSError as error:
        return f"{path.name} cannot be loaded: {error}"
    return None


_load_cpu()
_KERNELS_MISSING = _load_cuda()


def kernels_missing():
    """None when this installation has the CUDA kernels, whatever GPU there is, else one sentence that says why not."""
    return _KERNELS_MISSING


def cuda_missing():
    """None when CUDA tensors are served here, else one sentence that says what is missing: the kernels or a Hopper GPU."""
    if _KERNELS_MISSING is not None:
        return _KERNELS_MISSING
    if not torch.cuda.is_available():
        return "torch finds no CUDA device"
    if torch.cuda.get_device_capability()[0] != 9:
        return f"the kernels are for Hopper GPUs, and {torch.cuda.get_device_name()} is none"
    return None
