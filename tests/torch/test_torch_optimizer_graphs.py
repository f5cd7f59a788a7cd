"""Graphs that are not a plain chain: checkpoints, shared weights, branches, hooks of the user, threads, failures."""

import threading

import pytest
from ranks import as_ranks
from test_torch_optimizer import MAKERS, assert_same, batch, counted, loss_of, network, pair

torch = pytest.importorskip("torch")

from torch.utils.checkpoint import checkpoint  # noqa: E402

import hvdlite.torch as hvd  # noqa: E402


class Tied(torch.nn.Module):
    """The first weight is used within two checkpoints and, transposed, after them."""

    def __init__(self, reentrant, depth=1):
        super().__init__()
        torch.manual_seed(3)
        self.embed = torch.nn.Linear(5, 7, bias=False).double()
        self.middle = torch.nn.Linear(7, 7).double()
        self.reentrant, self.depth = reentrant, depth

    def block(self, rows, depth):
        if depth:
            return self.kept(lambda x: self.block(x, depth - 1), rows)
        return torch.tanh(self.middle(rows @ self.embed.weight.T @ self.embed.weight @ self.embed.weight.T))

    def kept(self, function, rows):
        return function(rows) if self.reentrant is None else checkpoint(function, rows, use_reentrant=self.reentrant)

    def forward(self, rows):
        rows = rows.clone().requires_grad_()
        for _ in range(2):
            rows = self.kept(lambda x: self.block(x, self.depth), rows) @ self.embed.weight
        return rows


@pytest.mark.parametrize("depth", [0, 1])
@pytest.mark.parametrize("reentrant", [True, False])
@as_ranks(2)
def test_checkpoints_and_shared_weights_in_and_around_them(reentrant, depth):
    model, reference = Tied(reentrant, depth), Tied(None)
    optimizer = hvd.DistributedOptimizer(MAKERS["sgd"](model.parameters()), model.named_parameters())
    plain = MAKERS["sgd"](reference.parameters())
    for step in range(4):
        whole, mine = batch(step)
        sends = counted(optimizer)
        for this, opt, rows in ((model, optimizer, mine), (reference, plain, whole)):
            opt.zero_grad()
            this(rows).pow(2).mean().backward()
            torch.nn.utils.clip_grad_norm_(this.parameters(), 0.1)
            opt.step()
        if step > 0:
            assert sorted(sends.values()) == [1, 1, 1], f"each parameter is reduced once, not {sends}"
    assert_same(model, reference)


@as_ranks(2)
def test_reentrant_checkpoints_alone_reduce_each_parameter_once_and_before_backward_returns():
    model = network()
    optimizer = hvd.DistributedOptimizer(MAKERS["sgd"](model.parameters()), model.named_parameters())
    sends = counted(optimizer)
    _, mine = batch(0)
    for step in range(1, 3):
        optimizer.zero_grad()
        checkpoint(
            lambda x: checkpoint(model, x, use_reentrant=True), mine.clone().requires_grad_(), use_reentrant=True
        ).sum().backward()
        everyone = hvd.allgather(model[0].weight.grad.flatten()[None])
        assert torch.equal(everyone[0], everyone[1])
        assert list(sends.values()) == [step] * 4
        optimizer.step()


@as_ranks(2, 3)
def test_a_random_branch_per_rank_per_step_with_clipping():
    torch.manual_seed(1)
    branches = torch.nn.ModuleList(torch.nn.Linear(5, 2).double() for _ in range(4))
    reference = torch.nn.ModuleList(torch.nn.Linear(5, 2).double() for _ in range(4))
    reference.load_state_dict(branches.state_dict())
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(branches.parameters(), lr=0.1), branches.named_parameters())
    plain = torch.optim.SGD(reference.parameters(), lr=0.1)
    choices = torch.Generator().manual_seed(5)
    for step in range(12):
        whole, mine = batch(step)
        chosen = torch.randint(0, 4, (hvd.size(),), generator=choices).tolist()
        optimizer.zero_grad(), plain.zero_grad()
        branches[chosen[hvd.rank()]](mine).pow(2).sum().backward()
        for rank, part in enumerate(whole.split(len(mine))):
            (reference[chosen[rank]](part).pow(2).sum() / hvd.size()).backward()
        for this, opt in ((branches, optimizer), (reference, plain)):
            torch.nn.utils.clip_grad_norm_(this.parameters(), 0.5)
            opt.step()
    assert_same(branches, reference)


@as_ranks(2)
def test_two_optimizers_met_in_different_order_do_not_wait_for_each_other():
    """Both have a parameter that backward never reaches; rank 1's graph meets the optimizers the other way round."""
    models = [torch.nn.ModuleList([torch.nn.Linear(3, 3), torch.nn.Linear(3, 3)]) for _ in range(2)]
    optimizers = [hvd.DistributedOptimizer(torch.optim.SGD(m.parameters(), 0.1), m.named_parameters()) for m in models]
    for _ in range(3):
        rows = torch.ones(1, 3) * (hvd.rank() + 1)
        for index in (0, 1) if hvd.rank() else (1, 0):
            rows = models[index][0](rows)
        rows.sum().backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()


@as_ranks(2)
def test_gan_with_equal_names_a_shared_graph_and_clipping():
    worlds = []
    for distributed in (True, False):
        nets = [network(), torch.nn.Sequential(torch.nn.Linear(3, 9), torch.nn.Tanh(), torch.nn.Linear(9, 1)).double()]
        if worlds:
            nets[1].load_state_dict(worlds[0][0][1].state_dict())
        else:
            hvd.broadcast_parameters(nets[1].state_dict(), 0)
        optimizers = [MAKERS["adam"](net.parameters()) for net in nets]
        if distributed:
            optimizers = [hvd.DistributedOptimizer(o, n.named_parameters()) for o, n in zip(optimizers, nets)]
        worlds.append((nets, optimizers))
    for step in range(4):
        for (nets, (g_optimizer, d_optimizer)), rows in zip(worlds, reversed(batch(step))):
            generator, judge = nets
            real = rows[:, :3]
            d_optimizer.zero_grad()
            (judge(generator(rows)).mean() - judge(real).pow(2).mean()).backward()  # reaches the generator, too
            torch.nn.utils.clip_grad_norm_(judge.parameters(), 0.3)
            d_optimizer.step()
            g_optimizer.zero_grad()
            (-judge(generator(rows)).mean()).backward()  # reaches the judge, too
            torch.nn.utils.clip_grad_norm_(generator.parameters(), 0.3)
            g_optimizer.step()
    for mine, theirs in zip(worlds[0][0], worlds[1][0]):
        assert_same(mine, theirs)


@pytest.mark.parametrize("when", ["before", "after"])
@as_ranks(2)
def test_hooks_of_the_user_change_the_gradient_before_it_travels(when):
    worlds = pair()
    if when == "after":
        model, optimizer, reference, plain = worlds
    else:
        model, reference = network(), network()
    ran = []

    def triple(parameter):
        parameter.grad.mul_(3.0)

    for parameter in model.parameters():
        parameter.register_hook(lambda gradient: gradient.clamp(-0.1, 0.1))
        parameter.register_hook(lambda gradient: ran.append(1))
        parameter.register_post_accumulate_grad_hook(triple)
    if when == "before":
        optimizer = hvd.DistributedOptimizer(MAKERS["sgd"](model.parameters()), model.named_parameters())
        plain = MAKERS["sgd"](reference.parameters())
    for step in range(3):
        whole, mine = batch(step)
        optimizer.zero_grad(), plain.zero_grad()
        loss_of(model, mine).backward()
        optimizer.step()
        for rank, part in enumerate(whole.split(len(mine))):  # clamped before the average, on every rank
            partial = torch.autograd.grad(loss_of(reference, part), list(reference.parameters()))
            for parameter, gradient in zip(reference.parameters(), partial):
                share = 3.0 * gradient.clamp(-0.1, 0.1) / hvd.size()
                parameter.grad = share if rank == 0 else parameter.grad + share
        plain.step()
    assert len(ran) == 12
    assert_same(model, reference)


@as_ranks(2)
def test_several_threads_with_a_model_each():
    failures = []
    worlds = [pair() for _ in range(3)]

    def train(number):
        try:
            model, optimizer, reference, plain = worlds[number]
            for step in range(5):
                whole, mine = batch(10 * number + step)
                for this, opt, rows in ((model, optimizer, mine), (reference, plain, whole)):
                    opt.zero_grad()
                    loss_of(this, rows).backward()
                    torch.nn.utils.clip_grad_norm_(this.parameters(), 0.1)
                    opt.step()
            assert_same(model, reference)
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=train, args=(number,)) for number in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert not failures and not any(thread.is_alive() for thread in threads)


@as_ranks(2)
def test_several_threads_that_add_to_one_model():
    model, optimizer, reference, plain = pair(backward_passes_per_step=3)
    for step in range(4):
        optimizer.zero_grad(), plain.zero_grad()
        together = threading.Barrier(3)

        def run(part, step=step, together=together):
            together.wait(20)
            loss_of(model, batch(10 * step + part)[1]).backward()

        threads = [threading.Thread(target=run, args=(part,)) for part in range(3)]
        for thread in threads:
            thread.start()
        for part in range(3):
            loss_of(reference, batch(10 * step + part)[0]).backward()
        for thread in threads:
            thread.join(30)
        (
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1),
            torch.nn.utils.clip_grad_norm_(reference.parameters(), 0.1),
        )
        optimizer.step(), plain.step()
    assert_same(model, reference)


@as_ranks(2)
def test_what_goes_wrong_at_the_end_of_backward_is_our_exception_and_the_optimizer_goes_on():
    model = torch.nn.Linear(2 + hvd.rank(), 1).double()
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), 0.1), model.named_parameters())
    with pytest.raises(hvd.HvdMismatchError, match="weight"):
        model(torch.ones(1, 2 + hvd.rank(), dtype=torch.float64)).sum().backward()
    optimizer.zero_grad()
    del optimizer
    model, optimizer, reference, plain = pair()
    for this, opt, rows in ((model, optimizer, batch(0)[1]), (reference, plain, batch(0)[0])):
        loss_of(this, rows).backward()
        opt.step()
    assert_same(model, reference)


@as_ranks(2)
def test_gradients_of_gradients():
    worlds = pair(lambda parameters: torch.optim.SGD(parameters, lr=0.1))
    for model, optimizer, rows in ((worlds[0], worlds[1], batch(0)[1]), (worlds[2], worlds[3], batch(0)[0])):
        rows = rows.clone().requires_grad_()
        (slope,) = torch.autograd.grad(model(rows).sum(), rows, create_graph=True)
        slope.pow(2).sum(1).mean().backward()
        optimizer.step()
    assert_same(worlds[0], worlds[2])


@pytest.mark.parametrize("op", ["Sum", "Min"])
@as_ranks(2)
def test_autograd_grad_of_the_parameters_is_no_backward_pass(op):
    model, optimizer, _, _ = pair(op=getattr(hvd, op))
    sends = counted(optimizer)
    for step in range(2):
        optimizer.zero_grad()
        torch.autograd.grad(loss_of(model, batch(9)[1]), list(model.parameters()))
        loss_of(model, batch(step)[1]).backward()
        reduced = model[0].weight.grad.clone()
        torch.autograd.grad(loss_of(model, batch(9)[1]), list(model.parameters()))
        assert list(sends.values()) == [step + 1] * 4 and torch.equal(model[0].weight.grad, reduced)
        optimizer.step()


@as_ranks(2)
def test_backward_of_some_inputs_is_one():
    worlds = pair(lambda parameters: torch.optim.SGD(parameters, lr=0.1))
    for step in range(2):
        for model, optimizer, rows in zip(worlds[::2], worlds[1::2], reversed(batch(step))):
            optimizer.zero_grad()
            loss_of(model, rows).backward(inputs=[model[0].weight, model[2].bias])
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.05)
            optimizer.step()
    assert_same(worlds[0], worlds[2])


@as_ranks(2)
def test_a_checkpointed_layer_that_ranks_use_unequally_often_is_reduced_once():
    layer, alone = torch.nn.Linear(3, 3), torch.nn.Linear(3, 3)
    hvd.broadcast_parameters(layer.state_dict(), 0)
    alone.load_state_dict(layer.state_dict())
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(layer.parameters(), lr=0.01), layer.named_parameters())
    single = torch.optim.SGD(alone.parameters(), lr=0.01)

    def loss(model, rank, step):
        x = (torch.arange(6.0).view(2, 3) / 6 * (rank + 1) + step * 0.1).requires_grad_()
        for _ in range(2 if rank == 0 and step % 2 == 1 else 1):
            x = checkpoint(model, x, use_reentrant=True)
        return x.pow(2).mean()

    for step in range(4):
        optimizer.zero_grad()
        loss(layer, hvd.rank(), step).backward()
        optimizer.step()
        single.zero_grad()
        sum(loss(alone, rank, step) for rank in range(2)).div(2).backward()
        single.step()
        assert torch.allclose(layer.weight, alone.weight, atol=1e-6)
