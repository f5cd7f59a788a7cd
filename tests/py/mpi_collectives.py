"""What all collectives give on a plane that an MPI carries: every op, dtype, scale and size that makes a difference."""

import math

import numpy as np

import hvdlite.numpy as hvd

OPS = {hvd.Sum: sum, hvd.Min: min, hvd.Max: max, hvd.Product: math.prod}
DTYPES = ("uint8", "int8", "uint16", "int16", "int32", "int64", "float16", "float32", "float64")


def values(rank, count, dtype):
    """Small whole numbers, so that every order of adding gives the same bits in every dtype."""
    return (np.arange(count) % 2 + 1 + rank % 2).astype(dtype)


def equal(got, wanted):
    assert got.dtype == wanted.dtype and got.shape == wanted.shape and (got == wanted).all(), (got, wanted)


def reductions(members, process_set):
    """Every op and dtype, scales, averages, counts around what makes a difference; bool; several in one bucket."""
    me, size = hvd.rank(), len(members)
    for dtype in DTYPES:
        for op, function in OPS.items():
            for count in (0, 1, 1000) if op == hvd.Sum else (7,):
                parts = [values(rank, count, dtype) for rank in members]
                wanted = np.array([function(column) for column in zip(*(part.tolist() for part in parts))], dtype)
                equal(hvd.allreduce(values(me, count, dtype), op=op, process_set=process_set), wanted)
        total = sum(values(rank, 50, "int64") for rank in members)
        average = hvd.allreduce(values(me, 50, dtype), process_set=process_set)
        close = (
            np.allclose(average, total / size, rtol=1e-3) if dtype.startswith("f") else (average == total // size).all()
        )
        assert close and average.dtype == dtype
        doubled = hvd.allreduce(values(me, 50, dtype), op=hvd.Sum, prescale_factor=2.0, process_set=process_set)
        equal(doubled, (2 * total).astype(dtype))
    flags = hvd.allreduce(np.array([True, False, me == members[0]]), op=hvd.Sum, process_set=process_set)
    equal(flags, np.array([True, False, True]))
    worst = np.array([np.nan, 1.0] if me == members[0] else [0.0, 2.0], np.float32)
    assert np.isnan(hvd.allreduce(worst, op=hvd.Max, process_set=process_set)[0])
    bucket = [values(me, count, "float32") for count in (3, 0, 5000, 17)]
    for got, count in zip(hvd.grouped_allreduce(bucket, op=hvd.Sum, process_set=process_set), (3, 0, 5000, 17)):
        equal(got, sum(values(rank, count, "float32") for rank in members))
    for got, count in zip(
        hvd.grouped_allreduce([x.astype("float16") for x in bucket], op=hvd.Sum, process_set=process_set),
        (3, 0, 5000, 17),
    ):
        equal(got, sum(values(rank, count, "float16") for rank in members))
    reduced = hvd.reduce(values(me, 9, "float32"), members[-1], op=hvd.Sum, process_set=process_set)
    if me == members[-1]:
        equal(reduced, sum(values(rank, 9, "float32") for rank in members))


def movements(members, process_set):
    """What only moves, with parts of different sizes and empty ones."""
    me, size = hvd.rank(), len(members)
    here = members.index(me)
    for dtype in ("uint8", "bool", "float64"):
        rows = [np.full((place % 3, 2), place + 1, dtype) for place in range(size)]
        equal(hvd.allgather(rows[here], process_set=process_set), np.concatenate(rows))
        equal(
            hvd.broadcast(values(me, 1001, dtype), members[-1], process_set=process_set),
            values(members[-1], 1001, dtype),
        )
        given = np.repeat(np.arange(size), np.arange(size) + here).astype(dtype)
        got, counts = hvd.alltoall(given, [place + here for place in range(size)], process_set=process_set)
        assert list(counts) == [here + place for place in range(size)]
        equal(got, np.full(sum(counts), here).astype(dtype))
        equal(hvd.allgather(np.zeros((0, 3), dtype), process_set=process_set), np.zeros((0, 3), dtype))
    several = hvd.grouped_allgather([rows[here], np.array([me])], process_set=process_set)
    equal(several[0], np.concatenate(rows))
    assert several[1].tolist() == members
    table = np.arange((2 * size + 1) * 3, dtype="float32").reshape(-1, 3) + me
    share = hvd.reducescatter(table, op=hvd.Sum, process_set=process_set)
    whole = sum(np.arange((2 * size + 1) * 3, dtype="float32").reshape(-1, 3) + rank for rank in members)
    before = here * 2 + min(here, 1)
    equal(share, whole[before : before + 2 + (here < 1)])
    if size > 1 and here == 0:
        hvd.send(values(me, 77, "int32"), members[-1], name="to", process_set=process_set)
    elif size > 1 and here == size - 1:
        equal(
            hvd.recv(np.zeros(77, "int32"), members[0], name="to", process_set=process_set),
            values(members[0], 77, "int32"),
        )
    hvd.barrier(process_set=process_set)


def large():
    """More than one segment, in every way."""
    me, size = hvd.rank(), hvd.size()
    for dtype, op in (("float16", hvd.Sum), ("float32", hvd.Sum), ("float64", hvd.Max)):
        count = (17 << 20) // np.dtype(dtype).itemsize + 5
        wanted = np.full(count, size * (size + 1) // 2 if op == hvd.Sum else size, dtype)
        equal(hvd.allreduce(np.full(count, me + 1, dtype), op=op), wanted)
    hvd.allreduce(np.full(1 << 20, me + 1.0), op=hvd.Adasum)
    total, count = size * (size + 1) // 2, (3 << 20) // 4 + 1  # in place, in one bucket, and where one rank wants it
    here = np.arange(count, dtype="float32") % 7 + me + 1
    hvd.allreduce_(here, op=hvd.Sum)
    equal(here, (np.arange(count) % 7 * size + total).astype("float32"))
    parts = [np.full(count, place + me, "int32") for place in range(3)]
    for place, got in enumerate(hvd.grouped_allreduce(parts, op=hvd.Sum)):
        equal(got, np.full(count, size * place + total - size, "int32"))
    kept = hvd.reduce(np.full(count, me + 1, "float64"), size - 1, op=hvd.Sum)
    if me == size - 1:
        equal(kept, np.full(count, total, "float64"))
