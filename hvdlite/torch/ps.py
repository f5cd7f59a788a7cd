"""How does a PyTorch model look up rows of a table that lies on servers? By layers without parameters.

    table = hvd.ps.Table("users", rows=50_000_000, dim=64, optimizer=hvd.ps.Adagrad(lr=0.05))
    embedding = hvd.ps.Embedding(table)              # forward(ids) -> (*ids.shape, 64), float32, on the device of ids
    bag = hvd.ps.EmbeddingBag(table, mode="sum")     # forward(ids, offsets)

A forward pulls the different rows of its batch and gives them to torch's own embedding, so sums and gradients have the
bits of torch.nn.Embedding, and the gradient of a row is added up where torch does it: in a fixed order, on the CPU that
in which the ids stand. The backward pushes these rows as soon as their gradient is there, and does not wait. Within
torch.no_grad() and table.frozen() rows are read and nothing is pushed.

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
from .off_graph import keep_off_graph

_SLICE = 1 << 16  # rows that materialize pulls at a time


class _Pull(torch.autograd.Function):
    """Rows of a table. The anchor needs a gradient: without one autograd would not come back here."""

    @staticmethod
    def forward(ctx: Any, anchor: torch.Tensor, table: Any, some: Any, device: torch.device) -> torch.Tensor:
        ctx.table, ctx.some = table, some
        return torch.from_numpy(table.pull_unique(some)).to(device)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[None, ...]:
        if not ctx.table.is_frozen:
            ctx.table.push_unique(ctx.some, np.ascontiguousarray(grad.detach().cpu().numpy()))
        return None, None, None, None


class _Lookup(torch.nn.Module):
    """What layers on a table have in common."""

    def __init__(self, table: Any) -> None:
        super().__init__()
        self.table = table

    def _pulled(self, ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """(place of each id in the rows, the different rows that ids ask for)."""
        numbers = self.table.checked_ids(ids.detach().cpu().numpy())
        some, back = np.unique(numbers, return_inverse=True)
        with torch.set_grad_enabled(torch.is_grad_enabled() and not self.table.is_frozen):
            rows = _Pull.apply(torch.zeros((), requires_grad=True), self.table, some, ids.device)
        return torch.from_numpy(back.reshape(ids.shape)).to(ids.device), rows

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
        return f"{self.table.rows}, {self.table.dim}, table={self.table.name!r}"


class Embedding(_Lookup):
    """Rows of a table, as torch.nn.Embedding(rows, dim) has them in its weight.

    ids: integers of any shape, on any device. Raises ValueError for what is no row's number, and what table.pull does.
    """

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """Return the rows: float32 of shape ``(*ids.shape, dim)``."""
        return functional.embedding(*self._pulled(ids))

    @torch.no_grad()
    def materialize(self) -> torch.nn.Embedding:
        """A torch.nn.Embedding with all rows as they are now, where this process has room for them: for serving."""
        weight = torch.empty(self.table.rows, self.table.dim)
        for begin in range(0, len(weight), _SLICE):
            some = np.arange(begin, min(begin + _SLICE, len(weight)))
            weight[begin : begin + len(some)] = torch.from_numpy(self.table.pull_unique(some))
        return torch.nn.Embedding.from_pretrained(weight, freeze=False)


class EmbeddingBag(_Lookup):
    """Sums or means of rows, as torch.nn.EmbeddingBag(rows, dim, mode=mode) makes them. An empty bag is zeros."""

    def __init__(self, table: Any, mode: str = "mean") -> None:
        super().__init__(table)
        if mode not in ("sum", "mean"):
            raise ValueError(f"EmbeddingBag: mode is 'sum' or 'mean', not {mode!r} [HVD025]")
        self.mode = mode

    def forward(self, ids: torch.Tensor, offsets: torch.Tensor | None = None) -> torch.Tensor:
        """float32 (bags, dim). ids: (bags, length), or flat with `offsets`, where each bag begins."""
        places, rows = self._pulled(ids)
        return functional.embedding_bag(places, rows, None if offsets is None else offsets.to(places), mode=self.mode)

    def extra_repr(self) -> str:
        """As torch.nn.EmbeddingBag shows itself."""
        return f"{super().extra_repr()}, mode={self.mode!r}"


keep_off_graph(Embedding.forward, EmbeddingBag.forward)

from .ps_group import EmbeddingBagCollection, EmbeddingCollection  # noqa: E402  # which need the classes above

__all__ = [*_tables.__all__, "Embedding", "EmbeddingBag", "EmbeddingBagCollection", "EmbeddingCollection"]
