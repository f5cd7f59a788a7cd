"""Micro-batches of a mini-batch: slices of its first dimension, in order.

Training cuts it into parts of equal size, so that the mean of their losses is the loss of all rows. What is only
evaluated is cut into parts that differ by one row at most, as many as there are rows if those are few.

A mini-batch is a tensor, or a tuple, list or dictionary (structure.py) of tensors with as many rows each. The values of
a tuple are the arguments of the first layer. Plain values are the same in all parts.
"""

from __future__ import annotations

from typing import Any

from .structure import put_together, taken_apart


def rows_of(batch: Any, what: str = "a part") -> int:
    """How many rows it has. ValueError for what has none, or tensors of different lengths."""
    try:
        tensors = taken_apart(batch)[0]
    except TypeError as error:
        raise ValueError(
            f"{what} has a value of type {error}: pass tensors, plain values, and tuples, lists or dictionaries of "
            "them [HVD010]"
        ) from None
    if not tensors or not all(t.dim() for t in tensors):
        raise ValueError(
            f"{what} must be a tensor, or a tuple, list or dictionary of tensors with rows, not {_shown(batch)} "
            "[HVD010]"
        )
    lengths = {len(t) for t in tensors}
    if len(lengths) > 1:
        raise ValueError(
            f"the tensors of {what} have different numbers of rows: {', '.join(map(str, sorted(lengths)))} [HVD010]"
        )
    return lengths.pop()


def _shown(batch: Any) -> str:
    return "None" if batch is None else type(batch).__name__


def _parts(batch: Any, count: int) -> list[Any]:
    tensors, form = taken_apart(batch)
    return [put_together(part, form) for part in zip(*(t.tensor_split(count) for t in tensors))]


def equal(batch: Any, count: int, what: str) -> list[Any]:
    """count parts of equal size. ValueError for rows that cannot be cut so, and for what has no rows."""
    rows = rows_of(batch, what)
    if rows % count or not rows:
        near = ", ".join(str(n) for n in range(1, rows + 1) if rows % n == 0) or "none"
        raise ValueError(
            f"a mini-batch of {rows} rows cannot be split into {count} micro-batches of equal size; {rows} rows can "
            f"be split into {near}. Drop the last incomplete batch of the data loader (drop_last=True) [HVD010]"
        )
    return _parts(batch, count)


def nearly_equal(batch: Any, count: int, what: str) -> list[Any]:
    """At most count parts, none of them empty. ValueError for what has no rows."""
    rows = rows_of(batch, what)
    if not rows:
        raise ValueError(f"{what} has no rows [HVD010]")
    return _parts(batch, min(rows, count))
