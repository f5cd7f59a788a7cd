"""A pipeline follows the number of ranks: whatever happens, a replay of its layouts in one process has the same bits.

The program is tests/support/elastic_pipeline_job.py. Ranks are killed after a commit, within calls of the state and at
any time, come again, are spare, lose both holders of a layer, and go on from a folder.
"""

import itertools
import json
import random
import re
import signal
import time
from pathlib import Path

import pytest
from elastic_jobs import AT_ONCE, ElasticJob
from elastic_pipeline_job import Plan, differing
from ranks import as_ranks, everything

from hvdlite.elastic_pipeline import holdings

PROGRAM = str(Path(__file__).parents[1] / "support" / "elastic_pipeline_job.py")
NEVER = ("--blacklist-cooldown-range", "100", "100")  # no replacement comes


class PipelineJob(ElasticJob):
    def __init__(self, folder, *flags, **plan):
        self.pipeline = Plan(**plan)
        super().__init__(folder, *flags, program=PROGRAM, OMP_NUM_THREADS="1", PIPELINE=json.dumps(plan))

    def equal(self):
        """Waits for the end; the layouts, once the replay has the same bits."""
        assert self.wait(100) == 0, self.out
        self.until_gone()
        wrong, log = differing(self.folder, self.pipeline)
        assert not wrong, f"{wrong} differ\n{log}\n{self.out}"
        return [(step, layout.pp, layout.dp) for step, layout in log]


@pytest.mark.parametrize(
    "ranks, plan, layouts",
    [
        (4, {"shapes": {4: [2, 2], 3: [3, 1]}, "kills": {6: [1]}, "frozen": True}, [(0, 2, 2), (6, 3, 1)]),
        *everything(
            (3, {"shapes": {3: [3, 1]}, "kills": {4: [0], 8: [1]}, "tied": True}, [(0, 3, 1), (4, 1, 2), (8, 1, 1)]),
            (2, {"shapes": {2: [1, 1]}, "kills": {5: [0]}}, [(0, 1, 1)]),
            (8, {"shapes": {8: [2, 4], 6: [3, 2]}, "kills": {6: [1, 6]}}, [(0, 2, 4), (6, 3, 2)]),
        ),
    ],
)  # fmt: skip
def test_ranks_are_killed_and_the_pipeline_changes(tmp_path, ranks, plan, layouts):
    plan = {**plan, "steps": 12}
    with PipelineJob(tmp_path, "-np", str(ranks), "--min-np", "1", *NEVER, **plan) as job:
        assert job.equal() == layouts


def until_all_train(job, count, killed_at):
    """Waits until so many ranks or more have made a step together since, so each layer has its copies again."""
    end = time.monotonic() + 60
    while True:
        last = [job.steps(pid)[-1] for pid in job.training()]
        if len(last) >= count and all(at > killed_at and size == len(last) for at, _, _, size in last):
            return
        assert time.monotonic() < end and job.process.poll() is None, job.out
        time.sleep(0.01)


SHAPES = {4: [2, 2], 3: [3, 1], 2: [2, 1], 1: [1, 1]}


@pytest.mark.parametrize("seed, deaths, pairs", everything((0, 3, False), (1, 50, False), (2, 25, True)))
def test_ranks_die_at_any_time_and_come_again(tmp_path, seed, deaths, pairs):
    drawn, killed_at = random.Random(seed), 0.0
    plan = {"shapes": SHAPES, "pause": 0.01, "copies": 3 if pairs else 2}
    with PipelineJob(tmp_path, "-np", "4", "--min-np", "1", *AT_ONCE, **plan) as job:
        for _ in range(deaths):
            until_all_train(job, 3 if pairs else 2, killed_at)
            time.sleep(drawn.uniform(0, 0.15))
            victims = drawn.sample(sorted(job.training()), 2 if pairs else 1)
            for victim in victims:
                job.signal(victim, signal.SIGKILL)
            while any(map(job.is_alive, victims)):
                time.sleep(0.001)
            killed_at = time.monotonic()
        until_all_train(job, 2, killed_at)
        (tmp_path / "last").touch()
        job.equal()


PLACES = ("step", "commit", "sync", "build", "alltoall")


@pytest.mark.parametrize("seed", everything(*range(30)))
def test_ranks_die_within_a_call_of_the_state(tmp_path, seed):
    drawn = random.Random(seed)
    deaths = {
        member: [drawn.choice(PLACES), drawn.randint(1, 4), drawn.choice((0, drawn.uniform(0, 0.02)))]
        for member in [*drawn.sample(range(4), 3), 4 + drawn.randrange(2)]
    }
    plan = {"shapes": SHAPES, "pause": 0.01, "copies": 4, "deaths": deaths}
    with PipelineJob(tmp_path, "-np", "4", "--min-np", "1", *AT_ONCE, **plan) as job:
        end = time.monotonic() + 20
        while time.monotonic() < end and sum(1 for _ in tmp_path.glob("*.met")) < len(deaths):
            time.sleep(0.05)
        time.sleep(0.3)
        (tmp_path / "last").touch()
        job.equal()


def test_a_job_goes_on_from_its_folder_with_other_ranks(tmp_path):
    """After it was preempted, and again when all that held a layer are gone. The replay is one of both jobs."""
    plan = {"shapes": {3: [3, 1], 2: [2, 1]}, "save_to": str(tmp_path / "kept"), "copies": 1, "steps": 400}
    with PipelineJob(tmp_path, "-np", "3", "--min-np", "1", *NEVER, **plan, pause=0.05) as job:
        job.until_training(3, 4)
        job.process.send_signal(signal.SIGTERM)
        assert job.wait(60) == 75, job.out
    step = max(int(line.split()[1]) for path in tmp_path.glob("*.steps") for line in path.read_text().splitlines())
    kills = {step + 4: [1]}
    with PipelineJob(tmp_path, "-np", "2", "--min-np", "1", *NEVER, **{**plan, "steps": step + 8}, kills=kills) as job:
        layouts = job.equal()
    assert layouts[0] == (0, 3, 1) and [each[1:] for each in layouts] == [(3, 1), (2, 1), (1, 1)], layouts
    assert layouts[1][0] in (step, step - 1) and step < layouts[2][0] <= step + 4
    assert len(list((tmp_path / "kept").iterdir())) == 2  # the state, and the layers of one commit


@pytest.mark.parametrize("step", everything(4))
def test_layers_that_all_holders_took_with_them_are_named(tmp_path, step):
    plan = {"shapes": {2: [2, 1]}, "copies": 1, "kills": {step: [1]}, "steps": 8}
    with PipelineJob(tmp_path, "-np", "2", "--min-np", "1", *NEVER, **plan) as job:
        assert job.wait(60) == 1
        assert "layers 4, 5, 6, 7 of the last commit are lost" in job.out and "Keep more than copies=1" in job.out


def refused(call, text, error=ValueError):
    with pytest.raises(error, match=re.escape(text)):
        call()


def state_of(**more):
    from elastic_pipeline_job import BATCH, layers_of, optimizer_of
    from torch.nn.functional import cross_entropy

    import hvdlite.torch as hvd
    from hvdlite.plan import Layer

    costs = {n: [Layer(str(i), n + 0.3, 2 * n + 0.3, 1e3, 1e4, 1e3) for i in range(8)] for n in (2, 4)}
    given = {"loss": cross_entropy, "batch": BATCH, "profile": costs, "shape": lambda size: (size, 1), **more}
    layers = given.pop("layers", layers_of(Plan()))
    return hvd.elastic.PipelineState(layers, optimizer_of, **given, step=0)


@as_ranks(2)
def test_what_does_not_fit_is_refused_by_name():
    import torch
    from elastic_pipeline_job import rows

    import hvdlite.torch as hvd

    def train(state, x, y):
        state.train(x, y)

    for more, error in (
        ({"batch": 24.0}, "batch must be a whole number"), ({"copies": 0}, "copies must be"),
        ({"pipe": 1}, "has a 'pipe' of its own"), ({"tied": [("t", ["0.weight"])]}, "'t' names"),
    ):  # fmt: skip
        refused(lambda more=more: state_of(**more), error)
    refused(state_of().commit, "hvd.elastic.run", hvd.HvdStateError)
    x, y = rows(0)
    refused(lambda: hvd.elastic.run(train)(state_of(memory=5e3), x, y), "the minimum is")
    refused(lambda: hvd.elastic.run(train)(state_of(batch=23), x, y), "keeps the batch")
    refused(
        lambda: hvd.elastic.run(train)(state_of(shape=lambda size: (size, 2)), x, y), "other numbers of layers or ranks"
    )
    refused(
        lambda: hvd.elastic.run(train)(state_of(layers=[torch.nn.Linear(8, 8).cpu] * 8), x, y), "the same module twice"
    )
    missing = OSError if hvd.rank() == 0 else ValueError
    refused(lambda: hvd.elastic.run(train)(state_of(profile="/not/there"), x, y), "/not/there", missing)
    refused(lambda: hvd.elastic.run(train)(state_of(profile={2: []}), x, y), "not one of these 8 layers")
    refused(lambda: hvd.elastic.run(train)(state_of(), x[1:], y), "has 23 rows, but train")


@as_ranks(2)
def test_a_second_function_goes_on_and_what_a_layer_got_later_is_refused():
    import torch
    from elastic_pipeline_job import rows

    import hvdlite.torch as hvd

    shapes = iter([(2, 1), (1, 1), (1, 2), (2, 1)])
    state = state_of(scaler=torch.amp.GradScaler("cpu", growth_interval=2), shape=lambda size: next(shapes))

    @hvd.elastic.run
    def train(state, steps):
        for _ in range(steps):
            mean = state.train(lambda first, last: tuple(t[first:last] for t in rows(state.step)), everywhere=True)
            state.step += 1
        return float(mean)

    first, mesh = train(state, 3), state.mesh
    assert train(state, 1) < first + 1 and (state.pipe is None) == (hvd.rank() == 1)  # weights that no commit had
    assert train(state, 1) < first + 1  # a rank that was spare has the scaler of the others
    assert [(step, layout.pp, layout.dp) for step, layout in state.log] == [(0, 2, 1), (3, 1, 1), (4, 1, 2)]

    @hvd.elastic.run
    def late(state):
        state.stage.register_parameter("more", torch.nn.Parameter(torch.zeros(1)))
        state.commit()

    refused(lambda: late(state), "'more' was added to its layer", hvd.HvdStateError)
    assert state.mesh is mesh  # sets of ranks are few


@as_ranks(3)
def test_a_pipeline_on_some_of_the_ranks_is_compared_and_saved_by_these_alone():
    import torch
    from elastic_pipeline_job import layers_of, optimizer_of, rows

    import hvdlite.torch as hvd
    from hvdlite import parallel

    mesh = hvd.Mesh(ranks=[1, 2], pp=2)
    if mesh.included():
        torch.manual_seed(0)
        stage = parallel.split(layers_of(Plan()), mesh, [3, 5])
        loss = torch.nn.functional.cross_entropy
        tied = [("weight", {0: "1.up.weight", 1: "4.up.weight"})]
        with torch.no_grad():
            stage.get_parameter("1.up.weight" if hvd.rank() == 1 else "4.up.weight").fill_(0.1)
        pipe = parallel.Pipeline(stage, optimizer_of(stage.parameters()), mesh, loss, 4, clip=1.0, tied=tied)
        first = float(pipe.step(*rows(0), everywhere=True))
        kept, whole = pipe.state_dict(), pipe.whole_state(root_rank=2)
        assert (whole is None) == (hvd.rank() == 1)
        pipe.load_state_dict(kept)
        pipe.load_whole(hvd.broadcast_object(whole, 2, process_set=mesh.process_set))
        assert float(pipe.step(*rows(0), everywhere=True)) < first
    assert hvd.allreduce(torch.tensor(1.0), op=hvd.Sum) == 3


def test_any_copies_minus_one_ranks_or_hosts_may_be_lost():
    for pp, dp, copies, spare, at in itertools.product(range(1, 5), range(1, 4), (1, 2, 3), (0, 1), (1, 2, 3)):
        ranks = pp * dp + spare
        hosts = [rank * at // ranks for rank in range(ranks)]
        held = [set(each) for each in holdings.needed([2] * pp, dp, hosts, copies)]
        gone = [*itertools.combinations(range(ranks), min(copies, ranks) - 1)]
        for lost in itertools.combinations({*hosts}, min(copies, len({*hosts})) - 1):
            gone.append([rank for rank in range(ranks) if hosts[rank] in lost])
        for lost in gone:
            left = [layers for rank, layers in enumerate(held) if rank not in lost]
            assert not holdings.lost(left, [range(2 * pp)]), (pp, dp, copies, hosts, lost)


def test_each_layer_travels_once_to_each_rank_that_lacks_it():
    drawn = random.Random(1)
    for _ in range(200):
        ranks, count = drawn.randint(1, 6), drawn.randint(1, 9)
        hosts = sorted(drawn.randrange(2) for _ in range(ranks))
        held = [set(drawn.sample(range(count), drawn.randint(0, count))) for _ in range(ranks)]
        held[0] |= set(range(count)).difference(*held)
        needs = [drawn.sample(range(count), drawn.randint(0, count)) for _ in range(ranks)]
        moves = holdings.moves(held, needs, {}, hosts)
        assert all(layer in held[source] for source, _, layer in moves)
        lacking = [(rank, layer) for rank in range(ranks) for layer in needs[rank] if layer not in held[rank]]
        assert sorted((target, layer) for _, target, layer in moves) == sorted(lacking)
        for source, target, layer in moves:
            near = any(layer in has and host == hosts[target] for has, host in zip(held, hosts))
            assert (hosts[source] == hosts[target]) == near
    assert holdings.lost([{0}, {1}], [[0, 1, 2], []]) == [2]
