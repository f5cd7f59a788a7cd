"""Process sets that only their members open: they share numbers, overlap, live beside those of all ranks, and fail."""

import os
import time
from pathlib import Path

import numpy as np
import pytest
from ranks import as_ranks

import hvdlite as hvd
from hvdlite import _core
from hvdlite.process_sets import process_set
from hvdlite.process_sets.process_set import open_among


def meeting(folder, ranks, title=""):
    """An allgather among these ranks, by files in the folder."""
    rounds = iter(range(9))

    def exchange(mine):
        files = [folder / f"{title}{ranks}.{rank}" for rank in ranks]
        turn, own = next(rounds), files[ranks.index(hvd.rank())]
        draft = Path(f"{own}.draft")
        draft.write_bytes(mine)
        draft.rename(f"{own}.{turn}")
        until, said = time.monotonic() + 20, []
        for each in files:
            while not (its := Path(f"{each}.{turn}")).exists():
                assert time.monotonic() < until, each
                time.sleep(0.002)
            said.append(its.read_bytes())
        return said

    return exchange


def fine(some):
    """Collectives of every kind of number pass in the set, and are those of its members."""
    total, mine = sum(some.ranks), np.full(30000, float(hvd.rank()))
    for _ in range(5):
        assert (hvd.allreduce(mine, op=hvd.Sum, process_set=some) == total).all()
    assert (hvd.allreduce(mine, name="same", op=hvd.Sum, process_set=some) == total).all()
    assert (hvd.broadcast(mine, some.ranks[-1], process_set=some) == some.ranks[-1]).all()
    assert hvd.allgather_object(hvd.rank(), process_set=some) == some.ranks
    hvd.monitored_barrier(20, some)


@pytest.mark.parametrize("plane", ["shm", "p2p"])
@as_ranks(4)
def test_members_open_sets_beside_those_of_all(tmp_path, plane):
    hvd.shutdown()
    os.environ["HVDLITE_PLANE"] = plane
    hvd.init()
    rank = hvd.rank()
    halves = [[0, 1], [2, 3]]
    half = open_among(halves[rank // 2], meeting(tmp_path, halves[rank // 2]))
    assert half.process_set_id == 1 and half.rank() == rank % 2 and half.included()
    fine(half)
    if rank in (1, 2):  # the others do not know of it
        middle = open_among([2, 1], meeting(tmp_path, [2, 1]))
        assert middle.ranks == [1, 2] and middle.process_set_id == 2
        fine(middle)
    every = [hvd.add_process_set([0, 1]), hvd.add_process_set([0, 2, 3])]
    assert [each.process_set_id for each in every] == [3, 4]
    again = open_among(range(4), meeting(tmp_path, [0, 1, 2, 3]))
    assert again.process_set_id == 5 and process_set.process_sets() == [hvd.global_process_set, *every]
    for some in (*every, half, again, *([middle] if rank in (1, 2) else [])):
        if some.included():
            fine(some)
            assert process_set.process_set_by_id(some.process_set_id) is some
    with pytest.raises(ValueError, match="opened by its members only"):
        hvd.remove_process_set(half)
    assert hvd.remove_process_set(every[0])
    if rank > 1:  # a number that is free again on these two
        assert open_among([2, 3], meeting(tmp_path, [2, 3], "later")).process_set_id == 3
    hvd.barrier()
    hvd.shutdown()
    assert half.process_set_id is None
    with pytest.raises(ValueError, match="not registered"):
        half.size()


@as_ranks(4)
def test_all_members_hear_of_one_that_fails(tmp_path):
    ranks, rank, opened = [0, 1, 3], hvd.rank(), _core.set_open
    for _ in range(255 if rank == 3 else 0):
        open_among([3], lambda mine: [mine])
    if rank != 2:
        for outside in ([rank, 4], [2]):
            with pytest.raises(ValueError, match="there is no rank 4|is not in the set"):
                open_among(outside, lambda mine: [mine, mine])
        with pytest.raises(ValueError, match="255 process sets are open, and no more fit"):
            open_among(ranks, meeting(tmp_path, ranks))
    if rank == 1:
        _core.set_open = lambda *_: (_ for _ in ()).throw(MemoryError("no room for a set"))
    if rank < 2:
        said = "no room for a set" if rank else "open_among of ranks .0, 1. failed on rank 1: no room for a set"
        with pytest.raises((MemoryError, RuntimeError), match=said):
            open_among([0, 1], meeting(tmp_path, [0, 1]))
        _core.set_open = opened
        with pytest.raises(hvd.HvdMismatchError, match="rank 0 calls open_among of ranks .0, 1., but rank 1"):
            open_among([1, 2] if rank else [0, 1], meeting(tmp_path, [0, 1], "b"))
        fine(open_among([0, 1], meeting(tmp_path, [0, 1], "c")))
    hvd.barrier()
    hvd.shutdown()


@as_ranks(4)
def test_who_is_missing_is_a_member_of_that_set(tmp_path):
    """Sets of one number, of which rank 0, who makes the report, is in one only."""
    rank = hvd.rank()
    ranks = [0, 1] if rank < 2 else [2, 3]
    half = open_among(ranks, meeting(tmp_path, ranks))
    if rank in (0, 2):
        with pytest.raises(hvd.HvdTimeoutError, match=rf"submitted by rank {rank}, missing on rank {rank + 1};"):
            hvd.monitored_barrier(0.3, half)
    hvd.barrier()
    if rank in (1, 3):
        with pytest.raises(hvd.HvdTimeoutError, match=f"rank {rank - 1} had given up"):
            hvd.monitored_barrier(20, half)
    hvd.barrier()
    hvd.shutdown()
