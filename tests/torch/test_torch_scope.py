"""hvd.scope trains the bits of the wrapped optimizer and of averages by hand, and ends."""

import copy

import numpy as np
import pytest
from fitting import digits
from ranks import as_ranks

pytest.importorskip("torch")
pytest.importorskip("sklearn")

import torch
from torch import nn
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    IterableDataset,
    SequentialSampler,
    TensorDataset,
    WeightedRandomSampler,
)

import hvdlite.torch as hvd

BATCH = 48


def made(norm=False):
    """A model and an optimizer, which begin elsewhere on each rank."""
    torch.manual_seed(hvd.rank())
    between = [nn.BatchNorm1d(16)] if norm else []
    model = nn.Sequential(nn.Linear(64, 16), *between, nn.Tanh(), nn.Linear(16, 10))
    return model, torch.optim.AdamW(model.parameters(), lr=1e-2)


def data(rows=BATCH * 6):
    images, labels = digits(rows)
    return TensorDataset(torch.from_numpy(images), torch.from_numpy(labels))


def trained(model, optimizer, batches, after_backward=lambda: None):
    for images, labels in batches:
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(images), labels).backward()
        after_backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()
    return [each.detach().clone() for each in model.state_dict().values()]


def share():
    """Each n-th row of a batch, as a DistributedSampler deals them."""
    for images, labels in DataLoader(data(), batch_size=BATCH):
        yield images[hvd.rank() :: hvd.size()], labels[hvd.rank() :: hvd.size()]


@as_ranks(2, 3)
def test_three_styles_have_the_same_bits():
    model, optimizer = made()
    hvd.broadcast_state(model, optimizer)

    def average():
        for name, parameter in model.named_parameters():
            parameter.grad = hvd.allreduce(parameter.grad, name=name)

    manual = trained(model, optimizer, share(), average)
    model, optimizer = made()
    hvd.broadcast_state(model, optimizer)
    wrapped = trained(model, hvd.DistributedOptimizer(optimizer, model.named_parameters()), share())
    model, optimizer = made()
    with hvd.scope(model, optimizer, DataLoader(data(), batch_size=BATCH)) as (model, optimizer, loader):
        scoped = trained(model, optimizer, loader)
    assert all(map(torch.equal, manual, wrapped)) and all(map(torch.equal, manual, scoped))


@as_ranks(2)
def test_a_scope_ends_with_one_model_and_local_gradients():
    model, optimizer = made(norm=True)
    loader = DataLoader(data(), batch_size=BATCH, shuffle=True, num_workers=1)
    with hvd.scope(model, optimizer, loader, backward_passes_per_step=1) as (model, wrapped, mine):
        scheduler = torch.optim.lr_scheduler.StepLR(wrapped, 1)
        epochs = [torch.cat([images for images, _ in mine]) for _ in range(2)]
        trained(model, wrapped, mine)
        scheduler.step()
        nn.functional.cross_entropy(model(epochs[0]), torch.zeros(len(epochs[0]), dtype=torch.long)).backward()
    hvd.check_consistency(model, wrapped)
    assert not torch.equal(*epochs), "each epoch has an order of its own"
    for epoch in epochs:
        rows = np.sort(hvd.allgather(epoch).numpy(), axis=0)
        np.testing.assert_array_equal(rows, np.sort(data().tensors[0].numpy(), axis=0))
    for each in (optimizer, wrapped):
        copied = copy.deepcopy(each)
        assert type(copied) is torch.optim.AdamW and copied.param_groups[0]["lr"] == 1e-3
        each.zero_grad()
        (model[0].weight.sum() * (hvd.rank() + 1)).backward()
        assert (model[0].weight.grad == hvd.rank() + 1).all(), "local"
        each.step()
    with hvd.scope(model, wrapped, mine) as (_, again, second):  # which makes the weights equal again
        assert second.batch_size == BATCH // 2 and len(second) == 6
        again.zero_grad()
        (model[0].weight.sum() * (hvd.rank() + 1)).backward()
        assert (model[0].weight.grad == 1.5).all()
        again.step()


@as_ranks(2)
@pytest.mark.parametrize("rows, drop_last", [(16, False), (17, False), (17, True)])
def test_batches_are_those_of_one_process(rows, drop_last):
    """Also with the random state of rank 0 as it goes on: over two scopes, and after a resume."""
    model, optimizer = made()
    whole = DataLoader(torch.arange(rows), 4, shuffle=True, drop_last=drop_last)
    torch.manual_seed(hvd.rank())
    found = []
    for _ in range(2):
        with hvd.scope(model, optimizer, whole) as (_, _, mine):
            found += [batch for _ in range(2) for batch in mine]
    torch.manual_seed(0)
    expected = [batch for _ in range(4) for batch in whole]
    assert len(found) == len(expected)
    for mine, theirs in zip(found, expected):
        both = torch.stack(hvd.allgather_object(mine)).T.ravel()  # rank 0 has the first row, rank 1 the second, ...
        assert torch.equal(both[: len(theirs)], theirs) and len(both) == len(theirs) + len(theirs) % 2


@as_ranks(2)
def test_an_exception_leaves_the_scope_and_nothing_is_waited_for():
    model, optimizer = made()
    with pytest.raises(KeyboardInterrupt), hvd.scope(model, optimizer) as (_, wrapped, _):
        if hvd.rank() == 0:
            wrapped.wait_in_backward = False
            model(torch.ones(1, 64)).sum().backward()  # which no other rank averages
        raise KeyboardInterrupt
    model.zero_grad()
    (model[0].weight.sum() * (hvd.rank() + 1)).backward()
    assert (model[0].weight.grad == hvd.rank() + 1).all()


@as_ranks(2)
def test_what_a_scope_cannot_share_is_refused_on_all_ranks():
    model, optimizer = made()

    class Stream(IterableDataset):
        def __iter__(self):
            return iter(range(4))

    rows = data()
    drawn = WeightedRandomSampler([1.0] * len(rows), len(rows))
    for loader, error, text in (
        (DataLoader(rows, batch_size=3), ValueError, r"batch size 3 is no multiple .* ranks, which is 2.*HVD240"),
        (DataLoader(rows, batch_size=4, sampler=drawn), ValueError, r"sampler of its own \(WeightedRandomSampler\)"),
        (DataLoader(rows, batch_size=None), ValueError, r"batch_sampler of its own, or makes no batches"),
        (DataLoader(rows, 4, sampler=SequentialSampler(range(8))), ValueError, "sampler of its own"),
        (DataLoader(rows, batch_sampler=BatchSampler(drawn, 4, True)), ValueError, "batch_sampler of its own"),
        (DataLoader(Stream(), batch_size=2), ValueError, r"sampler of its own \(_InfiniteConstantSampler\)"),
        (DataLoader(rows, batch_size=4 << hvd.rank()), hvd.HvdMismatchError, r"batch size.*4.*8.*same loader"),
        (DataLoader(rows, 4) if hvd.rank() else None, hvd.HvdMismatchError, r"NoneType.*HVD301"),
        ([1, 2], TypeError, r"expects a torch DataLoader, not list"),
    ):
        with pytest.raises(error, match=text), hvd.scope(model, optimizer, loader):
            pass
    for options in ({"shard": True}, {"op": hvd.Adasum}):
        with pytest.raises(ValueError, match="neither shard nor op=hvd.Adasum.*HVD224"):
            hvd.scope(model, optimizer, **options).__enter__()
    wrapped = hvd.DistributedOptimizer(optimizer, model.named_parameters())
    with pytest.raises(ValueError, match="is a DistributedOptimizer already"):
        hvd.scope(model, wrapped).__enter__()
