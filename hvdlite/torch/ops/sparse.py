"""Sparse gradients: what a rank has of an embedding's rows is sent as it is, values and indices, to everyone.

Two allgathers, and the result is a sparse tensor with every rank's entries, not coalesced: entries of one index add up
when a caller looks. So its size grows with the number of ranks, and the dense form is the smaller one when most rows
are touched (`sparse_as_dense` of the optimizer).
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from ...ops import Average, Sum
from ...process_sets.process_set import ProcessSet, global_process_set
from . import plain


def sparse_allreduce_async(
    tensor: torch.Tensor, name: str | None, op: int, process_set: ProcessSet = global_process_set
) -> Callable[[], torch.Tensor]:
    """Start to sum or average a sparse COO tensor over all ranks.

    It gathers the indices and values of all ranks. The result is not coalesced, so its size grows with the number of
    ranks. It has no gradient.

    Args:
        tensor (torch.Tensor): sparse COO tensor; the same shape and dtype on all ranks, any number of entries.
        name (str or None): name of the collective, the same on all ranks. None: calls are matched by their order.
        op (int): ``Average`` or ``Sum``.
        process_set (ProcessSet): ranks that take part. Default: all ranks.

    Returns:
        callable: a function without arguments that waits and returns the sparse result.

    Raises:
        HvdNotInitializedError: before ``init``.
        ValueError: for a dense tensor, for another op, and on a rank outside ``process_set``.
        TypeError: if an argument has a wrong type.

    Example:
        >>> x = torch.sparse_coo_tensor([[hvd.rank()]], [2.0], (2,))
        >>> wait = hvd.sparse_allreduce_async(x, name="rows", op=hvd.Sum)
        >>> wait().to_dense().tolist()
        [2.0, 2.0]
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
