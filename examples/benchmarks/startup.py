"""How long a program waits before it can begin: importing hvdlite, and starting two ranks that call init().

    python examples/benchmarks/startup.py

Each figure is the median of several fresh processes, of which the first is thrown away. The import is timed inside a
process that has imported NumPy already, and includes the compiled extension (`import hvdlite` itself imports nothing;
`hvdlite.init` does). The launch is timed from outside, beside a bare Python that imports NumPy. Of eight ranks what
counts is the time from the command to the end of the last one's init().
"""

import argparse
import subprocess
import sys
import time
from pathlib import Path

from measure import report

IMPORT = """
import time
import numpy
started = time.perf_counter()
import hvdlite
hvdlite.init
print(1000 * (time.perf_counter() - started))
"""


def output_of(command: "list[str]") -> str:
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"{' '.join(command)} failed:\n{done.stdout}{done.stderr}")
    return done.stdout


def timed(command: "list[str]", runs: int) -> "list[float]":
    """Milliseconds from start to end of each run."""
    times = []
    for _ in range(runs + 1):
        started = time.perf_counter()
        output_of(command)
        times.append(1000 * (time.perf_counter() - started))
    return times[1:]


def until_init(command: "list[str]", runs: int) -> "list[float]":
    """Milliseconds from the command until the last rank, which prints the time, is initialized."""
    times = []
    for _ in range(runs + 1):
        started = time.time()
        ended = [float(line.rpartition(":")[2]) for line in output_of(command).splitlines()]
        times.append(1000 * (max(ended) - started))
    return times[1:]


def main() -> None:
    parser = argparse.ArgumentParser(description="Time to import and to start.")
    parser.add_argument("--runs", type=int, default=15)
    args = parser.parse_args()
    imports = [float(output_of([sys.executable, "-c", IMPORT])) for _ in range(args.runs + 1)][1:]
    report("import hvdlite beyond numpy", "hvdlite", "ms", imports)
    launcher = str(Path(sys.executable).with_name("hvdlite-run"))
    job = [launcher, "-np", "2", sys.executable, "-c", "import hvdlite as h; h.init()"]
    report("start two ranks that call init()", "hvdlite", "ms", timed(job, args.runs))
    script = "import hvdlite as h, time; h.init(); print(time.time())"
    eight = until_init([launcher, "-np", "8", sys.executable, "-c", script], args.runs)
    report("from the command to the end of init() of eight ranks", "hvdlite", "ms", eight)
    report("python -c 'import numpy'", "bare Python", "ms", timed([sys.executable, "-c", "import numpy"], args.runs))


if __name__ == "__main__":
    main()
