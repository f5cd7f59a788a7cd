"""DiLoCo and LocalSGD give the weights that one process computes which plays all ranks."""

import pytest
from pretended_hosts import pretend
from ranks import as_ranks

torch = pytest.importorskip("torch")

import hvdlite.torch as hvd  # noqa: E402
from hvdlite.torch.local import diloco  # noqa: E402
from hvdlite.torch.local.schedule import cut  # noqa: E402


def network():
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.Tanh(), torch.nn.Linear(8, 3))


def backward(model, rank, step):
    rows = torch.randn(8, 6, generator=torch.Generator().manual_seed(1000 * rank + step))
    model(rows).pow(2).mean().backward()


def train(model, optimizer, steps, rank=None, first=0):
    for step in range(first, steps):
        optimizer.zero_grad()
        backward(model, hvd.rank() if rank is None else rank, step)
        optimizer.step()


def flat(model):
    return torch.cat([each.detach().flatten() for each in model.parameters()])


def adamw(model):
    return torch.optim.AdamW(model.parameters(), lr=0.01)


def same_on_all(model):
    hvd.check_consistency([each for each in model.state_dict().values() if each.is_floating_point()])


def played(ranks, steps, every, fragments, delay, alpha, outer=diloco.nesterov):
    """The weights of all ranks after so many steps, by one process, from the definition."""
    models = [network() for _ in range(ranks)]
    optimizers = [adamw(model) for model in models]
    whole = list(network().parameters())
    parts = cut([each.numel() for each in whole], fragments)
    outers = [outer(whole[part]) for part in parts]
    flying = {}
    for step in range(1, steps + 1):
        for rank, (model, optimizer) in enumerate(zip(models, optimizers)):
            train(model, optimizer, step, rank, step - 1)
        with torch.no_grad():
            if step % (every // fragments) == 0:
                number = step * fragments // every % fragments
                theirs = [list(model.parameters())[parts[number]] for model in models]
                sums = [
                    sum((mine.double() - each for each in same), torch.zeros_like(mine).double())
                    for mine, same in zip(whole[parts[number]], zip(*theirs))
                ]
                flying[number] = step + delay, [(total / ranks).float() for total in sums]
            for number in [number for number, (due, _) in flying.items() if due == step]:
                for each, gradient in zip(whole[parts[number]], flying.pop(number)[1]):
                    each.grad = gradient
                outers[number].step()
                for model in models:
                    for mine, each in zip(list(model.parameters())[parts[number]], whole[parts[number]]):
                        mine.lerp_(each, alpha if delay else 1.0)
    return [flat(model) for model in models]


@as_ranks(2, 3)
def test_every_step_is_synchronous_training():
    ours, theirs = network(), network()
    trainer = hvd.LocalSGD(ours, torch.optim.SGD(ours.parameters(), lr=0.1), sync_every=1)
    train(ours, trainer._optimizer, 20)
    sync = torch.optim.SGD(theirs.parameters(), lr=0.1)
    train(theirs, hvd.DistributedOptimizer(sync, theirs.named_parameters()), 20)
    assert (flat(ours) - flat(theirs)).abs().max() < 1e-6


@pytest.mark.parametrize("settings", [(6, 1, 0, 1.0), (6, 3, 0, 0.5), (8, 2, 3, 0.5), (8, 4, 1, 0.25)])
@as_ranks(2, 3)
def test_weights_are_those_of_the_definition(settings):
    every, fragments, delay, alpha = settings
    model = network()
    optimizer = adamw(model)
    hvd.DiLoCo(model.named_parameters(), optimizer, every, fragments=fragments, delay=delay, alpha=alpha)
    train(model, optimizer, 29)
    assert (flat(model) - played(hvd.size(), 29, *settings)[hvd.rank()]).abs().max() < 1e-5


@as_ranks(2)
def test_local_sgd_is_diloco_with_a_rate_of_1():
    found = []
    for kind, more in ((hvd.LocalSGD, {}), (hvd.DiLoCo, {"outer": lambda each: torch.optim.SGD(each, lr=1.0)})):
        model = network()
        trainer = kind(model, adamw(model), sync_every=5, **more)
        train(model, trainer._optimizer, 18)
        trainer.finish()
        found.append(flat(model))
    assert torch.equal(*found)


@pytest.mark.parametrize("more", [{}, {"fragments": 4, "delay": 1}, {"delay": 7, "fragments": 1}])
@as_ranks(3)
def test_ranks_with_fewer_steps_end_with_the_same_weights(more):
    model = torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.BatchNorm1d(8), torch.nn.Tanh(), torch.nn.Linear(8, 3))
    hvd.broadcast_parameters(model.state_dict(), 0)
    trainer = hvd.DiLoCo(model, adamw(model), sync_every=8, **more)
    for epoch in range(1, 3):  # the training goes on after finish
        train(model, trainer._optimizer, [30, 0, 17][hvd.rank()] * epoch, first=[30, 0, 17][hvd.rank()] * (epoch - 1))
        trainer.finish()
        same_on_all(model)


@as_ranks(2)
def test_a_rank_without_steps_does_not_count():
    model = network()
    trainer = hvd.LocalSGD(model, torch.optim.SGD(model.parameters(), lr=0.1), sync_every=4)
    train(model, trainer._optimizer, 6 if hvd.rank() == 0 else 0)
    trainer.finish()
    alone = network()
    train(alone, torch.optim.SGD(alone.parameters(), lr=0.1), 6, rank=0)
    assert (flat(model) - flat(alone)).abs().max() < 1e-6


@as_ranks(2)
def test_skipped_steps_do_not_count():
    model = network()
    trainer = hvd.LocalSGD(model, adamw(model), sync_every=3)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    scaler.scale(torch.ones(1))
    for step in range(9):
        trainer._optimizer.zero_grad()
        backward(model, hvd.rank(), step)
        if step == 2 and hvd.rank() == 1:
            model[0].weight.grad.fill_(float("inf"))
        scaler.step(trainer._optimizer)
        scaler.update()
    assert trainer._schedule.step == 9 - hvd.rank()
    trainer.finish()
    same_on_all(model)


@as_ranks(4)
def test_islands_that_average_in_each_step():
    mesh = hvd.Mesh(island=2, place=2)
    found = []
    for shard, exchange in (
        (False, mesh.group("island")),
        (True, mesh.group("island")),
        (False, hvd.global_process_set),
    ):
        model = network()
        optimizer = hvd.DistributedOptimizer(
            adamw(model), model.named_parameters(), process_set=mesh.group("place"), shard=shard
        )
        trainer = hvd.DiLoCo(model.named_parameters(), optimizer, 6, fragments=2, delay=1, process_set=exchange)
        train(model, optimizer, 20)
        trainer.finish()
        hvd.check_consistency(model)
        found.append(flat(model))
    assert torch.equal(found[0], found[1]) and (found[0] - found[2]).abs().max() < 1e-6


@pytest.mark.parametrize("per_host", [1, 2])
@as_ranks(4)
def test_four_bits_between_hosts(per_host):
    pretend(per_host)
    found = []
    for compression in (hvd.Compression.none, hvd.Compression.int4, hvd.Compression.fp16):
        model = network()
        trainer = hvd.DiLoCo(model, adamw(model), 6, fragments=2, delay=2, compression=compression)
        train(model, trainer._optimizer, 25 + hvd.rank())
        trainer.finish()
        same_on_all(model)
        found.append(flat(model))
    begin = (found[0] - flat(network())).norm()
    assert 0 < (found[1] - found[0]).norm() < 0.3 * begin and 0 < (found[2] - found[0]).norm() < 0.01 * begin


@pytest.mark.parametrize("delay", [0, 2])
@as_ranks(2)
def test_a_checkpoint_goes_on(delay):
    """Without a delay with the same bits. What is under way is sent again."""
    found = []
    for resumes in (False, True):
        model = network()
        trainer = hvd.DiLoCo(model, adamw(model), 6, fragments=2, delay=delay)
        train(model, trainer._optimizer, 16)
        if resumes:
            saved = [each.state_dict() for each in (model, trainer._optimizer, trainer)]
            assert saved[2]["schedule"]["again"] == ([1] if delay else [])
            model = network()
            trainer = hvd.DiLoCo(model, adamw(model), 6, fragments=2, delay=delay)
            for each, state in zip((model, trainer._optimizer, trainer), saved):
                each.load_state_dict(state)
        train(model, trainer._optimizer, 40, first=16)
        trainer.finish()
        hvd.check_consistency(model)
        found.append(flat(model))
    assert torch.equal(*found) if delay == 0 else (found[0] - found[1]).abs().max() < 0.1
    model = network()
    with pytest.raises(hvd.HvdStateError, match="1 fragments, the state .* in 2.*HVD425"):
        hvd.DiLoCo(model, adamw(model), 6).load_state_dict(trainer.state_dict())


@as_ranks(2)
def test_parameters_that_change_are_refused_by_name():
    for at, name in ((0, "0.bias"), (1, "2.weight")):
        model = network()
        model[0].bias.requires_grad_(False)
        trainer = hvd.DiLoCo(model, adamw(model), sync_every=2)
        train(model, trainer._optimizer, 2)
        assert flat(model).numel() - 8 == sum(each.numel() for each in trainer._fragments[0].globals)
        (model[0].bias if at == 0 else model[2].weight).requires_grad_(at == 0)
        with pytest.raises(ValueError, match=f"parameter {name} is {('trained', 'frozen')[at]} since.*HVD048"):
            train(model, trainer._optimizer, 2)
    model = network()
    trainer = hvd.DiLoCo(model, adamw(model), sync_every=2)
    trainer._optimizer.add_param_group({"params": [torch.nn.Parameter(torch.ones(2))]})
    with pytest.raises(ValueError, match="added to the optimizer is trained since"):
        train(model, trainer._optimizer, 2)


@as_ranks(2)
def test_ranks_that_differ_are_told():
    model = network()
    trainer = hvd.DiLoCo(model, adamw(model), sync_every=2 + hvd.rank())
    with pytest.raises(hvd.HvdMismatchError, match="rank 0 has sync_every=2; rank 1 has sync_every=3"):
        train(model, trainer._optimizer, 1)
    torch.nn.init.constant_(model[0].weight, hvd.rank())
    trainer = hvd.DiLoCo(model, adamw(model))
    with pytest.raises(hvd.HvdMismatchError, match="weights with the checksum.*call hvd.broadcast_parameters"):
        train(model, trainer._optimizer, 1)


@as_ranks(1)
def test_one_rank_and_what_cannot_be():
    model = network()
    optimizer = adamw(model)
    for more in (
        {"sync_every": 0},
        {"sync_every": 5, "fragments": 2},
        {"delay": 100},
        {"alpha": 0.0},
        {"fragments": 5},
    ):
        with pytest.raises(ValueError, match="HVD048"):
            hvd.DiLoCo(model, optimizer, **{"sync_every": 100, **more})
            train(model, optimizer, 1)
    for more in ({"compression": hvd.PowerSGD(2)}, {"compression": hvd.Compression.int4(feedback=True)}):
        with pytest.raises(ValueError, match="HVD208"):
            hvd.DiLoCo(model, optimizer, **more)
    with pytest.raises(ValueError, match="HVD225"):
        hvd.DiLoCo(list(model.named_parameters())[1:], optimizer)
    model = network().bfloat16()
    tied = [*model.named_parameters(), ("again", model[0].weight)]
    trainer = hvd.DiLoCo(tied, adamw(model), sync_every=4)
    rows = torch.ones(2, 6, dtype=torch.bfloat16)
    for _ in range(10):
        model(rows).sum().backward()
        trainer._optimizer.step()
    with pytest.raises(ValueError, match="call its finish"):
        hvd.LocalSGD(model, trainer._optimizer)
    trainer.finish()
    hvd.LocalSGD(model, trainer._optimizer)
    assert [each.dtype for each in trainer._fragments[0].globals] == [torch.float32] * 4
