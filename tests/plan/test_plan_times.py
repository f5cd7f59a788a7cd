"""Is a plan's time what the core's own formula says, and does each plan gain what its paper says it gains?

csrc/algo is compiled alone and asked for its steps and its cost, by ctypes: its tables are proved as any other.
"""

import ctypes as C
import itertools
import random
import shutil
import subprocess
from pathlib import Path

import pytest

from hvdlite.plan import Draft, Links, PlanError, make, prove, time
from hvdlite.plan.generators.grid import themis_orders
from hvdlite.plan.links import from_json
from hvdlite.plan.simulator import CURSORS, busy
from hvdlite.plan.table import HOW
from hvdlite.plan.tree_packing import least_cut, pack

ROOT = Path(__file__).resolve().parents[2]
KIND = {"allreduce": 0, "allgather": 1, "broadcast": 2, "reducescatter": 6, "reduce": 7}  # csrc/hvdlite.h
MB = 1 << 20


class Shape(C.Structure):  # these four: csrc/algo/algo.h
    _fields_ = [
        *((each, C.c_int) for each in ("kind", "rank", "size", "root")),
        *((each, C.c_uint64) for each in ("count", "grain")),
        *((each, C.c_void_p) for each in ("count_of", "host_of")),
        ("room", C.c_int64 * 16),
    ]


class Step(C.Structure):
    _fields_ = [
        *((each, C.c_int) for each in ("to", "frm")),
        *((each, C.c_uint64) for each in ("send_at", "send_count", "recv_at", "recv_count")),
        ("how", C.c_int),
        ("fold", C.c_bool),
    ]


class Algo(C.Structure):
    _fields_ = [
        ("name", C.c_char_p),
        ("ordered", C.c_bool),
        ("can", C.CFUNCTYPE(C.c_bool, C.c_int, C.c_int)),
        ("steps", C.CFUNCTYPE(C.c_int, C.POINTER(Shape))),
        ("step", C.c_void_p),
        ("whole", C.c_bool),
        ("most", C.c_uint64),
    ]


class Cost(C.Structure):
    _fields_ = [("alpha_ns", C.c_uint64), ("beta_ps", C.c_uint64)]


@pytest.fixture(scope="module")
def core(tmp_path_factory):
    """The library, and the names of its algorithms."""
    compiler = shutil.which("gcc") or shutil.which("cc")
    if not compiler:
        pytest.skip("there is no C compiler")
    folder, files = tmp_path_factory.mktemp("algo"), sorted((ROOT / "csrc" / "algo").glob("*.c"))
    stub, made = folder / "stub.c", folder / "algo.so"
    stub.write_text("#include <stdlib.h>\nvoid hvd_assert_failed(void);\nvoid hvd_assert_failed(void) { abort(); }\n")
    names = [file.stem for file in files if file.stem != "registry"]
    listed = "-DHVD_ALGO_LIST=" + " ".join(f"X({name})" for name in names)
    subprocess.run([compiler, "-O1", "-shared", "-fPIC", listed, "-o", made, *files, stub], check=True)
    library = C.CDLL(str(made))
    library.hvd_algo_named.restype = C.POINTER(Algo)
    library.hvd_algo_step.restype = Step
    library.hvd_algo_step.argtypes = [C.POINTER(Algo), C.POINTER(Shape), C.c_int]
    library.hvd_algo_cost.restype = C.c_uint64
    library.hvd_algo_cost.argtypes = [C.POINTER(Algo), C.POINTER(Shape), C.c_uint64, Cost]
    return library, names


def table_of(library, name, kind, n, chunks):
    algo, draft = library.hvd_algo_named(name.encode()), Draft(name, kind, n, chunks=chunks)
    shapes = [Shape(KIND[kind], r, n, 0, chunks, 1) for r in range(n)]
    count = {algo.contents.steps(C.byref(shape)) for shape in shapes}.pop()
    for i in range(count):
        rows = [library.hvd_algo_step(algo, C.byref(shape), i) for shape in shapes]
        for r, row in enumerate(rows):
            if row.to >= 0:
                draft.move(r, row.to, row.send_at, row.send_count, HOW[rows[row.to].how])
        draft.next()
        for r, row in enumerate(rows):
            if row.fold:
                at = 0 if algo.contents.whole else r * chunks // n
                draft.fold(r, at, chunks if algo.contents.whole else (r + 1) * chunks // n - at)
        draft.next()
    return draft.table()


def test_the_core_s_own_tables_are_proved(core):
    library, names = core
    proved = 0
    for name, kind, n in itertools.product(names, KIND, (2, 3, 4, 5, 8, 16)):
        algo = library.hvd_algo_named(name.encode()).contents
        if algo.can(KIND[kind], n) and name != "exchange":  # it adds to what it sends, once that has left
            proof = prove(table_of(library, name, kind, n, n))
            proved += 1
            if kind in ("allreduce", "reducescatter") and algo.ordered:
                assert proof.in_rank_order, (name, kind, n)
    assert proved == 78


@pytest.mark.parametrize("name", ["ring", "halving", "direct", "whole", "twotree", "chain"])
def test_times_are_the_core_s(core, name):
    """Where segments follow each other, the core's interpreter has one cursor each way of a rank."""
    library, _ = core
    algo = library.hvd_algo_named(name.encode())
    short = name in ("ring", "halving", "direct", "whole")
    links = Links.uniform(8, "20us", "1GB/s", busy=5000)
    for size, cursors in itertools.product((4096, 16 * MB) if short else (16 * MB,), CURSORS if short else ("rank",)):
        shape = Shape(0, 0, 8, 0, size // 4, 32768)
        cost = library.hvd_algo_cost(algo, C.byref(shape), 4, Cost(20000, 1000))
        own = table_of(library, name, "allreduce", 8, 8 if short else 128)
        assert time(own, size, links, cursors) == pytest.approx(cost, rel=0.01)
        if short and name != "whole":
            assert time(make(name, 8), size, links, cursors) == pytest.approx(cost, rel=0.01)


def test_central_waits_for_one_port():
    taken = time(make("central", 8), 16 * MB, Links.uniform(8, "20us", "1GB/s"))
    assert taken == pytest.approx(2 * 7 * 16 * MB, rel=0.01)


def test_hierarchical_leaves_a_host_with_fewer_bytes():
    links = Links.across([[0, 1, 2, 3], [4, 5, 6, 7]], ("1us", "1000GB/s"), ("20us", "1gbit"))
    flat, two = make("ring", 8), make("hierarchical", 8, links=links)
    left = [busy(table, 16 * MB, links)["wire out", 0] / 8 / (16 * MB) for table in (flat, two)]
    assert left == pytest.approx([1.75, 1.0])
    assert time(flat, 16 * MB, links) / time(two, 16 * MB, links) == pytest.approx(1.75, rel=0.01)
    with pytest.raises(PlanError, match=r"hosts have 1, 2 ranks, but must have equal numbers \[HVD003\]"):
        make("hierarchical", 3, hosts=[[0], [1, 2]])


@pytest.mark.parametrize("slower, gain", [(1, 1.59), (4, 1.0)])
def test_themis(slower, gain):
    rates, count = (1.0, float(slower)), 64 * 16 * 4096
    links = Links.grid((4, 4), rates, "1us")
    fixed = make("grid", 16, dims=(4, 4), orders=[(0, 1)] * 64)
    chosen = make("grid", 16, dims=(4, 4), parts=64, rates=rates)
    assert time(fixed, count, links) / time(chosen, count, links) == pytest.approx(gain, rel=0.01)
    if slower == 1:
        assert 2 * 0.75 * 64 / max(themis_orders((4, 4), rates, 64)[1]) == pytest.approx(1.6, rel=0.01)
        assert time(fixed, count, links, "rank") == pytest.approx(time(chosen, count, links, "rank"), rel=0.01)


def topology(name):
    return from_json((ROOT / "examples" / "plans" / name).read_text(), name)


def units(arcs, size):
    return {a: {b: 1 for begin, b in arcs if begin == a} for a in range(size)}


def ring_of(arcs, size):
    return next(
        (p for p in itertools.permutations(range(size)) if all((p[i - 1], p[i]) in arcs for i in range(size))), None
    )


def test_blink_on_six_gpus():
    """GPUs 0 1 3 4 5 7 of a DGX-1P: three trees against the two rings that there are."""
    links = topology("dgx1p-6.json")
    ring = ring_of(links.arcs, 6)
    rings = [list(zip(way, way[1:])) for way in (ring, (ring[0], *reversed(ring[1:])))]
    told = {"kind": "broadcast", "root": ring[0], "pieces": 128}
    three, two = make("trees", 6, links=links, **told), make("trees", 6, packed=rings, **told)
    assert three.chunks == 3 * 128
    assert time(two, 192 * MB, links) >= 1.5 * time(three, 192 * MB, links)
    assert prove(make("trees", 6, links=links)).ordered is False  # an allreduce, up and down
    assert time(make("trees", 6, links=links), 192 * MB, links) > time(three, 192 * MB, links)


def test_blink_on_all_gpus_and_on_three():
    links = topology("dgx1p.json")
    assert make("trees", 8, kind="broadcast", links=links, pieces=1).chunks == 4
    arcs = {(a, b): 0.05 for a, b in itertools.permutations(range(3), 2) if 0 in (a, b)}  # GPUs 0 1 4
    assert ring_of(arcs, 3) is None
    assert make("trees", 3, kind="broadcast", links=Links.graph(3, arcs, "1us"), pieces=1).chunks == 1


def test_a_link_that_is_twice_as_fast_bears_two_trees():
    arcs = {(0, 1): "20GB/s", (1, 2): "20GB/s", (0, 2): "10GB/s", (2, 1): "10GB/s"}
    assert make("trees", 3, kind="broadcast", links=Links.graph(3, arcs, "1us"), pieces=1).chunks == 3


def test_ranks_that_the_root_does_not_reach_are_named():
    links = Links.graph(3, {(0, 1): 1.0, (1, 0): 1.0, (2, 1): 1.0}, "1us")
    with pytest.raises(PlanError, match=r"no links lead from rank 0 to rank 2 \[HVD004\]"):
        make("trees", 3, kind="broadcast", links=links)
    with pytest.raises(PlanError, match=r"needs links that form a graph \[HVD004\]"):
        make("trees", 3)
    with pytest.raises(PlanError, match=r"no arc of a tree leads to rank 2 \[HVD003\]"):
        make("trees", 3, packed=[[(0, 1), (2, 2)]])


def test_random_graphs_are_packed_to_their_least_cut():
    r, found = random.Random(2), 0
    for _ in range(200):
        n, dense = r.randrange(3, 11), r.choice((0.3, 0.5, 0.8))
        capacity = {a: {b: r.randrange(1, 4) for b in range(n) if a != b and r.random() < dense} for a in range(n)}
        trees = pack(n, capacity, 0)
        assert len(trees) == least_cut(n, capacity, 0)[0]
        found += len(trees)
        for tree in trees:
            assert len(tree) == n - 1 and {b for _, b in tree} == set(range(1, n))
        used = [arc for tree in trees for arc in tree]
        assert all(used.count((a, b)) <= capacity[a][b] for a, b in used)
    assert found > 200
