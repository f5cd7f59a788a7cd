"""The collectives on NumPy arrays, on 1 to 4 ranks: every op with every dtype, and each form of each collective.

Expected values are computed from what every rank is known to have given.
"""

import numpy as np
import pytest
from ranks import as_ranks

import hvdlite as hvd
from hvdlite.numpy import Compression

SIZES = (1, 2, 3, 4)
DTYPES = ["uint8", "int8", "uint16", "int16", "int32", "int64", "float16", "float32", "float64", "bool"]
OPS = ["Average", "Sum", "Min", "Max", "Product"]
COUNTS = (0, 1, 7, 1000, 70001)


def given(rank, count, dtype):
    """What a rank gives: small numbers of both signs, different on every rank."""
    numbers = (np.arange(count) * 7 + rank * 3) % 11 - 4
    if dtype == "bool":
        return numbers > 0
    return np.abs(numbers).astype(dtype) if dtype.startswith("u") else numbers.astype(dtype)


def reduced(arrays, op):
    """What the reduction of these arrays is, by the rules of the kernels: wide accumulator, one rounding, wrapping."""
    dtype = arrays[0].dtype
    wide = np.stack(arrays).astype({"f": "f8", "i": "i8", "u": "i8", "b": "i8"}[dtype.kind])
    if dtype.kind == "b":
        return (wide.max(0) if op in ("Sum", "Max") else wide.min(0)).astype(bool)
    if op == "Average":
        total = wide.sum(0)
        return (total / len(arrays) if dtype.kind == "f" else np.trunc(total / len(arrays))).astype(dtype)
    return {"Sum": wide.sum, "Min": wide.min, "Max": wide.max, "Product": wide.prod}[op](0).astype(dtype)


@pytest.mark.parametrize("op", OPS)
@as_ranks(*SIZES)
def test_allreduce_reduces_every_dtype(op):
    for dtype in DTYPES:
        for count in COUNTS:
            arrays = [given(rank, count, dtype) for rank in range(hvd.size())]
            if dtype == "bool" and op == "Average":
                with pytest.raises(ValueError, match="bool"):
                    hvd.allreduce(arrays[hvd.rank()])
                continue
            result = hvd.allreduce(arrays[hvd.rank()], op=getattr(hvd, op), name=f"{op}.{dtype}.{count}")
            assert result.dtype == np.dtype(dtype)
            np.testing.assert_allclose(result, reduced(arrays, op), rtol=2e-3 if dtype == "float16" else 1e-6)


@as_ranks(*SIZES)
def test_forms_of_allreduce_agree():
    mine, total = (
        np.arange(6.0).reshape(2, 3) + hvd.rank(),
        np.arange(6.0).reshape(2, 3) * hvd.size() + sum(range(hvd.size())),
    )
    kept = mine.copy()
    np.testing.assert_array_equal(hvd.allreduce(mine, op=hvd.Sum), total)
    np.testing.assert_array_equal(mine, kept)
    handle = hvd.allreduce_async(mine, op=hvd.Sum)
    np.testing.assert_array_equal(hvd.synchronize(handle), total)
    assert hvd.poll(handle)
    np.testing.assert_array_equal(hvd.synchronize(handle), total)  # again: it says the same
    same = hvd.allreduce_(mine, average=False)
    assert same is mine
    np.testing.assert_array_equal(mine, total)
    again = kept.copy()
    assert hvd.synchronize(hvd.allreduce_async_(again)) is again
    np.testing.assert_allclose(again, total / hvd.size())


@as_ranks(*SIZES)
def test_scales_are_applied_before_and_after():
    mine = np.full(5, hvd.rank() + 1.0, np.float32)
    total = sum(range(1, hvd.size() + 1))
    result = hvd.allreduce(mine, op=hvd.Sum, prescale_factor=0.5, postscale_factor=4.0)
    np.testing.assert_allclose(result, np.full(5, 2.0 * total))
    lowest = hvd.allreduce(mine, op=hvd.Min, prescale_factor=-1.0)
    np.testing.assert_allclose(lowest, np.full(5, -float(hvd.size())))


@as_ranks(1, 2)
def test_compression_halves_what_travels():
    mine, whole = np.full(5, hvd.rank() + 0.5), np.arange(4)
    for compression in (Compression.fp16, hvd.numpy.Compression.none):
        result = hvd.allreduce(mine, compression=compression, op=hvd.Sum)
        assert result.dtype == np.float64 and (result == sum(r + 0.5 for r in range(hvd.size()))).all()
        (result,) = hvd.grouped_allreduce([whole], compression=compression, op=hvd.Sum)
        assert result.dtype == whole.dtype and (result == whole * hvd.size()).all()


@as_ranks(*SIZES)
def test_groups_are_reduced_together():
    mine = [np.full((i, 2), hvd.rank() + i, np.float64) for i in range(1, 6)]
    for name in (None, "group"):
        results = hvd.grouped_allreduce(mine, name=name, op=hvd.Sum)
        for i, result in enumerate(results, 1):
            np.testing.assert_array_equal(result, np.full((i, 2), i * hvd.size() + sum(range(hvd.size()))))
    assert hvd.grouped_allreduce_(mine)[0] is mine[0]
    mixed = [np.ones(3, np.float32), np.ones(2, np.int64)]
    first, second = hvd.synchronize(hvd.grouped_allreduce_async(mixed, op=hvd.Sum))
    assert first.dtype == np.float32 and second.dtype == np.int64 and second[0] == hvd.size()
    assert hvd.grouped_allreduce([]) == []


@as_ranks(*SIZES)
def test_names_make_the_order_of_calls_irrelevant():
    order = list(range(50)) if hvd.rank() % 2 else list(reversed(range(50)))
    handles = {i: hvd.allreduce_async(np.full(i + 1, float(i)), name=f"t{i}", op=hvd.Sum) for i in order}
    for i in order:
        np.testing.assert_array_equal(hvd.synchronize(handles[i]), np.full(i + 1, float(i * hvd.size())))


@as_ranks(*SIZES)
def test_layouts_other_than_contiguous_work():
    plain = np.arange(24.0).reshape(4, 6) * (hvd.rank() + 1)
    factor = sum(range(1, hvd.size() + 1))
    expected = np.arange(24.0).reshape(4, 6) * factor
    for pick in (np.s_[:, ::2], np.s_[::-1], np.s_[1:3, 2:5], np.s_[:, 3]):
        np.testing.assert_array_equal(hvd.allreduce(plain[pick], op=hvd.Sum), expected[pick])
    np.testing.assert_array_equal(hvd.allreduce(plain.T, op=hvd.Sum), expected.T)
    fortran = np.asfortranarray(plain)
    hvd.allreduce_(fortran, op=hvd.Sum)
    np.testing.assert_array_equal(fortran, expected)
    inside = plain.copy()
    hvd.allreduce_(inside[:, ::2], op=hvd.Sum)
    np.testing.assert_array_equal(inside[:, ::2], expected[:, ::2])
    np.testing.assert_array_equal(inside[:, 1::2], plain[:, 1::2])
    np.testing.assert_array_equal(hvd.broadcast(plain.T, 0), np.arange(24.0).reshape(4, 6).T)
    gathered = hvd.allgather(plain[:, ::3])
    np.testing.assert_array_equal(gathered[-4:], np.arange(24.0).reshape(4, 6)[:, ::3] * hvd.size())


@as_ranks(*SIZES)
def test_numbers_and_scalars_become_arrays_without_dimensions():
    assert hvd.allreduce(hvd.rank(), op=hvd.Sum) == sum(range(hvd.size()))
    assert hvd.allreduce(np.float32(2.5)).dtype == np.float32
    assert hvd.allreduce(2.5).shape == ()


@as_ranks(1, 2)
def test_more_dimensions_than_the_core_shows():
    mine = np.ones((1, 2, 1, 2, 1, 2, 1, 2, 1, 3))
    result = hvd.allreduce(mine, op=hvd.Sum)
    assert result.shape == mine.shape and (result == hvd.size()).all()
    assert hvd.allgather(mine).shape == (hvd.size(), *mine.shape[1:])


@pytest.mark.parametrize("dtype", DTYPES)
@as_ranks(*SIZES)
def test_allgather_joins_different_numbers_of_rows(dtype):
    for rows_of in (lambda r: r + 1, lambda r: 0 if r == 0 else 3, lambda r: 0, lambda r: 700):
        mine = given(hvd.rank(), rows_of(hvd.rank()) * 6, dtype).reshape(-1, 2, 3)
        result = hvd.allgather(mine, name="ragged")
        parts = [given(rank, rows_of(rank) * 6, dtype).reshape(-1, 2, 3) for rank in range(hvd.size())]
        np.testing.assert_array_equal(result, np.concatenate(parts))
        assert result.dtype == np.dtype(dtype)
    assert hvd.allgather(np.zeros((2, 0), dtype)).shape == (2 * hvd.size(), 0)


@pytest.mark.parametrize("dtype", DTYPES)
@as_ranks(*SIZES)
def test_broadcast_brings_the_roots_array(dtype):
    for root in range(hvd.size()):
        for count in COUNTS:
            mine = given(hvd.rank(), count, dtype)
            kept, expected = mine.copy(), given(root, count, dtype)
            np.testing.assert_array_equal(hvd.broadcast(mine, root, name=f"b{count}"), expected)
            np.testing.assert_array_equal(mine, kept)
            assert hvd.synchronize(hvd.broadcast_async_(mine, root_rank=root)) is mine
            np.testing.assert_array_equal(mine, expected)


@as_ranks(*SIZES)
def test_objects_travel():
    class Local:
        def __init__(self, value):
            self.value = value

    root = hvd.size() - 1
    sent = {"rank": hvd.rank(), "list": list(range(1000)), "local": Local(hvd.rank()), "f": lambda x: x + 1}
    got = hvd.broadcast_object(sent, root_rank=root, name="thing")
    assert (got["rank"], got["local"].value, got["f"](1)) == (root, root, 2)
    assert (got is sent) == (hvd.rank() == root)
    everyone = hvd.allgather_object("x" * hvd.rank())
    assert everyone == ["x" * rank for rank in range(hvd.size())]
    assert hvd.broadcast_object(None) is None


@as_ranks(*SIZES)
def test_barrier_waits_for_the_last():
    import time

    slowest = hvd.size() - 1
    if hvd.rank() == slowest:
        time.sleep(0.2)
    before = time.monotonic()
    hvd.barrier()
    arrived = hvd.allgather_object((before, time.monotonic()))  # one machine: one monotonic clock
    assert all(after >= arrived[slowest][0] for _, after in arrived), arrived


@as_ranks(1, 2, 3)
def test_shutdown_and_init_again():
    for _ in range(3):
        assert hvd.allreduce(1.0, op=hvd.Sum) == hvd.size()
        hvd.shutdown()
        assert not hvd.is_initialized()
        hvd.shutdown()  # nothing happens
        hvd.init()
        hvd.init()  # nothing happens
        assert hvd.is_initialized()


@as_ranks(2, 4)
def test_threads_share_one_engine():
    from concurrent.futures import ThreadPoolExecutor

    def work(thread):
        for step in range(50):
            result = hvd.allreduce(np.full(100, float(thread)), name=f"thread{thread}", op=hvd.Sum)
            assert (result == thread * hvd.size()).all(), (thread, step)

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(work, range(4)))


@as_ranks(2)
def test_handles_that_nobody_waits_for_do_no_harm():
    import gc

    arrays = [np.ones(1000) for _ in range(200)]
    for i, array in enumerate(arrays):
        hvd.allreduce_async_(array, name=f"left{i % 20}.{i}", op=hvd.Sum)
    del array
    gc.collect()
    hvd.barrier()
    assert hvd.allreduce(1, op=hvd.Sum) == hvd.size()
