"""A sharded optimizer of a group of ranks, beside gradients that only some ranks send, and in a `TorchState`."""

import shutil
import tempfile
from pathlib import Path

import pytest
import torch
from ranks import as_ranks
from test_torch_sharded import MAKE, bits, loss_of, net, require_equal_on_all, state_bits
from torch import nn, optim

import hvdlite.torch as hvd


@as_ranks(2)
def test_many_buckets_that_are_frozen_on_one_rank_only():
    values = []
    for shard in (False, True):
        torch.manual_seed(0)
        model = nn.Sequential(*[nn.Linear(260, 260, bias=False) for _ in range(6)])
        optimizer = optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        optimizer = hvd.DistributedOptimizer(optimizer, model.named_parameters(), shard=shard)
        for step in range(3):
            model[5].requires_grad_(hvd.rank() == 0 or step == 2)
            optimizer.zero_grad()
            model(torch.full((2, 260), 0.1 * (step + hvd.rank()))).sum().backward()
            optimizer.step()
        values.append(bits(model.parameters()))
    require_equal_on_all(*values)


def train_exactly(make, **words):
    """The state and values after steps whose sums are exact, so that the order of adding does not matter."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(300, 300, bias=False), nn.Linear(300, 3))
    for each in model.parameters():
        each.data.mul_(8).round_()
    optimizer = hvd.DistributedOptimizer(make(model.parameters()), model.named_parameters(), **words)
    for step in range(4):
        optimizer.zero_grad()
        hook = model[0].weight.register_hook(lambda _: 1 / 0) if step == 2 and hvd.rank() == 3 else None
        sign = torch.tensor([[1.0 + hvd.rank(), -1.0, 2.0]])
        loss = sum((each.view(-1)[::7] * (step + hvd.rank())).sum() for each in model.parameters()) + sign.sum()
        if step == 2:
            with pytest.raises((ZeroDivisionError, hvd.HvdMismatchError), match=r"zero|HVD308"):
                loss.backward()
            if hook is not None:
                hook.remove()
            continue
        loss.backward()
        optimizer.clip_grad_norm_(100.0)
        optimizer.step()
    folder = hvd.broadcast_object(tempfile.mkdtemp())
    hvd.save_sharded(f"{folder}/saved", model, optimizer)
    assert len(list(Path(f"{folder}/saved").glob("share-*"))) == (2 if "shard" in words else 1)
    before = bits(model.parameters())
    for each in model.parameters():
        each.data.zero_()
    hvd.load_sharded(f"{folder}/saved", model, optimizer)
    assert bits(model.parameters()) == before
    shutil.rmtree(folder, ignore_errors=True)
    state = optimizer.state_dict()
    return bits(model.parameters()), state if state is None else state_bits(state)


@pytest.mark.parametrize("name", ["adamw", "adafactor"])
@as_ranks(4)
def test_each_group_of_ranks_has_one_whole_state(name):
    mesh = hvd.Mesh(cross=2, local=2)
    whole, shared = train_exactly(MAKE[name]), train_exactly(MAKE[name], shard=mesh.group("local"))
    assert whole[0] == shared[0]
    require_equal_on_all(shared[0])
    assert shared[1] == (whole[1] if hvd.rank() == 0 else None)
    model = nn.Linear(2, 2)
    sets = [hvd.add_process_set([0, 1, 2]), hvd.add_process_set([3])]
    with pytest.raises(ValueError, match=r"groups of one size.*\[0, 1, 2\], \[3\].*HVD200"):
        hvd.DistributedOptimizer(
            optim.SGD(model.parameters(), lr=0.1), model.named_parameters(), shard=sets[hvd.rank() // 3]
        )
    for each in sets:
        hvd.remove_process_set(each)


@as_ranks(2)
def test_a_state_in_memory_goes_back_to_its_commit():
    model = net()
    optimizer = hvd.DistributedOptimizer(optim.AdamW(model.parameters(), lr=1e-2), model.named_parameters(), shard=True)
    state = hvd.elastic.TorchState(model, optimizer, step=0)
    results = []
    for times in (3, 3):
        for step in range(times):
            optimizer.zero_grad()
            loss_of(model, step).backward()
            if step == 1:
                with pytest.raises(hvd.HvdStateError, match="commit after step.*HVD425"):
                    state.commit()
            optimizer.step()
        results.append(
            (bits(model.parameters()), state_bits(optimizer.state_dict() or {"state": {}, "param_groups": 0}))
        )
        state.restore()
    require_equal_on_all(results[0][0], results[1][0])
    assert results[0] == results[1]


@as_ranks(2)
def test_options_that_are_set_later_make_state_of_whole_tensors_or_are_refused():
    states, values = [], []
    for shard in (False, True):
        model = net()
        optimizer = optim.SGD(model.parameters(), lr=0.05)
        optimizer = hvd.DistributedOptimizer(optimizer, model.named_parameters(), shard=shard)
        for step in range(4):
            optimizer.param_groups[0]["momentum"] = 0.9 if step > 1 else 0.0
            optimizer.zero_grad()
            loss_of(model, step).backward()
            optimizer.step()
        values.append(bits(model.parameters()))
        states.append(optimizer.state_dict())
    require_equal_on_all(*values)
    assert hvd.rank() == 1 or state_bits(states[0]) == state_bits(states[1])
    optimizer = hvd.DistributedOptimizer(optim.AdamW(model.parameters()), model.named_parameters(), shard=True)
    loss_of(model, 0).backward()
    optimizer.param_groups[0]["fused"] = True
    with pytest.raises(hvd.HvdError, match="may not be cut.*HVD200"):
        optimizer.step()


@as_ranks(2)
def test_a_step_that_fails_on_one_rank_fails_on_all_and_a_checkpoint_makes_them_equal(tmp_path):
    folder = hvd.broadcast_object(str(tmp_path / "saved"))
    model = net()
    optimizer = hvd.DistributedOptimizer(optim.AdamW(model.parameters()), model.named_parameters(), shard=True)
    hvd.save_sharded(folder, model, optimizer)
    optimizer._hvd_shards._step = (lambda *_: 1 / 0) if hvd.rank() else optimizer._hvd_shards._step
    loss_of(model, 0).backward()
    with pytest.raises(ZeroDivisionError if hvd.rank() else hvd.HvdMismatchError, match="zero|HVD310"):
        optimizer.step()
    hvd.load_sharded(folder, model, optimizer)
    optimizer._hvd_shards._step = optim.AdamW.step.__wrapped__
    optimizer.zero_grad()
    loss_of(model, 0).backward()
    optimizer.step()
    require_equal_on_all(bits(model.parameters()))
