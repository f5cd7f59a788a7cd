"""What a change reaches, in trees made up for it, and what is chosen of that; how long a test file is known to take."""

import json
import subprocess
from types import SimpleNamespace

import changed
import durations
import pytest

TREE = {
    "launcher/__init__.py": "",
    "launcher/__main__.py": "from .cli import main",
    "launcher/cli.py": "from . import desk",
    "launcher/desk.py": '"""Not read: hvdlite.torch and test_data.py."""\nfrom ..errors import HvdError',
    "hvdlite/__init__.py": 'def __getattr__(name): return import_module(".numpy", __name__)',
    "hvdlite/errors.py": "",
    "hvdlite/numpy.py": "from hvdlite._core.library import lib",
    "hvdlite/_core/library.py": "",
    "hvdlite/torch/__init__.py": "from .optimizer import make",
    "hvdlite/torch/optimizer.py": "from ..errors import HvdError",
    "tests/conftest.py": "import pytest",
    "tests/support/launching.py": 'RUN = ["-m", "hvdlite.launcher"]',
    "tests/launcher/test_desk.py": "from launching import launch",
    "tests/launcher/test_agent.py": "from launching import launch",
    "tests/launcher/test_torch.py": 'SCRIPT = "import os\\nimport hvdlite.torch as hvd"',
    "tests/data/test_data.py": 'PROGRAM = HERE / "trains.py"',
    "tests/launcher/trains.py": "import hvdlite as hvd",
    "csrc/hvdlite.h": "",
    "csrc/api.c": '#include "hvdlite.h"\n#include "coord/coord.h"',
    "csrc/ground/ground.h": '#include "../hvdlite.h"',
    "csrc/coord/coord.h": '#include "../ground/ground.h"',
    "csrc/coord/state.h": '#include "coord.h"',
    "csrc/coord/vote.c": '#include "state.h"',
    "tests/c/world.h": "",
    "tests/c/test_api.c": '#include "hvdlite.h"',
    "tests/c/world.c": '#include "world.h"\n#include "coord/coord.h"',
    "tests/c/test_state.c": '#include "coord/state.h"',
    "tests/c/test_world.c": '#include "world.h"',
    "tests/c/test_ground.c": '#include "ground/ground.h"\n#include "world.h"',
}


def reached(path, tree=TREE):
    """The tests, nearest first."""
    near = changed.nearness(path, changed.graph(tree))
    return [test.rpartition("/")[2] for test in sorted(near, key=lambda test: (near[test], test))]


def test_a_program_in_a_string_and_a_launched_module_count_as_imports():
    assert reached("hvdlite/torch/optimizer.py") == ["test_torch.py"]
    assert reached("launcher/desk.py") == ["test_desk.py", "test_agent.py"]
    assert reached("hvdlite/numpy.py") == ["test_data.py"]
    assert reached("hvdlite/errors.py") == ["test_torch.py", "test_agent.py", "test_desk.py"]
    assert reached("tests/conftest.py") == ["test_data.py", "test_agent.py", "test_desk.py", "test_torch.py"]


def test_a_header_stands_for_what_defines_its_names():
    assert reached("csrc/coord/vote.c") == [
        "test_state.c",
        "test_api.c",
        "test_ground.c",
        "test_world.c",
        "test_data.py",
    ]
    assert reached("csrc/ground/ground.h")[0] == "test_ground.c"
    assert reached("csrc/api.c")[0] == "test_api.c"
    assert reached("tests/c/test_world.c") == ["test_world.c"]


def test_who_still_names_a_deleted_file_is_reached():
    tree = {"launcher/gone.py": "", "tests/launcher/test_x.py": "from hvdlite.launcher import gone"}
    assert reached("launcher/gone.py", tree) == ["test_x.py"]
    assert reached("launcher/gone.py", {**tree, "launcher/wrong.py": "def"}) == ["test_x.py"]


def test_the_nearest_that_fit_are_chosen_and_the_others_named():
    readers = {"launcher/a.py": {"tests/launcher/test_near.py", "launcher/b.py"}}
    readers["launcher/b.py"] = {"tests/launcher/test_far.py", "tests/launcher/test_long.py"}
    takes = {"tests/launcher/test_near.py": 5.0, "tests/launcher/test_far.py": 4.0, "tests/launcher/test_long.py": 30.0}
    for most, run in ((10.0, ["near", "far"]), (6.0, ["near"]), (4.5, ["far"]), (99.0, ["near", "far", "long"])):
        choice = changed.choose(["launcher/a.py"], readers, takes, most)
        assert choice.run == [f"tests/launcher/test_{name}.py" for name in run]
        assert set(choice.run) | set(choice.left) == set(takes)
    itself = changed.choose(["tests/launcher/test_long.py", "launcher/a.py"], readers, takes, 5.0)
    assert itself.run == ["tests/launcher/test_long.py"] and len(itself.left) == 2
    assert changed.choose(["launcher/a.py"], readers, {"tests/launcher/test_far.py": 4.0}, 9.0) == (
        ["tests/launcher/test_far.py"],
        [],
    )
    said = changed.says("HEAD", ["launcher/a.py"], itself)
    assert "2 further test files can be reached (nearest: test_near.py test_far.py): tests/run" in said
    assert "further" not in changed.says("HEAD", [], changed.Choice([], []))


def test_what_has_changed_is_uncommitted_untracked_or_else_the_last_commit(tmp_path):
    def git(*words):
        subprocess.run(["git", "-c", "user.name=x", "-c", "user.email=x@y", *words], cwd=tmp_path, check=True)

    def commit(name):
        (tmp_path / name).write_text("")
        git("add", name)
        git("commit", "-q", "-m", name)

    git("init", "-q")
    commit("a.py")
    commit("b.py")
    assert changed.since(tmp_path) == ("HEAD~1", ["b.py"])
    (tmp_path / "é.py").write_text("x")
    (tmp_path / "a.py").unlink()
    assert changed.since(tmp_path) == ("HEAD", ["a.py", "é.py"])
    assert changed.since(tmp_path, "HEAD~1") == ("HEAD~1", ["a.py", "b.py", "é.py"])
    assert changed.texts(tmp_path, ["gone.py"]) == {"a.py": "", "b.py": "", "é.py": "x", "gone.py": ""}
    with pytest.raises(ValueError, match="nowhere"):
        changed.since(tmp_path, "nowhere")


def test_what_took_how_long_is_kept_by_test(tmp_path):
    record = tmp_path / "seconds.json"
    record.write_text(json.dumps({"tests/a.py": {"tests/a.py::x": 1.0, "tests/a.py::y": 2.0}}))
    run = durations.Durations(record)
    for name in ("tests/a.py::x", "tests/a.py::x", "tests/b.py::z"):
        run.pytest_runtest_logreport(SimpleNamespace(nodeid=name, duration=4.0))
    run.pytest_sessionfinish()
    assert durations.known("tests/a.py", tmp_path) == 10.0 and durations.known("tests/b.py", tmp_path) == 4.0
    log = tmp_path / "address-undefined/tests/c/test_x.log"
    assert durations.known("tests/c/test_x.c", tmp_path) == durations.UNKNOWN[".c"]
    log.parent.mkdir(parents=True)
    log.write_text("said\nok      test_x (7 s)\n")
    assert durations.known("tests/c/test_x.c", tmp_path) == 8.0
    said = []
    run.pytest_terminal_summary(SimpleNamespace(section=said.append, write_line=said.append))
    assert [line.split()[-1] for line in said[1:]] == ["tests/a.py", "tests/b.py", "all"]


def test_a_budget_is_written_anew_and_keeps_its_reasons(tmp_path):
    budget = tmp_path / "durations.txt"
    head = "# head\nbudget 5 first\nbudget 7 a feature of three words\n"
    budget.write_text(f"{head}  3.0 tests/gone.py\n  1.0 tests/b.py\n")
    (tmp_path / "seconds.json").write_text(json.dumps({"tests/a.py": {"x": 1.25, "y": 2.0}}))
    assert durations.write({"tests/a.py", "tests/b.py"}, budget, tmp_path) == pytest.approx(4.2)
    allowed, seconds = durations.budgets(budget.read_text())
    assert allowed == [(5, "first"), (7, "a feature of three words")] and seconds == {
        "tests/a.py": 3.2,
        "tests/b.py": 1.0,
    }
    with pytest.raises(KeyError):  # it has not run yet
        durations.write({"tests/c.py"}, budget, tmp_path)
