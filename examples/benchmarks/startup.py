"""How long a program waits before it can begin: importing hvdlite, and starting two ranks that call init().

    python examples/benchmarks/startup.py

Each figure is the median of several fresh processes, of which the first is thrown away. The import is timed inside a
process that has imported NumPy already, and includes the compiled extension (`import hvdlite` itself imports nothing;
`hvdlite.init` does). The launch is timed from outside, beside a bare Python that imports NumPy. Of eight ranks what
counts is the time from the command to the end of the last one's init(). `--torch 3` launches eight ranks with
PyTorch three times each, by turns: with `--preload auto`, with `--preload off` and by torchrun. It drops none of them.
"""

import argparse
import subprocess
import sys
import tempfile
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

SHOW = "print(f'{time.time()}\\n', end='', flush=True)\n"  # one write
HVDLITE = f"import torch, time, hvdlite.torch as hvd\nhvd.init()\n{SHOW}"
GLOO = f"import torch, time\ntorch.distributed.init_process_group('gloo')\n{SHOW}"


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


def until_init(command: "list[str]") -> float:
    """Milliseconds from the command until the last rank, which prints the time, is initialized."""
    started = time.time()
    ended = [float(line.rpartition(":")[2]) for line in output_of(command).splitlines()]
    return 1000 * (max(ended) - started)


def torch_by_turns(launcher: str, runs: int) -> None:
    """The same for eight ranks that import PyTorch, in three ways."""
    with tempfile.TemporaryDirectory() as folder:
        ours, gloo = Path(folder, "ours.py"), Path(folder, "gloo.py")
        ours.write_text(HVDLITE)
        gloo.write_text(GLOO)
        torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "8", str(gloo)]
        jobs = {
            f"hvdlite, --preload {how}": [launcher, "-np", "8", "--preload", how, sys.executable, str(ours)]
            for how in ("auto", "off")
        }
        times: dict[str, list[float]] = {"torchrun, Gloo": [], **{name: [] for name in jobs}}
        for _ in range(runs):
            for name in times:
                times[name].append(until_init(jobs.get(name, torchrun)))
    for name, each in times.items():
        report("the same with import torch", name, "ms", each)


def main() -> None:
    parser = argparse.ArgumentParser(description="Time to import and to start.")
    parser.add_argument("--runs", type=int, default=15)
    parser.add_argument("--torch", type=int, default=0, help="launches of each kind with PyTorch")
    args = parser.parse_args()
    imports = [float(output_of([sys.executable, "-c", IMPORT])) for _ in range(args.runs + 1)][1:]
    report("import hvdlite beyond numpy", "hvdlite", "ms", imports)
    launcher = str(Path(sys.executable).with_name("hvdlite-run"))
    job = [launcher, "-np", "2", sys.executable, "-c", "import hvdlite as h; h.init()"]
    report("start two ranks that call init()", "hvdlite", "ms", timed(job, args.runs))
    script = "import hvdlite as h, time; h.init(); print(time.time())"
    eight = [until_init([launcher, "-np", "8", sys.executable, "-c", script]) for _ in range(args.runs + 1)][1:]
    report("from the command to the end of init() of eight ranks", "hvdlite", "ms", eight)
    if args.torch:
        torch_by_turns(launcher, args.torch)
    report("python -c 'import numpy'", "bare Python", "ms", timed([sys.executable, "-c", "import numpy"], args.runs))


if __name__ == "__main__":
    main()
