"""The ranks of the soak: random collectives with known results, for SECONDS and ROUNDS at least.

    python soaking.py SEED SECONDS ROUNDS LEAKY     (what a launcher starts, from tests/tools/soak.py)

All ranks draw the same rounds from the seed; asynchronous calls of a round are submitted in each rank's own order.
Between rounds, when nothing is held, each rank prints a line of JSON every second: resident memory, what malloc and
Python have given out and not got back (which does not depend on how it is laid out), descriptors, threads. Rank LEAKY
(-1: none) loses LEAK_BYTES with every collective, to see that this is noticed.
"""

from __future__ import annotations

import ctypes
import faulthandler
import functools
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
PATTERN = (np.arange(BYTES_MAX) % 5).astype("uint8")  # small integers: sums are exact in every dtype
RESULTS = {hvd.Sum: np.sum, hvd.Min: np.min, hvd.Max: np.max, hvd.Average: np.mean}
NAMES = 600  # of each kind; the cache is smaller (tests/tools/soak.py), so that slots are taken away, too
EVERY_S = 1.0
STUCK_S = 160.0  # after the time is over, on a crowded machine that is still at its rounds
ROUNDS_BETWEEN = 10  # after so many rank 0's clock is asked
KEPT = 512  # requests that Python remembers here, so that these are given up and made again, too
FILL = 2 * 1024  # names that come first: they leave no cache empty, and no page of the trace's names untouched
NUMPY_KEEPS_BELOW, NUMPY_KEEPS = 1024, 7  # bytes; of each size
LEAK_BYTES = 1024


def given(rank, count, shift, dtype):
    """What a rank gives."""
    return (PATTERN[:count] + rank + shift).astype(dtype)


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

    def drawn(self, parts=1):
        """(count, shift, dtype) of a tensor of which somebody gets so many. Many are small."""
        dtype = self.chance.choice(DTYPES)
        most = BYTES_MAX // np.dtype(dtype).itemsize // parts
        count = int(most ** self.chance.random()) if self.chance.random() > 0.05 else self.chance.choice((0, most))
        return count, self.chance.randrange(3), dtype

    def summed(self, op, *tensor):
        """What a reduction makes of what the ranks give."""
        return RESULTS[op]([given(rank, *tensor) for rank in self.ranks], axis=0).astype(tensor[-1])

    def one(self):
        """(name, what submits it, its result) of a collective."""
        chance, name = self.chance, name_of(self.chance, "tensor")
        kinds = ("allreduce", "broadcast", "allgather", "alltoall", "reducescatter")
        kind = chance.choices(kinds, (4, 1, 1, 1, 1))[0]
        count, shift, dtype = self.drawn(1 if kind == "allreduce" else len(self.ranks))
        rows = [[chance.randrange(3) * count for _ in self.ranks] for _ in self.ranks]
        submit = functools.partial(getattr(hvd, f"{kind}_async"), name=name, process_set=self.set)
        if kind == "allreduce":
            op = chance.choice([op for op in RESULTS if op != hvd.Average or dtype.startswith("float")])
            want = self.summed(op, count, shift, dtype)
            return name, functools.partial(submit, given(hvd.rank(), count, shift, dtype), op=op), want
        if kind == "broadcast":
            root = chance.choice(self.ranks)
            want = given(root, count, shift, dtype)
            return name, functools.partial(submit, given(hvd.rank(), count, shift, dtype), root), want
        if kind == "reducescatter":
            want = self.summed(hvd.Sum, count * len(self.ranks), shift, dtype)[self.me * count :][:count]
            mine = given(hvd.rank(), count * len(self.ranks), shift, dtype)
            return name, functools.partial(submit, mine, op=hvd.Sum), want
        if kind == "allgather":
            want = np.concatenate([given(rank, n, shift, dtype) for rank, n in zip(self.ranks, rows[0])])
            return name, functools.partial(submit, given(hvd.rank(), rows[0][self.me], shift, dtype)), want
        mine = np.concatenate([np.full(n, hvd.rank() + shift, dtype) for n in rows[self.me]])
        want = np.concatenate([np.full(of[self.me], rank + shift, dtype) for of, rank in zip(rows, self.ranks)])
        return name, functools.partial(submit, mine, rows[self.me]), want

    def run(self, own):
        """Submits them in an order of one's own (`own`), but for those without a name; looks at all results, and
        says how many."""
        calls = [self.one() for _ in range(self.chance.randint(1, 8))]
        names = [name for name, _, _ in calls]
        calls = [each for at, each in enumerate(calls) if each[0] is None or each[0] not in names[:at]]
        unnamed = iter([each for each in calls if each[0] is None])
        mixed = [next(unnamed) if each[0] is None else each for each in own.sample(calls, len(calls))]
        handles = [(submit(), want) for _, submit, want in mixed]
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
            assert np.array_equal(got, self.summed(hvd.Sum, *each))

    def objects(self):
        """Pickled ones."""
        root, text = self.chance.choice(self.ranks), "x" * self.chance.randrange(6000)
        assert hvd.broadcast_object({hvd.rank(): text}, root, process_set=self.set) == {root: text}
        assert hvd.allgather_object((hvd.rank(), text), process_set=self.set) == [(rank, text) for rank in self.ranks]

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
        kinds = (lambda: self.run(own), self.group, self.objects, self.joining, lambda: hvd.barrier(self.set))
        self.chance.choices(kinds, (12, 3, 1, 1, 1))[0]()


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
        names = [f"tensor.once.{number:016x}" for number in range(first, first + KEPT)]
        for handle in [hvd.allreduce_async(ones, name=name, op=hvd.Sum) for name in names]:
            assert hvd.synchronize(handle) == hvd.size()
        for handle in [hvd.broadcast_async(ones, 0, name=name) for name in names]:
            assert hvd.synchronize(handle) == 1
    assert hvd.broadcast_object(7, 0) == 7 and hvd.allgather_object(7) == [7] * hvd.size()  # pickle is loaded


class Mallinfo(ctypes.Structure):
    """struct mallinfo2 of the C library."""

    _fields_ = [("of", ctypes.c_size_t * 10)]


def held():
    """What this process holds; heap: kB that malloc has given out, None where the C library does not say."""
    gc.collect()
    asked = getattr(ctypes.CDLL(None), "mallinfo2", None)  # glibc since 2.33
    if asked is not None:
        asked.restype = Mallinfo
    return {
        "heap": None if asked is None else (asked().of[4] + asked().of[7]) / 1024,  # hblkhd, uordblks
        "blocks": sys.getallocatedblocks(),
        "fds": len(os.listdir("/proc/self/fd")) - 1,
    }


def measured():
    """This process, now."""
    status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return {"rss": int(status["VmRSS"].split()[0]), "threads": int(status["Threads"]), **held()}


def leaks(lost):
    """From now on a collective of this rank costs it some memory for good."""
    run = Round.run
    Round.run = lambda this, own: lost.extend(bytes(LEAK_BYTES) for _ in range(run(this, own)))


def main():
    seed, seconds, least, leaky = int(sys.argv[1]), float(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4])
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
        now = time.monotonic() - began
        over = bool(hvd.broadcast(np.array([now > seconds and done >= least]), 0, name="over")[0])
        if now > due:
            line = json.dumps({"rank": hvd.rank(), "at": round(now, 3), "rounds": done, **measured()})
            os.write(1, f"{line}\n".encode())
            due = now + EVERY_S
    hvd.shutdown()


if __name__ == "__main__":
    main()
