"""The libraries that the benchmarks in Python compare, behind one set of names: hvdlite, Gloo, Horovod, mpi4py.

Each rank makes one of them, and a process has only one, so that no idle thread of another disturbs it. Sums of torch
tensors are taken in place. hvdlite and Horovod are the same class, because their calls are the same.
"""

import argparse
import importlib
import os
import sys
from collections.abc import Sequence

import torch
import torch.distributed as dist

from measure import PATIENCE

NAMES = ("hvdlite", "gloo", "horovod")
MPI4PY = ("mpi4py/openmpi", "mpi4py/mpich")  # calls only: it has no optimizer


def asked(description: str, names: Sequence[str] = NAMES) -> argparse.Namespace:
    """What a benchmark of one library is asked on its command line: `library` and `patience`."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--library", choices=names, default="hvdlite")
    parser.add_argument("--patience", choices=PATIENCE, default="full")
    return parser.parse_args()


class LikeHorovod:
    """hvdlite.torch or horovod.torch."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.calls = importlib.import_module(f"{name}.torch")
        self.calls.init()
        self.rank, self.size = self.calls.rank(), self.calls.size()

    def barrier(self) -> None:
        self.calls.barrier()

    def gather(self, value) -> list:
        """Every rank's value, on all ranks."""
        return self.calls.allgather_object(value)

    def reduce(self, tensor: torch.Tensor, name: str) -> None:
        self.calls.allreduce_(tensor, name=name, op=self.calls.Sum)

    def start(self, tensor: torch.Tensor, name: str):
        return self.calls.allreduce_async_(tensor, name=name, op=self.calls.Sum)

    def finish(self, handle) -> None:
        self.calls.synchronize(handle)

    def plane_memory(self, shape: "tuple[int, ...]") -> "torch.Tensor | None":
        """A float32 tensor that is moved without a copy, if the library has such memory."""
        empty = getattr(self.calls, "empty", None)
        return None if empty is None else empty(shape, dtype=torch.float32)

    def distribute(self, model: torch.nn.Module, optimizer: torch.optim.Optimizer):
        """The model and optimizer of data-parallel training."""
        named = list(model.named_parameters())
        self.calls.broadcast_parameters(model.state_dict(), root_rank=0)
        return model, self.calls.DistributedOptimizer(optimizer, named_parameters=named)

    def close(self) -> None:
        self.calls.shutdown()


class Gloo:
    """torch.distributed with its gloo backend; training is by DistributedDataParallel."""

    name = "gloo"

    def __init__(self) -> None:
        self.rank, self.size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        dist.init_process_group("gloo", init_method="env://", rank=self.rank, world_size=self.size)

    def barrier(self) -> None:
        dist.barrier()

    def gather(self, value) -> list:
        """Every rank's value, on all ranks."""
        values = [None] * self.size
        dist.all_gather_object(values, value)
        return values

    def reduce(self, tensor: torch.Tensor, name: str) -> None:
        dist.all_reduce(tensor)

    def start(self, tensor: torch.Tensor, name: str):
        return dist.all_reduce(tensor, async_op=True)

    def finish(self, handle) -> None:
        handle.wait()

    def plane_memory(self, shape: "tuple[int, ...]") -> None:
        """None: there is no such memory."""

    def distribute(self, model: torch.nn.Module, optimizer: torch.optim.Optimizer):
        """The model and optimizer of data-parallel training."""
        return torch.nn.parallel.DistributedDataParallel(model), optimizer

    def close(self) -> None:
        """Ends the process, too: a thread of torch's Gloo can outlive its group and then call std::terminate while
        Python finalizes (torch 2.13, 2 of 36 processes on a busy machine, with nothing of ours in them)."""
        dist.destroy_process_group()
        sys.stdout.flush()
        os._exit(0)


class Mpi4py:
    """mpi4py over the MPI that has started this process. A tensor is handed over as its NumPy array, without a copy."""

    def __init__(self, name: str) -> None:
        from mpi4py import MPI  # its import calls MPI_Init

        self.name, self.mpi, self.world = name, MPI, MPI.COMM_WORLD
        self.rank, self.size = self.world.Get_rank(), self.world.Get_size()

    def barrier(self) -> None:
        self.world.Barrier()

    def gather(self, value) -> list:
        """Every rank's value, on all ranks."""
        return self.world.allgather(value)

    def reduce(self, tensor: torch.Tensor, name: str) -> None:
        self.world.Allreduce(self.mpi.IN_PLACE, tensor.numpy())

    def start(self, tensor: torch.Tensor, name: str):
        return self.world.Iallreduce(self.mpi.IN_PLACE, tensor.numpy())

    def finish(self, handle) -> None:
        handle.Wait()

    def close(self) -> None:
        """MPI_Finalize is called when the process ends."""


def library(name: str) -> "LikeHorovod | Gloo | Mpi4py":
    """Start the library of this name on this rank."""
    if name in MPI4PY:
        return Mpi4py(name)
    return Gloo() if name == "gloo" else LikeHorovod(name)
