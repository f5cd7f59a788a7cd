"""Tensors in plane memory, which all ranks of a host map: they are reduced in place, without a copy.

See hvdlite._core.memory. Such a tensor is like any other: views keep its memory, and a copy (deepcopy, clone,
torch.save and load) has memory of its own. `empty` is for users; the optimizer moves gradients there by itself, many in
one block (`optimizer/places`).
"""

from __future__ import annotations

import math
from typing import Any

import torch

from .. import _core
from .._core.memory import block, shape_of
from .ops import plain


def empty(shape: Any, dtype: torch.dtype | None = None) -> torch.Tensor:
    """Return a new CPU tensor in memory that collectives need not copy.

    The memory is mapped by all ranks of the host. Without such memory (one rank, or no shared memory left) it is an
    ordinary tensor. ``allreduce_`` is fastest if the tensors of all ranks come from here. The contents are undefined.

    Args:
        shape (int or sequence of int): shape of the tensor.
        dtype (torch.dtype, optional): a dtype that collectives support. Default: ``torch.get_default_dtype()``.

    Returns:
        torch.Tensor: contiguous, of this shape and dtype.

    Raises:
        HvdNotInitializedError: before ``init``.
        ValueError: for an unsupported dtype or a negative dimension.
        TypeError: if ``shape`` or ``dtype`` has a wrong type.

    Example:
        >>> x = hvd.empty((2, 2)).fill_(hvd.rank() + 1)
        >>> hvd.allreduce_(x, op=hvd.Sum).tolist()
        [[3.0, 3.0], [3.0, 3.0]]
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
