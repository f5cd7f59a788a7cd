"""How many instructions do the hot paths take, and are they more than when tests/counts.json was written?

    make -C tests counts                        # builds what is counted, prints a table; exit 1 if a path grew
    make -C tests counts COUNTED=--update       # writes the baseline anew: do so where a change is meant
    make -C tests counts COUNTED=--no-hook      # only what is in C: a quarter of the time

Unlike times, counts are the same on a busy machine and, nearly, on any processor: valgrind shows programs one processor
that does not exist (AVX2, no AVX-512), the loops are chosen by name, and glibc's ways of copying, which follow cache
sizes, are pinned. What remains is the compiler and glibc, and for the hook Python and torch; the baseline says with
which it was made. With the same ones a path may grow by TOLERANCE, with others by TOLERANCE_ELSEWHERE; a hook under
another minor version of Python or torch is printed and not judged. Exit 77 with the reason if nothing can be counted.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

TESTS = Path(__file__).resolve().parents[1]
BASELINE = TESTS / "counts.json"
BUILT = TESTS / "out/plain/tests/c"
TOLERANCE, TOLERANCE_HOOK, TOLERANCE_ELSEWHERE = 0.05, 0.10, 0.30
HOOK = "gradient-hook-in-python"
SECONDS = 400
HUGE = 1 << 40
PINNED = ":".join(
    f"glibc.cpu.x86_{way}_threshold={HUGE}" for way in ("rep_movsb", "rep_stosb", "non_temporal")
)  # copy by vectors, whatever the size


def skip(why: str) -> None:
    print(f"counts are skipped: {why}")
    sys.exit(77)


def check_machine() -> None:
    """Exit 77 if callgrind is missing or would run other code than everywhere else."""
    if shutil.which("valgrind") is None:
        skip("valgrind is not installed")
    if not any(Path(folder, "valgrind/callgrind.h").exists() for folder in ("/usr/include", "/usr/local/include")):
        skip("valgrind's headers are not installed")
    if platform.machine() != "x86_64" or " avx2 " not in Path("/proc/cpuinfo").read_text():
        skip(f"the baseline is of x86-64 with AVX2, this is a {platform.machine()} without")


def valgrind(folder: str) -> list[str]:
    return [
        "valgrind",
        "-q",
        "--tool=callgrind",
        "--collect-atstart=no",
        f"--callgrind-out-file={folder}/out",
    ]


def read_counts(folder: str, printed: str) -> dict[str, float]:
    """Instructions per time of each section, from callgrind's files and the lines that the program printed."""
    times = {name: int(count) for name, count in re.findall(r"^(?:.*?)COUNT (\S+) (\d+)$", printed, re.MULTILINE)}
    counts = {}
    for path in Path(folder).glob("out.*"):
        text = path.read_text()
        section = re.search(r"^desc: Trigger: Client Request: (\S+)$", text, re.MULTILINE)
        total = re.search(r"^totals: (\d+)$", text, re.MULTILINE)
        if section and total and section.group(1) in times:
            counts[section.group(1)] = int(total.group(1)) / times[section.group(1)]
    return counts


def run(command: list[str], folder: str) -> dict[str, float]:
    """The counts of one program; RuntimeError with what it said if it fails."""
    environ = {**os.environ, "GLIBC_TUNABLES": PINNED, "HVDLITE_START_TIMEOUT": str(SECONDS)}
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environ, start_new_session=True
    )
    try:
        printed, _ = process.communicate(timeout=SECONDS)
    except subprocess.TimeoutExpired:
        process.terminate()  # a launcher ends its ranks
        printed, _ = process.communicate()
    if process.returncode:
        raise RuntimeError(f"{' '.join(command)} ended with {process.returncode}:\n{printed[-3000:]}")
    return read_counts(folder, printed)


def count_in_c() -> dict[str, float]:
    counts: dict[str, float] = {}
    for source in sorted((TESTS / "c").glob("count_*.c")):
        program = BUILT / source.stem
        if program.exists():
            with tempfile.TemporaryDirectory(prefix="hvdlite-counts-") as folder:
                counts |= run([*valgrind(folder), str(program)], folder)
    return counts


def count_hook() -> dict[str, float]:
    """Instructions of one gradient hook beyond a hook that does nothing."""
    launcher = Path(sys.executable).with_name("hvdlite-run")
    try:
        import torch  # noqa: F401
    except ImportError:
        print("the hook is not counted: torch is not installed")
        return {}
    if not launcher.exists():
        print("the hook is not counted: hvdlite is not installed")
        return {}
    with tempfile.TemporaryDirectory(prefix="hvdlite-counts-") as folder:
        command = [str(launcher), "-np", "2", sys.executable, str(Path(__file__)), "--rank", folder]
        counts = run(command, folder)
    return {HOOK: counts["hooks"] - counts["empty-hooks"]}


def be_rank(folder: str) -> None:
    """Rank 0 under callgrind, the other as it is."""
    program = [sys.executable, str(TESTS / "tools/count_hook.py"), str(BUILT / "count_section.so")]
    if os.environ["RANK"] == "0":
        program = [*valgrind(folder), "--instr-atstart=no", *program]
    os.execvp(program[0], program)


def made_with() -> dict[str, str]:
    words = [*shlex.split(os.environ.get("CC", "cc")), "-dumpfullversion"]
    compiler = subprocess.run(words, capture_output=True, text=True)
    found = {"compiler": compiler.stdout.strip(), "libc": platform.libc_ver()[1]}
    found["python"] = ".".join(platform.python_version_tuple()[:2])
    torch = sys.modules.get("torch")
    found["torch"] = "" if torch is None else ".".join(torch.__version__.split(".")[:2])
    return found


def judge(counts: dict[str, float]) -> bool:
    """Print the table beside the baseline; whether no path has grown beyond the tolerance."""
    baseline = json.loads(BASELINE.read_text()) if BASELINE.exists() else {"made with": {}, "counts": {}}
    here, there = made_with(), baseline["made with"]
    same_c = all(here[key] == there.get(key) for key in ("compiler", "libc"))
    same_python = all(here[key] == there.get(key) for key in ("python", "torch"))
    grown = []
    print(f"{'instructions of':28} {'now':>12} {'baseline':>12} {'change':>8}")
    for name, count in sorted(counts.items()):
        before = baseline["counts"].get(name)
        if before is None:
            print(f"{name:28} {count:12.0f} {'new':>12}")
            grown.append(f"{name} is not in {BASELINE.name}: write it with COUNTED=--update")
            continue
        closest = TOLERANCE_HOOK if name == HOOK else TOLERANCE
        change, tolerance = count / before - 1, closest if same_c else TOLERANCE_ELSEWHERE
        print(f"{name:28} {count:12.0f} {before:12.0f} {change:+8.1%}" + ("  (write it down)" if change < -0.1 else ""))
        if name == HOOK and not same_python:
            print(f"{'':28} not judged: the baseline is of Python {there['python']} and torch {there['torch']}")
        elif change > tolerance:
            grown.append(
                f"{name} takes {change:.1%} more instructions than in {BASELINE.name}, {tolerance:.0%} allowed"
            )
    print("\n".join(grown) or f"{len(counts)} paths take no more instructions than before")
    return not grown


def main() -> None:
    parser = argparse.ArgumentParser(description="Instructions of the hot paths, beside a baseline.")
    parser.add_argument("--update", action="store_true", help="write the baseline anew")
    parser.add_argument("--no-hook", action="store_true", help="leave out the hook in Python, which takes a minute")
    parser.add_argument("--rank", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.rank:
        be_rank(args.rank)
    check_machine()
    counts = count_in_c() | ({} if args.no_hook else count_hook())
    if args.update:
        kept = json.loads(BASELINE.read_text())["counts"] if args.no_hook and BASELINE.exists() else {}
        rounded = {name: round(count) for name, count in sorted((kept | counts).items())}
        BASELINE.write_text(json.dumps({"made with": made_with(), "counts": rounded}, indent=2) + "\n")
    sys.exit(0 if judge(counts) else 1)


if __name__ == "__main__":
    main()
