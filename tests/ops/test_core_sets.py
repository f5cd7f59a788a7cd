"""What Python sees of process sets, sends and alltoall in the core: numbers, errors, results."""

import ctypes

import numpy as np
import pytest
from ranks import as_ranks

from hvdlite import _core
from hvdlite.process_sets import open


def barrier():
    pending = _core.submit(_core.BARRIER, 0, 0, None, (), 0, 0, None)
    pending.wait()
    pending.release()


def opened(ranks):
    number = open.opened("open", ranks, [_core.rank()], [open.in_use()], lambda _, word: [word])  # as the others
    barrier()
    return number


def closed(number):
    barrier()
    open.closed(number)


def submit(kind, name, source, target=None, **more):
    return _core.submit(
        kind,
        _core.OPS["sum"],
        _core.DTYPES[str(source.dtype)],
        name,
        source.shape,
        source.ctypes.data,
        0 if target is None else target.ctypes.data,
        (source, target),
        **more,
    )


@as_ranks(3)
def test_sets_overlap_and_a_name_may_be_in_flight_in_each():
    rank = _core.rank()
    sets = {opened([0, 1]): [0, 1], opened([1, 2]): [1, 2], 0: [0, 1, 2]}
    assert sorted(sets) == [0, 1, 2]
    arrays, pending = {}, []
    for number, ranks in sets.items():
        if rank in ranks:
            arrays[number] = np.full(1000, 2.0**rank)
            pending.append(submit(_core.ALLREDUCE, "same", arrays[number], arrays[number], process_set=number))
    for each in pending:
        each.wait()
        each.release()
    for number, array in arrays.items():
        assert (array == sum(2.0**member for member in sets[number])).all()
    closed(1)
    closed(2)


@as_ranks(2)
def test_wrong_sets_are_value_errors_and_consume_no_number():
    for ranks, words in (([], "at least one"), ([2], "not one of 0 to 1"), ([1, 0], "ascend"), ([0, 0], "twice")):
        with pytest.raises(ValueError, match=words):
            _core.set_open(1, 1, ranks)
    for number in (0, 1, -1, 1000):
        with pytest.raises(ValueError):
            _core.set_close(number)
    number = opened([0])
    assert number == 1
    if _core.rank() == 1:
        with pytest.raises(ValueError, match="Rank 1 is not a member of the provided process set"):
            submit(_core.ALLREDUCE, "x", np.zeros(3), np.zeros(3), process_set=number)
    closed(number)
    with pytest.raises(ValueError, match="does not exist"):
        submit(_core.ALLREDUCE, "x", np.zeros(3), np.zeros(3), process_set=number)


@as_ranks(2)
def test_a_pending_request_of_a_closed_set_is_a_value_error():
    number = opened([0, 1])
    array = np.zeros(3)
    pending = submit(_core.ALLREDUCE, "alone", array, array, process_set=number) if _core.rank() == 0 else None
    closed(number)
    if pending is not None:
        with pytest.raises(ValueError, match="process set 1 was removed"):
            pending.wait()


@as_ranks(2, 3)
def test_alltoall_brings_rows_and_says_from_whom():
    rank, size = _core.rank(), _core.size()
    splits = tuple(rank + to for to in range(size))
    mine = np.concatenate([np.full(rows, 10 * rank + to, np.int64) for to, rows in enumerate(splits)])
    pending = submit(_core.ALLTOALL, "x", mine, splits=splits)
    pending.wait()
    got = pending.gathered()
    assert got.rows_of == [rank + sender for sender in range(size)]
    brought = ctypes.string_at(int(_core.ffi.cast("uintptr_t", got.address)), got.bytes)
    assert np.frombuffer(brought, np.int64).tolist() == [10 * f + rank for f in range(size) for _ in range(f + rank)]
    pending.release()
    with pytest.raises(ValueError, match="Number of entries in splits does not equal number of workers"):
        submit(_core.ALLTOALL, "x", mine, splits=(*splits, 0))
    barrier()


@as_ranks(3)
def test_a_send_needs_its_two_ranks_only():
    rank = _core.rank()
    array = np.arange(5.0) * (rank + 1)
    if rank in (0, 2):
        # one name both ways at once
        got = np.zeros(5)
        to = submit(_core.SEND, "x", array, root=rank, peer=2 - rank)
        back = submit(_core.SEND, "x", got, got, root=2 - rank, peer=rank)
        for pending in (back, to):
            pending.wait()
            pending.release()
        assert (got == np.arange(5.0) * (3 - rank)).all()
    else:
        with pytest.raises(ValueError, match="rank 1 cannot take part"):
            submit(_core.SEND, "x", array, array, root=0, peer=2)
    barrier()
