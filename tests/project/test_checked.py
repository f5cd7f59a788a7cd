"""What runs the C tests: each is run once, and what fails is named."""

import subprocess
from pathlib import Path

CHECKED = Path(__file__).parent.parent / "checked"
ONCE = "[ -e $0.failed ] || { touch $0.failed; exit 3; }"  # fails the first time only


def said_of(folder, **tests):
    """The last line and whether all is well; several of them would run at a time."""
    (folder / "tests" / "c").mkdir(parents=True, exist_ok=True)
    for name, body in tests.items():
        path = folder / "tests" / "c" / f"test_{name}"
        path.write_text(f"#!/bin/sh\n{body}\n")
        path.chmod(0o755)
    paths = [str(folder / "tests" / "c" / f"test_{name}") for name in tests]
    done = subprocess.run([CHECKED, folder, "2", " (here)", *paths], stdout=subprocess.PIPE, timeout=60)
    return done.stdout.decode().splitlines()[-1], done.returncode


def test_all_are_run(tmp_path):
    said = said_of(tmp_path, a="exit 0", b="exit 77", c="exit 0")
    assert said == ("C tests (here): 2 passed, 1 skipped", 0)


def test_what_fails_once_has_failed(tmp_path):
    said = said_of(tmp_path, a=ONCE, b="exit 1", c="exit 0")
    assert said in (
        ("C tests (here): 1 passed, 0 skipped, failed: test_a test_b", 1),
        ("C tests (here): 1 passed, 0 skipped, failed: test_b test_a", 1),
    )
    assert said_of(tmp_path, a=ONCE) == ("C tests (here): 1 passed, 0 skipped", 0)  # it would pass if asked again
