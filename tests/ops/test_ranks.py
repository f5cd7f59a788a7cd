"""Ranks that are kept for the next test: the test that spoils them fails, not the one that comes after it."""

import pytest
from ranks import Ranks, as_ranks

import hvdlite as hvd
from hvdlite import _core


@as_ranks(2)
def sums():
    assert hvd.allreduce(1, op=hvd.Sum) == 2


@as_ranks(2)
def fails_the_job():
    if hvd.rank() == 1:
        _core.lib.hvd_abort(1, _core.lib.HVD_EINTERNAL, b"rank 1 has had enough")


@as_ranks(2)
def fails_and_begins_a_new_life():
    fails_the_job.body()
    with pytest.raises(RuntimeError, match="had enough"):
        while True:
            hvd.allreduce(1, op=hvd.Sum)
    hvd.shutdown()


@pytest.fixture
def kept():
    ranks = Ranks()
    yield lambda body: ranks.run(2, __name__, body.__name__, {}, 40) or ranks.pools[2].job.process.pid
    ranks.close()


def test_a_test_that_spoils_its_ranks_fails_and_the_next_has_new_ones(kept):
    before = kept(sums)
    with pytest.raises(pytest.fail.Exception, match="passed, but its ranks are of no more use"):
        kept(fails_the_job)
    assert kept(sums) != before


def test_ranks_that_have_failed_and_begun_a_new_life_are_kept(kept):
    assert kept(fails_and_begins_a_new_life) == kept(sums)
