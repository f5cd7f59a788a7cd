"""Local steps with interrupts, new jobs, other periods, buffers, elastic states and several trainers lose nothing."""

import contextlib
import itertools

import pytest
from ranks import as_ranks

torch = pytest.importorskip("torch")

import hvdlite.torch as hvd  # noqa: E402
from hvdlite.torch.local import diloco  # noqa: E402


def by_ones(model, steps):
    """Steps of a model with one weight, each of which adds 1 + rank to it."""
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    trainer = hvd.LocalSGD(model, optimizer, sync_every=4)
    more_ones(model, optimizer, steps)
    return trainer


def more_ones(model, optimizer, steps):
    for _ in range(steps):
        model.weight.grad = torch.full((1, 1), -1.0 - hvd.rank())
        optimizer.step()


def one_weight():
    model = torch.nn.Linear(1, 1, bias=False)
    torch.nn.init.zeros_(model.weight)
    return model


def interrupt_rank_0(monkeypatch, *numbers):
    """Its waits of these numbers end with a KeyboardInterrupt."""
    wait, calls = diloco.WeightSum.wait, itertools.count(1)

    def interrupted(self):
        if hvd.rank() == 0 and next(calls) in numbers:
            raise KeyboardInterrupt
        return wait(self)

    monkeypatch.setattr(diloco.WeightSum, "wait", interrupted)


@as_ranks(2)
def test_what_was_in_flight_when_the_job_began_anew_is_not_lost():
    model = one_weight()
    trainer = hvd.DiLoCo(model, torch.optim.SGD(model.parameters(), lr=1.0), 4, diloco.nesterov, delay=2)
    trainer._outer = lambda each: torch.optim.SGD(each, lr=1.0)
    more_ones(model, trainer._optimizer, 4)
    hvd.shutdown()
    hvd.init()
    trainer.finish()
    assert model.weight.item() == 6.0


@as_ranks(2)
def test_a_longer_period_begins_where_a_checkpoint_is_loaded():
    model = one_weight()
    state = by_ones(model, 40).state_dict()
    longer = hvd.LocalSGD(model, torch.optim.SGD(model.parameters(), lr=1.0), sync_every=10)
    longer.load_state_dict(state)
    more_ones(model, longer._optimizer, 10)
    assert model.weight.item() == 60.0 + 15.0


@as_ranks(2)
def test_buffers_are_averaged_where_ranks_have_made_steps():
    model = torch.nn.Sequential(torch.nn.BatchNorm1d(3), torch.nn.Linear(3, 1))
    hvd.broadcast_parameters(model.state_dict(), 0)
    trainer = hvd.LocalSGD(model, torch.optim.SGD(model.parameters(), lr=0.01), sync_every=4)
    model.double().float()  # replaces buffers
    for _ in range(6):
        model(torch.randn(8, 3) + 10 * hvd.rank()).sum().backward()
        trainer._optimizer.step()
    trainer.finish()
    hvd.check_consistency([*model.parameters(), model[0].running_mean, model[0].running_var])
    assert 1.0 < model[0].running_mean[0] < 4.0
    model[0].running_mean.fill_(7.0)
    trainer.finish()
    assert model[0].running_mean[0] == 7.0


@as_ranks(1)
def test_an_outer_optimizer_of_other_parameters_and_a_former_trainer():
    model = one_weight()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    hvd.DiLoCo(model, optimizer, outer=lambda _: torch.optim.SGD(model.parameters(), lr=1.0))
    with pytest.raises(ValueError, match="exactly the parameters that it is given.*HVD048"):
        more_ones(model, optimizer, 1)
    former = by_ones(model := one_weight(), 3)
    former.finish()
    hvd.LocalSGD(model, former._optimizer)
    more_ones(model, former._optimizer, 3)
    former.finish()
    assert model.weight.item() == 6.0


@as_ranks(2)
def test_an_elastic_state_keeps_local_steps_and_synchronizes_the_rest():
    model, other = one_weight(), one_weight()
    trainer = by_ones(model, 5)
    plain = torch.optim.SGD(other.parameters(), lr=1.0)
    scheduler = torch.optim.lr_scheduler.StepLR(trainer._optimizer, 3)
    state = hvd.elastic.TorchState(
        model, trainer._optimizer, trainer=trainer, other=other, plain=plain, scheduler=scheduler
    )
    more_ones(model, trainer._optimizer, 1 + hvd.rank())
    other.weight.data.fill_(hvd.rank() + 1.0)
    for _ in range(3 - hvd.rank()):
        scheduler.step()
    state.sync()
    assert model.weight.item() == 6.0 + (1 + hvd.rank()) * (2 + hvd.rank())
    assert other.weight.item() == 1.0 and trainer._optimizer.param_groups[0]["lr"] == 0.1
    other.weight.data.fill_(5.0)
    more_ones(model, trainer._optimizer, 1)
    before = model.weight.item()
    state.restore()
    assert model.weight.item() == before and other.weight.item() == 1.0
    newcomer = one_weight()
    empty = hvd.LocalSGD(newcomer, torch.optim.SGD(newcomer.parameters(), lr=1.0), sync_every=4)
    taken = trainer if hvd.rank() == 0 else empty
    mine = model if hvd.rank() == 0 else newcomer
    hvd.elastic.TorchState(mine, taken._optimizer, trainer=taken).sync()
    assert mine.weight.item() == (before if hvd.rank() == 0 else 6.0)


@as_ranks(2)
def test_all_ranks_resume_a_saved_elastic_state_of_rank_0():
    model = one_weight()
    trainer = by_ones(model, 5)
    state = hvd.elastic.TorchState(model, trainer._optimizer, trainer=trainer, step=5)
    state.sync()
    saved = hvd.broadcast_object(state.state_dict())
    again = one_weight()
    other = by_ones(again, 0)
    resumed = hvd.elastic.TorchState(again, other._optimizer, trainer=other, step=0)
    resumed.load_state_dict(saved)
    resumed.sync()
    assert (again.weight.item(), other._schedule.step, resumed.step) == (7.0, 5, 5)
    more_ones(again, other._optimizer, 3)
    assert again.weight.item() == 6.0 + 1.0 + 3 * 1.5


@as_ranks(2)
def test_an_interrupted_finish_is_called_again(monkeypatch):
    model = one_weight()
    trainer = by_ones(model, 6)
    interrupt_rank_0(monkeypatch, 1)
    with contextlib.suppress(KeyboardInterrupt):
        trainer.finish()
    if hvd.rank() == 0:
        trainer.finish()
    assert model.weight.item() == 9.0


@as_ranks(2)
def test_several_trainers_need_equal_numbers_of_steps():
    """The rank with fewer steps says so; the other one would wait in a turn of the second trainer."""
    models = one_weight(), one_weight()
    first, second = (by_ones(model, 0) for model in models)
    for _ in range(5 if hvd.rank() == 0 else 8):
        more_ones(models[0], first._optimizer, 1)
        if hvd.rank() == 0 or first._schedule.step < 8:
            more_ones(models[1], second._optimizer, 1)
    if hvd.rank() == 0:
        with pytest.raises(ValueError, match="one of several DiLoCo.*HVD048"):
            first.finish()


@as_ranks(2)
def test_an_interrupted_wait_goes_on_and_loses_no_step(monkeypatch):
    model = one_weight()
    trainer = by_ones(model, 0)
    interrupt_rank_0(monkeypatch, 2, 6)
    for _ in range(14):
        with contextlib.suppress(KeyboardInterrupt):
            more_ones(model, trainer._optimizer, 1)
    monkeypatch.undo()
    trainer.finish()
    assert model.weight.item() == 14 * 1.5
    assert trainer._schedule.turn == 4
