"""How long does a test file take? Noted after each run of pytest, shown at its end, known when tests are chosen.

tests/out/seconds.json has them by file and test, so that a run of some of them changes nothing that is known of the
others. A C test says at the end of its log how long it took.
"""

from __future__ import annotations

import json
import os
import re
from collections import defaultdict
from pathlib import Path
from typing import Any

OUT = Path(__file__).resolve().parent / "out"
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


def known(test: str, out: Path = OUT) -> float:
    """Of a test file by its path, a Python one or one in C under the sanitizers."""
    if test.endswith(".py"):
        tests = _read(out / "seconds.json").get(test)
        return sum(tests.values()) if tests else UNKNOWN[".py"]
    log = out / "address-undefined" / Path(test).with_suffix(".log")
    ended = re.findall(r"^ok +\w+ \((\d+) s\)$", log.read_text(errors="replace"), re.MULTILINE) if log.exists() else []
    return float(ended[-1]) + 1 if ended else UNKNOWN[".c"]  # and it is linked


def _read(record: Path) -> dict[str, dict[str, float]]:
    try:
        found: dict[str, dict[str, float]] = json.loads(record.read_text())
    except (OSError, ValueError):
        return {}
    return found
