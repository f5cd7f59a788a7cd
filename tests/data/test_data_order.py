"""check=True of hvd.data.shard: ranks with other data, or another order, are told; ranks with the same are not."""

import random
import threading

import numpy as np
import pytest
from ranks import as_ranks

import hvdlite as hvd


class Given:
    """A dataset of these items."""

    def __init__(self, items, read=None):
        self.items, self.read = items, read or (lambda item: item)

    def __len__(self):
        return len(self.items)

    def __getitem__(self, index):
        return self.read(self.items[index])


class Plain:
    """Shows its address."""


KINDS = {
    "list": list,
    "array": np.array,
    "columns": lambda items: {"x": np.arange(len(items)), "y": list(items)},
    "dataset": Given,
    "iterable": iter,
}


@pytest.mark.parametrize("kind", KINDS)
@as_ranks(1, 3)
def test_data_in_another_order_is_an_error_on_all_ranks(kind):
    files = [f"part-{i:02}" for i in range(12)]
    made = KINDS[kind]
    assert len(list(hvd.data.shard(made(files), check=True))) in (2, 12 // hvd.size())
    if hvd.rank() == 1:
        files[2:] = reversed(files[2:])
    mine = hvd.data.shard(made(files))  # nobody asked
    if hvd.size() > 1:
        with pytest.raises(hvd.HvdMismatchError, match="item 2 on rank 1 differs from that on rank 0.* sorted"):
            list(hvd.data.shard(made(files), check=True))
    assert len(list(mine)) in (2, 12 // hvd.size())


@as_ranks(3)
def test_data_of_another_length_is_an_error_on_all_ranks():
    with pytest.raises(hvd.HvdMismatchError, match=r"by rank: \[30, 30, 31\]\) on rank 2 differs from that on rank 0"):
        hvd.data.shard(np.ones(30 + hvd.rank() // 2), check=True)
    with pytest.raises(hvd.HvdMismatchError, match="item 1 on ranks 1, 2 differs from that on rank 0"):
        list(hvd.data.shard(iter("abc" if hvd.rank() == 0 else "a"), check=True))


@as_ranks(2)
def test_the_same_items_are_told_from_others_whatever_they_are():
    torch = pytest.importorskip("torch")
    same = [{1, "a", (2,)}, Plain(), np.array([None, "a"], object), torch.ones(2, dtype=torch.bfloat16), len, 1.5]
    hvd.data.shard(Given(same), check=True)
    for unknown in (lambda _: random.random(), lambda _: (hvd.rank(), threading.Lock()), lambda _: 1 / 0):
        hvd.data.shard(Given(same, unknown), check=True)
    for item in (np.arange(3) + hvd.rank(), {hvd.rank()}, {"x": [torch.ones(1) * hvd.rank()]}):
        with pytest.raises(hvd.HvdMismatchError, match="item 1 on rank 1"):
            hvd.data.shard(Given([0, item]), check=True)
