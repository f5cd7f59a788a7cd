"""How long does a test file take? Noted after each run of pytest, shown at its end, known when tests are chosen.

tests/out/seconds.json has them by file and test, so that a run of some of them changes nothing that is known of the
others. A C test says at the end of its log how long it took.

    python tests/tools/durations.py      after a check: writes tests/durations.txt anew, the seconds of each Python file

tests/durations.txt is committed. Its head is a list of budgets, each with the reason why it rose; test_house compares
the last one with the sum.
"""

from __future__ import annotations

import json
import os
import re
from collections import defaultdict
from pathlib import Path
from typing import Any

TESTS = Path(__file__).resolve().parents[1]
OUT = TESTS / "out"
BUDGET = TESTS / "durations.txt"
SHOWN = 30
UNKNOWN = {".py": 12.0, ".c": 3.0}  # a file that has not run here yet


class Durations:
    """A plugin of pytest's own process; where pytest-xdist has others, they report to it."""

    def __init__(self, record: Path) -> None:
        self.record, self.taken = record, defaultdict(float)

    def pytest_runtest_logreport(self, report: Any) -> None:
        self.taken[report.nodeid] += report.duration

    def pytest_sessionfinish(self) -> None:
        known = _read(self.record)
        for name, seconds in self.taken.items():
            known.setdefault(name.split("::")[0], {})[name] = round(seconds, 3)
        self.record.parent.mkdir(parents=True, exist_ok=True)
        written = self.record.with_suffix(f".{os.getpid()}")
        written.write_text(json.dumps(known, indent=0, sort_keys=True))
        written.replace(self.record)

    def pytest_terminal_summary(self, terminalreporter: Any) -> None:
        files: dict[str, float] = defaultdict(float)
        for name, seconds in self.taken.items():
            files[name.split("::")[0]] += seconds
        if len(files) > 1:
            terminalreporter.section(f"seconds by file, the longest {min(len(files), SHOWN)} of {len(files)}")
            for name in sorted(files, key=lambda name: -files[name])[:SHOWN]:
                terminalreporter.write_line(f"{files[name]:8.1f} {name}")
            terminalreporter.write_line(f"{sum(files.values()):8.1f} in all")


def known(test: str, out: Path = OUT) -> float:
    """Of a test file by its path, a Python one or one in C under the sanitizers."""
    if test.endswith(".py"):
        tests = _read(out / "seconds.json").get(test)
        return sum(tests.values()) if tests else UNKNOWN[".py"]
    log = out / "address-undefined" / Path(test).with_suffix(".log")
    ended = re.findall(r"^ok +\w+ \((\d+) s\)$", log.read_text(errors="replace"), re.MULTILINE) if log.exists() else []
    return float(ended[-1]) + 1 if ended else UNKNOWN[".c"]  # and it is linked


def budgets(text: str) -> tuple[list[tuple[int, str]], dict[str, float]]:
    """Of tests/durations.txt: (seconds, why) of each budget, the last one in force, and the seconds of each file."""
    allowed = [(int(seconds), why.strip()) for seconds, why in re.findall(r"^budget +(\d+) *(.*)$", text, re.MULTILINE)]
    return allowed, {name: float(of) for of, name in re.findall(r"^ *(\d+\.\d) (\S+\.py)$", text, re.MULTILINE)}


def write(tests: set[str], budget: Path = BUDGET, out: Path = OUT) -> float:
    """The seconds of these files as a whole check has measured them; the sum. What has not run keeps what it had.
    KeyError: it had nothing."""
    new, old = _read(out / "seconds.json"), budgets(budget.read_text())[1]
    taken = {name: round(sum(new[name].values()), 1) if name in new else old[name] for name in tests}
    head = [line for line in budget.read_text().splitlines() if line.startswith(("#", "budget"))]
    ordered = sorted(taken, key=lambda name: (-taken[name], name))
    budget.write_text("\n".join([*head, *(f"{taken[name]:8.1f} {name}" for name in ordered), ""]))
    return sum(taken.values())


def _read(record: Path) -> dict[str, dict[str, float]]:
    try:
        found: dict[str, dict[str, float]] = json.loads(record.read_text())
    except (OSError, ValueError):
        return {}
    return found


if __name__ == "__main__":
    _root = BUDGET.parents[1]
    _tests = {path.relative_to(_root).as_posix() for path in BUDGET.parent.rglob("test_*.py")}
    print(f"{write(_tests):.0f} s; the budget is {budgets(BUDGET.read_text())[0][-1][0]} s")
