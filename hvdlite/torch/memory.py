"""Tensors in plane memory, which all ranks of a host map: they are reduced in place, without a copy.

See hvdlite.memory. Such a tensor is like any other: views keep its memory, and a copy (deepcopy, clone, torch.save and
load) has memory of its own. `empty` is for users; the optimizer moves gradients there by itself, many in one block
(`optimizer/places`).
"""

from __future__ import annotations

import math
from typing import Any

import torch

from .. import _core
from ..memory import block, shape_of
from .ops import plain


def empty(shape: Any, dtype: torch.dtype | None = None) -> torch.Tensor:
    """A new contiguous CPU tensor, contents undefined, in memory that collectives need not copy, where there is some.

    `shape`: a number or a sequence of them. `dtype`: torch's default dtype if None. An allreduce_ of it is fastest if
    all ranks have theirs from here. Raises ValueError for a dtype that cannot travel, HvdNotInitializedError before
    init().
    """
    _core.size()
    dtype = torch.get_default_dtype() if dtype is None else dtype
    if not isinstance(dtype, torch.dtype):
        raise TypeError(f"dtype must be a torch.dtype, not {dtype!r} [HVD220]")
    dims = shape_of(shape)
    sample = torch.empty(0, dtype=dtype)
    plain.adapter.view(sample)  # ValueError
    count = math.prod(dims)
    buffer = block(count * sample.element_size()) if count else None  # dtype.itemsize is younger than our oldest torch
    return torch.empty(dims, dtype=dtype) if buffer is None else torch.frombuffer(buffer, dtype=dtype).view(dims)
