"""How long does a sum by an aggregator take beside hvd.allreduce, do jobs share one fairly, and what if it is killed?

    python examples/benchmarks/aggregator.py                ratios by ranks, kind and size; 2 minutes
    python examples/benchmarks/aggregator.py --minute       two jobs on one aggregator, begun together and 3 s apart
    python examples/benchmarks/aggregator.py --kill 20      SIGKILL in the middle of an operation, 20 times

Ratios: both ways take turns in the same ranks, and figures are medians of the rounds. All sums are compared with those
of fixed_point.py, bit by bit. Fairness is Jain's index of the operations that the jobs finished while both ran: 1 where
they are equal, 0.5 where one job had all; the bar is 0.9.
"""

import argparse
import contextlib
import functools
import hashlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time

import numpy as np

import hvdlite.numpy as hvd
from hvdlite.aggregation import fixed_point, sockets
from hvdlite.aggregation.packet import BLOCK
from measure import MARK, size_text, spread, timed_us

SIZES, ROUNDS, SLOTS, BAR = (4 << 10, 64 << 10, 1 << 20, 4 << 20), 15, 64, 0.9
SHARED, LARGE, OPERATIONS = 400 << 10, 4 << 20, 6  # bytes: of the jobs that share, and of those whose switch is killed
AGGREGATOR = "import sys; from hvdlite.aggregation.aggregator_main import command; sys.exit(command())"


def given(size):
    """The vector of this rank, and the bytes of the sum of all, added here as integers of a fixed point."""
    vectors = [np.random.default_rng(of).standard_cauchy(size // 4).astype(np.float32) for of in range(hvd.size())]
    exponents = np.maximum.reduce([fixed_point.exponents(x) for x in vectors]).repeat(BLOCK)[: size // 4]
    integers = sum(fixed_point.encode(x, exponents, len(vectors)) for x in vectors)
    return vectors[hvd.rank()], fixed_point.decode(integers, exponents, len(vectors)).tobytes()


def say(wanted, wrong, **found):
    """A line of rank 0, with the number of wrong sums on all ranks and what the aggregator did for each."""
    found.update(wrong=sum(hvd.allgather_object(wrong)), stats=hvd.allgather_object(hvd.aggregation.stats()))
    if hvd.rank() == 0:
        print(MARK + json.dumps({**found, "sha": hashlib.sha256(wanted).hexdigest()[:12]}), flush=True)


def ratios():
    """A rank: milliseconds of both ways, and the ratio, of each size."""
    for size in SIZES:
        x, wanted = given(size)
        both = hvd.aggregation.allreduce, hvd.allreduce
        rows, ways = [], [functools.partial(each, x, op=hvd.Sum, name="sum") for each in both]
        for way, calls in ((ways[0], max(1, min(20, (1 << 20) // size))), (ways[1], 20)) * ROUNDS:
            hvd.barrier()
            rows.append(np.median([timed_us(way) / 1e3 for _ in range(calls)]))
        ms, ratio = [np.median(rows[at::2]) for at in (0, 1)], [*map(float.__truediv__, rows[::2], rows[1::2])]
        say(wanted, ways[0]().tobytes() != wanted, size=size_text(size), ms=ms, ratio=spread(ratio))


def loop(seconds):
    """A rank of a job that shares: when its operations ended, until its time is up on some rank."""
    (x, wanted), ends, wrong, began = given(SHARED), [], 0, time.monotonic()  # one clock for all processes of a host
    while not hvd.allreduce(np.array([time.monotonic() > began + float(seconds)]), op=hvd.Max, name="up")[0]:
        wrong += hvd.aggregation.allreduce(x, op=hvd.Sum, name="sum").tobytes() != wanted
        ends.append(time.monotonic())
    say(wanted, wrong, began=began, ends=ends)


def killed(pid, share):
    """A rank of a job whose aggregator rank 0 kills, after a share of the median time of an operation."""
    (x, wanted), took, wrong, inside = given(LARGE), [], 0, False
    for number in range(OPERATIONS):
        hvd.barrier()
        pause, begin = float(share) * np.median(took or [0]) / 1e3, time.monotonic()
        timer = threading.Timer(pause, os.kill, (int(pid), signal.SIGKILL))
        if number == OPERATIONS // 2 and hvd.rank() == 0:
            timer.start()
        wrong += hvd.aggregation.allreduce(x, op=hvd.Sum, name="sum").tobytes() != wanted
        inside = inside or timer.finished.is_set()
        took.append(1e3 * (time.monotonic() - begin))
    say(wanted, wrong, inside=inside, slowest=max(took), usual=np.median(took[: OPERATIONS // 2]))


@contextlib.contextmanager
def aggregator(kind):
    """(its process, the flags of hvdlite-run for it). Its key is not that of the user."""
    with sockets.opened("127.0.0.1") as free:
        address = sockets.named(free)
    with tempfile.NamedTemporaryFile("w") as key, contextlib.ExitStack() as stack:  # its mode is 0600
        print(os.urandom(32).hex(), file=key, flush=True)
        words = [sys.executable, "-c", AGGREGATOR, "--kind", kind, "--slots", str(SLOTS), "--listen", address]
        process = stack.enter_context(subprocess.Popen([*words, "--key", key.name], stdout=subprocess.DEVNULL))
        stack.callback(process.terminate)
        yield process, ("--aggregator", address, "--aggregator-key", key.name)


def started(ranks, flags, *words):
    command = [sys.executable, "-m", "hvdlite.launcher", "-np", ranks, *flags, sys.executable, __file__, "rank", *words]
    return subprocess.Popen([*map(str, command)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def results(job):
    """What its rank 0 has said."""
    out, err = job.communicate()
    if job.returncode:
        sys.exit(f"{out[-2000:]}{err[-4000:]}")
    return [json.loads(line.partition(MARK)[2]) for line in out.splitlines() if MARK in line]


def side_by_side(kind, _):
    """Rows of the table, each behind whether it is good."""
    for ranks in (2, 4):
        for row in results(started(ranks, ("--aggregators", "1", "--aggregator-kind", kind), "ratios")):
            figures = "{:.3f} | {:.3f} | {:.1f} | {:.1f} | {:.1f}".format(*row["ms"], *row["ratio"])
            yield not row["wrong"], ranks, kind, row["size"], figures


def minute(kind, seconds):
    for later in (0, 3):
        with aggregator(kind) as (_, flags):
            job = started(2, flags, "loop", seconds)
            time.sleep(later)
            found = [*results(started(2, flags, "loop", seconds)), *results(job)]
        first, last = max(row["began"] for row in found), min(row["ends"][-1] for row in found)
        counts = [sum(first <= end <= last for end in row["ends"]) for row in found]
        jain, wrong = sum(counts) ** 2 / (2 * sum(count**2 for count in counts)), sum(row["wrong"] for row in found)
        figures = f"{last - first:.1f}", *counts, f"{jain:.4f}", wrong, " ".join({row["sha"] for row in found})
        yield jain >= BAR and not wrong, kind, later, *figures
        print(*(each for row in found for each in row["stats"]), sep="\n", file=sys.stderr)


def kills(kind, count):
    rows = []
    for share in np.linspace(0.05, 0.9, count):
        with aggregator(kind) as (process, flags):
            rows += results(started(2, flags, "killed", process.pid, share))
    of = {what: [row[what] for row in rows] for what in rows[0]}
    figures = sum(of["inside"]), sum(of["wrong"]), round(np.median(of["usual"])), round(max(of["slowest"]))
    yield not sum(of["wrong"]), kind, count, *figures, " ".join(set(of["sha"]))


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--kind", choices=("pool", "hashed"), nargs="+", default=["pool", "hashed"])
    parser.add_argument("--minute", type=float, nargs="?", const=60.0, metavar="SECONDS")
    parser.add_argument("--kill", type=int, metavar="TIMES")
    args, good = parser.parse_args(), True
    rows, heads = side_by_side, "ranks | kind | size | aggregator ms | hvd.allreduce ms | ratio: 10 % | median | 90 %"
    if args.minute:
        rows, heads = minute, "kind | later s | both ran s | later one | other | Jain | wrong sums | digest"
    elif args.kill:
        rows, heads = kills, "kind | kills | in an operation | wrong sums | usual ms | slowest ms | digest"
    print(f"| {heads} |\n{'|---' * (heads.count('|') + 1)}|", flush=True)
    for fine, *row in (each for kind in args.kind for each in rows(kind, args.minute or args.kill)):
        print("|", " | ".join(map(str, row)), "|", flush=True)
        good = good and fine
    sys.exit(not good)


if __name__ == "__main__":
    if sys.argv[1:2] == ["rank"]:
        hvd.init()
        {"ratios": ratios, "loop": loop, "killed": killed}[sys.argv[2]](*sys.argv[3:])
    else:
        main()
