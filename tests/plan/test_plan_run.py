"""Plans in real jobs: integers are exact, floats have the same bits on all ranks, and what cannot be run is refused on
all ranks at once. What a table promises is written here anew, not taken from the proof.
"""

import hashlib
import sys
from pathlib import Path

import numpy as np
import pytest
from ranks import Job, as_ranks

import hvdlite.numpy as hvd
from hvdlite import plan
from hvdlite.plan import cli, execution, registry
from hvdlite.plan.links import from_json

COUNT = 1003
FRESH_RANKS = True  # examples of pages and docstrings leave plans of theirs among the names
DGX1P = Path(__file__).resolve().parents[2] / "examples/plans/dgx1p-6.json"


def check(table):
    """Runs a table twice, and compares."""
    n, me = hvd.size(), hvd.rank()
    every = np.random.default_rng(7).integers(-1000, 1000, (n, COUNT)).astype(np.float32)
    cut, each = table.cut(COUNT), table.chunks // n
    got = plan.run(table, every[me].copy())

    def part(rank):
        return slice(cut[rank * each], cut[(rank + 1) * each])

    if table.kind == "alltoall":
        for rank in range(n):
            cell = slice(cut[rank * n + me], cut[rank * n + me + 1])
            assert (got[cell] == every[rank][cell]).all(), (table.name, me, rank)
        return
    want = every[table.root] if table.kind == "broadcast" else every.sum(0)
    if table.kind == "allgather":
        want = np.concatenate([every[rank][part(rank)] for rank in range(n)])
    counts = {"reducescatter": part(me), "reduce": slice(None if me == table.root else COUNT, None)}
    where = counts.get(table.kind, slice(None))
    assert (got[where] == want[where]).all(), (table.name, table.kind, me)
    if table.kind in ("allreduce", "allgather", "broadcast"):
        real = plan.run(table, np.random.default_rng(me).standard_normal(COUNT))
        assert len(set(hvd.allgather_object(hashlib.sha256(real).digest()))) == 1, (table.name, "bits differ")


@as_ranks(2, 3, 4)
def test_every_plan_does_what_its_kind_promises():
    hvd.init()
    ran = 0
    for name, (kinds, _, _) in registry.names().items():
        for kind in kinds if name != "trees" and (name != "halving" or hvd.size() != 3) else ():
            check(plan.make(name, hvd.size(), kind, root=hvd.size() - 1 if kind in ("broadcast", "reduce") else 0))
            ran += 1
    assert ran > 8


@as_ranks(6)
def test_blinks_trees():
    hvd.init()
    for kind in ("broadcast", "allreduce"):
        check(plan.make("trees", 6, kind, links=from_json(DGX1P.read_text()), pieces=3))


@as_ranks(2)
def test_what_is_staged_is_added_by_rank_and_small_or_odd_arrays_do():
    hvd.init()
    draft = plan.Draft("staged", "allreduce", 2)
    for rank in range(2):
        draft.move(rank, 1 - rank, 0, 2, how="stage")
    draft.next()
    draft.fold(0, 0, 2)
    draft.fold(1, 0, 2)
    for array in (np.float64(3), np.ones((0, 2)), np.full((3, 2), 2, np.int16), np.full(1, 0.5, np.float16)):
        array = np.array(array)
        assert (plan.run(draft.table(), array.copy()) == 2 * array).all()


def refused(table, array, *words):
    """On all ranks: the words are in the error."""
    with pytest.raises(plan.PlanError) as error:
        plan.run(table, array)
    assert all(word in str(error.value) for word in (*words, "[HVD009]")), error.value
    assert len(set(hvd.allgather_object(str(error.value)))) == 1


@as_ranks(2)
def test_what_cannot_be_run_is_refused_on_all_ranks():
    hvd.init()
    me, array = hvd.rank(), np.ones(8, np.float32)
    ring, direct = plan.make("ring", 2), plan.make("direct", 2)
    mine = (ring, direct)[me]
    refused(
        mine, array, "rank 0 has plan 'ring' (", "rank 1 has plan 'direct' (", ring.digest()[:8], direct.digest()[:8]
    )
    refused(plan.make("ring", 3) if me else ring, array, "'ring'", "rank 1", "for 3 ranks, this job has 2")
    refused(ring, np.ones((4, 4))[:, 1] if me else array, "rank 1", "contiguous")
    refused(ring, [1.0] if me else array, "rank 1", "not on list")
    refused(ring, np.ones(8 + me, np.float32), "rank 0 has 8 elements of float32, rank 1 has 9 elements of float32")
    assert (plan.run(ring, array) == 2).all()  # and nothing is left of it


@as_ranks(2)
def test_the_program_in_each_rank():
    assert cli.main(["run", "direct", "--kind", "reducescatter"]) == 0
    right, execution.run = execution.run, lambda table, array: array
    try:
        assert cli.main(["run", "ring"]) == 1
    finally:
        execution.run = right


def test_hvdlite_run_starts_it():
    with Job(2, [sys.executable, "-m", "hvdlite.plan", "run", "ring"]) as job:
        assert job.wait(60) == 0, job.text()
        told = "ring: allreduce on 2 ranks, 4 moves in 2 steps: integers exact, floats the same bits on all 2 ranks"
        assert job.text().count(told) == 1, job.text()
