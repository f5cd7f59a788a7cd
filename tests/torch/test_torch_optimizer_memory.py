"""Gradients that stay from step to step move into plane memory, and nobody notices but the clock.

test_torch_gradient_allocator.py is about those that do not stay.
"""

import copy
import gc
import io
import os

import pytest
from ranks import as_ranks

torch = pytest.importorskip("torch")

import hvdlite.torch as hvd  # noqa: E402

WIDTH = 300


def arena():
    gc.collect()
    return hvd.memory_stats()["arena"]


def network():
    torch.manual_seed(1)
    layers = [torch.nn.Linear(WIDTH, WIDTH), torch.nn.Tanh(), torch.nn.Linear(WIDTH, 3, bias=False)]
    return torch.nn.Sequential(*layers)


def pair():
    """A distributed model and optimizer, and the same alone on all ranks' batches."""
    model, reference = network(), network()
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model.named_parameters())
    return model, optimizer, reference, torch.optim.SGD(reference.parameters(), lr=0.1)


def rows(rank, step):
    return torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(100 * step + rank))


def run(world, steps, clear=None, **backward):
    """Steps of both, and that they agree. `clear` gets an optimizer."""
    model, optimizer, reference, plain = world
    for step in steps:
        for each in (optimizer, plain):
            clear(each) if clear else each.zero_grad(set_to_none=False)
        model(rows(hvd.rank(), step).to(next(model.parameters()))).pow(2).mean().backward(**backward)
        whole = torch.cat([rows(rank, step) for rank in range(hvd.size())]).to(next(reference.parameters()))
        reference(whole).pow(2).mean().backward()
        for mine, its in zip(model.parameters(), reference.parameters()):
            assert torch.allclose(mine.grad, its.grad, rtol=1e-4, atol=1e-7)
        optimizer.step(), plain.step()


def places(model, optimizer):
    """How many gradients lie in their places."""
    found = optimizer._hvd.memory._moved
    return sum(
        number in found and parameter.grad is not None and parameter.grad.data_ptr() == found[number]
        for number, parameter in enumerate(model.parameters())
    )


@as_ranks(2)
def test_gradients_that_stay_move_into_plane_memory_once_and_remain_the_same_tensors():
    before, world = arena(), pair()
    run(world, range(1))
    held = [parameter.grad for parameter in world[0].parameters()]
    assert places(*world[:2]) == 0
    run(world, range(1, 3))
    assert places(*world[:2]) == 3 and arena() - before >= 4 * WIDTH * WIDTH
    run(world, range(3, 6))
    assert all(parameter.grad is tensor for parameter, tensor in zip(world[0].parameters(), held))
    del world, held
    assert arena() == before


@as_ranks(2)
def test_a_forked_child_sees_the_gradients_of_its_fork():
    world = pair()
    run(world, range(3))
    assert places(*world[:2]) == 3
    gradients = [parameter.grad for parameter in world[0].parameters()]
    kept = [gradient.clone() for gradient in gradients]
    ready, go = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(go), os.read(ready, 1)
        os._exit(0 if all(map(torch.equal, gradients, kept)) else 1)
    os.close(ready)
    run(world, range(3, 5))
    os.close(go)
    assert os.waitpid(child, 0)[1] == 0 and not torch.equal(gradients[0], kept[0])


@as_ranks(2)
def test_places_are_given_back_when_gradients_are_made_anew_and_found_again_when_they_stay():
    world = pair()
    run(world, range(3))
    used = arena()
    assert places(*world[:2]) == 3
    run(world, range(3, 6), lambda optimizer: optimizer.zero_grad())
    assert places(*world[:2]) == 0
    run(world, range(6, 9))
    assert places(*world[:2]) == 3 and arena() == used


@as_ranks(2)
def test_several_passes_add_up_in_place():
    model, optimizer, reference, plain = pair()
    optimizer.set_backward_passes_per_step(2)
    for step in range(4):
        optimizer.zero_grad(set_to_none=False), plain.zero_grad()
        for part in range(2):
            model(rows(hvd.rank(), 2 * step + part)).pow(2).mean().backward()
            whole = torch.cat([rows(rank, 2 * step + part) for rank in range(2)])
            reference(whole).pow(2).mean().backward()
        for mine, its in zip(model.parameters(), reference.parameters()):
            assert torch.allclose(mine.grad, its.grad, rtol=1e-4, atol=1e-7)
        optimizer.step(), plain.step()
    assert places(model, optimizer) == 3


@as_ranks(2)
def test_views_of_the_users_own_buffer_are_left_there():
    model, optimizer, reference, plain = world = pair()
    flat = torch.zeros(sum(parameter.numel() for parameter in model.parameters()))
    at = 0
    for parameter in model.parameters():
        parameter.grad = flat[at : at + parameter.numel()].view(parameter.shape)
        at += parameter.numel()
    run(world, range(4))
    assert places(model, optimizer) == 0
    expected = torch.cat([parameter.grad.flatten() for parameter in reference.parameters()])
    assert torch.allclose(flat, expected, rtol=1e-4, atol=1e-7)


@as_ranks(2)
def test_what_users_do_to_gradients_in_their_places():
    world = model, optimizer, reference, plain = pair()
    run(world, range(3))
    copied = copy.deepcopy(model[0].weight.grad).untyped_storage()
    assert copied.data_ptr() != model[0].weight.grad.data_ptr() and copied.nbytes() == 4 * WIDTH * WIDTH
    saved = io.BytesIO()
    torch.save(model[0].bias.grad, saved)
    assert saved.tell() < 20 * WIDTH  # not what lies around it
    optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    model[0].weight.grad = torch.ones(WIDTH, WIDTH)  # replaced by another tensor
    run(world, range(3, 5))
    run(world, range(5, 7), create_graph=True)
    model.zero_grad(set_to_none=True)  # dropped by the module
    run(world, range(7, 9))
    model.double(), reference.double()
    run(world, range(9, 13))


@as_ranks(2)
def test_after_another_init_gradients_move_into_the_plane_of_that_job():
    world = pair()
    run(world, range(3))
    assert places(*world[:2]) == 3
    hvd.shutdown()
    kept = [parameter.grad.clone() for parameter in world[0].parameters()]
    hvd.init()
    assert all(torch.equal(parameter.grad, value) for parameter, value in zip(world[0].parameters(), kept))
    assert arena() == 0
    run(world, range(3, 6))
    assert places(*world[:2]) == 3 and arena() >= 4 * WIDTH * WIDTH


@as_ranks(2)
def test_a_place_is_found_for_those_only_that_nobody_can_miss():
    model, optimizer, _, _ = world = pair()
    run(world, range(1))
    whole = torch.zeros(WIDTH + 5)
    model[0].bias.grad = whole[:WIDTH].detach().requires_grad_(False)
    run(world, range(1, 4))
    assert places(model, optimizer) == 2 and whole[:WIDTH].ne(0).any()
