"""`DistributedOptimizer(shard=True, offload=..., memory_cap=...)`: the same bits with a part of the state in a file."""

import os
import resource
import signal

import pytest
import torch
from ranks import as_ranks
from test_torch_sharded import MAKE, bits, loss_of, net, require_equal_on_all, state_bits
from torch import nn, optim

import hvdlite.torch as hvd
from hvdlite.torch.optimizer.state_offload import StateFile, bytes_of

STEPS = 5


def train(words, name="adamw", model=None, optimizer=None, first=0):
    """Steps with a late group and a parameter that is frozen for a while."""
    model = model or net()
    named = list(model.named_parameters())
    optimizer = optimizer or hvd.DistributedOptimizer(MAKE[name](model[:3].parameters()), named[:4], **words)
    for step in range(first, first + STEPS):
        if step == 2:
            optimizer.add_param_group({"params": [each for _, each in named[4:]], "lr": 3e-3})
        named[2][1].requires_grad_(step != 3)
        optimizer.zero_grad()
        loss_of(model, step).backward()
        optimizer.clip_grad_norm_(0.5)
        optimizer.step()
    return model, optimizer


def least_evictions(uses, room):
    """Of Belady's rule for chunks of one size, of which so many have room."""
    inside, out = set(), 0
    for at, chunk in enumerate(uses):
        if chunk not in inside and len(inside) == room:
            ahead = {each: uses.index(each, at) if each in uses[at:] else len(uses) for each in inside}
            inside.remove(max(ahead, key=ahead.get))
            out += 1
        inside.add(chunk)
    return out


@pytest.mark.parametrize("name", ["adamw", "momentum"])
@as_ranks(2)
def test_values_and_state_have_the_same_bits_under_each_cap(tmp_path, name):
    model, optimizer = train({"shard": True}, name)
    state = sum(value.numel() * value.element_size() for kept in optimizer._hvd_shards.inner.state.values()
                for value in kept.values() if torch.is_tensor(value))  # fmt: skip
    expected, whole = bits(model.parameters()), optimizer.state_dict()
    train({}, name, model, optimizer, STEPS)
    for percent in (60, 30, 15):
        cap = state * percent // 100
        words = {"shard": True, "offload": tmp_path, "memory_cap": cap}
        mine, offloaded = train(words, name)
        file = offloaded._hvd_shards.offload
        assert cap * 0.7 < file.peak <= cap, (file.peak, cap)
        require_equal_on_all(expected, bits(mine.parameters()))
        found = offloaded.state_dict()
        assert found is whole is None or state_bits(found) == state_bits(whole)
        assert file.peak <= cap and file.evictions
        saved = hvd.broadcast_object(found, 0)
        offloaded.load_state_dict(saved)
        assert file.held <= cap and file.peak <= cap
        train(words, name, mine, offloaded, STEPS)
        assert bits(mine.parameters()) == bits(model.parameters()) and file.peak <= cap
    assert not os.listdir(tmp_path)


@as_ranks(2)
def test_no_more_is_written_than_must_be(tmp_path):
    model = nn.Linear(512, 256, bias=False)
    optimizer = optim.AdamW(model.parameters())
    cap = 256 * 512 * 4 * 2 // 2 * 30 // 100
    optimizer = hvd.DistributedOptimizer(
        optimizer, model.named_parameters(), shard=True, offload=tmp_path, memory_cap=cap
    )
    for _ in range(6):
        optimizer.zero_grad()
        model(torch.ones(1, 512)).sum().backward()
        optimizer.step()
    file = optimizer._hvd_shards.offload
    chunks = len(file.chunks)
    least = least_evictions(list(range(chunks)) * 6, cap // file.chunks[0].estimate)
    assert chunks > 10 and least <= file.evictions <= 1.2 * least, (chunks, file.evictions, least)


@as_ranks(2)
def test_a_checkpoint_in_parts_keeps_to_the_cap(tmp_path):
    folder = hvd.broadcast_object(str(tmp_path / "saved"))
    words = {"shard": True, "offload": tmp_path, "memory_cap": "100K"}
    model, optimizer = train(words)
    hvd.save_sharded(folder, model, optimizer)
    other = net()
    loaded = hvd.DistributedOptimizer(
        optim.AdamW([{"params": other[:3].parameters()}, {"params": other[4].parameters()}]), other.named_parameters(),
        **words,
    )  # fmt: skip
    hvd.load_sharded(folder, other, loaded)
    assert loaded._hvd_shards.offload.peak <= 100 << 10
    train(words, model=model, optimizer=optimizer, first=STEPS)
    train(words, model=other, optimizer=loaded, first=STEPS)
    require_equal_on_all(bits(model.parameters()), bits(other.parameters()))


@as_ranks(2)
def test_a_full_disk_and_what_cannot_be_offloaded_are_named(tmp_path):
    model = net()

    def wrap(optimizer, **words):
        return hvd.DistributedOptimizer(optimizer, model.named_parameters(), **words)

    plain, there = optim.AdamW(model.parameters()), {"offload": tmp_path, "memory_cap": "64K"}
    for optimizer, words, text in (
        (plain, there, "needs shard=True"),
        (plain, {"shard": True, "offload": tmp_path}, "memory_cap"),
        (plain, {"shard": True, **there, "memory_cap": "many"}, "memory_cap='many'"),
        (optim.Adafactor(model.parameters()), {"shard": True, **there}, "Adafactor.*does not support"),
        (Counting(model.parameters(), lr=0.1), {"shard": True, **there}, "Counting.*does not support"),
    ):
        with pytest.raises(ValueError, match=f"{text}.*HVD200"):
            wrap(optimizer, **words)
    optimizer = wrap(plain, shard=True, **there)
    with pytest.raises(hvd.HvdStateError, match="offload.*HVD425"):
        hvd.elastic.TorchState(model, optimizer)
    loss_of(model, 0).backward()
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, limits[1]))
    try:
        with pytest.raises(OSError, match=rf"rank {hvd.rank()}: .* bytes .*{tmp_path}.*HVD200"):
            optimizer.step()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)


class Counting(optim.SGD):
    """Its group counts the steps."""

    def step(self, closure=None):
        super().step(closure)
        for group in self.param_groups:
            group["count"] = group.get("count", 0) + 1


def test_sizes_and_file(tmp_path):
    assert [bytes_of(each) for each in (70000, "64K", "1.5m", "2GB")] == [70000, 65536, 3 << 19, 2 << 30]
    StateFile(str(tmp_path / "new" / "folder"), 1000)
    assert os.listdir(tmp_path / "new" / "folder") == []
