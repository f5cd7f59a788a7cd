"""GPUs on two levels with an MPI between hosts: over a real MPI, made-up hosts, and a GPU that is none."""

from pathlib import Path

import gpus
import mpis
import pytest

import hvdlite as hvd
from hvdlite import _meeting, config, discovery
from hvdlite.links.seats import Seats

PROGRAM = Path(__file__).with_name("over_mpi_gpus.py")


def test_sums_cross_by_mpi_and_stay_by_nccl():
    gpus.build_stub()
    code, said = mpis.run("mpich", 4, PROGRAM, HVDLITE_GPU_HOSTS="mpi")
    assert code == 0 and said.count("fine") == 4, said


def test_without_an_mpi_it_is_refused_with_what_to_do():
    seats = Seats([0, 1], ["a", "b"])
    settings = config.read({"HVDLITE_GPU_HOSTS": "mpi"})
    place = discovery.Place(0, 2, 0, 1, 0, 2, "hvdlite-run")

    class Store:
        secret, job, epoch, allgather = bytes(32), 1, 0, None

    with pytest.raises(hvd.HvdInitError, match="HVDLITE_GPU_HOSTS=mpi needs a job over MPI.*hvdlite-run: start it"):
        _meeting.link(place, settings, Store(), seats)
    with pytest.raises(ValueError, match="HVDLITE_GPU_HOSTS"):
        config.read({"HVDLITE_GPU_HOSTS": "carrier pigeons"})
