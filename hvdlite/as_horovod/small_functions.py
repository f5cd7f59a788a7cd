"""`horovod.common.util`: small functions that scripts and frameworks on top of Horovod have come to import.

Each keeps Horovod's arguments and meaning where it has one here. What is about compiled extensions is answered by what
can be imported: hvdlite has one extension, and it serves every framework.
Nothing here is used by hvdlite itself.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import sysconfig
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

from .. import config
from ..lifecycle import capabilities
from ..ops import Average, Sum

Item = TypeVar("Item")

EXTENSIONS = ["tensorflow", "torch"]
_FRAMEWORKS = {"torch": "torch", "tensorflow": "tensorflow", "keras": "keras"}
_FRAMEWORKS.update({f"horovod.{name}": module for name, module in _FRAMEWORKS.items()})

_cache = functools.lru_cache(maxsize=None)

__all__ = [
    "EXTENSIONS",
    "ccl_built",
    "check_extension",
    "check_installed_version",
    "ddl_built",
    "env",
    "extension_available",
    "get_average_backwards_compatibility_fun",
    "get_ext_suffix",
    "gloo_built",
    "gpu_available",
    "is_iterable",
    "is_version_greater_equal_than",
    "mpi_built",
    "nccl_built",
    "num_rank_is_power_2",
    "split_list",
]


def extension_available(ext_base_name: str, verbose: bool = False) -> bool:
    """Whether hvdlite works with a framework ("torch", "tensorflow", ...) in this Python."""
    module = _FRAMEWORKS.get(ext_base_name)
    return module is not None and importlib.util.find_spec(module) is not None


def gpu_available(ext_base_name: str, verbose: bool = False) -> bool:
    """Whether tensors of this framework can be reduced on a GPU. False in this version."""
    return extension_available(ext_base_name) and capabilities.cuda_built()


def check_extension(ext_name: str, ext_env_var: str, pkg_path: str, *args: str) -> None:
    """ImportError if hvdlite does not work with the framework of `ext_name`, e.g. "horovod.torch"."""
    if not extension_available(ext_name):
        raise ImportError(
            f"{ext_name}: hvdlite does not work with that framework here (see hvdlite-run --check-build) [HVD808]"
        )


def check_installed_version(name: str, version: str, exception: Exception | None = None) -> None:
    """Nothing: hvdlite is compiled against no framework, so none can be of a wrong version."""


def get_ext_suffix() -> str:
    """How the file name of a compiled extension of this Python ends."""
    return sysconfig.get_config_var("EXT_SUFFIX") or ".so"


def mpi_built(verbose: bool = False) -> bool:
    """hvdlite.lifecycle.capabilities.mpi_built."""
    return capabilities.mpi_built()


def gloo_built(verbose: bool = False) -> bool:
    """hvdlite.lifecycle.capabilities.gloo_built."""
    return capabilities.gloo_built()


def nccl_built(verbose: bool = False) -> int:
    """hvdlite.lifecycle.capabilities.nccl_built."""
    return capabilities.nccl_built()


def ddl_built(verbose: bool = False) -> bool:
    """hvdlite.lifecycle.capabilities.ddl_built."""
    return capabilities.ddl_built()


def ccl_built(verbose: bool = False) -> bool:
    """hvdlite.lifecycle.capabilities.ccl_built."""
    return capabilities.ccl_built()


@contextlib.contextmanager
def env(**kwargs: str | None) -> Iterator[None]:
    """Environment variables for the duration of a block; None leaves a variable as it is."""
    passed = {name: value for name, value in kwargs.items() if value is not None}
    before = config.environ()
    for name, value in passed.items():
        config.write(name, value)
    try:
        yield
    finally:
        for name in passed:
            config.write(name, before.get(name))


def split_list(l: Sequence[Item], n: int) -> list[Sequence[Item]]:  # noqa: E741  (Horovod's name)
    """`n` runs of a list, of lengths that differ by one at most, the longer first."""
    short, longer = divmod(len(l), n)
    starts = [i * short + min(i, longer) for i in range(n + 1)]
    return [l[begin:end] for begin, end in zip(starts, starts[1:])]


def is_iterable(x: Any) -> bool:
    """Whether iter(x) works."""
    try:
        iter(x)
    except TypeError:
        return False
    return True


def num_rank_is_power_2(num_rank: int) -> bool:
    """Whether a number is a power of two. Horovod's Adasum needs that, hvdlite's does not."""
    return num_rank > 0 and num_rank & (num_rank - 1) == 0


def is_version_greater_equal_than(ver: str, target: str) -> bool:
    """Whether version `ver` is at least `target`, both like 2.13.0; what follows the numbers is not looked at."""
    return _numbers(ver) >= _numbers(target)


def _numbers(version: str) -> tuple[int, ...]:
    import re

    found = [int(part) for part in re.findall(r"\d+", version.partition("+")[0])[:3]]
    return tuple(found + [0] * (3 - len(found)))


def get_average_backwards_compatibility_fun(reduce_ops: Any) -> Callable[[int | None, bool | None], int]:
    """A function (op, average) -> op for the old argument and the new; ValueError if both are given."""

    def chosen(op: int | None, average: bool | None) -> int:
        if average is None:
            return getattr(reduce_ops, "Average", Average) if op is None else op
        if op is not None:
            raise ValueError("The op parameter supersedes average. Please provide only one of them. [HVD206]")
        return getattr(reduce_ops, "Average", Average) if average else getattr(reduce_ops, "Sum", Sum)

    return chosen


handle_average_backwards_compatibility = get_average_backwards_compatibility_fun(None)
