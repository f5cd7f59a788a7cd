"""All ranks start from the root's weights and optimizer state, whatever the optimizer; parameters are not touched."""

import pytest
from ranks import as_ranks

torch = pytest.importorskip("torch")

import hvdlite.torch as hvd  # noqa: E402

MAKERS = {
    "sgd": lambda p, lr: torch.optim.SGD(p, lr=lr),
    "momentum": lambda p, lr: torch.optim.SGD(p, lr=lr, momentum=0.9, weight_decay=0.1),
    "adam": lambda p, lr: torch.optim.Adam(p, lr=lr, amsgrad=True),
    "adamw": lambda p, lr: torch.optim.AdamW(p, lr=lr, weight_decay=0.1),
    "rmsprop": lambda p, lr: torch.optim.RMSprop(p, lr=lr),
    "lbfgs": lambda p, lr: torch.optim.LBFGS(p, lr=lr),
    "groups": lambda p, lr: torch.optim.SGD([{"params": [q], "lr": lr * i} for i, q in enumerate(p, 1)], momentum=0.9),
}


def network(seed):
    torch.manual_seed(seed)
    return torch.nn.Sequential(torch.nn.Linear(4, 6), torch.nn.BatchNorm1d(6), torch.nn.Linear(6, 2))


def train(model, optimizer, steps):
    for step in range(steps):
        torch.manual_seed(100 + step)
        rows = torch.randn(8, 4)

        def closure(rows=rows):
            optimizer.zero_grad()
            loss = model(rows).pow(2).mean()
            loss.backward()
            return loss

        optimizer.step(closure)


def flat(part):
    """Every leaf of a nested structure, tensors as lists, in order."""
    if isinstance(part, torch.Tensor):
        return [tuple(part.shape), str(part.dtype), part.tolist()]
    if isinstance(part, dict):
        return [(key, flat(part[key])) for key in part]
    if isinstance(part, (list, tuple)):
        return [flat(value) for value in part]
    return part


def assert_equal_on_all_ranks(value):
    everyone = hvd.allgather_object(flat(value))
    assert all(other == everyone[0] for other in everyone)


@as_ranks(1, 2, 3)
def test_parameters_become_the_roots():
    root = hvd.size() - 1
    model = network(hvd.rank())
    expected = network(root).state_dict()
    hvd.broadcast_parameters(model.state_dict(), root_rank=root)
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, expected[name]), name
    other = network(hvd.rank())
    hvd.broadcast_parameters(other.named_parameters(), root_rank=root)
    hvd.broadcast_parameters(list(other.buffers()), root_rank=root)
    assert torch.equal(other[0].weight, expected["0.weight"])


@pytest.mark.parametrize("maker", MAKERS)
@as_ranks(1, 2, 3)
def test_optimizer_state_becomes_the_roots(maker):
    """As after a restart, where only the root has loaded a checkpoint: it has state, the others have none."""
    root = hvd.size() - 1
    model = network(0)
    optimizer = MAKERS[maker](model.parameters(), 0.01 if hvd.rank() == root else 0.5)
    if hvd.rank() == root:
        train(model, optimizer, 3)
    before, mine = [p.detach().clone() for p in model.parameters()], flat(optimizer.state_dict())
    hvd.broadcast_optimizer_state(optimizer, root_rank=root)
    assert all(torch.equal(p, kept) for p, kept in zip(model.parameters(), before))
    assert_equal_on_all_ranks(optimizer.state_dict())
    if hvd.rank() == root:
        assert flat(optimizer.state_dict()) == mine
    hvd.broadcast_parameters(model.state_dict(), root_rank=root)
    train(model, optimizer, 2)  # the same on all ranks from here on
    assert_equal_on_all_ranks(model.state_dict())


@as_ranks(1, 2)
def test_a_fresh_optimizer_stays_fresh_and_parameters_stay_as_they_are():
    """Horovod takes a step with zero gradients here, which moves parameters under weight decay."""
    model = network(3)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, weight_decay=0.5)
    before = [p.detach().clone() for p in model.parameters()]
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)
    assert all(torch.equal(p, kept) for p, kept in zip(model.parameters(), before))
    assert not optimizer.state and all(p.grad is None for p in model.parameters())


@as_ranks(2)
def test_state_that_the_root_has_not_is_dropped():
    model = network(0)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    if hvd.rank() == 1:
        train(model, optimizer, 1)
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)
    assert not optimizer.state_dict()["state"]


@as_ranks(1, 2)
def test_a_distributed_optimizer_and_a_model_argument_are_welcome():
    model = network(0)
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1 + hvd.rank(), momentum=0.9))
    train(model, optimizer, 1)
    hvd.broadcast_optimizer_state(optimizer, 0, model=model)
    assert optimizer.param_groups[0]["lr"] == 0.1
    assert_equal_on_all_ranks(optimizer.state_dict())


@as_ranks(2)
def test_models_that_differ_are_told_apart_by_name():
    width = 4 if hvd.rank() == 0 else 5
    with pytest.raises(hvd.HvdMismatchError, match=r"rank 0 has weight \[2, 4\] float32; rank 1 has weight \[2, 5\]"):
        hvd.broadcast_parameters(torch.nn.Linear(width, 2).state_dict(), root_rank=0)
    assert hvd.allreduce(torch.ones(1), op=hvd.Sum).item() == 2


@as_ranks(1, 2)
def test_what_is_no_set_of_parameters_is_refused():
    for bad in (3, "weights", torch.ones(2), {"a": 1}, [("a", torch.ones(1)), ("a", torch.ones(1))], [1.0]):
        with pytest.raises(ValueError, match="invalid params"):
            hvd.broadcast_parameters(bad, root_rank=0)
