"""Plain values in a checkpoint, beside its tensors, and the agreement of ranks on them.

Numbers, texts, None, tensors, and lists, tuples and dictionaries of them: what torch.load(weights_only=True) reads.
Anything else is refused with its place, or it would be missing in silence after a resume. They are copied, since a
scheduler changes its lists in place. What is refused on one rank is refused on all: else the others would wait for it.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Callable
from typing import Any

import torch

import hvdlite.torch as hvd


def plain(value: Any, where: str) -> Any:
    """A copy, in host memory. ValueError for a type that a checkpoint does not hold."""
    if isinstance(value, torch.Tensor):
        return value.detach().cpu().clone()
    if value is None or type(value) in (bool, str):
        return value
    if isinstance(value, (int, float)):  # NumPy's float64 is a float, but its pickle is not
        return int(value) if isinstance(value, int) else float(value)
    if type(value) in (list, tuple):
        return type(value)([plain(each, f"{where}[{i}]") for i, each in enumerate(value)])
    if type(value) in (dict, OrderedDict, Counter):
        return type(value)({plain(key, where): plain(each, f"{where}[{key!r}]") for key, each in value.items()})
    raise ValueError(
        f"{where} has the type {type(value).__name__}, which a checkpoint cannot hold: make it a number, text, tensor, "
        "or a list or dict of them [HVD018]"
    )


def alike(a: Any, b: Any) -> bool:
    """Whether two such values are equal; NaN equals NaN."""
    if isinstance(a, torch.Tensor) or isinstance(b, torch.Tensor):
        return isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor) and a.dtype == b.dtype and torch.equal(a, b)
    if isinstance(a, dict) and isinstance(b, dict):
        return a.keys() == b.keys() and all(alike(a[key], b[key]) for key in a)
    if isinstance(a, (list, tuple)) and isinstance(b, (list, tuple)):
        return len(a) == len(b) and all(map(alike, a, b))
    return bool(a == b or (a != a and b != b))


def exchanged(
    make: Callable[[], Any], name: str, process_set: hvd.ProcessSet = hvd.global_process_set,
    timeout: float | None = None
) -> list[Any]:  # fmt: skip
    """What make returns on each rank of the set. A ValueError of one rank is raised on all of them; another exception
    there, and a ValueError on the others."""
    result: tuple[Any, str | None]
    mine: Exception | None = None
    try:
        result = make(), None
    except Exception as error:
        mine, result = (
            error,
            (None, str(error) if isinstance(error, ValueError) else f"{type(error).__name__}: {error}"),
        )
    if timeout is not None:  # allgather_object has none, so a barrier comes before
        hvd.synchronize(
            hvd.allreduce_async(torch.zeros(1), name=f"{name}.comes", process_set=process_set), timeout=timeout
        )
    everyone = hvd.allgather_object(result, name=name, process_set=process_set)
    if mine is not None and not isinstance(mine, ValueError):
        raise mine
    for rank, (_, failure) in zip(process_set.ranks, everyone):
        if failure is not None:
            raise ValueError(f"rank {rank}: {failure}")
    return [value for value, _ in everyone]
