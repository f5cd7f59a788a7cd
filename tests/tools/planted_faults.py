"""Do the programs in virtual time find faults? Each fault of tests/c/virtual_faults.txt is planted and looked for.

    make -C tests planted                                  all of them
    python tests/tools/planted_faults.py [NAME...]         these; needs `make -C tests virtual-build`
                                         [--seeds 2000]    schedules of each program at most

The file that the fault is in is compiled with the fault, by the command with which make builds it, and linked with the
other objects of that build. The fault is found by the first schedule that fails, if the same schedule of the same
program passes without it. Exits with 1 when a fault is not found, or when what a fault replaces is not in its file
exactly once: then the core has changed, and the fault is to be planted anew.
"""

from __future__ import annotations

import argparse
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
FAULTS = ROOT / "tests/c/virtual_faults.txt"
BUILT = ROOT / "tests/out/virtual"
OUT = ROOT / "tests/out/planted"


@dataclass
class Fault:
    """A paragraph of the table: its lines `name`, `file`, `runs` and `what`, and then what changes, as in a diff."""

    name: str = ""
    file: str = ""
    what: str = ""
    runs: list[list[str]] = field(default_factory=list)  # programs, each with its words
    old: str = ""
    new: str = ""

    def planted(self) -> str:
        """The source with the fault."""
        source = (ROOT / self.file).read_text(encoding="utf-8")
        if source.count(self.old) != 1:
            raise LookupError(f"what it replaces is {source.count(self.old)} times in {self.file}")
        return source.replace(self.old, self.new)


def read_faults(text: str) -> list[Fault]:
    """Those of the table."""
    found: list[Fault] = []
    for line in text.splitlines():
        key, _, rest = line.partition(" ")
        if key == "name":
            found.append(Fault(rest))
        elif key == "file":
            found[-1].file = rest
        elif key == "runs":
            found[-1].runs = [run.split() for run in rest.split(",")]
        elif key == "what":
            found[-1].what = rest
        elif line[:1] in ("-", "+", "|"):
            found[-1].old += line[1:] + "\n" if line[0] in "-|" else ""
            found[-1].new += line[1:] + "\n" if line[0] in "+|" else ""
        elif line and line[0] != "#":
            raise ValueError(f"{FAULTS}: {line}")
    return found


def commands() -> list[str]:
    """Those with which make builds the programs: one for each object, and one that links them."""
    words = ["make", "-n", "-B", "--no-print-directory", "-C", str(ROOT / "tests"), "virtual-build"]
    return subprocess.run(words, check=True, capture_output=True, text=True).stdout.splitlines()


def build(fault: Fault, known: list[str]) -> Path:
    """The programs with the fault."""
    folder = OUT / fault.name
    folder.mkdir(parents=True, exist_ok=True)
    source, target, program = folder / Path(fault.file).name, folder / "planted.o", folder / "virtual"
    source.write_text(fault.planted(), encoding="utf-8")
    before = str(BUILT / fault.file.replace(".c", ".o"))
    compile_it = next(line for line in known if f" -c -o {before} " in line)
    link = next(line for line in known if f" -o {BUILT}/virtual " in line)
    compile_it = compile_it.replace(f"-o {before} ", f"-o {target} ").replace(str(ROOT / fault.file), str(source))
    near = (ROOT / fault.file).parent  # headers that the source finds beside itself
    for command in (
        f"{compile_it} -w -iquote {shlex.quote(str(near))}",
        link.replace(before, str(target)).replace(f"-o {BUILT}/virtual ", f"-o {program} "),
    ):
        subprocess.run(command, shell=True, check=True)
    return program


def first_failure(program: Path, run: list[str], seeds: int) -> int | None:
    """The first seed that fails."""
    words = [str(program), run[0], "1", str(seeds), *run[1:]]
    with subprocess.Popen(
        words, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, errors="replace", start_new_session=True
    ) as process:
        assert process.stderr
        for line in process.stderr:
            found = re.match(rf"FAILED .*: {run[0]} (\d+)", line)
            if found:
                os.killpg(process.pid, signal.SIGKILL)
                return int(found[1])
    return None


def one(program: Path, run: list[str], seed: int) -> tuple[bool, str]:
    """Does this schedule pass? And what it has said last, without what each thread waits for."""
    words = [str(program), run[0], str(seed), *run[1:]]
    done = subprocess.run(words, capture_output=True, text=True, errors="replace")
    said = [line for line in done.stderr.splitlines() if not line.startswith("  thread ")]
    name = signal.Signals(-done.returncode).name if done.returncode < 0 else f"exit {done.returncode}"
    return done.returncode == 0, said[-1] if said else name


def look_for(fault: Fault, known: list[str], seeds: int) -> str | None:
    """Prints its row; what is wrong, if it is not found."""
    begun = time.time()
    try:
        program = build(fault, known)
    except LookupError as error:
        return str(error)
    for run in fault.runs:
        seed = first_failure(program, run, seeds)
        if seed is None:
            continue
        passes, how = one(program, run, seed)
        clean, said = one(BUILT / "virtual", run, seed)
        if passes:
            return f"{' '.join(run)} {seed} failed once, and passes now"
        if not clean:
            return f"{' '.join(run)} {seed} fails without the fault, too: {said}"
        how = re.sub(r"^.*/(tests/c/|csrc/)", "", how)
        print(f"{fault.name:24}  {' '.join(run):12}  {seed:5}  {time.time() - begun:4.0f} s  {how[:150]}", flush=True)
        return None
    return f"not found in {seeds} schedules of {' or '.join(' '.join(run) for run in fault.runs)}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME")
    parser.add_argument("--seeds", type=int, default=2000)
    words = parser.parse_args()
    faults = read_faults(FAULTS.read_text(encoding="utf-8"))
    wanted = [fault for fault in faults if not words.names or fault.name in words.names]
    unknown = set(words.names) - {fault.name for fault in faults}
    if unknown:
        parser.error(f"no such fault: {' '.join(sorted(unknown))}")
    print(f"{'fault':24}  {'program':12}  {'seed':>5}  {'time':>6}  how")
    known, bad = commands(), 0
    for fault in wanted:
        wrong = look_for(fault, known, words.seeds)
        if wrong:
            print(f"{fault.name:24}  {wrong} ({fault.what})", flush=True)
            bad += 1
    print(f"{len(wanted) - bad} of {len(wanted)} found")
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
