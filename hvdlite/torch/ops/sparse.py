"""Sparse gradients: what a rank has of an embedding's rows is sent as it is, values and indices, to everyone.

Two allgathers, and the result is a sparse tensor with every rank's entries, not coalesced: entries of one index add up
when somebody looks. So its size grows with the number of ranks, and the dense form is the smaller one when most rows
are touched (`sparse_as_dense` of the optimizer).
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from ...ops import Average, Sum
from ...process_set import ProcessSet, global_process_set
from . import plain


def sparse_allreduce_async(
    tensor: torch.Tensor, name: str | None, op: int, process_set: ProcessSet = global_process_set
) -> Callable[[], torch.Tensor]:
    """Sum or average a sparse COO tensor over all ranks; returns a function that waits and returns the result.

    All ranks give tensors of the same shape and dtype, with any number of entries. Raises ValueError for a dense tensor
    and for other ops than Sum and Average.
    """
    if not isinstance(tensor, torch.Tensor) or tensor.layout is not torch.sparse_coo:
        raise ValueError(
            "sparse_allreduce_async takes a sparse COO tensor: use allreduce_async for a dense one [HVD207]"
        )
    if op not in (Average, Sum):
        raise ValueError(f"op={op!r} is not supported for sparse tensors: use hvd.Average or hvd.Sum [HVD207]")
    shape, size = tensor.shape, process_set.size()
    with torch.no_grad():
        rows = tensor._indices().transpose(0, 1).contiguous()
        handles = (
            plain.allgather_async(rows, None if name is None else f"{name}.indices", process_set),
            plain.allgather_async(tensor._values(), None if name is None else f"{name}.values", process_set),
        )

    def wait() -> torch.Tensor:
        indices, values = (handle.wait() for handle in handles)
        if op == Average:
            values = values / size if values.is_floating_point() else values.div(size, rounding_mode="trunc")
        return torch.sparse_coo_tensor(indices.transpose(0, 1), values, shape, check_invariants=False)

    return wait
