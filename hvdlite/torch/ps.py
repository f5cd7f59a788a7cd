"""Embedding layers on parameter-server tables for PyTorch: they have no parameters of their own.

    table = hvd.ps.Table("users", rows=50_000_000, dim=64, optimizer=hvd.ps.Adagrad(lr=0.05))
    embedding = hvd.ps.Embedding(table)              # forward(ids) -> (*ids.shape, 64), float32, on the device of ids
    bag = hvd.ps.EmbeddingBag(table, mode="sum")     # forward(ids, offsets)

A forward pulls the different rows of its batch and gives them to torch's own embedding, so sums and gradients have the
bits of torch.nn.Embedding, and the gradient of a row is added up where torch does it: in a fixed order, on the CPU that
in which the ids stand. The backward pushes these rows as soon as their gradient is there, and does not wait. Within
torch.no_grad() and table.frozen() rows are read and nothing is pushed.

padding_idx is an id without a row: it is neither pulled nor pushed. Torch gets a row of zeros for it, in the order of
the ids, because the order in which torch adds depends on theirs.

What stands outside of these layers does not know the rows: clipping by the norm of all gradients does not reach them,
nor does weight decay. torch.amp.GradScaler scales what is pushed: train in bfloat16, which needs none.

A state_dict holds the table's name, as a tensor of bytes, so that all that takes tensors takes it; rows are saved by
table.save. All names of hvdlite.ps are here, too.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch.nn import functional

from .. import ps as _tables
from ..ps import *  # noqa: F403
from .graph_break import keep_off_graph

_SLICE = 1 << 16  # rows that materialize pulls at a time


class _Pull(torch.autograd.Function):
    """Rows of a table, with one of zeros at `padding`. The anchor needs a gradient: without one autograd would not come
    back here."""

    @staticmethod
    def forward(
        ctx: Any, anchor: torch.Tensor, table: Any, some: Any, padding: int | None, device: torch.device
    ) -> torch.Tensor:
        ctx.table, ctx.some, ctx.padding = table, some, padding
        rows = table.pull_unique(some)
        return torch.from_numpy(rows if padding is None else np.insert(rows, padding, 0, axis=0)).to(device)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[None, ...]:
        if not ctx.table.is_frozen:
            grads = grad.detach().cpu().numpy()
            grads = grads if ctx.padding is None else np.delete(grads, ctx.padding, axis=0)
            ctx.table.push_unique(ctx.some, np.ascontiguousarray(grads))
        return None, None, None, None, None


class _Lookup(torch.nn.Module):
    """What layers on a table have in common."""

    def __init__(self, table: Any, padding_idx: int | None) -> None:
        super().__init__()
        whole = isinstance(padding_idx, (int, np.integer))
        if padding_idx is not None and not (whole and -table.rows <= padding_idx < table.rows):
            raise ValueError(
                f"{type(self).__name__} on table {table.name!r}: padding_idx={padding_idx!r} must be an integer "
                f"from -{table.rows} to {table.rows - 1} [HVD025]"
            )
        self.table = table
        self.padding_idx = None if padding_idx is None else int(padding_idx) % table.rows

    def _pulled(self, ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, int | None]:
        """(place of each id in the rows, the different rows that ids ask for, the place of padding_idx)."""
        numbers, padding = self.table.checked_ids(ids.detach().cpu().numpy()), None
        if self.padding_idx is None:
            some, back = np.unique(numbers, return_inverse=True)
            indices = back.reshape(numbers.shape)
        else:
            has_row = numbers != self.padding_idx
            some, back = np.unique(numbers[has_row], return_inverse=True)
            padding = int(np.searchsorted(some, self.padding_idx))
            indices = np.full(numbers.shape, padding)
            indices[has_row] = back + (back >= padding)
        with torch.set_grad_enabled(torch.is_grad_enabled() and not self.table.is_frozen):
            rows = _Pull.apply(torch.zeros((), requires_grad=True), self.table, some, padding, ids.device)
        return torch.from_numpy(indices).to(ids.device), rows, padding

    def get_extra_state(self) -> torch.Tensor:
        """The table's name."""
        return torch.tensor(list(self.table.name.encode()), dtype=torch.uint8)

    def set_extra_state(self, state: torch.Tensor) -> None:
        """ValueError for the state of a layer on another table."""
        name = bytes(state.tolist()).decode(errors="replace")
        if name != self.table.name:
            raise ValueError(
                f"this state belongs to a layer on table {name!r}, but this layer is on table {self.table.name!r} "
                "[HVD034]"
            )

    def extra_repr(self) -> str:
        """As torch.nn.Embedding shows itself."""
        padding = "" if self.padding_idx is None else f", padding_idx={self.padding_idx}"
        return f"{self.table.rows}, {self.table.dim}, table={self.table.name!r}{padding}"


class Embedding(_Lookup):
    """Rows of a table, as torch.nn.Embedding(rows, dim) has them in its weight.

    ids: integers of any shape, on any device. Raises ValueError for what is no row's number, and what table.pull does.
    Placement with padding_idx are zeros, as in a torch.nn.Embedding that was not trained. table.prefetch gets ids
    without.
    """

    def __init__(self, table: Any, padding_idx: int | None = None) -> None:
        super().__init__(table, padding_idx)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """Return the rows: float32 of shape ``(*ids.shape, dim)``."""
        indices, rows, padding = self._pulled(ids)
        return functional.embedding(indices, rows, padding)

    @torch.no_grad()
    def materialize(self) -> torch.nn.Embedding:
        """A torch.nn.Embedding with all rows as they are now, where this process has room for them: for serving."""
        weight = torch.empty(self.table.rows, self.table.dim)
        for begin in range(0, len(weight), _SLICE):
            some = np.arange(begin, min(begin + _SLICE, len(weight)))
            weight[begin : begin + len(some)] = torch.from_numpy(self.table.pull_unique(some))
        if self.padding_idx is not None:
            weight[self.padding_idx] = 0
        return torch.nn.Embedding.from_pretrained(weight, freeze=False, padding_idx=self.padding_idx)


class EmbeddingBag(_Lookup):
    """Sums, means or maxima of rows, as torch.nn.EmbeddingBag(rows, dim, mode=mode) makes them.

    An empty bag is zeros. padding_idx does not count, in the divisor of a mean neither.
    """

    def __init__(
        self, table: Any, mode: str = "mean", include_last_offset: bool = False, padding_idx: int | None = None
    ) -> None:
        super().__init__(table, padding_idx)
        if mode not in ("sum", "mean", "max"):
            raise ValueError(
                f"EmbeddingBag on table {table.name!r}: mode is 'sum', 'mean' or 'max', not {mode!r} [HVD025]"
            )
        self.mode, self.include_last_offset = mode, include_last_offset

    def forward(
        self, ids: torch.Tensor, offsets: torch.Tensor | None = None, per_sample_weights: torch.Tensor | None = None
    ) -> torch.Tensor:
        """float32 (bags, dim). ids: (bags, length), or flat with `offsets`, where each bag begins.

        per_sample_weights, with mode "sum": float32 of the shape of ids. It gets its gradient, of which torch lets the
        last bits depend on where rows lie in memory.
        """
        weights = per_sample_weights
        if weights is not None and (self.mode, weights.shape, weights.dtype) != ("sum", ids.shape, torch.float32):
            raise ValueError(
                f"EmbeddingBag on table {self.table.name!r}: per_sample_weights needs mode 'sum', float32 and the "
                f"shape {tuple(ids.shape)} of ids, not mode {self.mode!r}, {weights.dtype} and {tuple(weights.shape)} "
                "[HVD025]"
            )
        indices, rows, padding = self._pulled(ids)
        return functional.embedding_bag(
            indices, rows, None if offsets is None else offsets.to(indices), mode=self.mode, per_sample_weights=weights,
            include_last_offset=self.include_last_offset, padding_idx=padding,
        )  # fmt: skip

    def extra_repr(self) -> str:
        """As torch.nn.EmbeddingBag shows itself."""
        return f"{super().extra_repr()}, mode={self.mode!r}"


keep_off_graph(Embedding.forward, EmbeddingBag.forward)

from .ps_table_group import EmbeddingBagCollection, EmbeddingCollection  # noqa: E402  # which need the classes above

__all__ = [*_tables.__all__, "Embedding", "EmbeddingBag", "EmbeddingBagCollection", "EmbeddingCollection"]
