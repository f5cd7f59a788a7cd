"""Adasum on NumPy arrays: against the tree computed by NumPy, alone, grouped, scaled, in place, and what is refused."""

import numpy as np
import pytest
from ranks import as_ranks

import hvdlite as hvd

SIZES = (1, 2, 3, 4)
ADASUM = hvd.Adasum
COUNTS = (1, 7, 1000, 300001)
PRECISION = {"float16": 2e-3, "float32": 1e-5, "float64": 1e-12}


def given(rank, count, dtype):
    """What a rank gives: a direction that all share and one of its own."""
    own, common = np.random.default_rng(rank + 1).normal(size=count), np.random.default_rng(99).normal(size=count)
    return (own + 0.5 * common).astype(dtype)


def pair(a, b):
    """Two gradients combined."""
    left, right, both = a @ a, b @ b, a @ b
    return (1 - both / (2 * left) if left else 1) * a + (1 - both / (2 * right) if right else 1) * b


def tree(arrays):
    """All ranks' gradients, level by level."""
    arrays = [array.astype(np.float64) for array in arrays]
    while len(arrays) > 1:
        odd = arrays[-1:] if len(arrays) % 2 else []
        arrays = [pair(a, b) for a, b in zip(arrays[::2], arrays[1::2])] + odd
    return arrays[0]


@pytest.mark.parametrize("dtype", sorted(PRECISION))
@as_ranks(*SIZES)
def test_adasum_is_the_tree_of_pairwise_combinations(dtype):
    for count in COUNTS:
        wanted = tree([given(rank, count, dtype) for rank in range(hvd.size())])
        result = hvd.allreduce(given(hvd.rank(), count, dtype), op=ADASUM, name=f"delta.{count}")
        assert result.dtype == np.dtype(dtype)
        np.testing.assert_allclose(result, wanted, rtol=PRECISION[dtype], atol=PRECISION[dtype])
        everyone = hvd.allgather(result[None])
        assert all(row.tobytes() == result.tobytes() for row in everyone)


@as_ranks(*SIZES)
def test_tensors_of_a_group_have_coefficients_of_their_own():
    counts = (5, 300, 1, 40000)
    inputs = [given(hvd.rank(), count, "float64") for count in counts]
    alone = [hvd.allreduce(array, op=ADASUM) for array in inputs]
    grouped = hvd.grouped_allreduce(inputs, op=ADASUM, name="group")
    for count, one, other in zip(counts, alone, grouped):
        assert one.tobytes() == other.tobytes()
        wanted = tree([given(rank, count, "float64") for rank in range(hvd.size())])
        np.testing.assert_allclose(one, wanted, rtol=1e-12, atol=1e-12)


@as_ranks(*SIZES)
def test_scales_apply_before_and_after_also_in_place():
    mine = given(hvd.rank(), 100, "float32")
    wanted = 6 * tree([given(rank, 100, "float32") for rank in range(hvd.size())])
    np.testing.assert_allclose(
        hvd.allreduce(mine, op=ADASUM, prescale_factor=2.0, postscale_factor=3.0), wanted, rtol=1e-5, atol=1e-5
    )
    assert hvd.allreduce_(mine, op=ADASUM) is mine
    np.testing.assert_allclose(6 * mine, wanted, rtol=1e-5, atol=1e-5)


@as_ranks(2, 4)
def test_equal_gradients_stay_and_orthogonal_ones_add_up():
    same = np.arange(1.0, 9.0)
    np.testing.assert_array_equal(hvd.allreduce(same, op=ADASUM), same)
    np.testing.assert_array_equal(hvd.allreduce(np.eye(hvd.size())[hvd.rank()], op=ADASUM), np.ones(hvd.size()))


@as_ranks(2)
def test_integers_are_refused_with_the_remedy():
    for dtype in ("int32", "uint8", "bool"):
        with pytest.raises(ValueError, match="counter.*Adasum is defined for float16.*cast"):
            hvd.allreduce(np.ones(3, dtype), op=ADASUM, name="counter")
    np.testing.assert_array_equal(hvd.allreduce(np.ones(3), op=ADASUM), np.ones(3))
