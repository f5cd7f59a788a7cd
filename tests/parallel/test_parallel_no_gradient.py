"""What does not exist stays so: gradients that there are none of, outputs of an earlier time, waits without an end."""

import contextlib
import copy
import time

import pytest
import torch
import torch.nn.functional as F
from ranks import as_ranks
from small_pipelines import Mlp, made, mlps, pipeline, rows, sgd
from torch import nn

import hvdlite.torch as hvd
from hvdlite.parallel import schedule as schedules

TIED = [("line", {0: "0.line.weight", 1: "3.line.weight"})]
CONTINUOUS = {"schedule": "continuous", "update": "stash"}


def tied(frozen=True):
    layers = mlps()
    layers[3].line.weight = nn.Parameter(layers[0].line.weight.detach().clone())
    for layer in (layers[0], layers[3]):
        layer.line.weight.requires_grad_(not frozen)
    return layers


@as_ranks(2)
def test_a_tied_weight_that_is_frozen_keeps_its_bits():
    for rest in ({}, {"schedule": "gpipe", "clip": 0.1}, CONTINUOUS, {"scaler": torch.amp.GradScaler("cpu")}):
        layers = tied()
        before = layers[0].line.weight.detach().clone()
        pipe = pipeline(layers, 4, tied=TIED, **rest)
        for x, y in rows():
            pipe.step(x, y)
        pipe.drain()
        assert torch.equal(layers[3 * hvd.rank()].line.weight, before), rest


@as_ranks(2)
def test_a_tied_weight_may_freeze_later_but_on_all_stages():
    layers = tied(frozen=False)
    mine, before = layers[3 * hvd.rank()].line.weight, layers[0].line.weight.detach().clone()
    pipe = pipeline(layers, 4, tied=TIED)
    pipe.step(*rows(1)[0])
    after = mine.detach().clone()
    assert not torch.equal(after, before)
    mine.requires_grad_(False)
    pipe.step(*rows(1)[0])
    assert torch.equal(mine, after)
    mine.requires_grad_(hvd.rank() == 0)
    with pytest.raises(ValueError, match=r"'line' is (not )?frozen on stage \d.*alike on all of them \[HVD022\]"):
        pipe.step(*rows(1)[0])


class Turns(nn.Module):
    """Uses what the stage before gives in every other mini-batch of 4 micro-batches only."""

    def __init__(self):
        super().__init__()
        self.line, self.calls = nn.Linear(12, 12), 0

    def forward(self, h):
        self.calls += 1
        return self.line(h if (self.calls - 1) // 4 % 2 == 0 else torch.ones_like(h))


@as_ranks(2)
def test_a_stage_whose_output_nothing_uses_keeps_its_weights():
    for rest in ({}, {"schedule": "gpipe"}, CONTINUOUS, {"clip": 1.0}):
        layers = made(lambda place: Turns() if place == 2 else Mlp())
        mine = layers[0].line.weight
        pipe, seen = pipeline(layers, 4, **rest), []
        for x, y in rows(4):
            pipe.step(x, y)
            pipe.drain()
            seen.append(mine.detach().clone())
        if hvd.rank() == 0:
            assert torch.equal(seen[0], seen[1]) and torch.equal(seen[2], seen[3]), rest
            assert not torch.equal(seen[1], seen[2])


class Detaches(Mlp):
    def forward(self, h):
        return super().forward(h.detach_())


@as_ranks(2)
def test_a_stage_that_takes_its_input_off_the_graph_ends():
    layers = made(lambda place: Detaches() if place == 2 else Mlp())
    before = copy.deepcopy(layers[0])
    pipeline(layers, 4).step(*rows(1)[0])
    assert torch.equal(layers[0].line.weight, before.line.weight)


class Recurrent(Mlp):
    """Its output is a state that learns, and that its next forward changes in place."""

    def forward(self, h):
        new = super().forward(h)
        if not hasattr(self, "state"):
            self.state = torch.zeros_like(new)
        self.state = self.state.detach()
        self.state.mul_(0.5).add_(new)
        return self.state


@as_ranks(2)
def test_outputs_that_their_stage_changes_later():
    def layers():
        return made(lambda place: Recurrent() if place in (1, 3) else Mlp())

    wanted = layers()
    optimizer = sgd([p for layer in wanted for p in layer.parameters()])
    x, y = rows(1, n=16)[0]
    for part, target in zip(x.chunk(4), y.chunk(4)):
        for layer in wanted:
            part = layer(part)
        (F.cross_entropy(part, target) / 4).backward()
    optimizer.step()
    for schedule in ("gpipe", "1f1b"):
        pipe = pipeline(layers(), 4, make=sgd, schedule=schedule)
        pipe.step(x, y)
        for mine, alone in zip(pipe.module, wanted[2 * hvd.rank() :]):
            assert torch.equal(mine.line.weight, alone.line.weight), schedule
    expected, now = [], layers()
    for part in x.chunk(4):
        for layer in now:
            part = layer(part)
        expected.append(part.detach().clone())
    found = pipeline(layers(), 4).predict(x)
    assert found is None or torch.equal(found, torch.cat(expected))


@as_ranks(2)
def test_the_loss_everywhere_beside_updates_that_all_stages_make_together():
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0)
    for rest in ({"clip": 1.0}, {"scaler": scaler}, {"tied": TIED}):
        with pytest.raises(ValueError, match=r"at least as many micro-batches as stages, but 1 < 2.*HVD011"):
            pipeline(tied(frozen=False), 1, **CONTINUOUS, **rest).step(*rows(1)[0], everywhere=True)
        pipe = pipeline(tied(frozen=False), 2, **CONTINUOUS, **rest)
        for x, y in rows(5):
            hvd.allreduce(pipe.step(x, y, everywhere=True))  # and a call of all ranks between steps
        pipe.drain()
        pipe = pipeline(tied(frozen=False), 1, **CONTINUOUS, **rest)
        for x, y in rows(5):
            pipe.step(x, y)
        pipe.drain()


def test_on_paper_updates_together_with_the_loss_everywhere():
    """The steps of `continuous`, each of which ends when all stages have ended it."""
    for p in range(2, 8):
        for m in range(1, 10):
            steps, stuck = [[schedules.part(s, p, m, n) for n in range(6)] for s in range(p)], False
            for n in range(6):  # updates in other steps on other stages wait for each other
                updates = {tuple(a for a in row[n] if a[0] == "U") for row in steps}
                stuck = stuck or len(updates) > 1
            assert stuck == (m < p)
            schedules.check([schedules.continuous(s, p, m, 6) for s in range(p)], micro_batches=m, together=True)


@as_ranks(2)
def test_the_limit_of_time_reaches_what_stages_do_together():
    pipe = pipeline(mlps(), 4, clip=1.0)
    pipe.finish.timeout, exchange = 0.3, pipe.finish.exchange
    pipe.finish.exchange = lambda: (time.sleep(1.5 * hvd.rank()), exchange())
    raises = pytest.raises(hvd.HvdTimeoutError, match=r"norm") if hvd.rank() == 0 else contextlib.nullcontext()
    with raises:
        pipe.step(*rows(1)[0])
    hvd.barrier()


@as_ranks(2)
def test_parameters_that_are_replaced_after_the_pipeline_is_made():
    for rest in ({}, CONTINUOUS, {"schedule": "continuous", "update": "pipemare"}):
        pipe = pipeline(tied(frozen=False), 4, tied=TIED, make=sgd, **rest)
        pipe.step(*rows(1)[0])
        pipe.drain()
        line = pipe.module[0].line if hvd.rank() == 0 else pipe.module[1].line
        line.weight = nn.Parameter(line.weight.detach().clone())
        pipe.finish.optimizer.add_param_group({"params": [line.weight]})
        before = line.weight.detach().clone()
        pipe.step(*rows(1)[0])
        pipe.drain()
        weights = hvd.allgather(line.weight.detach()[None])
        assert torch.equal(weights[0], weights[1]) and not torch.equal(line.weight, before), rest
