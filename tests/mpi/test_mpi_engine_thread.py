"""An engine thread that sleeps for long calls MPI soon after a collective that another thread has ended."""

import sys
import time

import as_program
import mpis

COLLECTIVES, ATTEMPTS = 15, 4  # a machine may be busy with something else for a while
SOON = 0.04  # a third of what it may sleep


def main():
    """The program of each rank: how long after a collective the engine thread has looked twice."""
    import numpy as np

    import hvdlite.numpy as hvd

    hvd.init()

    def looked_after(name):
        time.sleep(0.3)
        hvd.barrier()
        time.sleep(0.05)
        before, began = hvd.counters()["sleeps"], time.monotonic()
        hvd.broadcast(np.ones(4, np.float32), 0, name=name)
        while hvd.counters()["sleeps"] < before + 3:
            time.sleep(0.001)
        return time.monotonic() - began

    medians = []
    while hvd.allreduce(np.float32(not medians or medians[-1] >= SOON), op=hvd.Max):  # all go on, or none
        assert len(medians) < ATTEMPTS, medians
        medians.append(sorted(looked_after(f"small.{i}") for i in range(COLLECTIVES))[COLLECTIVES // 2])
    print("fine", flush=True)
    hvd.shutdown()


def finalizes():
    """A script that ends its MPI before hvdlite ends, and does something else for a while."""
    from mpi4py import MPI

    import hvdlite.numpy as hvd

    hvd.init()
    hvd.barrier()
    MPI.Finalize()
    before, until = hvd.counters()["sleeps"], time.monotonic() + 30
    while hvd.counters()["sleeps"] < before + 3 and time.monotonic() < until:
        time.sleep(0.01)
    print("fine", flush=True)


def test_who_has_ended_a_collective_is_called_for_what_it_owes_soon():
    code, said = mpis.run("mpich", 2, as_program.__file__, __file__, HVDLITE_PLANE="mpi")
    assert code == 0 and said.count("fine") == 2, said


def test_an_mpi_that_the_script_has_ended_is_called_no_more():
    code, said = mpis.run("mpich", 2, as_program.__file__, __file__, "finalizes", with_mpi4py=True, HVDLITE_PLANE="mpi")
    assert code == 0 and said.count("fine") == 2, said


if __name__ == "__main__":
    sys.exit(finalizes() if sys.argv[1:] else main())
