"""How is a mini-batch cut into micro-batches? Along the first dimension, in the order of its rows.

Training cuts it into parts of equal size, so that the mean of their losses is the loss of all rows. What is only
evaluated is cut into parts that differ by one row at most, as many as there are rows if those are few.

A mini-batch is a tensor, or a tuple of tensors with as many rows each, which are the arguments of the first layer.
"""

from __future__ import annotations

from typing import Any, Union

import torch

Rows = Union[torch.Tensor, tuple[torch.Tensor, ...]]


def _length(batch: Any, what: str) -> int:
    tensors = batch if isinstance(batch, tuple) else (batch,)
    if not tensors or not all(isinstance(t, torch.Tensor) and t.dim() for t in tensors):
        raise ValueError(f"{what} must be a tensor or a tuple of tensors with rows, not {_shown(batch)} [HVD010]")
    lengths = {len(t) for t in tensors}
    if len(lengths) > 1:
        raise ValueError(
            f"the tensors of {what} have different numbers of rows: {', '.join(map(str, sorted(lengths)))} [HVD010]"
        )
    return lengths.pop()


def _shown(batch: Any) -> str:
    return "None" if batch is None else type(batch).__name__


def _parts(batch: Rows, count: int) -> list[Rows]:
    if isinstance(batch, tuple):
        return list(zip(*(t.tensor_split(count) for t in batch)))
    return list(batch.tensor_split(count))


def equal(batch: Any, count: int, what: str) -> list[Rows]:
    """count parts of equal size. ValueError for rows that cannot be cut so, and for what has no rows."""
    rows = _length(batch, what)
    if rows % count or not rows:
        near = ", ".join(str(n) for n in range(1, rows + 1) if rows % n == 0) or "none"
        raise ValueError(
            f"a mini-batch of {rows} rows cannot be split into {count} micro-batches of equal size; {rows} rows can "
            f"be split into {near}. Drop the last incomplete batch of the data loader (drop_last=True) [HVD010]"
        )
    return _parts(batch, count)


def nearly_equal(batch: Any, count: int, what: str) -> list[Rows]:
    """At most count parts, none of them empty. ValueError for what has no rows."""
    rows = _length(batch, what)
    if not rows:
        raise ValueError(f"{what} has no rows [HVD010]")
    return _parts(batch, min(rows, count))


def copied(parts: list[Rows]) -> list[Rows]:
    """In memory of their own."""
    return [tuple(t.clone() for t in part) if isinstance(part, tuple) else part.clone() for part in parts]
