"""What ranks do that an mpirun has started: `over_mpi.py NAME` runs the function of this name, one rank's program each.

test_mpi_*.py start it; a rank that finds all as it should be says "fine" in a line of its own.
"""

import itertools
import os
import signal
import sys
import time

import numpy as np
import over_hosts
from over_mpi_early import early__exit, early_raise  # noqa: F401  (by their names)
from over_mpi_late import slow  # noqa: F401  (by its name)

import hvdlite.numpy as hvd
from hvdlite.lifecycle import init as _state
from hvdlite.process_sets.process_set import open_among, process_sets


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


def half():
    """A set that one rank cannot open: all hear of it, and all give its communicator back."""
    hvd.init()
    from hvdlite import _core, mpi

    opened, freed, world = _core.set_open, [], mpi.current()
    drop = world.drop_comm
    world.drop_comm = lambda comm: freed.append(comm) or drop(comm)

    def opened_in_vain(*words):
        opened(*words)
        _core.set_close(words[0])
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
    """The suite that every plane passes, on plane mpi."""
    hvd.init()
    assert plane() == "mpi" or hvd.size() == 1
    over_hosts.run(["test_numpy_collectives", "test_process_sets"])
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
    before = counter("sleeps")
    time.sleep(0.3)
    assert counter("sleeps") - before < 20, "the engine looks for news that cannot come"


def plane():
    """What the global set uses."""
    from hvdlite._core import lib, text_of

    return text_of(lib.hvd_plane_used())


def counter(name):
    """One of the core's. "sleeps": how often the engine thread has gone to sleep."""
    from hvdlite._core import lib, text_of

    names = []
    while text_of(lib.hvd_counter_name(len(names))):
        names.append(text_of(lib.hvd_counter_name(len(names))))
    return lib.hvd_counter(names.index(name))


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
    for incarnation in range(2):
        hvd.init(comm=world, process_sets=[half, pair] if incarnation == 0 else None)
        assert half.ranks == list(range(world.rank % 2, world.size, 2)) and half.included()
        assert half.rank() == parity.rank and half.size() == parity.size and half.mpi_comm is parity
        assert pair.ranks == [0, 1] and pair.included() == (world.rank < 2)
        assert len(process_sets()) == 4
        total = hvd.allreduce(np.array([world.rank]), op=hvd.Sum, process_set=half)
        assert total[0] == sum(half.ranks)
        if pair.included():
            assert hvd.allgather(np.array([world.rank]), process_set=pair).tolist() == [0, 1]
            alone = open_among([0, 1], world.Create_group(world.Get_group().Incl([0, 1])).allgather)
            assert hvd.allreduce(np.ones(3), op=hvd.Sum, process_set=alone).tolist() == [2, 2, 2]
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
        refused_set(ValueError, "is not a rank of this job", world)
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


def apart(slots, way="votes", *then):
    """Ranks of this machine that count as on several hosts, which agree over MPI: (2, 1) are two ranks on one and one
    on another. way: votes over MPI are asked for, or there is no route between the ranks. then: another function here,
    or the names of modules whose cases they run."""
    rank = int(os.environ.get("OMPI_COMM_WORLD_RANK", os.environ.get("PMI_RANK", "")))
    ends = itertools.accumulate(map(int, slots.split(",")))
    os.environ["HVDLITE_HOST_ID"] = f"host {sum(rank >= end for end in ends)}"
    if way == "votes":
        os.environ["HVDLITE_VOTES"] = "mpi"
    else:
        lead_astray()
    hvd.init()
    assert hvd.local_size() < hvd.size() and _state._state.links is None
    if then and then[0] in globals():
        return globals()[then[0]](*then[1:])
    over_hosts.run(then)
    assert _state._state.links is None
    assert counter("link_messages_in") > 0 or hvd.local_rank() > 0
    hvd.shutdown()
    fine()


def naps():
    """Looking for votes that do not come backs off to a millisecond."""
    hvd.allreduce(np.ones(3), name="a")
    time.sleep(0.2)
    before, began = counter("sleeps"), time.monotonic()
    time.sleep(1)
    slept, took = counter("sleeps") - before, time.monotonic() - began
    assert 10 < slept < 1000 * took + 50, (slept, took)
    hvd.shutdown()
    fine()


def silent(rank="1"):
    """A rank is stopped: nothing but its silence tells of it."""
    hvd.allreduce(np.ones(3), name="a")
    if hvd.rank() == int(rank):
        os.kill(os.getpid(), signal.SIGSTOP)
    hvd.allreduce(np.ones(3), name="b")


def lead_astray():
    """What the ranks are told of each other's listeners leads nowhere: a port at which nobody listens."""
    from hvdlite.transport import address, mesh

    listen = mesh.listen

    def listen_elsewhere(*words):
        listener = listen(*words)
        told = address.unpack(listener.address)
        listener.address = address.pack(told._replace(ends=(address.End("127.0.0.2", 1),)))
        return listener

    mesh.listen = listen_elsewhere


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
