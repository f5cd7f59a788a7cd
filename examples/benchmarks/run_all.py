"""Compares hvdlite with every peer found here, by turns in one run, and prints a table with ratios.

    python examples/benchmarks/run_all.py --quick          # two minutes; alone on the machine
    python examples/benchmarks/run_all.py                  # ten minutes: 2 ranks in three rounds, 4 in two
    python examples/benchmarks/run_all.py --only plane -np 2 --append     # one part; its launches join those before
    python examples/benchmarks/run_all.py --report --pictures pictures    # the table once more, and pictures

In each round every program of a part is launched once, one after the other, and the machine is probed before and after
each launch (probe.c). Launches go to a file (--results), one JSON line each; table.py makes tables of them: states of
the machine apart, launches that straddle a change of state dropped. `--only` and `--append` cut a long run into pieces.
Parts: plane (C, float32, with Open MPI and MPICH), halves (bfloat16, float16), calls, gradients, step (Python, with
Gloo, DistributedDataParallel, and Horovod if it is installed), hook, idle, startup.
"""

import argparse
import datetime
import importlib.util
import json
import os
import platform
import subprocess
import sys
import time
from pathlib import Path

from measure import MARK, probe_ns, size_text
from programs import PARTS, RANKS, ROOT, prepare, programs, run_quietly
from table import tables

LAUNCH_SECONDS = 140
ROUNDS = {"full": 3, "quick": 1, "tiny": 1}


def machine() -> "dict[str, str]":
    """What a reader must know of where the figures come from."""
    lines = Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else []
    models = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    commit = subprocess.run(["git", "-C", str(ROOT), "rev-parse", "--short", "HEAD"], capture_output=True, text=True)
    try:
        import torch

        torch_version = torch.__version__
    except ImportError:
        torch_version = "none"
    return {
        "processor": f"{len(os.sched_getaffinity(0))} x {models[0] if models else platform.processor()}",
        "system": f"{platform.system()} {platform.release()}, glibc {platform.libc_ver()[1]}",
        "python": platform.python_version(),
        "torch": torch_version,
        "commit": commit.stdout.strip(),
        "date": datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%d"),
    }


def results_of(printed: str, program: str) -> "list[dict]":
    """RESULT lines, and the harness's lines `name dtype bytes microseconds`."""
    found = []
    for line in printed.splitlines():
        if MARK in line:
            found.append(json.loads(line.partition(MARK)[2]))
            continue
        words = line.split()
        if len(words) == 4 and words[2].isdigit():
            column = {"private": program, "in-plane": f"{program}, plane memory"}.get(words[0], program)
            work, taken = f"allreduce {words[1]} {size_text(int(words[2]))}", float(words[3])
            found.append({"work": work, "column": column, "unit": "us", "median": taken, "low": taken, "high": taken})
    return found


def launch(part: str, ranks: int, program: str, command: "list[str]") -> dict:
    """Run one program once; the record of it."""
    before, started = probe_ns(), time.monotonic()
    try:
        printed, failed = run_quietly(command, LAUNCH_SECONDS), ""
    except (RuntimeError, OSError) as error:
        printed, failed = "", str(error)
        print(f"  {failed}", flush=True)
    seconds = round(time.monotonic() - started, 1)
    record = {"part": part, "ranks": ranks, "program": program, "before": before, "after": probe_ns()}
    return {**record, "seconds": seconds, "results": results_of(printed, program), "failed": failed}


def measure(args: argparse.Namespace, patience: str) -> None:
    """All launches, each written down as soon as it is over."""
    parts = args.only or list(PARTS)
    prepare(parts, args.cache)
    args.results.parent.mkdir(parents=True, exist_ok=True)
    with args.results.open("a" if args.append else "w") as file:
        file.write(json.dumps({"machine": machine()}) + "\n")
        for part in parts:
            for ranks in ranks_of(part, args):
                rounds = max(1, ROUNDS[patience] - (ranks > 2))  # more ranks take longer
                for number in range(args.rounds or rounds):
                    for program, command in programs(part, ranks, patience, args.cache):
                        record = launch(part, ranks, program, command)
                        file.write(json.dumps(record) + "\n")
                        file.flush()
                        print(f"  {part}, {ranks} ranks, round {number + 1}: {told(record)}", flush=True)


def told(record: dict) -> str:
    """A launch in a few words."""
    around = (record["before"], record["after"])
    probes = " -> ".join("?" if ns is None else f"{ns:.0f} ns" for ns in around)
    return f"{record['program']:22} {probes}, {record['seconds']} s"


def ranks_of(part: str, args: argparse.Namespace) -> "list[int]":
    """With how many ranks a part is launched."""
    if part not in RANKS:
        return [2]
    if args.np:
        return args.np
    return [2] if args.quick and part != "plane" else list(RANKS[part])


def main() -> None:
    parser = argparse.ArgumentParser(description="hvdlite beside its peers.")
    parser.add_argument("--quick", action="store_true", help="two minutes instead of ten")
    parser.add_argument("--tiny", action="store_true", help="only to see that everything works; figures mean nothing")
    parser.add_argument("--only", choices=PARTS, action="append", help="this part; may be given more than once")
    parser.add_argument("-np", type=int, action="append", help="so many ranks; may be given more than once")
    parser.add_argument("--rounds", type=int, help="launches of each program")
    default = ROOT / "tests/out/benchmarks.jsonl"
    parser.add_argument("--results", type=Path, default=default, help="where launches are kept (%(default)s)")
    parser.add_argument("--append", action="store_true", help="keep the launches that are in the file already")
    parser.add_argument("--report", action="store_true", help="measure nothing, print the table of what was measured")
    parser.add_argument("--pictures", type=Path, help="draw into this folder (needs matplotlib)")
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "hvdlite" / "benchmarks"
    parser.add_argument("--cache", type=Path, default=cache, help="where the MPIs are kept (%(default)s)")
    args = parser.parse_args()
    args.cache = args.cache.resolve()
    if any(ranks < 2 for ranks in args.np or ()):
        parser.error("-np: a comparison needs two ranks at least")
    if args.pictures and importlib.util.find_spec("matplotlib") is None:
        parser.error('--pictures needs matplotlib: pip install "hvdlite[bench]", or matplotlib alone')
    if not args.report:
        measure(args, "tiny" if args.tiny else "quick" if args.quick else "full")
    try:
        records = [json.loads(line) for line in args.results.read_text().splitlines()]
    except FileNotFoundError:
        parser.error(f"{args.results} does not exist: run without --report first")
    print(tables(records))
    if args.pictures:
        from pictures import draw

        draw(records, args.pictures)
    if any(record.get("failed") for record in records):
        sys.exit("some launches failed; see above")


if __name__ == "__main__":
    main()
