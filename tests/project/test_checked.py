"""What runs the C tests: each is run once, and what fails is named."""

import subprocess
from pathlib import Path

import pytest

CHECKED = Path(__file__).parent.parent / "checked"
ONCE = "[ -e $0.failed ] || { touch $0.failed; exit 3; }"  # fails the first time only


@pytest.mark.parametrize(
    ("bodies", "said"),
    [
        (["exit 0", "exit 77", "exit 0"], ["2 passed, 1 skipped"]),
        (
            [ONCE, "exit 1", "exit 0"],
            [f"1 passed, 0 skipped, failed: {both}" for both in ("test_0 test_1", "test_1 test_0")],
        ),
    ],
)
def test_each_is_run_once_and_what_fails_is_named(tmp_path, bodies, said):
    (tmp_path / "tests" / "c").mkdir(parents=True)
    paths = [tmp_path / "tests" / "c" / f"test_{number}" for number in range(len(bodies))]
    for path, body in zip(paths, bodies):
        path.write_text(f"#!/bin/sh\n{body}\n")
        path.chmod(0o755)
    done = subprocess.run([CHECKED, tmp_path, "2", " (here)", *paths], stdout=subprocess.PIPE, timeout=60, text=True)
    assert done.stdout.splitlines()[-1] in [f"C tests (here): {each}" for each in said]
    assert done.returncode == (ONCE in bodies)
