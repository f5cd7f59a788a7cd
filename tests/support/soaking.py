"""The ranks of the soak: random collectives, checked against closed forms, for SECONDS and ROUNDS at least.

    python soaking.py SEED SECONDS ROUNDS PACE LEAKY     (what a launcher starts, from tests/tools/soak.py)

All ranks draw the same rounds from the seed; asynchronous calls of a round are submitted in each rank's own order.
Before them come as many tensors of new names as any cache holds, so that caches are full and take no more memory later.
Between rounds, when nothing is held, each rank measures itself every second and says so in a line of JSON on stdout:
resident memory (and how much of it is its own), what malloc and Python have given out and not got back (which, other
than resident memory, does not hang on how it is laid out), descriptors, threads. Rank LEAKY (-1: none) loses LEAK_BYTES
with every collective, to see that this is noticed. Values are small integers, so that sums are exact in every dtype:
rank r gives (i % 5) + r + shift.
"""

from __future__ import annotations

import ctypes
import faulthandler
import gc
import json
import os
import random
import sys
import time
from pathlib import Path

import numpy as np

import hvdlite.numpy as hvd
from hvdlite.system import bounded_cache

DTYPES = ("uint8", "int8", "int32", "int64", "float16", "float32", "float64")
BYTES_MAX = 4 << 20
NAMES = 600  # of each kind; the cache is smaller (tests/tools/soak.py), so that slots are taken away, too
EVERY_S = 1.0
STUCK_S = 160.0  # after the time is over, on a crowded machine that is still at its rounds
ROUNDS_BETWEEN = 10  # after so many rank 0's clock is asked
KEPT = 512  # requests that Python remembers here, so that these are given up and made again, too
FILL = 2 * 1024  # names that come first: they leave no cache empty, and no page of the trace's names untouched
NUMPY_KEEPS_BELOW, NUMPY_KEEPS = 1024, 7  # bytes; of each size
LEAK_BYTES = 1024


class Given(ctypes.Structure):
    """struct mallinfo2 of the C library."""

    _fields_ = [
        (name, ctypes.c_size_t)
        for name in ("arena", "ordblks", "smblks", "hblks", "mapped", "usmblks", "fsmblks", "used", "free", "keepcost")
    ]


def given(rank, count, shift, dtype):
    """What a rank gives."""
    return ((np.arange(count) % 5) + rank + shift).astype(dtype)


def combined(op, ranks, count, shift, dtype):
    """What all of them make of it."""
    first = (np.arange(count) % 5).astype("int64") + shift
    if op == hvd.Sum:
        return (first * len(ranks) + sum(ranks)).astype(dtype)
    if op == hvd.Average:
        return (first + sum(ranks) / len(ranks)).astype(dtype)
    return (first + (max(ranks) if op == hvd.Max else min(ranks))).astype(dtype)


def name_of(chance, kind):
    """One of many, one that never comes again, or none."""
    how = chance.random()
    if how < 0.6:
        return f"{kind}.{chance.randrange(NAMES)}"
    return f"{kind}.once.{chance.getrandbits(64):x}" if how < 0.7 else None


class Round:
    """Some collectives on a set, drawn from `chance`, which is in the same state on all ranks of the set."""

    def __init__(self, chance, where):
        self.chance, self.set = chance, where
        self.ranks = where.ranks or list(range(hvd.size()))
        self.me = self.ranks.index(hvd.rank())

    def drawn(self):
        """(count, shift, dtype) of a tensor. Many are small."""
        dtype = self.chance.choice(DTYPES)
        most = BYTES_MAX // np.dtype(dtype).itemsize
        count = int(most ** self.chance.random()) if self.chance.random() > 0.05 else self.chance.choice((0, most))
        return count, self.chance.randrange(3), dtype

    def reduction(self):
        count, shift, dtype = self.drawn()
        kinds = [hvd.Sum, hvd.Min, hvd.Max] + ([hvd.Average] if dtype.startswith("float") else [])
        op, name = self.chance.choice(kinds), name_of(self.chance, "reduction")
        want = combined(op, self.ranks, count, shift, dtype)
        given_here = given(hvd.rank(), count, shift, dtype)
        return name, lambda: hvd.allreduce_async(given_here, name=name, op=op, process_set=self.set), want

    def movement(self):
        _, shift, dtype = self.drawn()
        name = name_of(self.chance, "movement")
        kind = self.chance.choice(("broadcast", "allgather", "alltoall", "reducescatter"))
        seen, scale = len(self.ranks), int(60000 ** self.chance.random())
        if kind == "broadcast":
            root = self.chance.choice(self.ranks)
            call = lambda: hvd.broadcast_async(given(hvd.rank(), scale, shift, dtype), root, name, self.set)  # noqa: E731
            return name, call, given(root, scale, shift, dtype)
        if kind == "allgather":
            rows = [self.chance.randrange(3) * scale for _ in self.ranks]
            call = lambda: hvd.allgather_async(given(hvd.rank(), rows[self.me], shift, dtype), name, self.set)  # noqa: E731
            return name, call, np.concatenate([given(r, n, shift, dtype) for r, n in zip(self.ranks, rows)])
        if kind == "alltoall":
            splits = [[self.chance.randrange(2) * scale for _ in self.ranks] for _ in self.ranks]
            mine = np.concatenate([np.full(n, hvd.rank() + shift, dtype) for n in splits[self.me]])
            want = np.concatenate([np.full(splits[o][self.me], r + shift, dtype) for o, r in enumerate(self.ranks)])
            return name, lambda: hvd.alltoall_async(mine, splits[self.me], name, self.set), want
        whole = combined(hvd.Sum, self.ranks, scale * seen, shift, dtype)
        call = lambda: hvd.reducescatter_async(  # noqa: E731
            given(hvd.rank(), scale * seen, shift, dtype), name=name, op=hvd.Sum, process_set=self.set
        )
        return name, call, whole[self.me * scale : (self.me + 1) * scale]

    def run(self, own):
        """Submits them in an order of one's own (`own`), but for those without a name; looks at all results, and
        says how many."""
        calls = [self.chance.choice((self.reduction, self.movement))() for _ in range(self.chance.randint(1, 8))]
        names = [name for name, _, _ in calls]
        calls = [each for at, each in enumerate(calls) if each[0] is None or each[0] not in names[:at]]
        unnamed = [each for each in calls if each[0] is None]
        mixed = own.sample(calls, len(calls))
        handles = [(unnamed.pop(0) if each[0] is None else each) for each in mixed]
        handles = [(call(), want) for _, call, want in handles]
        for handle, want in own.sample(handles, len(handles)):
            got = hvd.synchronize(handle)
            got = got[0] if isinstance(got, tuple) else got
            near = 1e-3 if got.dtype == "float16" else 1e-6 if got.dtype.kind == "f" else 0  # averages are rounded
            assert got.dtype == want.dtype and np.allclose(got, want, rtol=near, atol=0), (got, want)
        return len(handles)

    def group(self):
        """Several that travel together."""
        drawn = [self.drawn() for _ in range(self.chance.randint(1, 6))]
        tensors = [given(hvd.rank(), *each) for each in drawn]
        name = name_of(self.chance, "group")
        for got, each in zip(hvd.grouped_allreduce(tensors, name=name, op=hvd.Sum, process_set=self.set), drawn):
            assert np.array_equal(got, combined(hvd.Sum, self.ranks, *each))

    def objects(self):
        """Pickled ones."""
        root, count = self.chance.choice(self.ranks), self.chance.randrange(2000)
        assert hvd.broadcast_object({"from": hvd.rank(), "n": list(range(count))}, root, process_set=self.set) == {
            "from": root,
            "n": list(range(count)),
        }
        assert hvd.allgather_object((hvd.rank(), "x" * count), process_set=self.set) == [
            (r, "x" * count) for r in self.ranks
        ]

    def joining(self):
        """Ranks make different numbers of steps, and join."""
        if self.set is not hvd.global_process_set:
            return
        counts = [self.chance.randrange(4) for _ in self.ranks]
        for step in range(counts[self.me]):
            got = hvd.allreduce(np.ones(100, "float32"), name=f"uneven.{step}", op=hvd.Sum)
            assert (got == sum(count > step for count in counts)).all(), got
        assert 0 <= hvd.join() < hvd.size()

    def any(self, own):
        """One of all that."""
        kind = self.chance.choices(("run", "group", "objects", "joining", "barrier"), (12, 3, 1, 1, 1))[0]
        if kind == "run":
            self.run(own)
        elif kind == "barrier":
            hvd.barrier(process_set=self.set)
        else:
            getattr(self, kind)()


def rounds(chance, own):
    """Some rounds on all ranks, or on a set that is opened and closed for them."""
    if chance.random() < 0.2:
        members = sorted(chance.sample(range(hvd.size()), chance.randint(1, hvd.size() - 1)))
        small = hvd.add_process_set(members)
        inner = random.Random(chance.random())
        for _ in range(inner.randint(1, 4)):
            if small.included():
                Round(inner, small).any(own)
        hvd.remove_process_set(small)
    else:
        Round(chance, hvd.global_process_set).any(own)


def fill():
    """Makes all caches full: of requests by name, of words as they were said, of names in the core. And numpy's own, of
    small memory that it keeps for the next array of that size: random sizes would fill it for an hour, with 3.7 MB."""
    for size in range(NUMPY_KEEPS_BELOW):
        _ = [np.empty(size, "uint8") for _ in range(NUMPY_KEEPS)]
    ones = np.ones(1, "float32")
    for first in range(0, FILL // 2, KEPT):
        names = [f"once.{number:016x}" for number in range(first, first + KEPT)]
        for handle in [hvd.allreduce_async(ones, name=f"reduction.{name}", op=hvd.Sum) for name in names]:
            assert hvd.synchronize(handle) == hvd.size()
        for handle in [hvd.broadcast_async(ones, 0, name=f"movement.{name}") for name in names]:
            assert hvd.synchronize(handle) == 1
    assert hvd.broadcast_object(7, 0) == 7 and hvd.allgather_object(7) == [7] * hvd.size()  # pickle is loaded


def held():
    """kB that malloc has given out, None where the C library does not say; and Python's own small blocks."""
    asked = getattr(ctypes.CDLL(None), "mallinfo2", None)  # glibc since 2.33
    if asked is None:
        return {"heap": None, "blocks": sys.getallocatedblocks()}
    asked.restype = Given
    now = asked()
    return {"heap": (now.used + now.mapped) / 1024, "blocks": sys.getallocatedblocks()}


def measured(began, done):
    """This process, now."""
    gc.collect()
    status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    kilobytes = {name: int(status[name].split()[0]) for name in ("VmRSS", "RssAnon", "RssShmem")}
    return {
        "rank": hvd.rank(),
        "at": round(time.monotonic() - began, 3),
        "rounds": done,
        **kilobytes,
        **held(),
        "fds": len(os.listdir("/proc/self/fd")) - 1,
        "threads": int(status["Threads"]),
    }


def leaks(lost):
    """From now on a collective of this rank costs it some memory for good."""
    run = Round.run

    def run_and_lose(this, own):
        lost.extend(bytes(LEAK_BYTES) for _ in range(run(this, own)))

    Round.run = run_and_lose


def main():
    seed, seconds, least = int(sys.argv[1]), float(sys.argv[2]), int(sys.argv[3])
    pace, leaky = float(sys.argv[4]), int(sys.argv[5])
    faulthandler.dump_traceback_later(seconds + STUCK_S, exit=True)
    bounded_cache.KEPT = KEPT
    hvd.init()
    lost = []
    if hvd.rank() == leaky:
        leaks(lost)
    chance, own = random.Random(seed), random.Random((seed << 8) + hvd.rank())
    began = time.monotonic()
    fill()
    done, over, due = 0, False, EVERY_S
    while not over:
        for _ in range(ROUNDS_BETWEEN):
            rounds(chance, own)
            done += 1
            time.sleep(pace)
        now = time.monotonic() - began
        over = bool(hvd.broadcast(np.array([now > seconds and done >= least]), 0, name="over")[0])
        if now > due:
            os.write(1, (json.dumps(measured(began, done)) + "\n").encode())
            due = now + EVERY_S
    hvd.shutdown()


if __name__ == "__main__":
    main()
