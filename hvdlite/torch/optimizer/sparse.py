"""Sparse gradients: the two collectives of one are waited for together (`gradient_codec`).

Its indices go under the name that a dense gradient would have: a rank that takes it for dense makes an error by that,
and then no rank may answer the values, which are not sent.

What a rank sends that has no rows of its own is here, too.
"""

from __future__ import annotations

import torch

from ... import _core
from ...errors import is_outcome
from ...ops import Handle
from ...ops.tensors import placed
from ...process_sets.process_set import ProcessSet, number_of
from ..ops import plain


class Both:
    """The handles of a sparse gradient, waited for as one."""

    def __init__(self, handles: list[Handle]) -> None:
        self.handles = handles

    def wait(self) -> None:
        failure: Exception | None = None
        for handle in self.handles:
            if failure is None or handle.done():  # after a mismatch of the first, no rank may answer the second
                try:
                    handle.wait()
                except Exception as error:
                    if not is_outcome(error):
                        raise
                    failure = failure or error
        if failure is not None:
            raise failure


def gathered(rows: torch.Tensor, name: str, process_set: ProcessSet, priority: int = 0) -> Handle:
    """An allgather under a name of another kind of collective."""
    view = plain.adapter.view(rows)
    pending = _core.submit(
        _core.ALLGATHER, 0, view.dtype, name, view.shape, view.address, 0, rows, process_set=number_of(process_set),
        priority=priority, **placed(view, fetched=True),
    )  # fmt: skip
    return Handle([pending], lambda pending: plain.fetched(pending[0], rows, view)[0])


def no_rows(parameter: torch.Tensor, sparse_dims: int) -> torch.Tensor:
    """A sparse gradient of a parameter that nothing was added to."""
    indices = torch.empty((sparse_dims, 0), dtype=torch.int64, device=parameter.device)
    values = torch.empty((0, *parameter.shape[sparse_dims:]), dtype=parameter.dtype, device=parameter.device)
    return torch.sparse_coo_tensor(indices, values, parameter.shape, check_invariants=False)
