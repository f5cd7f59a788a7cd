"""What ranks do that an mpirun has started: `over_mpi.py NAME` runs the function of this name, one rank's program each.

test_mpi_*.py start it; a rank that finds all as it should be says "fine" in a line of its own.
"""

import math
import os
import signal
import sys
import time

import numpy as np

import hvdlite.numpy as hvd
from hvdlite.process_set import process_sets


def fine():
    os.write(1, b"fine\n")  # in one piece: lines of ranks do not mix


def meet(slots="", moves=""):
    """No launcher of hvdlite, no mpi4py; two lives. slots: ranks on each host; one host. moves: the plane in use."""
    for _ in range(2):
        hvd.init()
        assert hvd.mpi_enabled() and hvd.mpi_built() and hvd.mpi_threads_supported()
        counts = [int(count) for count in slots.split(",")] if slots else [hvd.size()]
        host, local = [(host, local) for host, count in enumerate(counts) for local in range(count)][hvd.rank()]
        fellows = [other for other, count in enumerate(counts) if count > local]
        assert (hvd.local_rank(), hvd.local_size()) == (local, counts[host])
        assert (hvd.cross_rank(), hvd.cross_size()) == (fellows.index(host), len(fellows))
        assert moves in ("", plane()), plane()
        total = hvd.allreduce(np.full(1000, hvd.rank() + 1.0), op=hvd.Sum, name="x")
        assert (total == hvd.size() * (hvd.size() + 1) / 2).all()
        assert hvd.allgather(np.array([hvd.rank()])).tolist() == list(range(hvd.size()))
        pair = hvd.add_process_set([0, 1])
        if pair.included():
            assert hvd.broadcast(np.array([hvd.rank()]), 1, process_set=pair).tolist() == [1]
        hvd.shutdown()
    assert not hvd.mpi_enabled()
    fine()


OPS = {hvd.Sum: sum, hvd.Min: min, hvd.Max: max, hvd.Product: math.prod}
DTYPES = ("uint8", "int8", "uint16", "int16", "int32", "int64", "float16", "float32", "float64")


def values(rank, count, dtype):
    """Small whole numbers, so that every order of adding gives the same bits in every dtype."""
    return (np.arange(count) % 2 + 1 + rank % 2).astype(dtype)


def equal(got, wanted):
    assert got.dtype == wanted.dtype and got.shape == wanted.shape and (got == wanted).all(), (got, wanted)


def reductions(members, process_set):
    """Every op and dtype, scales, averages, counts around what makes a difference; bool; several in one bucket."""
    me, size = hvd.rank(), len(members)
    for dtype in DTYPES:
        for op, function in OPS.items():
            for count in (0, 1, 1000) if op == hvd.Sum else (7,):
                parts = [values(rank, count, dtype) for rank in members]
                wanted = np.array([function(column) for column in zip(*(part.tolist() for part in parts))], dtype)
                equal(hvd.allreduce(values(me, count, dtype), op=op, process_set=process_set), wanted)
        total = sum(values(rank, 50, "int64") for rank in members)
        average = hvd.allreduce(values(me, 50, dtype), process_set=process_set)
        close = (
            np.allclose(average, total / size, rtol=1e-3) if dtype.startswith("f") else (average == total // size).all()
        )
        assert close and average.dtype == dtype
        doubled = hvd.allreduce(values(me, 50, dtype), op=hvd.Sum, prescale_factor=2.0, process_set=process_set)
        equal(doubled, (2 * total).astype(dtype))
    flags = hvd.allreduce(np.array([True, False, me == members[0]]), op=hvd.Sum, process_set=process_set)
    equal(flags, np.array([True, False, True]))
    worst = np.array([np.nan, 1.0] if me == members[0] else [0.0, 2.0], np.float32)
    assert np.isnan(hvd.allreduce(worst, op=hvd.Max, process_set=process_set)[0])
    bucket = [values(me, count, "float32") for count in (3, 0, 5000, 17)]
    for got, count in zip(hvd.grouped_allreduce(bucket, op=hvd.Sum, process_set=process_set), (3, 0, 5000, 17)):
        equal(got, sum(values(rank, count, "float32") for rank in members))
    for got, count in zip(
        hvd.grouped_allreduce([x.astype("float16") for x in bucket], op=hvd.Sum, process_set=process_set),
        (3, 0, 5000, 17),
    ):
        equal(got, sum(values(rank, count, "float16") for rank in members))
    reduced = hvd.reduce(values(me, 9, "float32"), members[-1], op=hvd.Sum, process_set=process_set)
    if me == members[-1]:
        equal(reduced, sum(values(rank, 9, "float32") for rank in members))


def movements(members, process_set):
    """What only moves, with parts of different sizes and empty ones."""
    me, size = hvd.rank(), len(members)
    here = members.index(me)
    for dtype in ("uint8", "bool", "float64"):
        rows = [np.full((place % 3, 2), place + 1, dtype) for place in range(size)]
        equal(hvd.allgather(rows[here], process_set=process_set), np.concatenate(rows))
        equal(
            hvd.broadcast(values(me, 1001, dtype), members[-1], process_set=process_set),
            values(members[-1], 1001, dtype),
        )
        given = np.repeat(np.arange(size), np.arange(size) + here).astype(dtype)
        got, counts = hvd.alltoall(given, [place + here for place in range(size)], process_set=process_set)
        assert list(counts) == [here + place for place in range(size)]
        equal(got, np.full(sum(counts), here).astype(dtype))
        equal(hvd.allgather(np.zeros((0, 3), dtype), process_set=process_set), np.zeros((0, 3), dtype))
    several = hvd.grouped_allgather([rows[here], np.array([me])], process_set=process_set)
    equal(several[0], np.concatenate(rows))
    assert several[1].tolist() == members
    table = np.arange((2 * size + 1) * 3, dtype="float32").reshape(-1, 3) + me
    share = hvd.reducescatter(table, op=hvd.Sum, process_set=process_set)
    whole = sum(np.arange((2 * size + 1) * 3, dtype="float32").reshape(-1, 3) + rank for rank in members)
    before = here * 2 + min(here, 1)
    equal(share, whole[before : before + 2 + (here < 1)])
    if size > 1 and here == 0:
        hvd.send(values(me, 77, "int32"), members[-1], name="to", process_set=process_set)
    elif size > 1 and here == size - 1:
        equal(
            hvd.recv(np.zeros(77, "int32"), members[0], name="to", process_set=process_set),
            values(members[0], 77, "int32"),
        )
    hvd.barrier(process_set=process_set)


def large():
    """More than one segment, in every way."""
    me, size = hvd.rank(), hvd.size()
    for dtype, op in (("float16", hvd.Sum), ("float32", hvd.Sum), ("float64", hvd.Max)):
        count = (17 << 20) // np.dtype(dtype).itemsize + 5
        wanted = np.full(count, size * (size + 1) // 2 if op == hvd.Sum else size, dtype)
        equal(hvd.allreduce(np.full(count, me + 1, dtype), op=op), wanted)
    hvd.allreduce(np.full(1 << 20, me + 1.0), op=hvd.Adasum)
    total, count = size * (size + 1) // 2, (3 << 20) // 4 + 1  # in place, in one bucket, and where one rank wants it
    here = np.arange(count, dtype="float32") % 7 + me + 1
    hvd.allreduce_(here, op=hvd.Sum)
    equal(here, (np.arange(count) % 7 * size + total).astype("float32"))
    parts = [np.full(count, place + me, "int32") for place in range(3)]
    for place, got in enumerate(hvd.grouped_allreduce(parts, op=hvd.Sum)):
        equal(got, np.full(count, size * place + total - size, "int32"))
    kept = hvd.reduce(np.full(count, me + 1, "float64"), size - 1, op=hvd.Sum)
    if me == size - 1:
        equal(kept, np.full(count, total, "float64"))


def half():
    """A set that one rank cannot open: all hear of it, and all give its communicator back."""
    hvd.init()
    from hvdlite import _core, mpi

    opened, freed, world = _core.set_open, [], mpi.current()
    drop = world.drop_comm
    world.drop_comm = lambda comm: freed.append(comm) or drop(comm)

    def opened_in_vain(*words):
        _core.set_close(opened(*words))
        raise MemoryError("no room for a set")

    if hvd.rank() == 1:
        _core.set_open = opened_in_vain
    for tries in (1, 2):
        try:
            hvd.add_process_set([0, 1])
        except (MemoryError, RuntimeError) as error:
            assert "no room for a set" in str(error)
        else:
            raise AssertionError("it was opened")
        assert len(freed) == tries * (hvd.rank() < 2) and 0 not in freed, freed
    _core.set_open = opened
    pair = hvd.add_process_set([0, 1])
    if pair.included():
        assert hvd.allreduce(np.ones(3), op=hvd.Sum, process_set=pair).tolist() == [2, 2, 2]
    hvd.shutdown()
    fine()


def collectives():
    """All of them on plane mpi: all ranks, and two process sets at once."""
    hvd.init()
    assert plane() == "mpi" or hvd.size() == 1
    everyone = list(range(hvd.size()))
    reductions(everyone, hvd.global_process_set)
    movements(everyone, hvd.global_process_set)
    large()
    if hvd.size() > 2:
        sets = [hvd.add_process_set(ranks) for ranks in ([0, 1], everyone[1:])]
        waiting = [
            (hvd.allreduce_async(np.ones(100), op=hvd.Sum, process_set=each), each.size())
            for each in sets
            if each.included()
        ]
        for handle, size in reversed(waiting):
            assert (hvd.synchronize(handle) == size).all()
        for each in sets:
            if each.included():
                reductions(each.ranks, each)
                movements(each.ranks, each)
        hvd.barrier()
        for each in sets:
            hvd.remove_process_set(each)
    for _ in range(hvd.rank() * 2):  # and those who have joined stand for zeros
        assert hvd.allreduce(np.ones(10, "float16"), op=hvd.Sum, name="uneven").max() <= hvd.size()
    hvd.join()
    idle()
    fine()


def idle():
    """Works go on while nobody waits, and nobody polls when there is nothing to do."""
    handle = hvd.allreduce_async(np.ones(5 << 20, "float32"), op=hvd.Sum, name="background")
    deadline = time.monotonic() + 60
    while not hvd.poll(handle):
        assert time.monotonic() < deadline, "nobody has gone on with it"
        time.sleep(0.01)
    assert (hvd.synchronize(handle) == hvd.size()).all()
    hvd.barrier()
    before = sleeps()
    time.sleep(0.3)
    assert sleeps() - before < 20, "the engine looks for news that cannot come"


def plane():
    """What the global set uses."""
    from hvdlite._core import lib, text_of

    return text_of(lib.hvd_plane_used())


def sleeps():
    """How often the engine thread has gone to sleep."""
    from hvdlite._core import lib, text_of

    names = []
    while text_of(lib.hvd_counter_name(len(names))):
        names.append(text_of(lib.hvd_counter_name(len(names))))
    return lib.hvd_counter(names.index("sleeps"))


def communicators():
    """mpi4py has started MPI; its world, a part of it, some of its ranks, and it goes on working afterwards."""
    from mpi4py import MPI

    world = MPI.COMM_WORLD
    hvd.init(comm=world)
    assert (hvd.rank(), hvd.size()) == (world.rank, world.size) and hvd.mpi_threads_supported()
    assert world.allreduce(1) == hvd.allreduce(np.ones(1), op=hvd.Sum)[0] == world.size
    hvd.shutdown()
    half = world.Split(world.rank % 2, -world.rank)
    hvd.init(comm=half)
    assert (hvd.rank(), hvd.size()) == (half.rank, half.size)
    assert hvd.allgather(np.array([world.rank])).tolist() == half.allgather(world.rank)
    hvd.shutdown()
    some = [2, 0]
    if world.rank in some:
        hvd.init(comm=some)
        assert (hvd.rank(), hvd.size()) == (some.index(world.rank), 2)
        assert hvd.allgather(np.array([world.rank])).tolist() == some
        hvd.shutdown()
    else:
        refused(ValueError, "rank 1 of MPI_COMM_WORLD is not in comm=[2, 0]", some)
    refused(ValueError, "COMM_NULL", MPI.COMM_NULL)
    hvd.init(comm=MPI.COMM_SELF)
    assert hvd.size() == 1 and hvd.allreduce(np.ones(1))[0] == 1
    hvd.shutdown()
    assert world.allreduce(1) == world.size and MPI.Is_initialized() and not MPI.Is_finalized()
    fine()


def sets():
    """Process sets from communicators: of a part, of both halves at once, of none; static, added later, and again."""
    from mpi4py import MPI

    world = MPI.COMM_WORLD
    parity = world.Split(world.rank % 2, world.rank)
    front = world.Create(world.Get_group().Incl([1, 0]))
    half, pair = hvd.ProcessSet(parity), hvd.ProcessSet(front)
    for life in range(2):
        hvd.init(comm=world, process_sets=[half, pair] if life == 0 else None)
        assert half.ranks == list(range(world.rank % 2, world.size, 2)) and half.included()
        assert half.rank() == parity.rank and half.size() == parity.size and half.mpi_comm is parity
        assert pair.ranks == [0, 1] and pair.included() == (world.rank < 2)
        assert len(process_sets()) == 4
        total = hvd.allreduce(np.array([world.rank]), op=hvd.Sum, process_set=half)
        assert total[0] == sum(half.ranks)
        if pair.included():
            assert hvd.allgather(np.array([world.rank]), process_set=pair).tolist() == [0, 1]
        hvd.barrier()
        hvd.shutdown()
    later = world.Split(0 if world.rank else MPI.UNDEFINED, world.rank)
    hvd.init(comm=[world, parity])
    assert len(process_sets()) == 3
    most = hvd.add_process_set(later)
    assert most.ranks == list(range(1, world.size)) and most.included() == (world.rank > 0)
    if most.included():
        assert hvd.allreduce(np.ones(3), op=hvd.Sum, process_set=most)[0] == world.size - 1
    try:
        hvd.add_process_set(hvd.ProcessSet(world))
    except ValueError as error:
        assert "global_process_set" in str(error), error
    else:
        raise AssertionError("a set of all ranks was made")
    hvd.shutdown()
    if world.rank < 2:
        hvd.init(comm=[1, 0], process_sets=[])  # ranks of the job are not those of MPI_COMM_WORLD
        alone = hvd.add_process_set(world.rank == 1 and MPI.COMM_SELF or MPI.COMM_NULL)
        assert alone.ranks == [0] and alone.included() == (hvd.rank() == 0)
        refused_set(ValueError, "is no rank of this job", world)
        hvd.shutdown()
    fine()


def refused_set(kind, text, comm):
    """add_process_set(comm) raises this."""
    try:
        hvd.add_process_set(comm)
    except kind as error:
        assert text in str(error), error
    else:
        raise AssertionError(f"a process set was made of {comm}")


def refused(kind, text, comm):
    """init(comm) raises this."""
    try:
        hvd.init(comm=comm)
    except kind as error:
        assert text in str(error), error
    else:
        raise AssertionError(f"init took {comm}")


def low():
    """The script has asked MPI for less than hvdlite needs."""
    import mpi4py

    mpi4py.rc.thread_level = "serialized"
    from mpi4py import MPI

    refused(hvd.HvdInitError, "below MPI_THREAD_MULTIPLE", MPI.COMM_WORLD)
    refused(hvd.HvdInitError, "mpi4py.rc.thread_level", None)
    MPI.COMM_WORLD.Barrier()
    fine()


def absent():
    """Rank 1 never calls init(): the others raise in time."""
    from mpi4py import MPI

    if MPI.COMM_WORLD.rank == 1:
        MPI.COMM_WORLD.recv(source=0)  # until the others have given up
        return
    refused(hvd.HvdInitError, "within 1 s (HVDLITE_START_TIMEOUT sets the limit)", None)
    refused(hvd.HvdInitError, "cannot be used again", None)
    fine()
    if MPI.COMM_WORLD.rank == 0:
        MPI.COMM_WORLD.send(None, dest=1)


def never():
    """Rank 1 does not even start MPI; it ends with its launcher."""
    if int(os.environ.get("OMPI_COMM_WORLD_RANK", os.environ.get("PMI_RANK", ""))) == 1:
        signal.pause()
    hvd.init()


def init():
    hvd.init()


def fail(rank="1"):
    """A rank raises between two collectives."""
    hvd.init()
    hvd.allreduce(np.ones(3), name="a")
    if hvd.rank() == int(rank):
        raise ValueError("out of cheese")
    hvd.allreduce(np.ones(3), name="b")


def die(rank="1"):
    """A rank is killed between two collectives."""
    hvd.init()
    hvd.allreduce(np.ones(3), name="a")
    if hvd.rank() == int(rank):
        os.kill(os.getpid(), signal.SIGKILL)
    hvd.allreduce(np.ones(3), name="b")


if __name__ == "__main__":
    globals()[sys.argv[1]](*sys.argv[2:])
