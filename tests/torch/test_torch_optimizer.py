"""DistributedOptimizer trains as one process would on the batches of all ranks together.

The reference is computed on every rank by a plain optimizer on the whole batch, in float64.
"""

import copy
import warnings

import pytest
from ranks import as_ranks

torch = pytest.importorskip("torch")

import hvdlite.torch as hvd  # noqa: E402

MAKERS = {
    "sgd": lambda params: torch.optim.SGD(params, lr=0.05, momentum=0.9, weight_decay=0.01),
    "adam": lambda params: torch.optim.Adam(params, lr=0.01),
    "adamw": lambda params: torch.optim.AdamW(params, lr=0.01),
}


def network():
    torch.manual_seed(7)
    return torch.nn.Sequential(torch.nn.Linear(5, 9), torch.nn.Tanh(), torch.nn.Linear(9, 3)).double()


def batch(step, rows=4):
    """The whole batch of a step and this rank's part of it."""
    generator = torch.Generator().manual_seed(step)
    whole = torch.randn(rows * hvd.size(), 5, generator=generator, dtype=torch.float64)
    return whole, whole[hvd.rank() * rows : (hvd.rank() + 1) * rows]


def counted(optimizer):
    """How often each parameter was submitted, by name, from now on."""
    sends, wire = {}, optimizer._hvd.wire
    send, prepare_all = wire.send, wire.prepare_all

    def count(numbers):
        for number in numbers:
            sends[wire.names[number]] = sends.get(wire.names[number], 0) + 1

    def counted_send(number):
        count([number])
        return send(number)

    def counted_prepare_all(numbers):
        flight = prepare_all(numbers)
        count(numbers if flight is not None else [])
        return flight

    wire.send, wire.prepare_all = counted_send, counted_prepare_all
    return sends


def loss_of(model, rows):
    return (model(rows) - rows.sum(1, keepdim=True)).pow(2).mean()


def assert_same(model, reference):
    for (name, mine), other in zip(model.named_parameters(), reference.parameters()):
        torch.testing.assert_close(mine, other, rtol=1e-9, atol=1e-11, msg=lambda m, n=name: f"{n}: {m}")


def pair(make=MAKERS["sgd"], **arguments):
    """A model with a distributed optimizer, and its reference with a plain one."""
    model, reference = network(), network()
    optimizer = hvd.DistributedOptimizer(make(model.parameters()), model.named_parameters(), **arguments)
    return model, optimizer, reference, make(reference.parameters())


@pytest.mark.parametrize("maker", MAKERS)
@as_ranks(1, 2, 3)
def test_training_equals_one_process_on_the_whole_batch(maker):
    model, optimizer, reference, plain = pair(MAKERS[maker])
    for step in range(6):
        whole, mine = batch(step)
        for this, opt, rows in ((model, optimizer, mine), (reference, plain, whole)):
            opt.zero_grad()
            loss_of(this, rows).backward()
            opt.step()
    assert_same(model, reference)


@as_ranks(1, 2, 3)
def test_gradients_of_several_passes_are_summed():
    model, optimizer, reference, plain = pair(backward_passes_per_step=2)
    for step in range(4):
        optimizer.zero_grad(), plain.zero_grad()
        for half in range(2):
            whole, mine = batch(2 * step + half)
            loss_of(model, mine).backward()
            loss_of(reference, whole).backward()
        optimizer.step(), plain.step()
    whole, mine = batch(100)  # a last window of one pass only
    optimizer.zero_grad(), plain.zero_grad()
    loss_of(model, mine).backward(), loss_of(reference, whole).backward()
    optimizer.step(), plain.step()
    assert_same(model, reference)


@as_ranks(1, 2)
def test_clipping_after_synchronize_averages_once():
    for skip in (True, False):
        model, optimizer, reference, plain = pair()
        for step in range(3):
            whole, mine = batch(step)
            optimizer.zero_grad(), plain.zero_grad()
            loss_of(model, mine).backward(), loss_of(reference, whole).backward()
            optimizer.synchronize()
            for this in (model, reference):
                torch.nn.utils.clip_grad_norm_(this.parameters(), 0.1)
            if skip:
                with optimizer.skip_synchronize():
                    optimizer.step()
            else:
                optimizer.step()
            plain.step()
        assert_same(model, reference)


@as_ranks(1, 2)
def test_a_grad_scaler_after_synchronize():
    """Scaled losses train as unscaled ones; an infinity on one rank makes every rank skip that step."""
    model, optimizer, reference, plain = pair()
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=1000)
    for step in range(5):
        whole, mine = batch(step)
        optimizer.zero_grad(), plain.zero_grad()
        poisoned = step == 2
        factor = float("inf") if poisoned and hvd.rank() == hvd.size() - 1 else 1.0
        scaler.scale(loss_of(model, mine) * factor).backward()
        optimizer.synchronize()
        scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 100.0)
        with optimizer.skip_synchronize():
            scaler.step(optimizer)
        scaler.update()
        loss_of(reference, whole).backward()
        if not poisoned:
            plain.step()
    assert_same(model, reference)
    assert hvd.allgather_object(scaler.get_scale()) == [512.0] * hvd.size()


@pytest.mark.parametrize("before", [True, False], ids=["scheduler made before", "scheduler made after"])
@as_ranks(1, 2)
def test_learning_rate_schedulers(before):
    model, reference = network(), network()
    inner, plain = MAKERS["sgd"](model.parameters()), MAKERS["sgd"](reference.parameters())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        scheduler = torch.optim.lr_scheduler.StepLR(inner, 2, 0.5) if before else None
        optimizer = hvd.DistributedOptimizer(inner, model.named_parameters())
        scheduler = scheduler or torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
        theirs = torch.optim.lr_scheduler.StepLR(plain, 2, 0.5)
        for step in range(5):
            whole, mine = batch(step)
            optimizer.zero_grad(), plain.zero_grad()
            loss_of(model, mine).backward(), loss_of(reference, whole).backward()
            optimizer.step(), plain.step()
            scheduler.step(), theirs.step()
    assert optimizer.param_groups[0]["lr"] == plain.param_groups[0]["lr"] == 0.05 / 4
    assert_same(model, reference)


@as_ranks(1, 2)
def test_the_class_is_the_originals():
    model, optimizer, _, plain = pair()
    assert isinstance(optimizer, torch.optim.SGD) and type(optimizer).__name__ == "SGD"
    assert optimizer.defaults == plain.defaults
    calls = []
    optimizer.register_step_pre_hook(lambda *_: calls.append("pre"))
    optimizer.load_state_dict(copy.deepcopy(plain.state_dict()))
    loss_of(model, batch(0)[1]).backward()
    optimizer.step()
    assert calls == ["pre"]  # once, also after load_state_dict has patched the class


@pytest.mark.parametrize("op", [hvd.Average, hvd.Adasum])
@pytest.mark.parametrize("rate", [float, torch.tensor])
@as_ranks(1, 2)
def test_schedulers_made_before_and_after_wrapping_steer_what_was_loaded(rate, op):
    model = network()
    inner = torch.optim.SGD(model.parameters(), lr=rate(0.1 * (1 + hvd.rank())), momentum=0.9)
    before = torch.optim.lr_scheduler.StepLR(inner, 1, 0.5)
    optimizer = hvd.DistributedOptimizer(inner, op=op)
    after = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
    hvd.broadcast_state(model, optimizer, [before, after])
    optimizer.add_param_group({"params": [torch.zeros(1, requires_grad=True)], "lr": 1.0})
    for step in range(2):
        optimizer.zero_grad()
        model(batch(step)[1]).sum().backward()
        optimizer.step()
        before.step(), after.step()
        (inner if step else optimizer).load_state_dict(optimizer.state_dict())
        assert inner.param_groups is optimizer.param_groups and inner.state is optimizer.state
    assert [float(group["lr"]) for group in optimizer.param_groups] == pytest.approx([0.1 / 16, 1.0 / 16])
    hvd.check_consistency(model)
    optimizer.state.clear()
    optimizer.param_groups = optimizer.param_groups[:1]  # a group that was removed does not come back
    optimizer.load_state_dict(optimizer.state_dict())
    assert len(optimizer.param_groups) == 1 and optimizer.param_groups[0] is inner.param_groups[0]
