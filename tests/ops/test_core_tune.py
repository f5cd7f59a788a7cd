"""A size of buckets that one rank proposes: in force on all ranks at the next collective; wrong values are refused."""

import numpy as np
import pytest
from ranks import as_ranks

import hvdlite as hvd
from hvdlite import _core
from hvdlite.errors import HvdNotInitializedError


@as_ranks(1, 2, 3)
def test_a_proposal_of_rank_0_is_in_force_everywhere_at_the_next_collective():
    option = _core.fusion_bytes()
    hvd.barrier()  # everybody has seen it before anything is proposed
    for size in (1 << 20, 0, 2**63 - 1, option):
        if hvd.rank() == 0:
            _core.tune(size)
        assert hvd.allreduce(np.ones(3), name="w", op=hvd.Sum).tolist() == [hvd.size()] * 3
        assert _core.fusion_bytes() == size
        hvd.barrier()


@as_ranks(2)
def test_wrong_sizes_are_refused_and_change_nothing():
    before = _core.fusion_bytes()
    for wrong, error in ((-1, ValueError), (2**63, OverflowError), (1.5, TypeError), ("1", TypeError)):
        with pytest.raises(error):
            _core.tune(wrong)
    hvd.barrier()
    assert _core.fusion_bytes() == before


@as_ranks(1)
def test_before_init_there_is_nothing_to_tune():
    hvd.shutdown()
    with pytest.raises(HvdNotInitializedError):
        _core.tune(1 << 20)
    with pytest.raises(HvdNotInitializedError):
        _core.fusion_bytes()
    hvd.init()
