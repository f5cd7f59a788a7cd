"""Shards: every sample goes to a rank, evenly unless asked otherwise, in any kind of data; and Horovod's loaders."""

import subprocess
import sys
import threading
import time
import warnings

import numpy as np
import pytest
from ranks import as_ranks

import hvdlite as hvd
from hvdlite import data
from hvdlite.data import shards


class Samples:
    """A dataset as torch means it: a length and an index."""

    def __init__(self, count):
        self.count = count

    def __len__(self):
        return self.count

    def __getitem__(self, index):
        if not 0 <= index < self.count:
            raise IndexError(index)
        return index * 10


class Frame:
    """As pandas': [] means labels, iloc places."""

    def __init__(self, values):
        self.iloc, self.shape = values, values.shape


def everyone(part):
    return hvd.allgather_object([int(value) for value in part])


@pytest.mark.parametrize("shuffle", [False, True])
@pytest.mark.parametrize("uneven", ["pad", "drop", "keep"])
@pytest.mark.parametrize("count", [0, 1, 2, 7, 12])
def test_a_deal_is_even_and_complete(count, uneven, shuffle):
    """Without ranks: what the ranks of worlds of 1 to 5 get."""
    for size in range(1, 6):
        for strided in (False, True):
            parts = [list(shards._Deal(r, size, shuffle, 0, uneven).mine(count, 3, strided)) for r in range(size)]
            dealt, lengths = sorted(sum(parts, [])), {len(part) for part in parts}
            assert max(lengths) - min(lengths) <= (uneven == "keep")
            if uneven == "pad":
                assert set(dealt) == set(range(count)) and len(dealt) - count < size
            elif uneven == "drop":
                assert len(set(dealt)) == len(dealt) == count // size * size
            else:
                assert dealt == list(range(count))


@as_ranks(1, 2, 3)
def test_a_dataset_is_seen_through_a_view():
    view = hvd.data.shard(Samples(10), shuffle=True, seed=4)
    assert len(view) == -(-10 // hvd.size())
    first = everyone(view)
    assert {value for part in first for value in part} == {index * 10 for index in range(10)}
    view.set_epoch(1)
    assert everyone(view) != first
    view.set_epoch(0)
    assert everyone(view) == first
    plain = everyone(hvd.data.shard(Samples(10)))
    assert plain[0] == [index * 10 for index in range(0, 10, hvd.size())]
    with pytest.raises(IndexError):
        view[len(view)]
    assert len(hvd.data.shard(Samples(10), uneven="drop")) == 10 // hvd.size()
    assert sum(hvd.allgather_object(len(hvd.data.shard(Samples(10), uneven="keep")))) == 10
    assert list(hvd.data.shard(Samples(0))) == []


@as_ranks(2)
def test_a_torch_loader_reads_a_shard_also_with_workers():
    torch = pytest.importorskip("torch")
    view = hvd.data.shard(torch.utils.data.TensorDataset(torch.arange(8)), shuffle=True)
    loader = torch.utils.data.DataLoader(view, batch_size=2, num_workers=1, persistent_workers=True)
    epochs = []
    for epoch in range(3):
        view.set_epoch(epoch)
        epochs.append(everyone(torch.cat([batch for (batch,) in loader]).tolist()))
        assert sorted(sum(epochs[-1], [])) == list(range(8))
    assert epochs[0] != epochs[1] != epochs[2], "the worker that stays alive did not hear of the epoch"
    del loader


SPAWNS = """
import copy, multiprocessing, sys
from hvdlite.data import shards

def doubles_epoch(view):
    view.set_epoch(view._epoch.value * 2)

if __name__ == "__main__":
    view = shards.Shard([1, 2], shards._Deal(0, 2, True, 0, "drop"))
    view.set_epoch(2**40)
    copied = copy.deepcopy(view)
    child = multiprocessing.get_context("spawn").Process(target=doubles_epoch, args=(view,))
    child.start()
    child.join()
    sys.exit(child.exitcode or (view._epoch.value, copied._epoch.value) != (2**41, 2**40))
"""


def test_an_epoch_is_shared_with_spawned_processes_and_not_with_copies(tmp_path):
    """In a process of its own, since multiprocessing leaves one behind."""
    (tmp_path / "spawns.py").write_text(SPAWNS)
    assert subprocess.run([sys.executable, tmp_path / "spawns.py"], timeout=60).returncode == 0


@as_ranks(2, 3)
def test_arrays_are_sliced_without_a_copy_where_they_divide():
    rows = np.arange(24).reshape(12, 2)
    mine = hvd.data.shard(rows)
    assert np.shares_memory(mine, rows)
    assert np.array_equal(np.concatenate(hvd.allgather_object(mine)), rows)
    assert np.array_equal(hvd.data.shard(rows, strided=True), rows[hvd.rank() :: hvd.size()])
    x, y = hvd.data.shard((rows, np.arange(12)), shuffle=True, seed=2)
    assert np.array_equal(x[:, 0], y * 2) and isinstance(x, np.ndarray)
    named = hvd.data.shard({"x": rows, "y": list(range(12))})
    assert list(named) == ["x", "y"] and len(named["y"]) == len(named["x"]) == 12 // hvd.size()
    parts = hvd.allgather_object(hvd.data.shard(np.arange(7)).tolist())
    assert sum(parts, [])[:7] == list(range(7)) and len({len(part) for part in parts}) == 1
    parts = hvd.allgather_object(hvd.data.shard(np.arange(7), uneven="keep").tolist())
    assert sum(parts, []) == list(range(7))
    assert hvd.data.shard(["a", "b", "c", "d"], uneven="drop")[0] == "abcd"[hvd.rank() * (4 // hvd.size())]


@as_ranks(2)
def test_tensors_are_arrays():
    torch = pytest.importorskip("torch")
    x, y = hvd.data.shard((torch.arange(6.0), torch.arange(6)), uneven="drop")
    assert isinstance(x, torch.Tensor) and x.tolist() == y.tolist() == [[0, 1, 2], [3, 4, 5]][hvd.rank()]


@pytest.mark.parametrize("how", [{}, {"shuffle": True}, {"strided": True}, {"uneven": "drop"}], ids=str)
@as_ranks(1, 2)
def test_sparse_rows_and_frames_are_dealt_as_those_of_an_array(how):
    sparse, torch = pytest.importorskip("scipy.sparse"), pytest.importorskip("torch")
    whole = np.arange(14.0).reshape(7, 2)
    mine = hvd.data.shard(whole, **how)
    for form in ("csr", "csc", "lil", "dok"):
        for kind in ("matrix", "array"):
            rows, labels = hvd.data.shard((getattr(sparse, f"{form}_{kind}")(whole), np.arange(7)), **how)
            assert np.array_equal(rows.toarray(), mine) and np.array_equal(whole[labels], mine)
    assert np.array_equal(hvd.data.shard(torch.tensor(whole).to_sparse(), **how).to_dense(), mine)
    assert np.array_equal(hvd.data.shard(Frame(whole), **how), mine)
    refused = [getattr(sparse, f"{form}_matrix")(whole) for form in ("coo", "bsr", "dia")]
    for bad in [*refused, torch.tensor(whole).to_sparse_csr()]:
        with pytest.raises(TypeError, match=r"cannot shard a .*: pass its \.(tocsr|to_sparse_coo)\(\)"):
            hvd.data.shard((bad, np.arange(7)), **how)


@pytest.mark.parametrize("uneven", ["pad", "drop", "keep"])
@pytest.mark.parametrize("count", [0, 1, 2, 3, 10])
@as_ranks(1, 3)
def test_what_can_be_iterated_is_dealt_as_it_comes(count, uneven):
    parts = everyone(hvd.data.shard((value for value in range(count)), uneven=uneven))
    lengths = {len(part) for part in parts}
    assert max(lengths) - min(lengths) <= (uneven == "keep")
    dealt = sorted(sum(parts, []))
    if uneven == "drop":
        assert dealt == list(range(count // hvd.size() * hvd.size()))
    elif uneven == "keep":
        assert dealt == list(range(count))
    else:
        assert set(dealt) == set(range(count)) and len(dealt) - count < hvd.size()


@as_ranks(2)
def test_iterating_is_lazy_and_can_be_repeated():
    def endless():
        number = 0
        while True:
            yield number
            number += 1

    numbers = iter(hvd.data.shard(endless()))
    assert [next(numbers) for _ in range(3)] == [hvd.rank(), hvd.rank() + 2, hvd.rank() + 4]
    again = hvd.data.shard({1: "a", 2: "b"}.keys())
    assert list(again) == list(again) == [1 + hvd.rank()]


@as_ranks(2)
def test_a_torch_loader_divides_an_iterable_shard_among_its_workers():
    torch = pytest.importorskip("torch")

    class Numbers(torch.utils.data.IterableDataset):
        def __iter__(self):
            return iter(range(12))

    view = hvd.data.shard(Numbers())
    assert isinstance(view, torch.utils.data.IterableDataset)
    for workers in (0, 2):
        loader = torch.utils.data.DataLoader(view, batch_size=2, num_workers=workers)
        seen = everyone(torch.cat(list(loader)).tolist())
        assert sorted(sum(seen, [])) == list(range(12)) and len(seen[0]) == len(seen[1])


@as_ranks(1)
def test_what_is_no_data_is_refused():
    for bad, kind, says in (
        (3, TypeError, "cannot shard a int"),
        ("text", TypeError, "cannot shard a str"),
        ((1, 2), TypeError, "holds other objects"),
        ((np.ones(2), np.ones(3)), ValueError, r"equal lengths; these have \[2, 3\]"),
        (np.ones(()), TypeError, "ndarray without dimensions"),
        ({"a", "b"}, TypeError, r"cannot shard a set, .* pass sorted\(...\)"),
        (frozenset("ab"), TypeError, "cannot shard a frozenset"),
        ({1: 2}.keys() - {3}, TypeError, "cannot shard a set"),
        (iter({1}), TypeError, "cannot shard a set_iterator"),
    ):
        with pytest.raises(kind, match=says):
            hvd.data.shard(bad)
    with pytest.raises(ValueError, match="uneven='even'"):
        hvd.data.shard([1], uneven="even")
    with pytest.raises(ValueError, match="shuffle needs"):
        hvd.data.shard(iter([1]), shuffle=True)


def warned(make):
    """Whether reading made rank 0 warn, as every rank hears it."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        list(make())
    mine = [str(entry.message) for entry in caught if "same first batch" in str(entry.message)]
    counts = hvd.allgather_object(len(mine))
    assert sum(counts[1:]) == 0 and counts[0] <= 1
    return counts[0] == 1


@as_ranks(1, 2, 3)
def test_identical_first_batches_are_warned_about_once_on_rank_0():
    many = hvd.size() > 1
    same = [{"x": np.arange(4), "y": ["a"]}, np.ones(2)]
    assert warned(lambda: data.watch(same, check=True)) == many
    assert not warned(lambda: data.watch(same))  # nobody asked
    mine = [{"x": np.arange(4) + hvd.rank(), "y": ["a"]}]
    assert not warned(lambda: data.watch(mine, check=True))
    assert warned(lambda: hvd.data.shard(np.ones((hvd.size() * 2, 3)), check=True)) == many
    assert not warned(lambda: hvd.data.shard(Samples(9), check=True))
    assert not warned(lambda: hvd.data.shard(iter("abcdef"), check=True))
    from hvdlite import config

    config.write("HVDLITE_CHECK_DATA", "1")
    try:
        assert warned(lambda: data.watch(same)) == many
    finally:
        config.write("HVDLITE_CHECK_DATA", None)
    assert len(data.watch(same, check=True)) == 2


@as_ranks(2)
def test_digests_depend_on_all_of_a_batch():
    torch = pytest.importorskip("torch")
    from hvdlite.data.first_batch import digest

    batches = [
        np.ones(3),
        np.ones(3, np.float32),
        np.ones((3, 1)),
        torch.ones(3, dtype=torch.bfloat16),
        [1, 2],
        (1, [2]),
    ]
    batches += [{"a": 1}, {"b": 1}, "text", lambda: 3, torch.tensor(1.5), []]
    assert len({digest(batch) for batch in batches}) == len(batches)
    assert digest([np.ones(3), "x"]) == digest([np.ones(3), "x"])
    for _ in hvd.data.shard(torch.utils.data.TensorDataset(torch.ones(4)), check=False):
        pass


class Numbers(data.BaseDataLoader):
    def __init__(self, count, fails_at=None):
        self.count, self.fails_at = count, fails_at

    def __len__(self):
        return self.count

    def _iterate(self):
        for number in range(self.count):
            if number == self.fails_at:
                raise RuntimeError("no more")
            yield number

    def _process_batch(self, batch):
        return batch * 2


class AsyncNumbers(data.AsyncDataLoaderMixin, Numbers):
    pass


def threads_of_loaders():
    return [thread for thread in threading.enumerate() if thread.name == "hvdlite loader"]


@pytest.mark.parametrize("ahead", [0, 1, 64])
def test_loaders_give_processed_batches_in_order(ahead):
    assert list(Numbers(3)) == [0, 2, 4]
    loader = AsyncNumbers(ahead, False, 5)
    for _ in range(3):
        assert list(loader) == [0, 2, 4, 6, 8] and len(loader) == 5
    assert not threads_of_loaders()


@pytest.mark.parametrize("ahead", [0, 2])
def test_an_exception_of_a_loader_comes_out_of_the_loop(ahead):
    seen = []
    with pytest.raises(RuntimeError, match="no more"):
        for batch in AsyncNumbers(async_loader_queue_size=ahead, count=5, fails_at=2):
            seen.append(batch)
    assert seen == [0, 2] and not threads_of_loaders()


def test_a_loop_that_is_left_early_leaves_no_thread():
    loader = AsyncNumbers(2, True, 1000)
    passes = [iter(loader), iter(loader)]
    assert [next(each) for each in passes] == [0, 0] and len(threads_of_loaders()) == 2
    passes.pop(0).close()
    assert len(threads_of_loaders()) == 1
    loader.close_async_loader()
    loader.close_async_loader()
    assert not threads_of_loaders() and list(passes[0]) == []


def test_batches_are_made_ahead_of_their_use():
    made = threading.Semaphore(0)

    class Counted(data.AsyncDataLoaderMixin, Numbers):
        def _iterate(self):
            for number in super()._iterate():
                made.release()
                yield number

    batches = iter(Counted(3, False, 10))
    next(batches)
    until = time.monotonic() + 20
    for _ in range(4):  # one taken, three in the queue
        assert made.acquire(timeout=max(0.0, until - time.monotonic()))
    batches.close()
