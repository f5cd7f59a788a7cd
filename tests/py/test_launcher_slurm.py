"""A real Slurm on two hosts starts ranks: by srun alone, and by hvdlite-run inside an allocation."""

import os
import sys
from pathlib import Path

import pytest
from hosts import Hosts, needs_hosts
from slurm import Slurm

pytestmark = needs_hosts
PROGRAM = Path(__file__).resolve().parent / "on_slurm.py"


@pytest.fixture(scope="module")
def slurm():
    with Hosts(2) as hosts, Slurm(hosts) as made:
        yield made


@pytest.fixture
def quiet(tmp_path):
    """A home without a key in it, and one thread per rank."""
    return {"XDG_CONFIG_HOME": str(tmp_path), "OMP_NUM_THREADS": "1"}


@pytest.mark.parametrize("slots", ["2,2", "2,1"])
def test_srun_needs_neither_mpi_nor_a_launcher(slurm, quiet, slots):
    count = sum(map(int, slots.split(",")))
    ranks = ["-N2", f"-n{count}", "--ntasks-per-node=2", "--mpi=none", "--distribution=block"]
    code, said = slurm.srun(ranks, [sys.executable, PROGRAM, "meet", slots], **quiet)
    assert code == 0 and said.count("fine\n") == count, said
    kept = os.stat(os.path.join(quiet["XDG_CONFIG_HOME"], "hvdlite", "key"))
    assert kept.st_mode & 0o077 == 0


def test_a_lost_rank_0_is_named_by_the_others(slurm, quiet):
    code, said = slurm.srun(["-N2", "-n4", "--mpi=none"], [sys.executable, PROGRAM, "die", "0"], kill=False, **quiet)
    assert code != 0 and said.count("lost: barrier") == 3 and said.count("rank 0 (pid ") == 3, said


def test_nodes_that_do_not_share_a_secret_are_told_so(slurm, quiet):
    """The second node's key is another: its rank says what to do, and nobody waits for ever."""
    words = f"XDG_CONFIG_HOME={quiet['XDG_CONFIG_HOME']}/$SLURM_NODEID exec {sys.executable} {PROGRAM} meet 1,1"
    quiet["HVDLITE_START_TIMEOUT"] = "4"
    code, said = slurm.srun(["-N2", "-n2", "--mpi=none"], ["sh", "-c", words], kill=False, **quiet)
    assert code != 0 and "something that has another secret" in said and "export HVDLITE_SECRET_KEY" in said, said
    assert "rank 1 did not call init within 4 s" in said, said
