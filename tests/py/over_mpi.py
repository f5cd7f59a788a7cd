"""What ranks do that an mpirun has started: `over_mpi.py NAME` runs the function of this name, one rank's program each.

test_mpi_*.py start it; a rank that finds all as it should be says "fine" in a line of its own.
"""

import os
import signal
import sys

import numpy as np

import hvdlite.numpy as hvd


def fine():
    os.write(1, b"fine\n")  # in one piece: lines of ranks do not mix


def meet():
    """No launcher of hvdlite, no mpi4py; two lives."""
    for _ in range(2):
        hvd.init()
        assert hvd.mpi_enabled() and hvd.mpi_built() and hvd.mpi_threads_supported()
        assert (hvd.local_rank(), hvd.local_size(), hvd.cross_size()) == (hvd.rank(), hvd.size(), 1)
        total = hvd.allreduce(np.full(1000, hvd.rank() + 1.0), op=hvd.Sum, name="x")
        assert (total == hvd.size() * (hvd.size() + 1) / 2).all()
        assert hvd.allgather(np.array([hvd.rank()])).tolist() == list(range(hvd.size()))
        pair = hvd.add_process_set([0, 1])
        if pair.included():
            assert hvd.broadcast(np.array([hvd.rank()]), 1, process_set=pair).tolist() == [1]
        hvd.shutdown()
    assert not hvd.mpi_enabled()
    fine()


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


def init():
    hvd.init()


def fail():
    """Rank 1 raises between two collectives."""
    hvd.init()
    hvd.allreduce(np.ones(3), name="a")
    if hvd.rank() == 1:
        raise ValueError("out of cheese")
    hvd.allreduce(np.ones(3), name="b")


def die():
    """Rank 1 is killed between two collectives."""
    hvd.init()
    hvd.allreduce(np.ones(3), name="a")
    if hvd.rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    hvd.allreduce(np.ones(3), name="b")


if __name__ == "__main__":
    globals()[sys.argv[1]](*sys.argv[2:])
