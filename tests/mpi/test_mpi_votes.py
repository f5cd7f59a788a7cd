"""Votes over MPI, for hosts that no stream joins. Ranks of this machine count as on several (over_mpi.py: apart)."""

import re
import types

import mpis
import pytest
from ranks import everything
from test_mpi_init import PROGRAM

from hvdlite import HvdInitError, config
from hvdlite.rendezvous import bootstrap
from hvdlite.rendezvous.discovery import Place
from hvdlite.rendezvous.placement import HostLayout

SECONDS = 300


def apart(mpi, slots, *words, **environ):
    """(exit code, output) of ranks on so many hosts, which are none."""
    named = ",".join(map(str, slots))
    return mpis.run(mpi, sum(slots), PROGRAM, "apart", named, *words, seconds=SECONDS, **environ)


def fine(mpi, slots, *words, **environ):
    """Every rank says fine."""
    code, said = apart(mpi, slots, *words, **environ)
    assert code == 0 and said.count("fine") == sum(slots), said
    return said


@pytest.mark.parametrize(("mpi", "slots"), [("mpich", (1, 2)), ("system", (1, 1, 1)), *everything(("openmpi", (2, 1)))])
def test_votes_over_mpi_where_they_are_asked_for(mpi, slots):
    """Two lives, collectives on plane mpi, a process set."""
    assert "no stream" not in fine(mpi, slots, "votes", "meet", ",".join(map(str, slots)), "mpi")


def test_ranks_that_do_not_reach_each_other_vote_over_mpi():
    """Rank 0 says why. The suite of sets, on three hosts, of which one has two ranks."""
    said = fine("mpich", (2, 1, 1), "astray", "test_process_sets")
    assert "hvdlite: votes cross over MPI, polled, because no stream joins all ranks" in said, said
    assert "rank 2 at 127.0.0.2:1 on host" in said, said


def test_who_asks_for_streams_hears_that_there_is_no_route():
    code, said = apart("mpich", (1, 1), "astray", HVDLITE_VOTES="tcp", HVDLITE_START_TIMEOUT="3")
    assert code != 0 and "has no connection for 'set 0 votes'" in said and "polled" not in said, said


def test_looking_for_votes_backs_off():
    fine("mpich", (1, 1), "votes", "naps")


def test_a_rank_that_raises_is_named():
    code, said = apart("openmpi", (2, 1), "votes", "fail", "2")
    assert code != 0 and "HvdPeerLostError" in said, said
    assert re.search(r"on rank 0: rank 2 \(host \S+\) raised ValueError: out of cheese \(over_mpi.py:", said), said


def test_a_rank_that_is_killed_ends_the_job():
    code, said = apart("mpich", (1, 2), "votes", "die", "1")
    assert code != 0, said


def test_a_rank_that_is_silent_is_named():
    """MPI has no end of a stream, and a stopped process is no error of its."""
    code, said = apart("mpich", (1, 1), "votes", "silent", HVDLITE_PEER_TIMEOUT="3")
    assert code != 0 and "is silent: it has not answered for 3 s (HVDLITE_PEER_TIMEOUT)" in said, said


@pytest.mark.parametrize("mpi", ["mpich", *everything("openmpi")])
def test_a_rank_that_leaves_a_set_late_does_no_harm_to_the_next_one(mpi):
    """MPICH gives the number of a communicator that was freed to the next."""
    fine(mpi, (2, 1), "votes", "slow", "2.5")


@pytest.mark.parametrize(("way", "told"), [("mpi", "needs a job under MPI"), ("udp", "must be auto, tcp or mpi")])
def test_a_way_that_cannot_be_is_refused(way, told):
    place = Place(0, 2, 0, 1, 0, 2, "hvdlite-run")
    store = types.SimpleNamespace(secret=b"", job=7, epoch=0, allgather=None)
    with pytest.raises(HvdInitError, match=f"HVDLITE_VOTES=.*{told}"):
        bootstrap.link(place, config.read({"HVDLITE_VOTES": way}), store, HostLayout([0, 1], ["a", "b"]))
