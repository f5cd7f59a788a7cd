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
def run(monkeypatch, tmp_path, capsys):
    """Runs steps in the place of those of the check; (exit code, what is said). Each is (name, seconds, command)."""

    def run(*made, beside=()):
        monkeypatch.setattr(steps, "STEPS", [steps.Step(*each, check="x", beside=each[0] in beside) for each in made])
        return steps.main([]), capsys.readouterr().out

    monkeypatch.setattr(steps, "LOGS", tmp_path / "log")
    monkeypatch.setattr(steps, "ROOT", tmp_path)
    return run


def test_every_step_is_in_the_check_or_has_a_reason_why_not():
    assert all(bool(step.check) != bool(step.long) for step in steps.STEPS)
    assert steps.chosen([]) == [step for step in steps.STEPS if step.check]
    assert steps.chosen(["everything"]) == list(steps.STEPS)
    assert [step.name for step in steps.chosen(["pytest", "mypy"])] == ["pytest", "mypy"]


def test_all_pass_and_a_skip_is_named(run):
    code, said = run(("a", 9, "echo well"), ("b", 9, "echo no compiler; exit 77"))
    assert code == 0 and "ok      a" not in said and "all passed" in said
    assert "skipped  b" in said and "no compiler" in said


def test_the_end_names_the_failed_tests_why_and_how_to_run_them_alone(run):
    code, said = run(("thread", 9, FAILS), ("after", 9, "true"))
    end = said.split("\n\n")[-1]
    assert code == 1 and "ok       after" in end and end.endswith("s)\n") and "failed: thread (after" in end
    assert "FAILED tests/ops/test_x.py::test_y[a b] - assert 0\n    pytest 'tests/ops/test_x.py::test_y[a b]'\n" in end
    assert "FAILED test_kernel (134)\n    make -C tests check SAN=thread ONLY=kernel\n" in end


def test_python_tests_wait_for_what_runs_beside(run, tmp_path, monkeypatch):
    monkeypatch.setattr(steps, "PREPARED", "true")
    waits = "beside", 9, f"sleep 0.5; touch {tmp_path}/there"
    assert run(("pytest", 9, f"test -e {tmp_path}/there"), waits, beside="beside")[0] == 0


def test_a_step_that_hangs_is_ended_with_all_that_it_has_started(run, tmp_path):
    code, said = run(("hangs", 1, f"sleep 1000 & echo $! > {tmp_path}/pid; wait"))
    assert code == 1 and "no end within 1 s" in said
    assert not gone([int((tmp_path / "pid").read_text())])


def test_an_interrupt_ends_all_steps_and_what_they_have_left(run, tmp_path):
    """As Ctrl-C, or a SIGTERM, which __main__ makes a SystemExit."""

    def interrupt():
        while len(steps._running) < 2 or not all((tmp_path / name).exists() for name in ("beside", "runs")):
            time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGINT)

    threading.Thread(target=interrupt, daemon=True).start()
    with pytest.raises(KeyboardInterrupt):
        run(
            ("left", 9, f"sleep 1000 & echo $! > {tmp_path}/left"),
            ("beside", 99, f"echo $$ > {tmp_path}/beside; sleep 1000"),
            ("runs", 99, f"echo $$ > {tmp_path}/runs; sleep 1000"),
            beside="beside",
        )
    assert not gone([int((tmp_path / name).read_text()) for name in ("left", "beside", "runs")])


@pytest.mark.parametrize(
    "broken", ["", "ERROR tests/ops/test_z.py - ImportError: no module", "ERROR tests/ops/test_z.py"]
)
def test_only_tests_that_failed_run_once_more(run, monkeypatch, broken):
    """A file that cannot be imported does not pass alone."""
    steps.LOGS.mkdir()
    monkeypatch.setattr(steps, "PYTEST", "true ")
    text = "ERROR    root:test_y.py:3 logged\n==== short test summary info ====\n"
    text += f"FAILED tests/ops/test_x.py::test_y[a b] - assert 0\n{broken}\n"
    found = [] if broken else ["tests/ops/test_x.py::test_y[a b]"]
    assert steps.unsteady(steps.Step("pytest", 9, "x"), text) == found


def test_a_step_that_is_not_there_is_refused_by_name(capsys):
    assert steps.main(["nonsense"]) == 2
    assert "no step is called nonsense; there are everything, changed, ruff, " in capsys.readouterr().out


def test_a_change_gives_the_steps_that_it_can_reach(monkeypatch, capsys):
    readers = steps.changed.graph(steps.changed.texts(steps.ROOT, []))
    monkeypatch.setattr(steps.changed, "graph", lambda tree: readers)
    monkeypatch.setattr(steps.durations, "known", lambda test: 8.0)
    of_c, of_python = "clang-format house address,undefined", "ruff format mypy house pytest"
    for path, kind, names, tests in (  # apart: this file shall not be one that names them
        ("launcher/starters/slurm", ".py", of_python, "tests/launcher/test_launcher_"),
        ("csrc/negotiation/vote", ".c", of_c, "ONLY='negotiation_finite negotiation_fuzz"),
        ("hvdlite/rendezvous/store_client", ".py", of_python, "tests/rendezvous/test_st"),
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
