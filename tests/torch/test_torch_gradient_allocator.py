"""Gradients that autograd allocates anew lie in plane memory, and are in all else what they are without hvdlite."""

import copy
import os
import threading

import pytest
from ranks import as_ranks
from test_torch_optimizer_memory import arena, network, pair, rows, run

torch = pytest.importorskip("torch")

from torch.utils.checkpoint import checkpoint  # noqa: E402

import hvdlite.torch as hvd  # noqa: E402
from hvdlite._core import lib  # noqa: E402
from hvdlite.torch.optimizer import gradient_allocator  # noqa: E402

ALL = 3  # gradients of `network`
pytestmark = pytest.mark.skipif(
    ".".join(torch.__version__.split(".")[:2]) not in gradient_allocator._TESTED, reason="a PyTorch that is not served"
)


def drop(optimizer):
    optimizer.zero_grad()


def served(gradients):
    """How many of these gradients (or of a model's) lie in blocks."""
    if isinstance(gradients, torch.nn.Module):
        gradients = [parameter.grad for parameter in gradients.parameters()]
    return sum(lib.hvd_grad_alloc_has(each.data_ptr()) for each in gradients if each is not None and not each.is_sparse)


def backward(model, step=0):
    model(rows(hvd.rank(), step)).pow(2).mean().backward()


@as_ranks(2)
def test_they_are_allocated_there_from_the_third_step_on_and_outlive_the_optimizer():
    before, world = arena(), pair()
    run(world, range(1), drop)
    assert served(world[0]) == 0 and arena() == before
    run(world, range(1, 4), drop)
    assert served(world[0]) == ALL and served(world[2]) == 0
    used = arena()
    world[1].set_backward_passes_per_step(2)  # the first pass makes a gradient, the second adds to it
    for _ in range(3):
        world[1].zero_grad()
        backward(world[0], 1), backward(world[0], 2)
        world[1].step()
        assert served(world[0]) == ALL and arena() == used
    held = [parameter.grad for parameter in world[0].parameters()]
    sums = [tensor.clone() for tensor in held]
    del world
    assert arena() == used and all(map(torch.equal, held, sums))
    held.clear()
    assert arena() == before


@as_ranks(2)
def test_other_models_of_the_same_sizes_get_none():
    world = model, optimizer, _, _ = pair()
    foreign = network()
    plain = torch.optim.SGD(foreign.parameters(), lr=0.1)
    run(world, range(3), drop)
    for first in (drop, lambda _: None):  # the foreign one runs before and after the gradients are dropped
        for step in range(4):
            first(optimizer), plain.zero_grad()
            backward(foreign, step), plain.step()
            optimizer.zero_grad()
            backward(model, step), optimizer.step()
            assert (served(model), served(foreign)) == (ALL, 0)
    optimizer.zero_grad()
    found = torch.autograd.grad(model(rows(0, 0)).sum(), list(model.parameters()))
    assert served(found) == 0
    model(rows(hvd.rank(), 0)).sum().backward(inputs=list(model.parameters()))
    assert served(model) == ALL
    optimizer.step(), optimizer.zero_grad()
    foreign(torch.tanh(model(rows(hvd.rank(), 0))).repeat(1, 100)).sum().backward()  # both in one pass
    optimizer.step(), optimizer.zero_grad(), plain.zero_grad()
    backward(model), optimizer.step()
    assert served(model) == ALL


@as_ranks(2)
def test_a_slab_that_has_no_block_left_changes_nothing():
    world = pair()
    run(world, range(3), drop)
    held = []
    for step in range(3, 6):
        run(world, range(step, step + 1), drop)
        held.append([(each.grad, each.grad.clone()) for each in world[0].parameters()])
    assert all(torch.equal(*both) for step in held for both in step)
    del held
    run(world, range(6, 7), drop)
    assert served(world[0]) == ALL


@as_ranks(2)
def test_graphs_of_other_kinds():
    world = model, optimizer, reference, plain = pair()
    run(world, range(3), drop)
    run(world, range(3, 5), drop, retain_graph=True)
    run(world, range(5, 7), drop, create_graph=True)
    run(world, range(7, 9), drop)
    for reentrant in (True, False):
        optimizer.zero_grad(), plain.zero_grad()
        for this, each in ((model, rows(hvd.rank(), 9)), (reference, torch.cat([rows(rank, 9) for rank in range(2)]))):
            kept = checkpoint(this, each.requires_grad_(), use_reentrant=reentrant)
            (slope,) = torch.autograd.grad(this(each).sum(), each, create_graph=True)
            (kept.pow(2).mean() + slope.pow(2).sum(1).mean()).backward()
        for mine, its in zip(model.parameters(), reference.parameters()):
            assert torch.allclose(mine.grad, its.grad, rtol=1e-4, atol=1e-7)
        optimizer.step(), plain.step()
    step = threading.Thread(target=run, args=(world, range(10, 12), drop))
    step.start(), step.join()
    assert served(model) == ALL


@as_ranks(2)
def test_what_users_do_to_them():
    world = model, optimizer, _, _ = pair()
    run(world, range(4), drop)
    weight, bias = model[0].weight.grad, model[0].bias.grad
    assert weight.untyped_storage().nbytes() == 4 * weight.numel()
    kept = [each.clone() for each in (weight, bias)]
    copied, again = copy.deepcopy(weight), bias.clone()
    again.untyped_storage().resize_(8 * again.numel())
    assert torch.equal(copied, weight) and torch.equal(again, bias)
    ready, go = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(go), os.read(ready, 1)
        same = torch.equal(weight, kept[0]) and torch.equal(bias, kept[1])
        model.zero_grad()
        del weight, bias
        torch.nn.Linear(300, 300)(torch.ones(2, 300)).sum().backward()
        os._exit(0 if same else 1)
    os.close(ready)
    bias.share_memory_()
    weight.untyped_storage().resize_(8 * weight.numel())
    assert torch.equal(weight, kept[0]) and torch.equal(bias, kept[1]) and not served([bias])
    weight.untyped_storage().resize_(0)
    run(world, range(4, 7), drop)
    os.close(go)
    assert os.waitpid(child, 0)[1] == 0 and served(model) == ALL


@as_ranks(2)
def test_another_job_has_other_memory():
    world = pair()
    run(world, range(3), drop)
    held = [(each.grad, each.grad.clone()) for each in world[0].parameters()]
    for _ in range(2):
        hvd.shutdown()
        hvd.init()
        assert arena() == 0 and all(torch.equal(*both) for both in held)
        run(world, range(3, 6), drop)
        assert served(world[0]) == ALL and arena() >= 4 * 300 * 300
    del world
    assert arena() == 0 and all(torch.equal(*both) for both in held)


class Mixed(torch.nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(2)
        self.rows, self.table = torch.nn.Embedding(50, 8, sparse=True), torch.nn.Embedding(50, 8)
        self.small, self.frozen = torch.nn.Linear(8, 64, dtype=torch.bfloat16), torch.nn.Linear(64, 64)
        self.last = torch.nn.Conv1d(1, 4, 3)
        self.frozen.requires_grad_(False)

    def forward(self, index):
        found = self.small((self.rows(index) + self.table(index)).bfloat16()).float()
        return self.last(torch.tanh(self.frozen(found)).unsqueeze(1))


@as_ranks(2)
def test_kinds_of_parameters_and_those_that_come_late():
    model, late = Mixed(), torch.nn.Parameter(torch.ones(4))
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model.named_parameters())

    def steps(count):
        for step in range(count):
            optimizer.zero_grad()
            index = torch.arange(10) + 3 * step + hvd.rank()
            (model(index) * late.view(4, 1)).pow(2).mean().backward()
            optimizer.step()
        return served(model)

    assert steps(4) == 5  # not the sparse one, nor those of the frozen layer
    model.frozen.requires_grad_(True)
    assert steps(4) == 7
    optimizer.add_param_group({"params": [late]})
    assert steps(4) == 7 and served([late.grad]) == 1
    assert hvd.allgather_object(float(late.detach().sum()))[0] == float(late.detach().sum())


@pytest.mark.parametrize("reason", ["option", "version", "allocator", "trial"])
@as_ranks(2)
def test_without_it_they_stay_where_pytorch_allocates_them(reason):
    before, world = arena(), pair()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gradient_allocator, "_state", {"installed": True} if reason == "trial" else {})
        if reason == "option":
            patch.setenv("HVDLITE_GRADIENT_ALLOCATOR", "0")
        elif reason == "version":
            patch.setattr(gradient_allocator, "_TESTED", ())
        elif reason == "trial":
            patch.setattr(gradient_allocator, "_serves", lambda size, count: False)
        run(world, range(4), drop)  # "allocator": another one than the default is set, as the test before has left it
        assert served(world[0]) == 0 and arena() == before


@as_ranks(2)
def test_memory_does_not_grow():
    def resident():
        with open("/proc/self/statm") as file:
            return int(file.read().split()[1])

    model = torch.nn.Sequential(torch.nn.Linear(300, 16), torch.nn.Tanh(), torch.nn.Linear(16, 3, bias=False))
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=1e-3), model.named_parameters())
    at = []
    for step in range(1050):
        if step in (50, 1049):
            at.append((resident(), arena()))
        optimizer.zero_grad()
        backward(model, step % 10)
        optimizer.step()
    assert at[1][0] < 1.01 * at[0][0] and at[1][1] == at[0][1]
    assert served(model) == ALL
