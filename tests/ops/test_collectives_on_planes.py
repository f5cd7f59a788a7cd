"""The suite of collectives, 1 to 8 ranks of one host, on every plane: shared memory, links, MPI.

Each case is that of `@as_ranks` tests, run by over_hosts.py one after the other on one job. Between hosts, and by links
on one host as well: test_hosts_collectives.py.
"""

import re
import sys

import mpis
import pytest
from ranks import HERE, Job, everything

SIZES = (1, 4, *everything(2, 3, 7, 8))
PROGRAM = HERE / "over_hosts.py"
SUITE = ("test_numpy_collectives", "test_process_sets")
SECONDS = 300


def counted(text, size):
    """How many cases each of the ranks has passed."""
    counts = re.findall(r"(\d+) cases passed", text)  # mpiexec may put two lines into one
    assert len(counts) == size and len(set(counts)) == 1, text
    return int(counts[0])


@pytest.mark.parametrize("size", SIZES)
def test_in_shared_memory(size):
    with Job(size, [sys.executable, str(PROGRAM), *SUITE], HVDLITE_PLANE="shm" if size > 1 else "self") as job:
        assert job.wait(SECONDS) == 0, job.text()
        assert counted(job.text(), size) > 10


@pytest.mark.parametrize("size", [3, *everything(1, 2, 4, 7, 8)])
def test_over_an_mpi(size):
    code, said = mpis.run("mpich", size, PROGRAM, *SUITE, HVDLITE_PLANE="mpi", seconds=SECONDS)
    assert code == 0, said
    assert counted(said, size) > 10
