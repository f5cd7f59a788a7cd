"""Shards a small transformer over the ranks with PyTorch's fully_shard (FSDP2), and saves and loads it halfway.

    hvdlite-run -np 2 python examples/12_fsdp2.py
    hvdlite-run -np 4 python examples/12_fsdp2.py checkpoint     # a permanent folder (on several hosts: shared)

The text is tempfile.py of Python's standard library, byte by byte. Each rank holds its shard of the parameters and of
the optimizer's state. Halfway, all ranks write one torch.distributed.checkpoint, and a new model reads it.
"""

import sys
import tempfile

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import fully_shard

WIDTH, LENGTH, BATCH, STEPS = 64, 64, 32, 60


class Writer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.symbol, self.place = nn.Embedding(256, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.blocks = nn.ModuleList(nn.TransformerEncoderLayer(WIDTH, 4, 256, 0.0, batch_first=True) for _ in range(2))
        self.head = nn.Linear(WIDTH, 256)

    def forward(self, text: torch.Tensor) -> torch.Tensor:  # bytes (n, LENGTH + 1); the loss of all but the first
        x, later = self.symbol(text[:, :-1]) + self.place.weight, torch.ones(LENGTH, LENGTH, dtype=torch.bool).triu(1)
        for block in self.blocks:
            x = block(x, later)
        return nn.functional.cross_entropy(self.head(x).flatten(0, 1), text[:, 1:].flatten())


def sharded() -> "tuple[nn.Module, torch.optim.Optimizer]":
    model, mesh = Writer(), dist.init_device_mesh("cpu", (dist.get_world_size(),))
    for part in (*model.blocks, model):
        fully_shard(part, mesh=mesh)
    return model, torch.optim.AdamW(model.parameters(), lr=0.003)


def train(folder: str) -> None:
    text = torch.tensor(list(open(tempfile.__file__, "rb").read()))
    (model, optimizer), rows = sharded(), torch.Generator().manual_seed(dist.get_rank())
    for step in range(1, STEPS + 1):
        starts = torch.randint(len(text) - LENGTH, (BATCH, 1), generator=rows)
        optimizer.zero_grad()
        loss = model(text[starts + torch.arange(LENGTH + 1)])
        loss.backward()
        optimizer.step()
        dist.all_reduce(mean := loss.detach(), dist.ReduceOp.AVG)
        if dist.get_rank() == 0 and step % 10 == 0:
            print(f"step {step}  loss {mean:.4f}")
        if step == STEPS // 2:
            dcp.save(dict(zip("mo", get_state_dict(model, optimizer))), checkpoint_id=folder)
            model, optimizer = sharded()
            dcp.load(saved := dict(zip("mo", get_state_dict(model, optimizer))), checkpoint_id=folder)
            set_state_dict(model, optimizer, model_state_dict=saved["m"], optim_state_dict=saved["o"])


if __name__ == "__main__":
    torch.manual_seed(1)
    dist.init_process_group("hvdlite")
    with tempfile.TemporaryDirectory() as own:
        dist.broadcast_object_list(name := sys.argv[1:] or [own], 0)  # rank 0's
        train(name[0])
    dist.destroy_process_group()
