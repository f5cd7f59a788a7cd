"""A language model whose optimizer's state does not fit into the memory of a rank, and fits into that of all.

    hvdlite-run -np 4 python examples/25_sharded_optimizer.py               # trains
    hvdlite-run -np 4 python examples/25_sharded_optimizer.py --replicated  # ends: no memory is left

Each rank limits the memory that it may ask for, as a small machine would: to --limit times the size of the parameters,
beyond what it has when the model is made. Adam needs 3 of these on every rank: for gradients, and twice as much for its
state. With `shard=True` a rank has 1/n of the state, and its share of the averaged gradients.

The text is the source of Python's standard library. The checkpoint is written by all ranks together.
"""

import argparse
import resource
import sysconfig
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn

import hvdlite.torch as hvd  # hvdlite

LENGTH = 64  # characters of a sample


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Train a language model under a limit of memory.")
    parser.add_argument("--replicated", action="store_true", help="each rank has the whole state")
    parser.add_argument(
        "--limit", type=float, default=2.6, help="memory beyond the model's, in sizes of the parameters"
    )
    parser.add_argument("--width", type=int, default=512)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--checkpoint", type=Path, help="folder to write at the end")
    return parser.parse_args()


class Model(nn.Module):
    """A transformer on bytes."""

    def __init__(self, width: int, layers: int) -> None:
        super().__init__()
        self.embedding, self.place = nn.Embedding(256, width), nn.Parameter(torch.zeros(LENGTH, width))
        block = nn.TransformerEncoderLayer(width, 8, 4 * width, dropout=0.0, batch_first=True, norm_first=True)
        self.blocks, self.out = nn.TransformerEncoder(block, layers, enable_nested_tensor=False), nn.Linear(width, 256)

    def forward(self, text: torch.Tensor) -> torch.Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(LENGTH)
        return self.out(self.blocks(self.embedding(text) + self.place, mask=mask, is_causal=True))


def limit_memory(size: float) -> None:
    """So many bytes more, at most, than this process has now."""
    pages = int(Path("/proc/self/statm").read_text().split()[5])
    limit = pages * resource.getpagesize() + int(size)
    resource.setrlimit(resource.RLIMIT_DATA, (limit, resource.RLIM_INFINITY))


def main() -> None:
    args = arguments()
    hvd.init()  # hvdlite
    torch.set_num_threads(1)
    torch.manual_seed(0)
    files = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))[hvd.rank() :: hvd.size()]  # hvdlite
    text = torch.frombuffer(bytearray(b"".join(path.read_bytes() for path in files)), dtype=torch.uint8)
    model = Model(args.width, args.layers)
    size = sum(each.numel() * each.element_size() for each in model.parameters())
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4, foreach=False)
    optimizer = hvd.DistributedOptimizer(  # hvdlite
        optimizer, model.named_parameters(), shard=not args.replicated
    )
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)  # hvdlite
    limit_memory(args.limit * size)
    for step in range(args.steps):
        at = torch.randint(len(text) - LENGTH - 1, (2,)).tolist()
        sample = torch.stack([text[begin : begin + LENGTH + 1] for begin in at]).long()
        optimizer.zero_grad()
        loss = F.cross_entropy(model(sample[:, :-1]).flatten(0, 1), sample[:, 1:].flatten())
        loss.backward()
        optimizer.clip_grad_norm_(1.0)  # hvdlite
        optimizer.step()
        loss = float(hvd.allreduce(loss.detach(), name="loss"))  # hvdlite
        if hvd.rank() == 0 and (step + 1) % 5 == 0:
            print(f"step {step + 1}: loss {loss:.3f}", flush=True)
    if args.checkpoint:
        hvd.save_sharded(args.checkpoint, model, optimizer)  # hvdlite


if __name__ == "__main__":
    main()
