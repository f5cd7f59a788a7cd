"""What runs the C tests: what fails beside others has to pass alone; what a sanitizer found is a failure at once."""

import subprocess
from pathlib import Path

CHECKED = Path(__file__).parent.parent / "checked"
ONCE = "[ -e $0.failed ] || { touch $0.failed; exit 3; }"  # fails the first time only


def said_of(folder, **tests):
    """The last line and whether all is well; several of them would run at a time."""
    (folder / "tests" / "c").mkdir(parents=True)
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


def test_what_fails_in_company_has_to_pass_alone_and_is_named(tmp_path):
    said = said_of(tmp_path, a=ONCE, b="exit 0")
    assert said == ("C tests (here): 1 passed, 0 skipped, passed alone only: test_a", 0)


def test_what_fails_alone_too_is_a_failure(tmp_path):
    said = said_of(tmp_path, a=ONCE, b="exit 1", c="exit 0")
    assert said == ("C tests (here): 1 passed, 0 skipped, passed alone only: test_a, failed: test_b", 1)


def test_what_a_sanitizer_found_is_a_failure_at_once(tmp_path):
    for number, words in enumerate(("WARNING: ThreadSanitizer: data race", "x.c:1:2: runtime error: shift")):
        said = said_of(tmp_path / str(number), a=f"echo '{words}'; {ONCE}")
        assert said == ("C tests (here): 0 passed, 0 skipped, failed: test_a", 1)


def test_many_that_fail_are_not_a_crowd(tmp_path):
    said = said_of(tmp_path, a=ONCE, b=ONCE, c=ONCE)
    assert said[1] == 1 and said[0].startswith("C tests (here): 0 passed, 0 skipped, failed: ")
