"""Arrays on the way to servers and back: tensors become NumPy arrays, and rows have the type of the ids.

Gradients of one row are added up before they are sent, in the order in which they stand: the bits are those of a loop
over the batch, as of torch.nn.Embedding.

Messages have a largest size, so rows for one server go in pieces.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

import numpy as np

_FEW = 64  # ids


def in_order(ids: Any) -> Any:
    """np.argsort(ids, kind="stable") of int64 ids >= 0, in a quarter of the time: row and index are sorted as one
    number where both fit into it (8 million ids of the largest table). A few take less time without that."""
    bits = len(ids).bit_length()
    if len(ids) <= _FEW or int(ids.max(initial=0)).bit_length() + bits > 63:
        return np.argsort(ids, kind="stable")
    return np.sort(ids << bits | np.arange(len(ids))) & ((1 << bits) - 1)


def different(ids: Any) -> tuple[Any, Any]:
    """(sorted different ids, where each id is among them), as np.unique, which takes twice as long for a few."""
    if ids.size > _FEW:
        some, back = np.unique(ids, return_inverse=True)
        return some, back.reshape(ids.shape)
    some = np.array(sorted(set(ids.ravel().tolist())), np.int64)
    return some, some.searchsorted(ids)


def added_up(ids: Any, grads: Any) -> tuple[Any, Any]:
    """(sorted different ids, their gradients added up in the order in which they stand): float32 [n, dim], fresh."""
    order = in_order(ids)
    lined = ids[order]
    differs = lined[1:] != lined[:-1]
    if np.count_nonzero(differs) == len(differs):
        return lined, grads.take(order, axis=0)
    starts = np.nonzero(np.concatenate([[True], differs]))[0]
    total, counts = grads.take(order[starts], axis=0), np.diff(starts, append=len(ids))
    several, nth = np.nonzero(counts > 1)[0], 1
    while len(several):  # np.add.reduceat is slower, and adds in another order
        total[several] += grads[order[starts[several] + nth]]
        nth += 1
        several = several[counts[several] > nth]
    return lined[starts], total


def by_piece(owners: Any, most: int) -> Iterator[tuple[int, Any]]:
    """(server, which of the rows) with at most so many rows each: their numbers, or a slice where the server has all.
    owners: of each row its server, or its different servers."""
    counts = np.bincount(owners.ravel())
    for server in counts.nonzero()[0].tolist():
        count = int(counts[server])
        at = None if count == len(owners) else (owners == server).nonzero()[0]
        for begin in range(0, count, most):
            piece = slice(begin, min(begin + most, count))
            yield server, piece if at is None else at[piece]


def numbers(values: Any) -> Any:
    """What NumPy takes of an array, a list or a framework's tensor."""
    if hasattr(values, "detach"):  # torch's
        values = values.detach()
        return (values.float() if values.dtype.itemsize < 4 and values.is_floating_point() else values).cpu().numpy()
    return values.numpy() if hasattr(values, "numpy") else values  # TensorFlow's


def like(rows: Any, example: Any) -> Any:
    """Rows as what the ids were, on their device."""
    if hasattr(example, "detach"):
        return sys.modules["torch"].from_numpy(rows).to(example.device)
    if hasattr(example, "numpy"):
        return sys.modules["tensorflow"].convert_to_tensor(rows)
    return rows
