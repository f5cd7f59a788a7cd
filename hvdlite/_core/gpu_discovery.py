"""Discovery of CUDA's driver and NCCL for the core, and their versions, at the first use.

A framework brings an NCCL, and a process must not hold two. Where the framework is linked with it, it is loaded
already; where it is not, its file lies in a package of its own, and the core gets its path. HVDLITE_NCCL_LIBRARY and
HVDLITE_CUDA_LIBRARY name others. Asking for a version starts nothing on a GPU; that of NCCL loads the library.
"""

from __future__ import annotations

import functools
import importlib.util
import os

from .. import _core, config


@functools.cache
def find() -> None:
    """Gives the core the paths of the libraries before it loads them."""
    values = config.load().values
    _core.gpu_libraries(values["cuda_library"], values["nccl_library"] or _packaged("nvidia.nccl", "libnccl.so.2"))


def _packaged(package: str, name: str) -> str | None:
    """A file of one of NVIDIA's Python packages, that PyTorch's wheels bring with them."""
    try:
        found = importlib.util.find_spec(package)
    except ModuleNotFoundError:
        return None
    for folder in (found.submodule_search_locations or []) if found is not None else []:
        path = os.path.join(folder, "lib", name)
        if os.path.exists(path):
            return path
    return None


def cuda_version() -> int:
    """CUDA's version as the driver of this machine has it, such as 12040; 0 without a driver."""
    find()
    version: int = _core.lib.hvd_gpu_version(0)
    return version


def nccl_version() -> int:
    """NCCL's version as a number such as 22105; 0 where there is none, or no driver for it."""
    version: int = _core.lib.hvd_gpu_version(1) if cuda_version() else 0
    return version
