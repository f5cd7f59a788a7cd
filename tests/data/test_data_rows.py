"""Rows of containers with rules of their own, such as HDF5 datasets; and ranks that get no data at all."""

import warnings

import numpy as np
import pytest
from ranks import as_ranks

import hvdlite as hvd


class Container:
    """As h5py's datasets, or less: what is not in `takes` is refused."""

    def __init__(self, values, *takes):
        self.values, self.takes, self.shape, self.dtype = values, takes, values.shape, values.dtype

    def __getitem__(self, index):
        kind = type(index).__name__
        if kind == "ndarray" and "increasing" in self.takes and np.all(np.diff(index) > 0):
            return self.values[index]
        if kind == "ndarray" and "once" in self.takes:  # wrong without a word: duplicates are left out
            return self.values[np.unique(index)]
        if kind in self.takes:
            return self.values[index]
        raise TypeError(f"Indexing by {kind} must be in increasing order")


TAKES = [("slice", "int", "increasing"), ("slice", "int", "once"), ("slice",), ("int",), ("slice", "int", "ndarray")]
HOW = [{}, {"shuffle": True}, {"strided": True}, {"uneven": "drop"}, {"uneven": "keep"}]


@as_ranks(1, 3)
def test_rows_are_taken_as_a_container_can():
    kinds = [lambda values, takes=takes: Container(values, *takes) for takes in TAKES]
    try:
        import io

        import h5py

        file = h5py.File(io.BytesIO(), "w")
        kinds.append(lambda values: file.create_dataset(str(len(file)), data=values))
    except ImportError:
        pass
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for rows in (0, 1, 2, 7, 9):
            values = np.arange(rows * 2.0).reshape(rows, 2)
            for make in kinds:
                for how in HOW:
                    found = hvd.data.shard((make(values), values), **how)
                    np.testing.assert_array_equal(found[0], found[1], err_msg=f"{make} {rows} {how}")


@as_ranks(2)
def test_who_can_give_no_rows_is_refused_on_all_ranks():
    for rows in (2, 3):
        with pytest.raises(TypeError, match="Container.*increasing order.*NumPy array.*HVD240"):
            hvd.data.shard(Container(np.zeros((rows, 1)), "none"))
    arrow = pytest.importorskip("pyarrow")
    table = hvd.data.shard(arrow.table({"x": [0, 1, 2], "y": [3, 4, 5]}))
    assert table.column("x").to_pylist() == [[0, 1], [2, 0]][hvd.rank()]


@as_ranks(2)
def test_a_rank_without_data_is_told():
    def told(act):
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            act()
        return [str(each.message) for each in said if "HVD240" in str(each.message)]

    for values, how, empty in (([], {}, (0, 1)), ([7], {"uneven": "keep"}, (1,)), ([7], {"uneven": "drop"}, (0, 1))):
        for given in (values, np.array(values)):
            said = told(lambda given=given, how=how: hvd.data.shard(given, **how))
            assert len(said) == (hvd.rank() in empty) and all(f"rank {hvd.rank()} of 2" in each for each in said)
    assert any("no batch" in each for each in told(lambda: list(hvd.data.timer([]))))
    mine = [1] if hvd.rank() == 0 else []
    said = told(lambda: list(hvd.data.watch(mine, check=True)))
    assert len(said) == (hvd.rank() == 0) and all("rank 1 read no batch" in each for each in said)
