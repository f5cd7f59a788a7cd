"""What users do around a pipeline besides: they clear gradients, hook, freeze, replace layers, forget a seed."""

from collections import OrderedDict, namedtuple

import pytest
import torch
import torch.nn.functional as F
from ranks import as_ranks
from small_pipelines import Mlp, made, mlps, pipeline, rows, sgd
from torch import nn

import hvdlite.torch as hvd
from hvdlite import parallel

SCHEDULES = (
    {}, {"schedule": "interleaved"}, {"schedule": "continuous", "update": "stash"},
    {"schedule": "continuous", "update": "pipemare"},
)  # fmt: skip


def piped(layers, schedule="1f1b", make=sgd, loss=F.cross_entropy, mesh=None, **rest):
    mesh = mesh or hvd.Mesh(pp=2)
    stage = parallel.split(layers, mesh, [1] * 4 if schedule == "interleaved" else [2, 2])
    return parallel.Pipeline(stage, make(stage.parameters()), mesh, loss, 4, schedule, timeout=20, **rest)


@as_ranks(2)
def test_clearing_gradients_between_steps_changes_nothing():
    for rest in SCHEDULES:
        found = []
        for clears in (False, True):
            pipe = piped(mlps(), **rest)
            for x, y in rows(4):
                if clears:
                    pipe.finish.optimizer.zero_grad()
                pipe.step(x, y)
            pipe.drain()
            found.append(torch.cat([p.detach().flatten() for p in pipe.module.parameters()]))
        assert torch.equal(*found), rest


@as_ranks(2)
def test_hooks_of_parameters_run_and_frozen_weights_rest():
    for rest in SCHEDULES:
        pipe = piped(mlps(), **rest)
        masked, frozen = list(pipe.module.parameters())[:2]
        masked.register_hook(torch.zeros_like)
        before = masked.detach().clone()
        for x, y in rows(3):
            pipe.step(x, y)
        assert torch.equal(masked, before), rest
        frozen.requires_grad_(False)  # also in flight
        before = frozen.detach().clone()
        for x, y in rows(3):
            pipe.step(x, y)
        pipe.drain()
        assert torch.equal(frozen, before), rest
    pipe = piped(mlps(), schedule="continuous", update="stash")
    next(pipe.module.parameters()).register_post_accumulate_grad_hook(print)
    if hvd.rank() == 0:
        with pytest.raises(ValueError, match=r"'0.line.weight' has a hook after.*HVD011"):
            pipe.step(*rows(1)[0])


@as_ranks(2)
def test_layers_that_are_replaced_or_in_eval_mode_keep_so():
    losses = []
    for schedule in ("1f1b", "interleaved"):
        layers = made(lambda place: nn.BatchNorm1d(12).eval() if place == 1 else Mlp())
        pipe = piped(layers, schedule)
        assert not layers[1].training
        pipe.step(*rows(1)[0])
        torch.manual_seed(5)
        new = Mlp()
        if hasattr(pipe.module, "3"):
            setattr(pipe.module, "3", new)
        losses.append(pipe.evaluate(*rows(1)[0], everywhere=True))
    assert torch.equal(*losses)


class Scaled(nn.Module):
    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(2.0))

    def forward(self, out, y):
        return F.cross_entropy(out * self.scale, y)


@as_ranks(2)
def test_optimizers_of_other_parameters_than_the_stage_has():
    loss = Scaled()
    extra = [loss.scale] if hvd.rank() else []
    pipe = piped(mlps(), loss=loss, make=lambda own: sgd([*own, *extra]))
    with pytest.raises(ValueError, match="HVD018"):
        pipe.state_dict()
    if hvd.rank():
        loss.scale.grad = torch.ones(())
        with pytest.raises(ValueError, match=r"a parameter of shape \[\] that learns, but is not of the stage.*HVD011"):
            pipe.finish.exchange()


@as_ranks(2)
def test_a_step_that_is_skipped_is_skipped_on_all_stages():
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    pipe = piped(mlps(), make=lambda own: sgd(list(own)[1:]), scaler=scaler)
    before = [p.detach().clone() for p in pipe.module.parameters()]
    if hvd.rank():
        list(pipe.module.parameters())[-1].register_hook(lambda g: g * float("inf"))
    pipe.step(*rows(1)[0])
    assert all(map(torch.equal, pipe.module.parameters(), before)) and scaler.get_scale() == 2.0


@as_ranks(2)
def test_a_rate_that_the_step_itself_sets_stays():
    pipe = piped(mlps())
    pipe.finish.optimizer.register_step_post_hook(lambda optimizer, *_: optimizer.param_groups[0].update(lr=0.05))
    pipe.step(*rows(1)[0])
    assert pipe.finish.optimizer.param_groups[0]["lr"] == 0.05


@as_ranks(4)
def test_copies_begin_alike():
    torch.manual_seed(hvd.rank())
    pipe = piped([Mlp() for _ in range(4)], mesh=hvd.Mesh(dp=2, pp=2))
    weights = hvd.allgather(next(pipe.module.parameters()).detach()[None])
    assert torch.equal(weights[0], weights[2]) and torch.equal(weights[1], weights[3])


@as_ranks(2)
def test_tensors_that_cannot_be_seen_or_joined_are_refused():
    pipe, (x, y) = pipeline(mlps(), 4), rows(1)[0]
    for other in (namedtuple("Pair", "a b")(x, y), OrderedDict(a=x), {"a": x, "b": y.numpy()}, {1: x}):
        with pytest.raises(ValueError, match=r"has a value of type \w+: pass tensors.*HVD010"):
            pipe.step(other, other)
    forms = pipeline(made(lambda place: Turns() if place == 3 else Mlp()), 4)
    if hvd.rank():
        with pytest.raises(ValueError, match="outputs of one form.*HVD014"):
            forms.predict(x)
    else:
        forms.predict(x)


class Turns(Mlp):
    calls = 0

    def forward(self, x):
        self.calls += 1
        return (super().forward(x), None if self.calls % 2 else x)


@as_ranks(2)
def test_two_pipelines_of_one_stage():
    first = piped(mlps(), schedule="continuous", update="stash")
    second = parallel.Pipeline(
        first.module, first.finish.optimizer, hvd.Mesh(pp=2), F.cross_entropy, 4, timeout=20
    )  # fmt: skip
    x, y = rows(1)[0]
    first.step(x, y)
    for call in (lambda: second.step(x, y), second.state_dict, lambda: second.evaluate(x, y)):
        with pytest.raises(ValueError, match="in flight.*HVD015"):
            call()
    first.drain()
    second.step(x, y)


class Reused(nn.Module):
    def __init__(self):
        super().__init__()
        self.kept = torch.zeros(())

    def forward(self, out, y):
        return self.kept.copy_(F.cross_entropy(out, y)) if not torch.is_grad_enabled() else F.cross_entropy(out, y)


@as_ranks(2)
def test_a_loss_that_returns_one_buffer():
    x, y = rows(1)[0]
    means = [piped(mlps(), loss=loss).evaluate(x, y, everywhere=True) for loss in (Reused(), F.cross_entropy)]
    assert torch.equal(*means)


class Fails(Mlp):
    def get_extra_state(self):
        return 1

    def set_extra_state(self, state):
        raise KeyError("no such state")


@as_ranks(2)
def test_a_load_that_fails_halfway_fails_everywhere():
    pipe = piped(made(lambda place: Fails() if place == 3 else Mlp()))
    with pytest.raises(KeyError if hvd.rank() else ValueError, match="no such state"):
        pipe.load_state_dict(pipe.state_dict())
    with pytest.raises(ValueError, match="HVD015"):
        pipe.step(*rows(1)[0])
