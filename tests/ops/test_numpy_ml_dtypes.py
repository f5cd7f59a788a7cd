"""Arrays of ml_dtypes in NumPy, where that package is there: bfloat16 and float8, reduced and moved."""

import pytest
from ranks import as_ranks

ml_dtypes = pytest.importorskip("ml_dtypes")

import numpy as np  # noqa: E402

import hvdlite as hvd  # noqa: E402


@as_ranks(1, 2)
def test_arrays_of_ml_dtypes_are_reduced_and_moved():
    rank, size = hvd.rank(), hvd.size()
    for name in ("bfloat16", "float8_e4m3fn", "float8_e5m2"):
        dtype = np.dtype(getattr(ml_dtypes, name))
        every = [(np.arange(37) % 5 - r).astype(dtype) for r in range(size)]
        wide = [one.astype(np.float32) for one in every]
        for op, due in ((hvd.Sum, sum(wide)), (hvd.Average, sum(wide) / size), (hvd.Max, np.max(wide, axis=0))):
            got = hvd.allreduce(every[rank], op=op)
            assert got.dtype == dtype
            np.testing.assert_array_equal(got.astype(np.float32), due.astype(dtype).astype(np.float32), f"{name} {op}")
        joined = hvd.allgather(every[rank][: 3 + rank])
        np.testing.assert_array_equal(
            joined.astype(np.float32), np.concatenate([w[: 3 + r] for r, w in enumerate(wide)])
        )
        same = every[rank].copy()
        hvd.broadcast_(same, root_rank=size - 1)
        np.testing.assert_array_equal(same.astype(np.float32), wide[-1])
        if size > 1:
            part = hvd.scatter(every[0] if rank == 0 else None, 0, [20, 17])
            assert part.dtype == dtype and len(part) == (20, 17)[rank]
        held = hvd.empty((5,), dtype)
        held[...] = rank + 1
        assert hvd.allreduce_(held, op=hvd.Sum).astype(np.float32).tolist() == [size * (size + 1) / 2] * 5
    with pytest.raises(ValueError, match="float8_e3m4.*supported.*float8_e4m3fn"):
        hvd.allreduce(np.zeros(2, ml_dtypes.float8_e3m4))
