"""What runs the steps of a check: the steps that are asked for, their deadline, and what is said of a failed one."""

import os
import signal
import threading
import time

import pytest
import steps
from ranks import gone

FAILS = "echo 'FAILED tests/ops/test_x.py::test_y[a b] - assert 0'; echo 'FAILED  test_kernel (134)'; echo last; exit 1"


@pytest.fixture
def table(monkeypatch, tmp_path):
    """Takes the place of the steps and of their logs."""

    def put(*made):
        monkeypatch.setattr(steps, "STEPS", made)

    monkeypatch.setattr(steps, "LOGS", tmp_path / "log")
    monkeypatch.setattr(steps, "ROOT", tmp_path)
    return put


def test_every_step_is_in_the_check_or_has_a_reason_why_not():
    assert all(bool(step.check) != bool(step.long) for step in steps.STEPS)
    assert steps.chosen([]) == [step for step in steps.STEPS if step.check]
    assert steps.chosen(["everything"]) == list(steps.STEPS)
    assert [step.name for step in steps.chosen(["pytest", "mypy"])] == ["pytest", "mypy"]


def test_all_pass_and_a_skip_is_named(table, capsys):
    table(steps.Step("a", 9, "echo well", check="x"), steps.Step("b", 9, "echo no compiler; exit 77", check="x"))
    assert steps.main([]) == 0
    said = capsys.readouterr().out
    assert "ok      a" not in said and "skipped  b" in said and "no compiler" in said and "all passed" in said


def test_the_end_names_the_failed_tests_why_and_how_to_run_them_alone(table, capsys):
    table(steps.Step("thread", 9, FAILS, check="x"), steps.Step("after", 9, "true", check="x"))
    assert steps.main([]) == 1
    end = capsys.readouterr().out.split("\n\n")[-1]
    assert "ok       after" in end and end.endswith("s)\n") and "failed: thread (after" in end
    assert "FAILED tests/ops/test_x.py::test_y[a b] - assert 0\n    pytest 'tests/ops/test_x.py::test_y[a b]'\n" in end
    assert "FAILED test_kernel (134)\n    make -C tests check SAN=thread ONLY=kernel\n" in end


def test_python_tests_wait_for_what_runs_beside(table, tmp_path, monkeypatch):
    monkeypatch.setattr(steps, "PREPARED", "true")
    waits = steps.Step("beside", 9, f"sleep 0.5; touch {tmp_path}/there", check="x", beside=True)
    table(steps.Step("pytest", 9, f"test -e {tmp_path}/there", check="x"), waits)
    assert steps.main([]) == 0


def test_a_step_that_hangs_is_ended_with_all_that_it_has_started(table, capsys, tmp_path):
    table(steps.Step("hangs", 1, f"sleep 1000 & echo $! > {tmp_path}/pid; wait", check="x"))
    assert steps.main([]) == 1 and "no end within 1 s" in capsys.readouterr().out
    assert not gone([int((tmp_path / "pid").read_text())])


def test_an_interrupt_ends_all_steps_and_what_they_have_left(table, tmp_path):
    """As Ctrl-C, or a SIGTERM, which __main__ makes a SystemExit."""
    table(
        steps.Step("left", 9, f"sleep 1000 & echo $! > {tmp_path}/left", check="x"),
        steps.Step("beside", 99, f"echo $$ > {tmp_path}/beside; sleep 1000", check="x", beside=True),
        steps.Step("runs", 99, f"echo $$ > {tmp_path}/runs; sleep 1000", check="x"),
    )

    def interrupt():
        while len(steps._running) < 2 or not all((tmp_path / name).exists() for name in ("beside", "runs")):
            time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGINT)

    threading.Thread(target=interrupt, daemon=True).start()
    with pytest.raises(KeyboardInterrupt):
        steps.main([])
    assert not gone([int((tmp_path / name).read_text()) for name in ("left", "beside", "runs")])


@pytest.mark.parametrize(
    ("said", "gives_up"),
    [
        ("FAILED tests/ops/test_x.py::test_y[a b] - assert 0", False),
        ("FAILED tests/ops/test_x.py::test_y - assert 0\nERROR tests/ops/test_z.py - ImportError: no module", True),
        ("FAILED tests/ops/test_x.py::test_y - assert 0\nERROR tests/ops/test_z.py", True),
    ],
)
def test_only_tests_that_failed_run_once_more(table, monkeypatch, said, gives_up):
    """A file that cannot be imported does not pass alone."""
    table()
    steps.LOGS.mkdir()
    monkeypatch.setattr(steps, "PYTEST", "true ")
    text = f"ERROR    root:test_y.py:3 logged\n==== short test summary info ====\n{said}\n"
    assert steps.unsteady(steps.Step("pytest", 9, "x"), text) == (
        [] if gives_up else ["tests/ops/test_x.py::test_y[a b]"]
    )


def test_a_step_that_is_not_there_is_refused_by_name(capsys):
    assert steps.main(["nonsense"]) == 2
    assert "no step is called nonsense; there are everything, changed, ruff, " in capsys.readouterr().out


def test_a_change_gives_the_steps_that_it_can_reach(monkeypatch, capsys):
    readers = steps.changed.graph(steps.changed.texts(steps.ROOT, []))
    monkeypatch.setattr(steps.changed, "graph", lambda tree: readers)
    monkeypatch.setattr(steps.durations, "known", lambda test: 8.0)
    for path, kind, names, tests in (  # apart: this file shall not be one that names them
        ("launcher/starters/slurm", ".py", "ruff format mypy house pytest", "tests/launcher/test_launcher_"),
        (
            "csrc/negotiation/vote",
            ".c",
            "clang-format house address,undefined",
            "ONLY='negotiation_finite negotiation_fuzz",
        ),
        ("hvdlite/rendezvous/store_client", ".py", "ruff format mypy house pytest", "tests/rendezvous/test_st"),
        ("LICENSE", "", "house", "tests/project/test_house"),
    ):
        since = ("HEAD", [path + kind])
        monkeypatch.setattr(steps.changed, "since", lambda root, commit="", since=since: since)
        made = steps.chosen(["changed"])
        assert " ".join(step.name for step in made).startswith(names)
        assert any(tests in step.command for step in made)
        assert "further test files" in capsys.readouterr().out or path == "LICENSE"
    monkeypatch.undo()
    with pytest.raises(ValueError, match="merge-base"):
        steps.chosen(["changed", "no-such-commit"])
