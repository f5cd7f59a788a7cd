"""Rows of an array of any library, recognized by shape, dtype and indexing.

Most slice, and take an array of row numbers. Frames of pandas are indexed by place (iloc), since [] means labels.
Sparse tensors of torch and tensors of TensorFlow select by a function of their own. What cannot give rows is refused
with what to make of it. A sparse matrix has no length (or len() counts what is stored), so rows are counted by shape.
Tables and arrays of pyarrow take rows by a function, since [] means a column or one value.

Other containers, such as datasets of h5py and zarr, have rules of their own: only increasing indices, only slices, only
one row at a time. Each way is tried on the first rows, on every rank alike, and compared with single rows. So a
container that is refused is refused on all ranks, and not on the one whose rows need more than the others'.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

_NO_ROWS = {"coo": "tocsr()", "bsr": "tocsr()", "dia": "tocsr()"}  # formats of scipy
_NO_ROWS.update({f"torch.sparse_{layout}": "to_sparse_coo()" for layout in ("csr", "csc", "bsr", "bsc")})


def columns(data: Any) -> list[Any] | None:
    """The arrays that are sliced alike; None for what is no array. TypeError for arrays that cannot give rows."""
    if isinstance(data, Mapping) and not hasattr(data, "tocsr"):  # as scipy's dok_matrix is
        parts = list(data.values())
    elif isinstance(data, tuple):
        parts = list(data)
    elif isinstance(data, (list, range)) or _is_array(data):
        parts = [data]
    else:
        return None
    if not parts or not all(_is_array(part) or isinstance(part, list) or part is data for part in parts):
        raise TypeError(
            f"a {type(data).__name__} of arrays is sharded by rows, and this one holds other objects [HVD240]"
        )
    for part in parts:
        form = getattr(part, "format", None) if hasattr(part, "tocsr") else str(getattr(part, "layout", ""))
        if form in _NO_ROWS:
            kind = f"{type(part).__name__} ({form.removeprefix('torch.')})"
            raise TypeError(
                f"cannot shard a {kind}, whose rows cannot be selected: pass its .{_NO_ROWS[form]} [HVD240]"
            )
        if not isinstance(part, (list, range)) and not _of_pyarrow(part) and len(part.shape) == 0:
            raise TypeError(f"cannot shard a {type(part).__name__} without dimensions: it has no rows [HVD240]")
    return parts


def count(array: Any) -> int:
    """The number of rows."""
    return len(array) if isinstance(array, (list, range)) or _of_pyarrow(array) else int(array.shape[0])


def taken(array: Any, rows: range | list[int]) -> Any:
    """These rows; of a range a slice where that does it: no copy."""
    if str(getattr(array, "layout", "")) == "torch.sparse_coo":
        return array.index_select(0, sys.modules["torch"].tensor(rows, dtype=sys.modules["torch"].int64))
    if _of_pyarrow(array):
        whole = isinstance(rows, range) and rows.step == 1
        return array.slice(rows[0] if rows else 0, len(rows)) if whole else array.take(list(rows))
    tensorflow: Any = sys.modules.get("tensorflow")
    if not _is_known(array) and not (tensorflow is not None and tensorflow.is_tensor(array)):
        return _of_container(array, rows)
    array = getattr(array, "iloc", array)
    if isinstance(rows, range):
        return array[rows.start : max(rows.stop, rows.start) : rows.step]
    if isinstance(array, (list, range)):
        return [array[row] for row in rows]
    if tensorflow is not None and tensorflow.is_tensor(array):
        return tensorflow.gather(array, rows)  # a list in [] means one element
    return array[np.asarray(rows, np.int64)]


def _is_known(array: Any) -> bool:
    """Whether it takes slices and any row numbers."""
    torch = sys.modules.get("torch")
    return (
        isinstance(array, (np.ndarray, list, range))
        or hasattr(array, "iloc")
        or hasattr(array, "tocsr")
        or (torch is not None and isinstance(array, torch.Tensor))
    )


def _sliced(array: Any, rows: Sequence[int]) -> Any:
    if not isinstance(rows, range):
        raise IndexError("not a slice")
    return array[rows.start : max(rows.stop, rows.start) : rows.step] if rows else array[0:0]


def _at_once(array: Any, rows: Any) -> Any:
    return array[np.asarray(rows, np.int64)] if len(rows) else array[0:0]


def _increasing(array: Any, rows: Sequence[int]) -> Any:
    once, indices = np.unique(np.asarray(rows, np.int64), return_inverse=True)
    return np.asarray(_at_once(array, once))[indices]


def _by_runs(array: Any, rows: Sequence[int]) -> Any:
    once, indices = np.unique(np.asarray(rows, np.int64), return_inverse=True)
    runs = np.split(once, np.flatnonzero(np.diff(once) > 1) + 1)
    return np.concatenate([array[int(run[0]) : int(run[-1]) + 1] if len(run) else array[0:0] for run in runs])[indices]


def _one_by_one(array: Any, rows: Sequence[int]) -> Any:
    if not rows:
        return np.empty((0, *array.shape[1:]), array.dtype)
    return np.stack([np.asarray(array[int(row)]) for row in rows])


def _of_container(array: Any, rows: range | list[int]) -> Any:
    """The rows, in the first way that is right for some rows of any rank. TypeError if there is none."""
    first = min(count(array), 3)
    trials: list[Sequence[int]] = [range(0, first, 2), [row % first for row in (2, 0, 0)] if first else []]
    why: Any = None
    right: list[list[Any]] = [[], []]
    for way in (_sliced, _at_once, _increasing, _by_runs, _one_by_one):
        for trial, ways in zip(trials, right):
            try:
                if _are_rows(way(array, trial), array, trial):
                    ways.append(way)
            except Exception as error:  # whatever a container raises for an index that it does not take
                why = error if isinstance(trial, range) or why is None else why
    if not all(right):
        raise TypeError(
            f"cannot shard a {type(array).__module__}.{type(array).__name__}, which gives neither several rows nor one "
            f"({type(why).__name__}: {why}): pass a NumPy array of it, or an object with "
            "__len__ and __getitem__ [HVD240]"
        )
    return right[not isinstance(rows, range)][0](array, rows)


def _are_rows(found: Any, array: Any, rows: Sequence[int]) -> bool:
    """Whether these are the rows, as far as single rows can be read."""
    if len(found) != len(rows):
        return False
    for value, row in zip(found, rows):
        try:
            single = np.asarray(array[int(row)])
        except Exception:  # it only takes slices
            return True
        if single.tobytes() != np.asarray(value).tobytes() and not np.array_equal(single, value):
            return False
    return True


def _of_pyarrow(value: Any) -> bool:
    """Whether it is a table, a batch or an array of pyarrow."""
    of_pyarrow = type(value).__module__.partition(".")[0] == "pyarrow"
    return of_pyarrow and hasattr(value, "take") and hasattr(value, "slice")


def _is_array(value: Any) -> bool:
    indexed = hasattr(value, "__getitem__") or hasattr(value, "tocsr")
    if hasattr(value, "iloc") or _of_pyarrow(value):
        return True
    return indexed and hasattr(value, "shape") and hasattr(value, "dtype")
