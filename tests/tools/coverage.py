"""How much of the C core do tests run through? Lines by file, from what `make -C tests coverage` has let gcov count.

    python tests/tools/coverage.py FOLDER [--least 90] [--missed FILE...]

FOLDER holds the objects that were compiled with --coverage and what their runs have counted. A line counts as run when
any test has run it, in any of the objects that it is compiled into (headers are in several; each SIMD variant of a
kernel is a file's own). Lines of variants that this processor does not have cannot be run, and do not count. Exits
with 1 when less than `--least` per cent of all lines were run, with 77 when there is no gcov.
"""

from __future__ import annotations

import argparse
import collections
import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
CSRC = ROOT / "csrc"
NEEDS = {"csrc/kernel/avx512.c": "avx512f", "csrc/kernel/avx2.c": "avx2"}  # and what they include on their own account


def has(flag):
    """Whether this processor has it."""
    with open("/proc/cpuinfo", encoding="utf-8") as file:
        return any(flag in line.split() for line in file if line.startswith(("flags", "Features")))


def counted(folder):
    """{file of csrc/: {line: how often it was run}}."""
    found = collections.defaultdict(dict)
    notes = sorted(Path(folder).resolve().rglob("csrc/**/*.gcno"))
    with tempfile.TemporaryDirectory() as scratch:
        for note in notes:
            words = ["gcov", "--json-format", "--stdout", str(note)]
            done = subprocess.run(words, cwd=scratch, capture_output=True, text=True)
            for said in done.stdout.splitlines():
                for file in json.loads(said)["files"]:
                    path = Path(os.path.normpath(ROOT / file["file"]))
                    if not path.is_relative_to(CSRC):
                        continue
                    lines = found[path.relative_to(ROOT).as_posix()]
                    for line in file["lines"]:
                        number = line["line_number"]
                        lines[number] = lines.get(number, 0) + line["count"]
    return found


def spans(numbers):
    """[1, 2, 3, 7] as "1-3 7"."""
    shown, numbers = [], sorted(numbers)
    for number in numbers:
        if shown and shown[-1][1] == number - 1:
            shown[-1][1] = number
        else:
            shown.append([number, number])
    return " ".join(f"{first}-{last}" if first != last else str(first) for first, last in shown)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder")
    parser.add_argument("--least", type=float, default=90.0, help="per cent of all lines")
    parser.add_argument(
        "--missed", nargs="*", default=(), metavar="PART", help="show lines of files with this in a name"
    )
    words = parser.parse_args()
    if shutil.which("gcov") is None:
        print("there is no gcov here; it comes with gcc")
        sys.exit(77)
    found = {name: lines for name, lines in counted(words.folder).items() if name not in NEEDS or has(NEEDS[name])}
    run, all_of = 0, 0
    for name, lines in sorted(found.items(), key=lambda one: sum(map(bool, one[1].values())) / max(1, len(one[1]))):
        ran = sum(map(bool, lines.values()))
        run, all_of = run + ran, all_of + len(lines)
        missed = [number for number, count in lines.items() if not count]
        show = any(part in name for part in words.missed)
        print(
            f"{100 * ran / max(1, len(lines)):6.1f} %  {ran:5} of {len(lines):5}  {name}", spans(missed) if show else ""
        )
    share = 100 * run / max(1, all_of)
    print(f"{share:6.1f} %  {run:5} of {all_of:5}  of all lines; {words.least:g} % are wanted")
    sys.exit(share < words.least)


if __name__ == "__main__":
    main()
