"""What the benchmarks share: medians, the machine's state, how often to repeat, and one line per result.

Programs that are measured print `RESULT {...}` lines, which run_all.py collects: a work (what was done), a column (by
whom, in what memory), a unit, the median and the tenth and ninetieth percentile. A figure without its peer in the same
run and without the state of the machine says little: see probe.c, and table.py for what is made of it.
"""

import functools
import json
import shutil
import subprocess
import tempfile
import time
from pathlib import Path

MARK = "RESULT "
PATIENCE = ("full", "quick", "tiny")  # tiny shows only that a program works


@functools.cache
def _folder() -> tempfile.TemporaryDirectory:
    return tempfile.TemporaryDirectory(prefix="hvdlite-probe-")  # goes with this process


@functools.cache
def _probe_program() -> "str | None":
    """probe.c compiled, or None without a compiler."""
    compiler = shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
    if compiler is None:
        return None
    program = str(Path(_folder().name) / "probe")
    done = subprocess.run([compiler, "-O2", "-o", program, str(Path(__file__).with_name("probe.c"))])
    return program if done.returncode == 0 else None


def probe_ns() -> "float | None":
    """The one-way latency in nanoseconds, None where it cannot be measured; call it while nothing else runs."""
    program = _probe_program()
    done = subprocess.run([program], capture_output=True, text=True) if program else None
    return None if done is None or done.returncode else float(done.stdout)


def spread(values: "list[float]") -> "tuple[float, float, float]":
    """The tenth percentile, the median and the ninetieth percentile."""
    ordered = sorted(values)
    return tuple(ordered[min(len(ordered) - 1, round(share * (len(ordered) - 1)))] for share in (0.1, 0.5, 0.9))


def report(work: str, column: str, unit: str, values: "list[float]") -> None:
    """Print one result."""
    low, median, high = (float(f"{value:.5g}") for value in spread(values))
    result = {"work": work, "column": column, "unit": unit, "median": median, "low": low, "high": high}
    print(MARK + json.dumps(result), flush=True)


def size_text(size: int) -> str:
    """For example `64 KB`."""
    for unit, bytes_of in (("MB", 1 << 20), ("KB", 1 << 10)):
        if size >= bytes_of:
            return f"{size // bytes_of} {unit}"
    return f"{size} B"


def timed_us(work) -> float:
    """Microseconds of one call."""
    started = time.perf_counter_ns()
    work()
    return (time.perf_counter_ns() - started) / 1000


def repetitions(library, work, seconds: float, most: int) -> int:
    """How often all ranks do `work` so that it takes about so long: the same on all, from 3 to `most`."""
    library.barrier()
    taken = [timed_us(work) for _ in range(4)][1:]
    slowest = max(library.gather(sorted(taken)[1]))
    return int(min(most, max(3, seconds * 1e6 / max(slowest, 0.1))))


def slower_rank(library, values: "list[float]") -> "list[float]":
    """The values of the rank whose median is greatest."""
    return max(library.gather(values), key=lambda of_rank: spread(of_rank)[1])
