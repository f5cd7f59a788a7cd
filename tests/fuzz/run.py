"""Fuzz what reads bytes of others, for as long as you like: `make -C tests fuzz`, or this with more to choose.

    make -C tests fuzz                                  every target, 100,000 inputs
    make -C tests fuzz SECONDS=600 TARGETS="votes tree" SEED=7
    python tests/fuzz/run.py --inputs 1000000 --keep    afterwards the inputs that reach something new are kept

Targets in C (tests/c/fuzz_*.c: check, votes, tree, stall, heads, report, tagged, signed) go to clang's libFuzzer under
the address and undefined sanitizers; those in Python (decoders.py) to atheris where it is installed, else to mutations
of our own. The same inputs from the same seed are the same run. What is known to be worth playing is kept beside this
file, one input a line in hex, and played by the tests of every commit (tests/c/test_fuzz.c,
tests/project/test_fuzz_decoders.py).

A failure ends the run and leaves its input in tests/out/fuzz/failed/.
"""

import argparse
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path

HERE = Path(__file__).resolve().parent
OUT = HERE.parent / "out" / "fuzz"
IN_C = ("check", "votes", "tree", "stall", "heads", "report", "tagged", "signed")
IN_PYTHON = ("proof", "address", "frames", "store", "members", "listener", "dial")
INPUT_MAX = 512
KEPT_MAX = 250


def read_kept(target: str) -> "list[bytes]":
    """The inputs that are kept for a target."""
    lines = (HERE / f"{target}.txt").read_text().splitlines() if (HERE / f"{target}.txt").exists() else []
    return [bytes.fromhex(line) for line in lines if not line.startswith("#")]


def write_kept(target: str, inputs: "list[bytes]") -> None:
    """Smallest first; more than KEPT_MAX are thinned out evenly."""
    inputs = sorted(set(inputs), key=lambda each: (len(each), each))
    step = max(1, -(-len(inputs) // KEPT_MAX))
    head = f"# Inputs of target {target}, kept by tests/fuzz/run.py --keep.\n"
    (HERE / f"{target}.txt").write_text(head + "".join(each.hex() + "\n" for each in inputs[::step]))


def unpack(target: str) -> Path:
    """A folder with the kept inputs of a target, one a file, as libFuzzer wants them."""
    folder = OUT / "inputs" / target
    folder.mkdir(parents=True, exist_ok=True)
    for number, each in enumerate(read_kept(target)):
        (folder / f"kept-{number}").write_bytes(each)
    return folder


def fuzz(command: "list[str]", target: str, options: argparse.Namespace) -> int:
    """Runs a libFuzzer or atheris program over one target; how many inputs it played."""
    folder = unpack(target)
    (OUT / "failed").mkdir(parents=True, exist_ok=True)
    arguments = [f"-seed={options.seed}", f"-max_len={INPUT_MAX}", f"-artifact_prefix={OUT}/failed/{target}-"]
    arguments += [f"-max_total_time={options.seconds}"] if options.seconds else [f"-runs={options.inputs}"]
    began = time.monotonic()
    run = subprocess.run([*command, *arguments, str(folder)], stderr=subprocess.PIPE, text=True, errors="replace")
    found = re.search(r"^Done (\d+) runs", run.stderr, re.MULTILINE)
    if run.returncode or not found:
        print(run.stderr[-6000:], file=sys.stderr)
        raise SystemExit(f"{target}: it failed; the input lies in {OUT}/failed")
    covered = re.findall(r"cov: (\d+) ft: (\d+)", run.stderr)[-1]
    took = time.monotonic() - began
    print(f"{target}: {found[1]} inputs in {took:.0f} s, {covered[0]} edges, {covered[1]} features", flush=True)
    if options.keep:
        keep(command, target, folder)
    return int(found[1])


def fuzz_python(target: str, options: argparse.Namespace) -> int:
    """Likewise, of decoders.py, which needs an installed hvdlite."""
    sys.path.insert(0, str(HERE))
    try:
        import decoders
    except ModuleNotFoundError as error:
        print(f"{target}: skipped, {error}")
        return 0
    if decoders.has_atheris():
        return fuzz([sys.executable, str(HERE / "decoders.py"), f"--target={target}"], target, options)
    return decoders.play_mutations(target, read_kept(target), options.seed, options.inputs, options.seconds)


def keep(command: "list[str]", target: str, folder: Path) -> None:
    """Keeps the fewest inputs that reach what all found so far do; of Python's all that reached something new, since
    atheris cannot merge."""
    merged = folder
    if target in IN_C:
        merged = OUT / "merged" / target
        shutil.rmtree(merged, ignore_errors=True)
        merged.mkdir(parents=True)
        subprocess.run([*command, "-merge=1", str(merged), str(folder)], check=True, stderr=subprocess.DEVNULL)
    write_kept(target, [each.read_bytes() for each in merged.iterdir()])
    print(f"{target}: {len(read_kept(target))} inputs are kept", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("targets", nargs="*", metavar="TARGET", help=f"of {', '.join(IN_C + IN_PYTHON)}")
    parser.add_argument("--inputs", type=int, default=100_000, help="of each target")
    parser.add_argument("--seconds", type=int, default=0, help="of each target, instead of a number of inputs")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--keep", action="store_true", help="keep the inputs that reach something new")
    options = parser.parse_args()
    total, began = 0, time.monotonic()
    for target in options.targets or IN_C + IN_PYTHON:
        if target in IN_C:
            total += fuzz([str(OUT / "fuzzer"), f"--target={target}"], target, options)
        else:
            total += fuzz_python(target, options)
    print(f"{total} inputs in {time.monotonic() - began:.0f} s, nothing failed")


if __name__ == "__main__":
    main()
