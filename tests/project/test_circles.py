"""The C core has no circles of calls, and each folder of the engine calls those alone that csrc/README.md names."""

import callgraph
import pytest
from test_house import CSRC, complain, read

# Circles that are left. The list may only become shorter.
LEFT = [
    {"negotiation/steady_state.c", "negotiation/cache.c"},
    {"kernel/cpu_dispatch.c", "kernel/multi_output.c"},
    {"plane/nccl/device.c", "plane/nccl/end.c"},
    {"tensorflow/inflight.c", "tensorflow/kernel.c", "tensorflow/wait.c"},
]
PAGE = """### The folders of engine/
| folder | contents | calls |
| --- | --- | --- |
| `state/` | handles | the floors below |
| `execution/` | buckets | `state` |
| `engine/` itself | the turn | all above |
### Next
| `other/` | | `works` |
"""


@pytest.fixture(scope="module")
def core(symbols):
    return {path.relative_to(CSRC).as_posix(): entry for path, entry in symbols.items()}


def test_no_files_of_the_engine_call_each_other_in_a_circle(core):
    engine = {file: entry for file, entry in core.items() if callgraph.room(file)}
    complain([" ".join(sorted(circle)) for circle in callgraph.circles(callgraph.calls(engine, data=True))])


def test_circles_of_the_core_become_fewer(core):
    found, left = callgraph.circles(callgraph.calls(core)), {frozenset(circle) for circle in LEFT}
    wrong = [f"a new circle: {' '.join(sorted(circle))}" for circle in found - left]
    complain(wrong + [f"gone, take it out of LEFT: {' '.join(sorted(circle))}" for circle in left - found])


def test_folders_of_the_engine_call_those_of_their_row(core):
    allowed = callgraph.rooms(read(CSRC / "README.md"))
    assert set(allowed) == {callgraph.room(file) for file in core} - {""}, "folders of csrc/engine and the table differ"
    complain(callgraph.trespasses(callgraph.calls(core, data=True), allowed))


def test_a_circle_is_found_and_data_makes_none_unless_asked():
    made = {
        "a.c": ({"a": "T"}, {"b", "printf"}),
        "b.c": ({"b": "T"}, {"c", "table"}),
        "c.c": ({"c": "T"}, {"a", "c"}),
        "table.c": ({"table": "D"}, {"plug_in", "c"}),
        "plug_in.c": ({"plug_in": "D"}, {"b"}),
    }
    three = frozenset({"a.c", "b.c", "c.c"})
    assert callgraph.circles(callgraph.calls(made)) == {three}
    assert callgraph.circles(callgraph.calls(made, data=True)) == {three | {"table.c", "plug_in.c"}}
    made["c.c"][1].remove("a")
    assert callgraph.circles(callgraph.calls(made)) == set()


def test_the_table_of_folders_is_read_and_kept():
    allowed = callgraph.rooms(PAGE)
    assert allowed == {"state": set(), "execution": {"state"}, "engine": {"execution", "state"}}
    graph = {
        "engine/execution/w.c": {"engine/state/s.c", "engine/execution/v.c", "base/g.c"},
        "api.c": {"engine/progress.c"},
    }
    graph["engine/progress.c"] = {"engine/execution/w.c"}
    assert callgraph.trespasses(graph, allowed) == []
    graph["engine/state/s.c"] = {"engine/progress.c"}
    assert callgraph.trespasses(graph, allowed) == ["engine/state/s.c calls engine/progress.c: state may call []"]
