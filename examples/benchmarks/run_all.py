"""Runs every benchmark and prints one table: medians, what they should be, and the state of the machine around each.

    python examples/benchmarks/run_all.py                 # two ranks; alone on the machine, a minute or two
    python examples/benchmarks/run_all.py -np 4 --only gradients

The targets of `plane` are the best peer's time in the same run over what is asked for at that size; plane.py alone
prints more of it.
"""

import argparse
import json
import subprocess
import sys
from pathlib import Path

from measure import MARK, machine_state

HERE = Path(__file__).resolve().parent
BENCHMARKS = {
    "latency": True,
    "gradients": True,
    "idle": True,
    "startup": False,
    "plane": False,
}  # True: needs hvdlite-run


def run(name: str, ranks: int) -> "list[dict]":
    """The results of one benchmark, each with the state of the machine before and after."""
    command = [sys.executable, str(HERE / f"{name}.py")]
    if name == "plane":
        command += ["-np", str(ranks)]
    if BENCHMARKS[name]:
        command = [str(Path(sys.executable).with_name("hvdlite-run")), "-np", str(ranks), *command]
    before = machine_state()
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    after = machine_state()
    if done.returncode:
        raise SystemExit(f"{name} failed ({done.returncode}):\n{done.stdout}")
    lines = [line.partition(MARK)[2] for line in done.stdout.splitlines() if MARK in line]
    return [{**json.loads(line), "state": f"{before} -> {after}"} for line in lines]


def row(result: dict) -> str:
    target = result["target"]
    verdict = "" if target is None else f"<= {target:g}: " + ("yes" if result["median"] <= target else "NO")
    figures = f"{result['median']:10.2f} {result['low']:10.2f} {result['high']:10.2f} {result['unit']:11}"
    return f"{result['name']:62} {figures} {verdict:12} {result['state']}"


def main() -> None:
    parser = argparse.ArgumentParser(description="Run all benchmarks and print one table.")
    parser.add_argument("-np", type=int, default=2)
    parser.add_argument("--only", choices=sorted(BENCHMARKS), action="append", help="may be given more than once")
    args = parser.parse_args()
    print(f"{'':62} {'median':>10} {'p10':>10} {'p90':>10} {'':11} {'target':12} machine before -> after")
    for name in args.only or BENCHMARKS:
        for result in run(name, args.np):
            print(row(result), flush=True)


if __name__ == "__main__":
    main()
