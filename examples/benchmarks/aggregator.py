"""How long does a sum by an aggregator take beside hvd.allreduce, do jobs share one fairly, and what if it is killed?

    python examples/benchmarks/aggregator.py                ratios by ranks, kind and size; 2 minutes
    python examples/benchmarks/aggregator.py --minute       two jobs on one aggregator for a minute, begun together, and
                                                            for another, begun 3 s one after the other
    python examples/benchmarks/aggregator.py --kill 20      SIGKILL in the middle of an operation, 20 times

Ratios: both ways take turns in the same ranks. A figure is the median of the rounds, a ratio that of the ratios within
rounds. All sums are compared with those of fixed_point.py, bit by bit. Fairness is Jain's index of the operations that
the jobs finished while both ran: 1 where they are equal, 0.5 where one job had all; the bar is 0.9.
"""

import argparse
import contextlib
import hashlib
import json
import os
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time

import numpy as np

import hvdlite.numpy as hvd
from hvdlite.aggregation import fixed_point
from hvdlite.aggregation.packet import BLOCK
from measure import MARK, size_text, spread, timed_us

SIZES, ROUNDS, SLOTS, BAR = (4 << 10, 64 << 10, 1 << 20, 4 << 20), 15, 64, 0.9
SHARED, LARGE, OPERATIONS = 400 << 10, 4 << 20, 6  # bytes: of the jobs that share, and of those whose switch is killed
AGGREGATOR = "import sys; from hvdlite.aggregation.aggregator_main import command; sys.exit(command())"
OF_SIZES = "| ranks | kind | size | aggregator ms | hvd.allreduce ms | ratio | 10 % | 90 % |"
OF_MINUTES = "| kind | later s | both ran s | first | second | Jain | wrong sums | digest |"
OF_KILLS = (
    "| kind | kills | in an operation | wrong sums | usual ms | slowest ms | digest | operations of the last job |"
)


def given(size):
    """The vector of this rank, and the bytes of the sum of all, added here as integers of a fixed point."""
    ranks = hvd.size()
    vectors = [np.random.default_rng(each).standard_cauchy(size // 4).astype(np.float32) for each in range(ranks)]
    most = np.maximum.reduce([fixed_point.exponents(x) for x in vectors])
    of_each = np.repeat(most, BLOCK)[: size // 4]
    integers = sum(fixed_point.encode(x, of_each, ranks) for x in vectors)
    return vectors[hvd.rank()], fixed_point.decode(integers, of_each, ranks).tobytes()


def added(x):
    return hvd.aggregation.allreduce(x, op=hvd.Sum, name="sum")


def say(wanted, wrong, **found):
    """A line of rank 0, with the number of wrong sums on all ranks and what the aggregator did for each."""
    wrong, stats = sum(hvd.allgather_object(wrong)), hvd.allgather_object(hvd.aggregation.stats())
    if hvd.rank() == 0:
        sha = hashlib.sha256(wanted).hexdigest()[:12]
        print(MARK + json.dumps({**found, "wrong": wrong, "sha": sha, "stats": stats}), flush=True)


def ratios():
    """A rank: milliseconds of both ways, and the ratio, of each size."""
    for size in SIZES:
        x, wanted = given(size)
        plain, wrong, taken = (lambda x: hvd.allreduce(x, op=hvd.Sum)), int(added(x).tobytes() != wanted), []
        for _ in range(ROUNDS + 1):
            taken.append([])
            for way, calls in ((added, max(1, min(20, (1 << 20) // size))), (plain, 20)):
                hvd.barrier()
                taken[-1].append(statistics.median(timed_us(lambda: way(x)) / 1e3 for _ in range(calls)))  # noqa: B023
        ms = [statistics.median(column) for column in zip(*taken[1:])]
        say(wanted, wrong, size=size_text(size), ms=ms, ratio=spread([one / other for one, other in taken[1:]]))


def loop(seconds):
    """A rank of a job that shares: when its operations ended, until its time is up on some rank."""
    (x, wanted), ends, wrong = given(SHARED), [], 0
    began = time.monotonic()  # one clock for all processes of a host
    while not hvd.allreduce(np.array([time.monotonic() > began + float(seconds)]), op=hvd.Max, name="up")[0]:
        y = added(x)
        ends.append(time.monotonic())
        wrong += y.tobytes() != wanted
    say(wanted, wrong, began=began, ends=ends)


def killed(pid, share):
    """A rank of a job whose aggregator rank 0 kills, after a share of the median time of an operation."""
    (x, wanted), took, wrong, inside = given(LARGE), [], 0, False
    for number in range(OPERATIONS):
        hvd.barrier()
        pause, begin = float(share) * statistics.median(took or [0]) / 1e3, time.monotonic()
        timer = threading.Timer(pause, os.kill, (int(pid), signal.SIGKILL))
        if number == OPERATIONS // 2 and hvd.rank() == 0:
            timer.start()
        wrong += added(x).tobytes() != wanted
        inside = inside or timer.finished.is_set()
        took.append(1e3 * (time.monotonic() - begin))
    say(wanted, wrong, inside=inside, slowest=max(took), usual=statistics.median(took[: OPERATIONS // 2]))


@contextlib.contextmanager
def aggregator(kind):
    """(its process, the flags of hvdlite-run for it). Its key is not that of the user."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as free:
        free.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{free.getsockname()[1]}"
    with tempfile.NamedTemporaryFile("w") as key:  # its mode is 0600
        print(os.urandom(32).hex(), file=key, flush=True)
        words = [sys.executable, "-c", AGGREGATOR, "--kind", kind, "--slots", SLOTS, "--listen", address]
        with subprocess.Popen([*map(str, words), "--key", key.name], stdout=subprocess.PIPE, text=True) as process:
            assert "slots at" in process.stdout.readline()
            try:
                yield process, ("--aggregator", address, "--aggregator-key", key.name)
            finally:
                process.terminate()
                process.communicate()


def started(ranks, flags, *words):
    command = [sys.executable, "-m", "hvdlite.launcher", "-np", str(ranks), *flags, sys.executable, __file__, "rank"]
    return subprocess.Popen([*command, *map(str, words)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


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
            low, ratio, high = (f"{each:.1f}" for each in row["ratio"])
            yield not row["wrong"], ranks, kind, row["size"], *(f"{ms:.3f}" for ms in row["ms"]), ratio, low, high


def minute(kind, seconds):
    for later in (0, 3):
        with aggregator(kind) as (_, flags):
            jobs = [started(2, flags, "loop", seconds)]
            time.sleep(later)
            found = [row for job in [*jobs, started(2, flags, "loop", seconds)] for row in results(job)]
        first, last = max(row["began"] for row in found), min(row["ends"][-1] for row in found)
        counts = [sum(first <= end <= last for end in row["ends"]) for row in found]
        jain, wrong = sum(counts) ** 2 / (2 * sum(count**2 for count in counts)), sum(row["wrong"] for row in found)
        good, sha = jain >= BAR and not wrong, " ".join({row["sha"] for row in found})
        yield good, kind, later, f"{last - first:.1f}", *counts, f"{jain:.4f}", wrong, sha
        print(*(each for row in found for each in row["stats"]), sep="\n", file=sys.stderr)


def kills(kind, count):
    rows = []
    for number in range(count):
        with aggregator(kind) as (process, flags):
            rows += results(started(2, flags, "killed", process.pid, 0.05 + 0.85 * number / count))
    inside, wrong = (sum(row[what] for row in rows) for what in ("inside", "wrong"))
    usual, slowest = statistics.median(row["usual"] for row in rows), max(row["slowest"] for row in rows)
    ways, sha = rows[-1]["stats"][0]["operations"], " ".join({row["sha"] for row in rows})
    yield not wrong, kind, len(rows), inside, wrong, f"{usual:.0f}", f"{slowest:.0f}", sha, ways


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--kind", choices=("pool", "hashed"), nargs="+", default=["pool", "hashed"])
    parser.add_argument("--minute", type=float, nargs="?", const=60.0, metavar="SECONDS")
    parser.add_argument("--kill", type=int, metavar="TIMES")
    args, good = parser.parse_args(), True
    of_what = (OF_MINUTES, minute) if args.minute else (OF_KILLS, kills) if args.kill else (OF_SIZES, side_by_side)
    print(f"{of_what[0]}\n{'|---' * (of_what[0].count('|') - 1)}|", flush=True)
    for kind in args.kind:
        for fine, *row in of_what[1](kind, args.minute or args.kill):
            print("|", " | ".join(map(str, row)), "|", flush=True)
            good = good and fine
    sys.exit(not good)


if __name__ == "__main__":
    if sys.argv[1:2] == ["rank"]:
        hvd.init()
        {"ratios": ratios, "loop": loop, "killed": killed}[sys.argv[2]](*sys.argv[3:])
    else:
        main()
