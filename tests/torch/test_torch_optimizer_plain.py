"""The plain loop of one process, unchanged: clipping, mixed precision, accumulation, no extra calls.

Each test trains a model with a distributed optimizer on this rank's part, and a reference with a plain one on all.
"""

import warnings

import pytest
from ranks import as_ranks
from test_torch_optimizer import assert_same, batch, loss_of, pair

torch = pytest.importorskip("torch")

import hvdlite.torch as hvd  # noqa: E402


def both(model, optimizer, reference, plain, step):
    """(model, optimizer, rows) of this rank and of the reference."""
    whole, mine = batch(step)
    return (model, optimizer, mine), (reference, plain, whole)


@as_ranks(1, 2)
def test_clipping_before_step_clips_the_average_without_a_warning():
    worlds = pair()
    for step in range(4):
        norms = []
        for model, optimizer, rows in both(*worlds, step):
            optimizer.zero_grad()
            loss_of(model, rows).backward()
            norms.append(torch.nn.utils.clip_grad_norm_(model.parameters(), 0.05))
            with warnings.catch_warnings():
                warnings.simplefilter("error")
                optimizer.step()
        torch.testing.assert_close(*norms)
    assert_same(worlds[0], worlds[2])


@pytest.mark.parametrize("passes", [1, 2])
@as_ranks(1, 2)
def test_amp_with_unscale_and_clipping(passes):
    """The plain recipe of torch's documentation; an infinity on one rank makes all skip, a partial window included."""
    worlds = pair(backward_passes_per_step=passes)
    scalers = [torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=1000) for _ in range(2)]
    for step in range(6):
        poisoned = step in (2, 5)
        for (model, optimizer, rows), scaler in zip(both(*worlds, step), scalers):
            optimizer.zero_grad()
            last = hvd.size() - 1
            bad = poisoned and (optimizer is worlds[3] or hvd.rank() == last)
            for half in range(passes if step < 4 else 1):  # the last windows are partial
                factor = float("inf") if bad and half == 0 else 1.0
                scaler.scale(loss_of(model, rows) * factor).backward()
            scaler.unscale_(optimizer)
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.05)
            scaler.step(optimizer)
            scaler.update()
    assert_same(worlds[0], worlds[2])
    assert hvd.allgather_object(scalers[0].get_scale()) == [scalers[1].get_scale()] * hvd.size() == [256.0] * hvd.size()


@as_ranks(2)
def test_amp_skips_on_all_ranks_although_one_skipped_backward():
    model, optimizer, _, _ = pair()
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    before = [p.detach().clone() for p in model.parameters()]
    if hvd.rank() == 0:
        scaler.scale(loss_of(model, batch(0)[1]) * float("inf")).backward()
    else:
        scaler.scale(torch.zeros(1))
    scaler.step(optimizer)
    scaler.update()
    assert all(torch.equal(*both) for both in zip(before, model.parameters()))
    assert scaler.get_scale() == 2.0


@pytest.mark.parametrize("fused", [True, False], ids=["fused", "foreach"])
@as_ranks(2)
def test_amp_with_an_optimizer_that_does_the_scaling_itself(fused):
    def make(parameters):
        parameters = list(parameters)
        for parameter in parameters:
            parameter.data = parameter.data.float()
        return torch.optim.Adam(parameters, lr=0.01, fused=fused, foreach=None if fused else True)

    worlds = pair(make)
    scalers = [torch.amp.GradScaler("cpu", init_scale=64.0) for _ in range(2)]
    for step in range(3):
        for (model, optimizer, rows), scaler in zip(both(*worlds, step), scalers):
            optimizer.zero_grad()
            poisoned = step == 1 and (optimizer is worlds[3] or hvd.rank() == 0)
            scaler.scale(loss_of(model, rows.float()) * (float("nan") if poisoned else 1.0)).backward()
            scaler.step(optimizer)
            scaler.update()
    for mine, theirs in zip(worlds[0].parameters(), worlds[2].parameters()):
        torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-6)
    assert scalers[0].get_scale() == 32.0


@pytest.mark.parametrize("arguments", [{}, {"gradient_predivide_factor": 2.0}, {"op": hvd.Sum}], ids=str)
@pytest.mark.parametrize("wait", [True, False], ids=["waits in backward", "waits in step"])
@as_ranks(1, 2, 3)
def test_any_number_of_passes_before_step(arguments, wait):
    worlds = pair(**arguments)
    worlds[1].wait_in_backward = wait
    factor = hvd.size() if "op" in arguments else 1
    for step in range(4):
        for model, optimizer, _ in both(*worlds, step):
            optimizer.zero_grad()
            for part in range(step + 1):
                rows = batch(10 * step + part)[optimizer is worlds[1]]
                (loss_of(model, rows) * (factor if optimizer is worlds[3] else 1)).backward()
            optimizer.step()
    assert_same(worlds[0], worlds[2])


@as_ranks(2)
def test_passes_onto_gradients_that_no_zero_grad_came_between_keep_what_is_there():
    worlds = pair()
    for step in range(3):
        for model, optimizer, rows in both(*worlds, step):
            loss_of(model, rows).backward()  # nobody ever clears: gradients add up over the steps
            optimizer.step()
    assert_same(worlds[0], worlds[2])


@pytest.mark.parametrize("passes", [1, 3])
@as_ranks(1, 2)
def test_no_sync_accumulates_and_the_next_pass_sends_the_sum(passes):
    worlds = pair(backward_passes_per_step=passes)
    for step in range(3):
        for model, optimizer, _ in both(*worlds, step):
            optimizer.zero_grad()
            whole_or_mine = optimizer is worlds[1]
            context = optimizer.no_sync if whole_or_mine else torch.enable_grad
            with context():
                for part in range(2):
                    loss_of(model, batch(10 * step + part)[whole_or_mine]).backward()
                if whole_or_mine and hvd.size() > 1:
                    everyone = hvd.allgather(model[0].weight.grad.flatten()[None])
                    assert not torch.equal(everyone[0], everyone[1]), "these are local sums"
            loss_of(model, batch(10 * step + 5)[whole_or_mine]).backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            optimizer.step()
    assert_same(worlds[0], worlds[2])


@as_ranks(2)
def test_step_after_synchronize_warns_once_per_step_and_reduces_once():
    model, optimizer, _, _ = pair(op=hvd.Sum)
    for skip in (False, True, False):
        optimizer.zero_grad()
        loss_of(model, batch(0)[1]).backward()
        optimizer.synchronize()
        reduced = model[0].weight.grad.clone()
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            if skip:
                with optimizer.skip_synchronize():
                    optimizer.step()
            else:
                optimizer.step()
        assert [str(each.message)[:42] for each in caught] == ["optimizer.step() called without optimizer."] * (
            not skip
        )
        assert torch.equal(model[0].weight.grad, reduced)


@as_ranks(2)
def test_where_backward_is_skipped_synchronize_makes_clipping_agree():
    model, optimizer, _, _ = pair()
    for step in range(4):
        optimizer.zero_grad()
        if step % 2 != hvd.rank():
            loss_of(model, batch(step)[1]).backward()
        optimizer.synchronize()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.01)
        with optimizer.skip_synchronize():
            optimizer.step()
    states = hvd.allgather_object([p.detach() for p in model.parameters()])
    assert all(torch.equal(*both) for both in zip(*states))


@as_ranks(1, 2)
def test_passes_per_step_can_be_changed():
    worlds = pair()
    worlds[1].set_backward_passes_per_step(2)
    assert worlds[1].backward_passes_per_step == 2
    for step in range(2):
        for model, optimizer, _ in both(*worlds, step):
            optimizer.zero_grad()
            for part in range(2):
                loss_of(model, batch(10 * step + part)[optimizer is worlds[1]]).backward()
            optimizer.step()
    assert_same(worlds[0], worlds[2])
    with pytest.raises(ValueError, match="backward_passes_per_step"):
        worlds[1].set_backward_passes_per_step(0)
