"""One hook per gradient once a graph has shown to be plain; what brings the guards back; where runs end."""

import pytest
from ranks import as_ranks
from test_torch_optimizer import assert_same, batch, counted, loss_of, pair

torch = pytest.importorskip("torch")

from torch.utils.checkpoint import checkpoint  # noqa: E402

import hvdlite.torch as hvd  # noqa: E402


def guards(model):
    return sum(bool(parameter._backward_hooks) for parameter in model.parameters())


def train(world, steps):
    model, optimizer, reference, plain = world
    for step in steps:
        optimizer.zero_grad(), plain.zero_grad()
        loss_of(model, batch(step)[1]).backward(), loss_of(reference, batch(step)[0]).backward()
        optimizer.step(), plain.step()
    assert_same(model, reference)


@as_ranks(2)
def test_a_plain_graph_loses_its_guards_after_two_rounds_and_each_gradient_is_still_sent_once():
    world = pair()
    assert guards(world[0]) == 4
    train(world, range(2))
    assert guards(world[0]) == 0 and all(p._backward_hooks is None for p in world[0].parameters())
    sends = counted(world[1])
    train(world, range(2, 6))
    assert list(sends.values()) == [4] * 4


@as_ranks(2)
def test_waiting_later_brings_the_guards_back_at_once():
    world = pair()
    train(world, range(3))
    world[1].wait_in_backward = False
    assert guards(world[0]) == 4
    for step in range(3, 6):  # two passes onto what the first one has sent
        world[1].zero_grad(), world[3].zero_grad()
        for part in range(2):
            loss_of(world[0], batch(9 * step + part)[1]).backward()
            loss_of(world[2], batch(9 * step + part)[0]).backward()
        world[1].step(), world[3].step()
    assert_same(world[0], world[2])


@pytest.mark.parametrize("clears", [True, False])
@as_ranks(2)
def test_a_pass_that_fails_after_guards_have_gone_can_be_repeated(clears):
    world = model, optimizer, reference, plain = pair()
    train(world, range(3))

    def fail(_):
        raise ZeroDivisionError

    optimizer.zero_grad(), plain.zero_grad()
    handle = model[0].weight.register_hook(fail)
    with pytest.raises(ZeroDivisionError):
        loss_of(model, batch(3)[1]).backward()
    handle.remove()
    assert guards(model) == 4  # the others are under way
    if clears:
        optimizer.zero_grad()
    else:
        model.zero_grad()
    loss_of(model, batch(4)[1]).backward(), loss_of(reference, batch(4)[0]).backward()
    optimizer.step(), plain.step()
    assert_same(model, reference)
    train(world, range(5, 9))
    assert guards(model) == 0


class Late(torch.nn.Module):
    """Plain at first; later its first layer is used in a checkpoint, and its last one twice: within and after it."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(5)
        self.first, self.last = torch.nn.Linear(5, 5).double(), torch.nn.Linear(5, 5).double()
        self.nested, self.shared = False, False

    def block(self, rows):
        rows = torch.tanh(self.first(rows))
        return self.last(rows) if self.shared else rows

    def forward(self, rows):
        rows = rows.clone().requires_grad_()
        inner = checkpoint(self.block, rows, use_reentrant=True) if self.nested else self.block(rows)
        return self.last(inner)


def late_pair():
    model, reference = Late(), Late()
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model.named_parameters())
    return model, optimizer, reference, torch.optim.SGD(reference.parameters(), lr=0.1)


@as_ranks(2)
def test_nested_passes_that_come_later_bring_the_guards_back():
    world = late_pair()
    train(world, range(3))
    assert guards(world[0]) == 0
    world[0].nested = True
    train(world, range(3, 7))
    assert guards(world[0]) == 4
    world[0].shared = world[2].shared = True
    train(world, range(7, 10))


@as_ranks(2)
def test_a_nested_pass_that_adds_to_what_is_under_way_unguarded_is_an_error_and_the_next_step_is_right():
    world = model, optimizer, reference, _ = late_pair()
    train(world, range(3))
    model.nested = model.shared = reference.shared = True
    optimizer._hvd.order.ends[:] = bytes([1, 1, 1, 1])  # what is ready goes before the next
    optimizer.zero_grad()
    with pytest.raises(hvd.HvdError, match=r"'last\.(weight|bias).*zero_grad"):
        loss_of(model, batch(3)[1]).backward()
    optimizer.zero_grad()
    train(world, range(4, 7))
    assert guards(model) == 4


@as_ranks(2)
def test_gradients_of_other_forms_go_one_by_one_among_those_that_go_together():
    model, optimizer, reference, plain = world = pair()
    train(world, range(3))
    handles = [
        each[0].weight.register_post_accumulate_grad_hook(lambda p: setattr(p, "grad", p.grad.t().clone().t()))
        for each in (model, reference)
    ]
    sends = counted(optimizer)
    train(world, range(3, 6))
    assert list(sends.values()) == [3] * 4
    for handle in handles:
        handle.remove()
    model[2].bias.requires_grad_(False), reference[2].bias.requires_grad_(False)
    for step in range(6, 9):
        optimizer.zero_grad(), plain.zero_grad()
        loss_of(model, batch(step)[1]).backward(), loss_of(reference, batch(step)[0]).backward()
        optimizer.step(), plain.step()
    assert_same(model, reference)


@as_ranks(2)
def test_a_parameter_that_shrinks_is_sent_as_large_as_it_is():
    """The larger gradient's memory must not be taken for the smaller one's, wherever that one lies."""
    model = torch.nn.ParameterList([torch.nn.Parameter(torch.ones(1000)), torch.nn.Parameter(torch.ones(10))])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
    held = torch.full((1000,), -1.0)  # the new gradient is a part of it: same address, and a neighbour to spoil

    def step():
        optimizer.zero_grad(set_to_none=False)
        (sum((p * (hvd.rank() + 1)).sum() for p in model)).backward()
        optimizer.step()

    model[0].grad = held
    for _ in range(4):
        step()
    with torch.no_grad():
        model[0].grad = None
        model[0].data = torch.ones(400)
        held.fill_(float(hvd.rank()))
        model[0].grad = held[:400]
    step()
    assert model[0].grad.eq(1.5).all() and model[1].grad.eq(1.5).all()
    assert held[400:].eq(float(hvd.rank())).all(), "memory behind the gradient was reduced, too"
