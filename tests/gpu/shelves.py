"""Ranks that share a GPU add up in each other's memory (csrc/cuda/shelf.cu), as little as shows all of that kernel.

machine.py starts it under compute-sanitizer, which is slow: so there is no kernel of PyTorch's that need not be, and
what is compared is compared on the CPU. Every dtype of the kernel; whole lines of 16 bytes, what is left of them, and
memory that begins between two; more tensors than a launch has rows; a broadcast; as often as shelves are used again.
"""

import sys
import warnings

import torch
from machine import BY_IPC

import hvdlite.torch as hvd

KINDS = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
COUNTS = (1, 7, 8, 1000, 4096, 100_003)
MANY = 100


def values(count, step, kind):
    """On the CPU, and others on each rank."""
    maker = torch.Generator().manual_seed(1000 * step + hvd.rank())
    return torch.randn(count, generator=maker).to(kind)


def holds():
    """The bits that the CPU's planes have."""
    for step, kind in enumerate(KINDS):
        for count in COUNTS:
            mine = values(count + 1, step, kind)
            for begin in (0, 1):
                due, there = hvd.allreduce(mine[begin:]), mine.cuda()[begin:]
                assert torch.equal(hvd.allreduce_(there).cpu(), due), (kind, count, begin)
        several = [values(50 + i, step, kind) for i in range(MANY)]
        due = hvd.grouped_allreduce(several, op=hvd.Sum)
        got = hvd.grouped_allreduce([one.cuda() for one in several], op=hvd.Sum)
        assert all(torch.equal(one.cpu(), wanted) for one, wanted in zip(got, due)), kind
        same = values(1000, step, kind)
        assert torch.equal(hvd.broadcast(same.cuda(), 1).cpu(), hvd.broadcast(same, 1)), kind


def main():
    """The program of each rank."""
    hvd.init()
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        for _ in range(2):  # which way tensors go is told with the second one
            hvd.allreduce(torch.ones(3).cuda())
    holds()
    if hvd.rank() == 0:
        texts = [str(one.message) for one in said if "hvdlite" in str(one.message)]
        print(BY_IPC if any("go by CUDA IPC" in text for text in texts) else f"another way: {texts}", flush=True)
    hvd.shutdown()


if __name__ == "__main__":
    sys.exit(main())
