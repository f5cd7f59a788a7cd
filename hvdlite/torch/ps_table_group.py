"""Embedding collections for PyTorch on a group of tables (hvdlite/ps/table_group.py): one message for all.

    group = hvd.ps.TableGroup("features", {"user": 50_000, "item": 9_000}, dim=16, optimizer=hvd.ps.Adagrad(0.05))
    embeddings = hvd.ps.EmbeddingCollection(group)         # {"user": ids, "item": ids} -> {"user": rows, "item": rows}
    bags = hvd.ps.EmbeddingBagCollection(group, "sum")     # sums or means of rows

The names are those of torchrec. A forward is one pull, a backward one push, for all tables. Sums and gradients are made
by torch's own functions, in the order in which the ids stand: the bits are those of a layer for each table.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch.nn import functional

from .graph_break import keep_off_graph
from .ps import _Lookup, _Pull

Tensors = Mapping[str, torch.Tensor]


class _Collection(_Lookup):
    """What layers on a group have in common."""

    def __init__(self, table: Any) -> None:
        super().__init__(table, None)

    def _pulled_all(self, ids: Tensors) -> tuple[Any, Any, torch.Tensor, torch.Tensor]:
        """(how ids are split, the different ids, place of each id among them, their rows)."""
        joined = self.table.joined(ids)
        device = next(iter(ids.values())).device
        some, back = np.unique(joined.flat, return_inverse=True)
        with torch.set_grad_enabled(torch.is_grad_enabled() and not self.table.is_frozen):
            rows = _Pull.apply(torch.zeros((), requires_grad=True), self.table, some, None, device)
        return joined, some, torch.from_numpy(back.reshape(-1)).to(device), rows


class EmbeddingCollection(_Collection):
    """Rows of the tables of a group, as a torch.nn.Embedding for each has them in its weight."""

    def forward(self, ids: Tensors) -> dict[str, torch.Tensor]:
        """Return the rows of each table: float32 of shape ``(*ids[name].shape, dim)``.

        Args:
            ids (dict): integers of any shape, by the names of tables.

        Returns:
            dict: by the same names.

        Raises:
            ValueError: there is no such table, or no such row.
        """
        joined, _, indices, rows = self._pulled_all(ids)
        parts = functional.embedding(indices, rows).split([int(np.prod(shape)) for shape in joined.shapes])
        return {n: each.reshape(*shape, self.table.dim) for n, each, shape in zip(joined.names, parts, joined.shapes)}


class EmbeddingBagCollection(_Collection):
    """Sums or means of rows of the tables of a group, as a torch.nn.EmbeddingBag for each makes them."""

    def __init__(self, table: Any, mode: str = "mean") -> None:
        super().__init__(table)
        if mode not in ("sum", "mean"):
            raise ValueError(f"EmbeddingBagCollection: mode is 'sum' or 'mean', not {mode!r} [HVD025]")
        self.mode = mode

    def forward(self, ids: Tensors, offsets: Tensors | None = None) -> dict[str, torch.Tensor]:
        """Return the sums or means of each table: float32 of shape (bags, dim). An empty bag is zeros.

        Args:
            ids (dict): integers by the names of tables, of shape (bags, length), or flat if ``offsets`` has the name.
            offsets (dict, optional): where each bag begins, by name.

        Returns:
            dict: by the names of ``ids``.

        Raises:
            ValueError: there is no such table, or no such row. Or ids are flat and have no offsets.
        """
        for name, each in ids.items():
            if each.dim() != (2 if offsets is None or name not in offsets else 1):
                raise ValueError(
                    f"EmbeddingBagCollection: ids of {name!r} have the shape {tuple(each.shape)}: give (bags, length) "
                    "without offsets, or flat ids with offsets [HVD025]"
                )
        joined, some, indices, rows = self._pulled_all(ids)
        counts = self.table.rows_of_tables(some)
        own = dict(zip(counts, rows.split(list(counts.values()))))
        first = dict(zip(counts, np.cumsum([0, *counts.values()]).tolist()))
        made = {}
        for (name, each), part in zip(ids.items(), indices.split([each.numel() for each in ids.values()])):
            begins = None if offsets is None else offsets.get(name)
            begins = None if begins is None else begins.to(part)
            at = (part - first[name]).reshape(each.shape)
            made[name] = functional.embedding_bag(at, own[name], begins, mode=self.mode)
        return made

    def extra_repr(self) -> str:
        """As torch.nn.EmbeddingBag shows itself."""
        return f"{super().extra_repr()}, mode={self.mode!r}"


keep_off_graph(EmbeddingCollection.forward, EmbeddingBagCollection.forward)
