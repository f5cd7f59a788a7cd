"""Are a pipeline's weights those of one process, bit by bit, and does it keep what its schedule says?

Every schedule and update policy on 4 stages, and on 2 stages of 2 replicas, against the papers' recurrences in one
process (one_process.py). Peaks of stash and versions are the papers' numbers.
"""

import one_process as alone
import pytest
import torch.nn.functional as F
from ranks import as_ranks

import hvdlite.torch as hvd
from hvdlite import parallel
from hvdlite.parallel import schedule as schedules

CASES = [
    ("gpipe", "flush", 8, 3, [8, 8, 8, 8], [1, 1, 1, 1]),
    ("1f1b", "flush", 8, 3, [4, 3, 2, 1], [1, 1, 1, 1]),
    ("1f1b", "flush", 2, 3, [2, 2, 2, 1], [1, 1, 1, 1]),
    ("gpipe", "flush", 1, 3, [1, 1, 1, 1], [1, 1, 1, 1]),
    ("continuous", "stash", 1, 32, [4, 3, 2, 1], [4, 3, 2, 1]),
    ("continuous", "vertical", 1, 16, [4, 3, 2, 1], [4, 4, 4, 4]),
    ("continuous", "2bw", 8, 5, [4, 3, 2, 1], [2, 2, 2, 2]),
    ("continuous", "pipemare", 1, 32, [4, 3, 2, 1], [1, 1, 1, 1]),
    ("continuous", "pipemare", 2, 16, [4, 3, 2, 1], [1, 1, 1, 1]),
]


def train(mesh, schedule, update, m, batches, **options):
    """-> (pipeline, its stage) after so many mini-batches."""
    p = mesh.shape["pp"]
    stage = parallel.split(alone.layers(p), mesh, [2] * p)
    optimizer = alone.optimizer(stage.parameters(), update)
    if update == "pipemare":
        options.setdefault("anneal", 10)
    pipe = parallel.Pipeline(stage, optimizer, mesh, F.cross_entropy, m, schedule, update, timeout=20, **options)
    pipe.actions = []
    pipe.same = _watched(pipe.weights)
    for n in range(batches):
        pipe.step(*alone.data(n, mesh.coordinate("dp"), m))
    pipe.drain()
    return pipe, stage


def _watched(policy):
    """For each micro-batch whether the weights of its backward have the bits of those of its forward."""
    forward, backward, seen, same = policy.forward, policy.backward, {}, []

    def at_forward(k):
        leaves = forward(k)
        seen[k] = leaves and (leaves, alone.sha(leaves.values()))
        return leaves

    def at_backward(k):
        leaves = seen.pop(k)
        same.append(leaves is None or alone.sha(leaves[0].values()) == leaves[1])
        return backward(k)

    policy.forward, policy.backward = at_forward, at_backward
    return same


def wanted(mesh, update, m, batches):
    p, replicas = mesh.shape["pp"], mesh.shape["dp"]
    linears = alone.trained(update, p, m, batches, replicas, anneal=10 if update == "pipemare" else 0)
    return alone.sha(linears[mesh.coordinate("pp")].parameters())


@as_ranks(4)
@pytest.mark.parametrize(("schedule", "update", "m", "batches", "stash", "copies"), CASES)
def test_weights_are_those_of_one_process(schedule, update, m, batches, stash, copies):
    mesh = hvd.Mesh(dp=1, pp=4)
    pipe, stage = train(mesh, schedule, update, m, batches)
    me = mesh.coordinate("pp")
    assert alone.sha(stage.parameters()) == wanted(mesh, update, m, batches)
    assert (pipe.peak_stash, pipe.weights.peak) == (stash[me], copies[me])
    assert len(pipe.same) == m * batches
    assert all(pipe.same) or (update == "pipemare" and me < 3)
    assert pipe.actions == schedules.PLANS[schedule](me, 4, m, batches)


@as_ranks(4)
@pytest.mark.parametrize(("schedule", "update", "m"), [case[:3] for case in CASES if case[1] != "vertical"])
def test_replicas_of_two_stages(schedule, update, m):
    mesh = hvd.Mesh(dp=2, pp=2)
    pipe, stage = train(mesh, schedule, update, m, 4)
    groups = [edge.group for chunk in pipe._chunks for edge in (chunk.before, chunk.after) if edge]
    assert all(len(group.ranks) == 2 and group is not pipe.finish.data for group in groups)  # no send waits for buckets
    assert alone.sha(stage.parameters()) == wanted(mesh, update, m, 4)
