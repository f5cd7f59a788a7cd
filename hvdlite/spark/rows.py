"""Columns of a DataFrame as arrays on ranks, and predictions as a column.

Spark writes Parquet. Each rank takes the same number of rows, one after the other in the order of the files, and reads
only the row groups that they lie in: one group at a time, so a rank's part need not fit into memory. So all ranks make
the same number of steps of the same size; up to size - 1 rows at the end are left out. With a seed, an epoch takes the
groups in another order, and the rows of each group, too; batches go on from one group to the next.

A column of numbers is an array of one dimension, lists of one length add dimensions. Arrays of float64 come as float32,
since models have such weights; integers of any size as int64, since losses of PyTorch take no others for classes.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from .store import Store


class Rows:
    """This rank's part of the Parquet in this folder of the store. ValueError for fewer rows than ranks."""

    def __init__(self, store: Store, folder: Sequence[str], columns: Sequence[str], rank: int, size: int) -> None:
        import pyarrow.dataset

        system, path = store.at(*folder)
        files = pyarrow.dataset.dataset(path, filesystem=system, format="parquet").get_fragments()
        groups = [group for file in sorted(files, key=lambda each: each.path) for group in file.split_by_row_group()]
        counts = [group.row_groups[0].num_rows for group in groups]
        self.count = sum(counts) // size
        if self.count == 0:
            raise ValueError(f"{folder[-1]}: {sum(counts)} rows are too few for {size} ranks [HVD240]")
        self._columns, self._parts, at = list(columns), list[tuple[Any, int, int]](), -rank * self.count
        for group, rows in zip(groups, counts):
            first, end = max(-at, 0), min(self.count - at, rows)
            if first < end:
                self._parts.append((group, first, end))
            at += rows

    def batches(self, size: int, seed: int | None = None) -> Iterator[list[np.ndarray[Any, Any]]]:
        """One epoch: an array for each column. seed: None: in order."""
        random = None if seed is None else np.random.default_rng(seed)
        order = range(len(self._parts)) if random is None else random.permutation(len(self._parts))
        held: list[np.ndarray[Any, Any]] = []
        for number in order:
            group, first, end = self._parts[number]
            table = group.to_table(columns=list(dict.fromkeys(self._columns))).slice(first, end - first)
            arrays = [array_of(table[name].combine_chunks(), name) for name in self._columns]
            if random is not None:
                chosen = random.permutation(end - first)
                arrays = [array[chosen] for array in arrays]
            held = [np.concatenate(pair) for pair in zip(held, arrays)] if held else arrays
            while len(held[0]) >= size:
                yield [array[:size] for array in held]
                held = [array[size:] for array in held]
        if held and len(held[0]):
            yield held


def array_of(column: Any, name: str) -> np.ndarray[Any, Any]:
    """Of a column of Arrow. Raises ValueError for nulls, lists of several lengths, and what is no number."""
    import pyarrow.compute
    from pyarrow import types

    shape = [len(column)]
    while types.is_list(column.type) or types.is_large_list(column.type):
        lengths = pyarrow.compute.unique(pyarrow.compute.list_value_length(column)).to_pylist()
        if len(lengths) != 1 or lengths[0] is None:
            raise ValueError(f"column {name}: its rows have the lengths {lengths}, not one length [HVD240]")
        shape, column = [*shape, lengths[0]], column.flatten()
    if column.null_count or not (types.is_primitive(column.type)):
        raise ValueError(f"column {name}: has {column.null_count} nulls, and is of {column.type} [HVD240]")
    array = column.to_numpy(zero_copy_only=False).reshape(shape)
    return array.astype({"i": np.int64, "f": np.float32}.get(array.dtype.kind, array.dtype))


def column_of(array: np.ndarray[Any, Any]) -> Any:
    """Of Arrow, in float32; the inverse of `array_of`."""
    import pyarrow

    column = pyarrow.array(np.ascontiguousarray(array, np.float32).reshape(-1))
    for width in reversed(array.shape[1:]):
        offsets = pyarrow.array(np.arange(0, len(column) + 1, width, dtype=np.int32))
        column = pyarrow.ListArray.from_arrays(offsets, column)
    return column
