"""Which plans are found, and what becomes of a package, a generator or a name that is wrong?"""

import importlib
import sys

import pytest

from hvdlite.plan import PlanError, algorithm, make, prove, registry
from hvdlite.plan.table import MOVES_MAX

THEIRS = '''
from hvdlite.plan import algorithm

@algorithm("theirs")
def star(draft):
    """to rank 0 and back

    and more"""
    draft.chunks = 1
    for r in range(1, draft.size):
        draft.move(r, 0, 0)
        draft.next()
    for r in range(1, draft.size):
        draft.move(0, r, 0, how="copy")
'''


@pytest.fixture(autouse=True)
def known(monkeypatch):
    """What a test registers is gone after it."""
    registry.names()
    monkeypatch.setattr(registry, "_known", dict(registry._known))


@pytest.fixture
def package(tmp_path, monkeypatch):
    """A package of somebody else's: one plan that is good, three modules that cannot be imported."""
    modules = {
        "plans_theirs": THEIRS,
        "plans_broken": THEIRS.replace("theirs", "half") + "raise RuntimeError('no\x1b')\n",
        "plans_ends": "raise SystemExit(3)\n",
        "plans_twice": THEIRS.replace("theirs", "ring"),
    }
    for name, text in modules.items():
        (tmp_path / f"{name}.py").write_text(text)
        monkeypatch.delitem(sys.modules, name, raising=False)
    about = tmp_path / "theirs-1.0.dist-info"
    about.mkdir()
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: theirs\nVersion: 1.0\n")
    (about / "entry_points.txt").write_text("[hvdlite.plans]\n" + "".join(f"{name} = {name}\n" for name in modules))
    monkeypatch.syspath_prepend(str(tmp_path))
    importlib.invalidate_caches()
    yield
    for name in modules:
        sys.modules.pop(name, None)


def test_own_plans_are_there():
    names = registry.names()
    assert {"central", "direct", "exchange", "grid", "halving", "hierarchical", "ring", "trees"} <= set(names)
    assert names["ring"][0] == ("allreduce", "reducescatter", "allgather")
    assert all(line and package == "hvdlite" for _, line, package in names.values())


def test_a_package_of_somebody_else_s(package):
    assert prove(make("theirs", 5)).moves == 8
    assert registry.names()["theirs"] == (("allreduce",), "to rank 0 and back", "plans_theirs")
    problems = registry.found_elsewhere()
    assert [line.split()[1] for line in problems] == ["plans_broken", "plans_ends", "plans_twice"]
    assert "RuntimeError: no?" in problems[0] and "SystemExit: 3" in problems[1]
    assert "plan 'ring' of plans_twice: hvdlite.plan.generators.ring already has a plan of this name" in problems[2]
    assert "half" not in registry.names()


def test_a_name_twice_is_refused():
    with pytest.raises(PlanError, match=r"plan 'ring' of \S+: .* already has a plan of this name \[HVD003\]"):
        algorithm("ring")(print)
    with pytest.raises(PlanError, match=r"printable characters \[HVD003\]"):
        algorithm("\x1b[31m")
    with pytest.raises(PlanError, match=r"must be from allreduce, .* \[HVD003\]"):
        algorithm("mine", kinds="allsum")


def test_a_generator_of_no_module_stays(package):
    exec(THEIRS.replace('"theirs"', '"typed", kinds="allreduce"'), {})
    registry.found_elsewhere()
    assert registry.names()["typed"][0] == ("allreduce",) and prove(make("typed", 3)).moves == 4


def test_a_generator_that_fails_is_named():
    @algorithm("fails")
    def fails(draft):
        raise KeyError("seven")

    @algorithm("endless")
    def endless(draft):
        while True:
            draft.move(0, 1, 0)

    @algorithm("unfinished")
    def unfinished(draft):
        draft.move(0, 1, 0)

    def refused(does, text):
        registry._known.pop("wrong", None)
        algorithm("wrong")(does)
        with pytest.raises(PlanError, match=rf"plan 'wrong': {text}.*\[HVD00[23]\]"):
            make("wrong", 2)

    def steps(draft):
        while True:
            draft.next()

    refused(steps, rf"its generator makes more than {MOVES_MAX} steps")
    refused(lambda draft: sys.exit(3), "its generator raised SystemExit: 3")
    refused(lambda draft: draft.move(0.9, 1, 0), r"the move \(0, 0.9, 1, 0, 1, 1\) must consist of whole numbers")
    refused(lambda draft: setattr(draft, "chunks", 1.5), "'float' object")
    refused(lambda draft: setattr(draft, "size", 1), "its generator returned another plan than requested")
    with pytest.raises(PlanError, match=r"plan 'fails': its generator raised KeyError: 'seven' \[HVD003\]") as error:
        make("fails", 2)
    assert isinstance(error.value.__cause__, KeyError)
    with pytest.raises(PlanError, match=rf"'endless': its generator makes more than {MOVES_MAX} moves \[HVD003\]"):
        make("endless", 2)
    with pytest.raises(PlanError, match=r"'unfinished': .* chunk 0 of rank 0 lacks what rank 1 gave \[HVD001\]"):
        make("unfinished", 2)


@pytest.mark.parametrize(
    "told, text",
    [
        ({"name": "rung"}, r"there is no plan 'rung'; there are aggregator, central, .*trees \[HVD003\]"),
        ({"kind": "alltoall"}, r"plan 'ring' is for allreduce, reducescatter, allgather, not for alltoall \[HVD003\]"),
        ({"size": 0}, r"root 0 of 0 ranks is invalid; a plan is for 1 to 1024 ranks \[HVD003\]"),
        ({"root": 4}, r"root 4 of 4 ranks"),
        ({"turns": 3}, r"its generator raised TypeError: .*'turns' \[HVD003\]"),
        ({"name": "halving", "size": 6}, r"6 ranks are not a power of two \[HVD003\]"),
        ({"name": "grid", "dims": (2, 3)}, r"2x3 is not a grid of 4 ranks \[HVD003\]"),
        (
            {"name": "grid", "dims": (2, 2), "orders": [(0, 0)]},
            r"must have each of 2 dimensions once \[HVD003\]",
        ),
        (
            {"name": "grid", "dims": (2, 2), "rates": ["1GB/s"]},
            r"needs one rate for each, not 1 \[HVD003\]",
        ),
        ({"name": "hierarchical", "hosts": [[0, 1], [2, 2]]}, r"must list each of 4 ranks once \[HVD004\]"),
        ({"name": "trees", "packed": [[(0, 1)]], "pieces": 1 << 30}, r"too many moves \[HVD003\]"),
        ({"name": "aggregator", "pieces": 0}, r"0 pieces: the number must be at least 1 \[HVD003\]"),
    ],
)
def test_what_cannot_be_made_says_why(told, text):
    with pytest.raises(PlanError, match=text):
        make(**{"name": "ring", "size": 4, **told})
