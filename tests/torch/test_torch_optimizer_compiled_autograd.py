"""Compiled autograd: a backward pass that does not tell when gradients are complete is refused by its first hook, on
all ranks; one that it leaves to autograd averages as ever, and so does the next step without it."""

import contextlib

import pytest
from ranks import as_ranks
from test_torch_optimizer import assert_same, batch, loss_of, pair

torch = pytest.importorskip("torch")
pytest.importorskip("torch._dynamo.compiled_autograd")

import hvdlite.torch as hvd  # noqa: E402


@contextlib.contextmanager
def switched_on(form):
    """How a loop comes to compiled autograd: by the option, or by the context."""
    import torch._dynamo.compiled_autograd as compiled_autograd

    torch._dynamo.reset()
    enable = getattr(compiled_autograd, "_enable", None) or compiled_autograd.enable
    config = torch._dynamo.config
    if form in ("function", "model") and not hasattr(config, "compiled_autograd"):
        pytest.skip("this torch has no such option")
    with contextlib.ExitStack() as stack:
        if form in ("function", "model"):
            stack.enter_context(config.patch(compiled_autograd=True))
        else:
            stack.enter_context(enable(torch.compile(backend="eager")))
            if form == "disabled":
                disable = getattr(compiled_autograd, "_disable", None) or compiled_autograd.disable
                stack.enter_context(disable())
        yield
    torch._dynamo.reset()


def backward_by(form, model, rows):
    """One forward and backward."""
    if form == "function":

        @torch.compile(backend="aot_eager")
        def train(rows):
            loss = loss_of(model, rows)
            loss.backward()
            return loss

        train(rows)
    elif form == "model":
        loss_of(torch.compile(model, backend="aot_eager"), rows).backward()
    else:
        loss_of(model, rows).backward()


@pytest.mark.parametrize("form", ["function", "context", "model", "disabled"])
@as_ranks(2, deadline=120)
def test_with_clipping_it_is_refused_or_the_weights_are_those_of_one_process(form):
    model, optimizer, reference, plain = pair()

    def step(number, compiled):
        whole, mine = batch(number)
        optimizer.zero_grad(), plain.zero_grad()
        if compiled:
            with switched_on(form):
                backward_by(form, model, mine)
        else:
            loss_of(model, mine).backward()
        loss_of(reference, whole).backward()
        for this in (model, reference):
            torch.nn.utils.clip_grad_norm_(this.parameters(), 0.1)
        optimizer.step(), plain.step()

    refused = False
    for number in range(3):
        try:
            step(number, True)
        except hvd.HvdError as error:
            refused = error.code == "HVD810" and "torch._dynamo.config.compiled_autograd = False" in str(error)
            assert refused, error
            step(number, False)
    assert refused or form not in ("function", "context")
    everyone = hvd.allgather(torch.cat([each.detach().flatten() for each in model.parameters()])[None])
    assert torch.equal(everyone[0], everyone[1])
    assert_same(model, reference)
