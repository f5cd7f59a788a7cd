"""Which rows of an array, whatever library it is of? Arrays are known by what they have: a shape, a dtype, an index.

Most slice, and take an array of row numbers. Frames of pandas are indexed by place (iloc), since [] means labels.
Sparse tensors of torch and tensors of TensorFlow select by a function of their own. What cannot give rows is refused
with what to make of it. A sparse matrix has no length (or len() counts what is stored), so rows are counted by shape.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
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
        if not isinstance(part, (list, range)) and len(part.shape) == 0:
            raise TypeError(f"cannot shard a {type(part).__name__} without dimensions: it has no rows [HVD240]")
    return parts


def count(array: Any) -> int:
    """The number of rows."""
    return len(array) if isinstance(array, (list, range)) else int(array.shape[0])


def taken(array: Any, rows: range | list[int]) -> Any:
    """These rows; of a range a slice where that does it: no copy."""
    if str(getattr(array, "layout", "")) == "torch.sparse_coo":
        return array.index_select(0, sys.modules["torch"].tensor(rows, dtype=sys.modules["torch"].int64))
    array = getattr(array, "iloc", array)
    if isinstance(rows, range):
        return array[rows.start : max(rows.stop, rows.start) : rows.step]
    if isinstance(array, (list, range)):
        return [array[row] for row in rows]
    tensorflow: Any = sys.modules.get("tensorflow")
    if tensorflow is not None and tensorflow.is_tensor(array):
        return tensorflow.gather(array, rows)  # a list in [] means one element
    return array[np.asarray(rows, np.int64)]


def _is_array(value: Any) -> bool:
    indexed = hasattr(value, "__getitem__") or hasattr(value, "tocsr")
    return hasattr(value, "iloc") or (indexed and hasattr(value, "shape") and hasattr(value, "dtype"))
