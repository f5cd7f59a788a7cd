"""torch.compile: the model, the optimizer's step, a whole training step, with no graph break of ours."""

import pytest
from ranks import as_ranks, everything
from test_torch_optimizer import MAKERS, assert_same, batch, loss_of, pair

torch = pytest.importorskip("torch")


def breaks(function):
    """(graphs, breaks and their reasons) of compiling and running a function once."""
    torch._dynamo.reset()
    found = torch._dynamo.explain(function)()
    return found.graph_count, [reason.reason for reason in found.break_reasons]


@pytest.mark.parametrize("maker", ["adam", *everything("sgd")])
@as_ranks(2, deadline=120)
def test_model_and_step_compile_as_those_of_one_process(maker):
    """fullgraph=True makes a graph break an error; for step(), which torch itself breaks, the graphs are compared."""
    torch._dynamo.reset()
    model, optimizer, reference, plain = pair(MAKERS[maker])
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)

    def advance(step):
        whole, mine = batch(step)
        optimizer.zero_grad(), plain.zero_grad()
        loss_of(compiled, mine).backward(), loss_of(reference, whole).backward()
        for this in (model, reference):
            torch.nn.utils.clip_grad_norm_(this.parameters(), 0.1)

    steps = [torch.compile(lambda opt=opt: opt.step(), backend="eager") for opt in (optimizer, plain)]
    for step in range(3):
        advance(step)
        for step_once in steps:
            step_once()
    assert_same(model, reference)
    advance(4)
    assert breaks(lambda: optimizer.step()) == breaks(lambda: plain.step())
    assert_same(model, reference)


@as_ranks(2, deadline=120)
def test_a_whole_training_step_compiles():
    model, optimizer, reference, plain = pair()
    torch._dynamo.reset()

    def train(this, opt, rows):
        opt.zero_grad()
        loss = loss_of(this, rows)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(this.parameters(), 0.1)
        opt.step()
        return loss

    compiled = torch.compile(train, backend="aot_eager")
    for step in range(3):
        whole, mine = batch(step)
        compiled(model, optimizer, mine)
        train(reference, plain, whole)
    assert_same(model, reference)
    rows = batch(3)
    ours = breaks(lambda: train(model, optimizer, rows[1]))
    assert ours == breaks(lambda: train(reference, plain, rows[0]))
