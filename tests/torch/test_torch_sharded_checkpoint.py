"""`save_sharded` and `load_sharded`: the same bits on another number of ranks, and nothing changed by a bad folder."""

import json
import os
import shutil

import pytest
import torch
from ranks import as_ranks, everything
from test_torch_sharded import MAKE, bits, loss_of, net, require_equal_on_all, state_bits
from torch import nn, optim

import hvdlite.torch as hvd
from hvdlite.training import checkpoint_folder

OPTIMIZERS = ["adamw", "adafactor", *everything("momentum", "adamw-fused", "asgd", "nadam")]


def wrapped(model, name="adamw", **words):
    words = {"shard": True, **words}
    return hvd.DistributedOptimizer(MAKE[name](model.parameters()), model.named_parameters(), **words)


def train(model, optimizer, begin, end):
    for step in range(begin, end):
        optimizer.zero_grad()
        loss_of(model, step).backward()
        optimizer.step()


def zeroed(form="plain"):
    model = net(form)
    for each in model.parameters():
        each.detach().zero_()
    return model


@pytest.mark.parametrize("name", OPTIMIZERS)
@as_ranks(4)
def test_saved_on_4_ranks_and_loaded_on_2_and_3_with_and_without_shard(name, tmp_path):
    model = net()
    optimizer = wrapped(model, name)
    train(model, optimizer, 0, 3)
    hvd.save_sharded(tmp_path / "saved", model, optimizer, {"epoch": 3, "mean": torch.ones(2)})
    state = hvd.broadcast_object(optimizer.state_dict(), 0)
    for ranks in ([0, 1], [1, 2, 3]):
        members, results = hvd.add_process_set(ranks), []
        for how in ("whole", "folder", "folder, not sharded") if hvd.rank() in ranks else ():
            fresh = zeroed()
            loaded = wrapped(fresh, name, process_set=members, shard=how != "folder, not sharded")
            if how == "whole":
                fresh.load_state_dict(model.state_dict())
                loaded.load_state_dict(state)
            else:
                extra = hvd.load_sharded(str(tmp_path / "saved"), fresh, loaded)
                assert extra["epoch"] == 3 and extra["mean"].tolist() == [1, 1]
                assert bits(fresh.parameters()) == bits(model.parameters())
            train(fresh, loaded, 3, 6)
            results.append((bits(fresh.parameters()), loaded.state_dict()))
        hvd.barrier()
        hvd.remove_process_set(members)
        assert len({each for each, _ in results}) <= 1, ranks
        assert hvd.rank() != ranks[0] or len({repr(state_bits(each)) for _, each in results}) == 1, ranks


class Mixed(nn.Module):
    """Frozen, late, unused, half, not contiguous, of no optimizer; buffers."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(1)
        self.conv = nn.Conv2d(4, 8, 3).to(memory_format=torch.channels_last)
        self.norm = nn.BatchNorm2d(8)
        self.low = nn.Parameter(torch.randn(32).to(torch.bfloat16))
        self.frozen = nn.Parameter(torch.randn(32), requires_grad=False)
        self.unused, self.other = nn.Parameter(torch.randn(70)), nn.Parameter(torch.randn(3))
        self.scale, self.late = nn.Parameter(torch.tensor(2.0)), nn.Linear(32, 10)

    def forward(self, x):
        x = self.norm(self.conv(x.view(-1, 4, 4, 4))).flatten(1)
        return self.late(x * self.low.float() * self.scale + self.frozen)


def mixed(shard):
    model = Mixed()
    own = [each for name, each in model.named_parameters() if name != "other" and not name.startswith("late")]
    optimizer = optim.AdamW([{"params": own[:2], "lr": 0.01}, {"params": own[2:], "betas": (0.8, 0.9)}], lr=0.003)
    named = [(name, each) for name, each in model.named_parameters() if any(each is one for one in own)]
    optimizer = hvd.DistributedOptimizer(optimizer, named, shard=shard)
    optimizer.add_param_group({"params": list(model.late.parameters()), "lr": 0.02})
    return model, optimizer


def content(model, optimizer):
    """The first rank's; BatchNorm's buffers are each rank's own."""
    return hvd.broadcast_object((bits(model.state_dict().values()), optimizer.state_dict()), 0)


@as_ranks(1, 2)
def test_every_kind_of_parameter_between_sharded_and_not(tmp_path):
    for saved, loaded in ((True, True), (False, True), (True, False)):
        model, optimizer = mixed(saved)
        train(model, optimizer, 0, 2)
        optimizer.param_groups[0]["lr"] = 0.5
        optimizer.wait_in_backward = False
        loss_of(model, 2).backward()  # a save may come between backward and step
        hvd.save_sharded(tmp_path / "saved", model, optimizer)
        before = content(model, optimizer)
        other, optimizer = mixed(loaded)
        with torch.no_grad():
            for each in [*other.parameters(), *other.buffers()]:
                each.zero_()
        loss_of(other, 0).backward()
        assert hvd.load_sharded(tmp_path / "saved", other, optimizer) is None
        values, state = content(other, optimizer)
        assert values == before[0] and state_bits(state) == state_bits(before[1])
        assert len(state["state"]) == 9 - (hvd.size() == 1)  # the frozen one has none; the unused one alone neither
        require_equal_on_all(values, bits(other.state_dict().values()))
        assert sorted(os.listdir(tmp_path)) == ["saved"]


def damaged(folder, how):
    share = sorted(each for each in os.listdir(folder) if each.startswith("share"))[-1]
    path = folder / {"manifest": "manifest.json", "rest": "rest.pt"}.get(how.split()[0], share)
    if how.endswith("flipped bit"):
        data = bytearray(path.read_bytes())
        data[len(data) // 2] ^= 4
        path.write_bytes(data)
    elif how.endswith("cut"):
        os.truncate(path, 3000)
    elif how.endswith("missing"):
        path.unlink()
    else:  # numbers and names that lead elsewhere
        found = json.loads(path.read_text())
        key, value = {"manifest path": ("file", "../x.bin"), "manifest range": ("end", 1 << 40)}[how]
        found["entries"][0][key] = value
        path.write_text(json.dumps(found))


DAMAGES = {
    "flipped bit": r"share-1-of-2.bin: bytes \d+ to \d+, of .* are not those",
    "cut": "share-1-of-2.bin ends before",
    "missing": "share-1-of-2.bin cannot be read",
    "manifest missing": "manifest.json is not in it",
    "manifest cut": "manifest.json cannot be read",
    "manifest path": r"manifest.json cannot be read.*'\.\./x.bin'",
    "manifest range": "manifest.json cannot be read.*do not fit",
    "rest flipped bit": "rest.pt is not as it was written",
}


@as_ranks(2)
def test_a_damaged_folder_and_another_model_are_named_and_change_nothing(tmp_path):
    model = net()
    optimizer = wrapped(model)
    train(model, optimizer, 0, 2)
    hvd.save_sharded(tmp_path / "saved", model, optimizer)
    train(model, optimizer, 2, 3)
    before = content(model, optimizer)

    def refused(folder, text, model=model, optimizer=optimizer):
        with pytest.raises(ValueError, match=rf"load_sharded: .*{text}.*\. Nothing was changed \[HVD427\]$"):
            hvd.load_sharded(folder, model, optimizer)

    for how, text in DAMAGES.items():
        copy = tmp_path / how
        if hvd.rank() == 0:
            shutil.copytree(tmp_path / "saved", copy)
            damaged(copy, how)
        hvd.barrier()
        refused(copy, text)
    refused(tmp_path / "saved" / str(hvd.rank()), "no such folder")
    small = net("channels-last")
    refused(tmp_path / "saved", "parameter '0.weight' is .* in this optimizer", small, wrapped(small))
    same = net()
    refused(tmp_path / "saved", "AdamW, and this optimizer is Adafactor", same, wrapped(same, "adafactor"))
    after = content(model, optimizer)
    assert after[0] == before[0] and state_bits(after[1]) == state_bits(before[1])


@as_ranks(2)
def test_a_save_that_fails_leaves_the_checkpoint_from_before(tmp_path):
    folder, model = tmp_path / "saved", net()
    optimizer = wrapped(model)
    hvd.save_sharded(folder, model, optimizer, "first")
    train(model, optimizer, 0, 1)
    real, last = os.fsync, hvd.rank() == 1

    def full(_):
        raise OSError(28, "No space left on device")

    try:
        os.fsync = full if last else real
        with pytest.raises(OSError, match=r"rank 1: .*share-1-of-2.bin cannot be written.*No space.*stays \[HVD427\]$"):
            hvd.save_sharded(folder, model, optimizer, "second")
    finally:
        os.fsync = real
    with pytest.raises(ValueError, match=r"rank 0: extra\['args'\]\[1\] is Job.*HVD427"):
        hvd.save_sharded(folder, model, optimizer, {"epoch": 1, "args": [1, Job()]})
    patience, checkpoint_folder._seen_within_s = checkpoint_folder._seen_within_s, 0.2
    with pytest.raises(ValueError, match=r"rank 1: .*which rank 0 made, is not here.*that all ranks share"):
        hvd.save_sharded(tmp_path / f"own-{hvd.rank()}", model, optimizer)
    checkpoint_folder._seen_within_s = patience
    with pytest.raises(ValueError, match="is no file of a checkpoint: give a folder of its own"):
        hvd.save_sharded(tmp_path, model, optimizer)
    assert sorted(os.listdir(tmp_path)) == ["saved"]
    hvd.barrier()
    if hvd.rank() == 0:
        os.rename(folder, tmp_path / "saved.old")  # as a job leaves it that ends between two renames
    hvd.barrier()
    assert hvd.load_sharded(folder, model, optimizer) == "first"
    hvd.save_sharded(folder, model, optimizer, "third")
    assert hvd.load_sharded(folder, model, optimizer) == "third"


class Job:
    """An object that `torch.load(weights_only=True)` refuses."""


@as_ranks(2)
def test_a_save_on_one_rank_is_an_error_and_no_hang(tmp_path):
    for other in ("train", "state_dict", "load"):
        model = net()
        optimizer = wrapped(model)
        train(model, optimizer, 0, 1)
        optimizer.zero_grad()
        with pytest.raises(hvd.HvdMismatchError, match=r"all ranks (of a sharded optimizer )?must.*\[HVD310\]$"):
            if hvd.rank() == 0:
                hvd.save_sharded(tmp_path / "saved", model, optimizer)
            elif other == "train":
                loss_of(model, 1).backward()
            else:
                optimizer.state_dict() if other == "state_dict" else hvd.load_sharded("x", model, optimizer)
    with pytest.raises(ValueError, match="give what hvd.DistributedOptimizer returned.*HVD427"):
        hvd.save_sharded(tmp_path / "saved", model, optim.SGD(model.parameters(), lr=1.0))
    with pytest.raises(TypeError, match="HVD427"):
        hvd.load_sharded(tmp_path / "saved", optimizer, model)
