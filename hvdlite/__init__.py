"""hvdlite: a training script for one process runs on many.

    import hvdlite as hvd            # NumPy arrays
    import hvdlite.torch as hvd      # PyTorch tensors

This file imports nothing: the launcher lives in this package and needs neither NumPy nor the compiled extension. The
names below are those of hvdlite.numpy, imported when the first of them is used; what needs no arrays comes without
NumPy, whose import takes longer than init().
"""

from __future__ import annotations

from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

__version__ = "0.2.0"

if TYPE_CHECKING:
    from .numpy import *  # noqa: F403


def __getattr__(name: str) -> Any:
    """A public name, or `__all__`, on first use. Modules of this package are left to the import system."""
    private = name.startswith("_") and name != "__all__"
    if name in ("aggregation", "autotune", "ps", "rpc"):  # public modules, which are imported when they are used
        return import_module(f"{__name__}.{name}")
    if private or (name != "data" and find_spec(f"{__name__}.{name}") is not None):
        raise AttributeError(f"module 'hvdlite' has no attribute {name!r}")
    public = import_module("._api", __name__)
    source = public if name in public.__all__ else import_module(".numpy", __name__)
    if name not in source.__all__ and name != "__all__":
        raise AttributeError(f"module 'hvdlite' has no attribute {name!r}")
    value = getattr(source, name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(set(globals()) | set(__getattr__("__all__")))
