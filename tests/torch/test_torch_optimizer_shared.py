"""Gradients whose memory somebody else has, too: another branch of backward, another parameter, the user."""

import pytest
from ranks import as_ranks

torch = pytest.importorskip("torch")

import hvdlite.torch as hvd  # noqa: E402

WIDTH, STEPS = 96, 4


class Residual(torch.nn.Module):
    """The bias's gradient is a view of the sum's, which backward needs for `first` only after all of the layers."""

    def __init__(self):
        super().__init__()
        self.bias = torch.nn.Parameter(torch.randn(WIDTH * WIDTH) * 0.1)
        self.layers = torch.nn.ModuleList([torch.nn.Linear(WIDTH, WIDTH) for _ in range(6)])
        self.first = torch.nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        h = y = self.first(x)
        for layer in self.layers:
            y = torch.relu(layer(y))
        return h + y + self.bias.view(WIDTH, WIDTH)


class Twins(torch.nn.Module):
    """Two parameters whose gradients are one."""

    def __init__(self):
        super().__init__()
        self.a, self.b = (torch.nn.Parameter(torch.randn(WIDTH * WIDTH)) for _ in range(2))

    def forward(self, x):
        return x @ (self.a.view(WIDTH, WIDTH) + self.b.view(WIDTH, WIDTH))


def made(kind):
    torch.manual_seed(0)
    return kind()


def loss(model, step, rank):
    x = torch.randn(WIDTH, WIDTH, generator=torch.Generator().manual_seed(100 * step + rank))
    return model(x).pow(2).mean() * 10


def expected(model, step, op):
    """What the ranks' gradients come to, computed alone."""
    sums = None
    for rank in range(hvd.size()):
        model.zero_grad()
        loss(model, step, rank).backward()
        grads = [parameter.grad.clone() for parameter in model.parameters()]
        sums = grads if sums is None else [total + grad for total, grad in zip(sums, grads)]
    return [total / hvd.size() if op == hvd.Average else total for total in sums]


WAYS = {
    "plain": {},
    "sum": {"op": hvd.Sum},
    "groups": {"num_groups": 2},
    "one group": {"num_groups": 1},
    "fp16": {"compression": hvd.Compression.fp16},
}


@pytest.mark.parametrize("wait", [True, False], ids=["waits", "waits later"])
@pytest.mark.parametrize("keep", [False, True], ids=["new gradients", "gradients stay"])
@pytest.mark.parametrize("way", WAYS)
@as_ranks(2)
def test_memory_that_backward_still_needs_is_not_reduced_in_place(way, keep, wait):
    model, alone = made(Residual), made(Residual)
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.0), named_parameters=model.named_parameters(), **WAYS[way]
    )
    optimizer.wait_in_backward = wait
    for step in range(STEPS):
        optimizer.zero_grad(set_to_none=not keep)
        loss(model, step, hvd.rank()).backward()
        optimizer.synchronize()
        with optimizer.skip_synchronize():
            optimizer.step()
        wanted = expected(alone, step, WAYS[way].get("op", hvd.Average))
        for (name, parameter), right in zip(model.named_parameters(), wanted):
            near = {"rtol": 2e-3, "atol": 1e-3} if way == "fp16" else {"rtol": 1e-5, "atol": 1e-6}
            torch.testing.assert_close(parameter.grad, right, msg=lambda text, name=name: f"{name}: {text}", **near)


@pytest.mark.parametrize("way", ["plain", "sum", "groups"])
@as_ranks(2, 3)
def test_parameters_that_share_the_memory_of_their_gradients(way):
    model, alone = made(Twins), made(Twins)
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.0), named_parameters=model.named_parameters(), **WAYS[way]
    )
    for step in range(STEPS):
        optimizer.zero_grad()
        loss(model, step, hvd.rank()).backward()
        for parameter, right in zip(model.parameters(), expected(alone, step, WAYS[way].get("op", hvd.Average))):
            torch.testing.assert_close(parameter.grad, right, rtol=1e-5, atol=1e-5)
        optimizer.step()


VIEWS = {
    "data": lambda gradient: gradient.data,
    "detach": lambda gradient: gradient.detach(),
    "view": lambda gradient: gradient.view(-1),
    "numpy": lambda gradient: torch.from_numpy(gradient.numpy()),
    "dlpack": torch.from_dlpack,
}


@pytest.mark.parametrize("view", VIEWS)
@as_ranks(2)
def test_views_that_the_user_holds_of_a_gradient_stay_views(view):
    torch.manual_seed(1)
    model = torch.nn.Linear(30, 30)
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.1), named_parameters=model.named_parameters()
    )
    x = torch.randn(4, 30)
    model(x).sum().backward()
    held = [VIEWS[view](parameter.grad) for parameter in model.parameters()]
    optimizer.step()
    for _ in range(6):
        for each in held:
            each.zero_()
        assert all(parameter.grad.abs().max() == 0 for parameter in model.parameters())
        model(x).sum().backward()
        assert all((each.view(-1) == p.grad.view(-1)).all() for each, p in zip(held, model.parameters()))
        optimizer.step()
