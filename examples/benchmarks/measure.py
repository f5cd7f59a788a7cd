"""What the benchmarks share: medians, the state of the machine, and one line per result that run_all.py collects.

A figure without its peer in the same run and without the state of the machine says little: see probe.c. `near` and
`far` are a one-way cache-line latency below 110 ns and from 200 ns to 400 ns; anything else is printed as it is.
"""

import functools
import json
import shutil
import subprocess
import tempfile
from pathlib import Path

MARK = "RESULT "


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


def state_of(ns: "float | None") -> str:
    """`near`, `far`, `between`, `disturbed` or `unknown`."""
    if ns is None:
        return "unknown"
    return "near" if ns < 110 else "far" if 200 <= ns < 400 else "between" if ns < 200 else "disturbed"


def machine_state() -> str:
    """For example `near (61 ns)`."""
    ns = probe_ns()
    return state_of(ns) if ns is None else f"{state_of(ns)} ({ns:.0f} ns)"


def spread(values: "list[float]") -> "tuple[float, float, float]":
    """The tenth percentile, the median and the ninetieth percentile."""
    ordered = sorted(values)
    return tuple(ordered[min(len(ordered) - 1, round(share * (len(ordered) - 1)))] for share in (0.1, 0.5, 0.9))


def report(name: str, unit: str, values: "list[float]", target: "float | None" = None) -> float:
    """Print one result, for people and for run_all.py; the median."""
    low, median, high = spread(values)
    result = {"name": name, "unit": unit, "median": median, "low": low, "high": high, "target": target}
    print(MARK + json.dumps(result), flush=True)
    return median
