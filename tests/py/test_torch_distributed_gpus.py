"""Backend "hvdlite" takes tensors on GPUs, over a GPU that is none (gpus.py): which way they go, and that results are
right; and what a Work says of a device that is not done.
"""

import contextlib
import warnings
from types import SimpleNamespace

import gpus
import pytest
import torch
import torch.distributed as dist
from ranks import as_ranks
from test_torch_distributed import backend, same

import hvdlite.torch as hvd
from hvdlite.torch.distributed import group, pairs, submission, tensors


@pytest.fixture(scope="module", autouse=True)
def stub():
    gpus.build_stub()


@contextlib.contextmanager
def on_gpu(index):
    """All tensors of the process group lie there, too."""
    device = gpus.Pretended(index)
    with gpus.on_gpus(index), pytest.MonkeyPatch.context() as patch:
        for module in (pairs, submission, tensors):
            patch.setattr(module, "place_of", lambda given: device if given else None)
        patch.setattr(group.HvdProcessGroup, "_again", lambda *_: None)
        yield device


def reductions(rank, size):
    total = size * (size + 1) / 2
    dist.all_reduce(mine := torch.full((5,), rank + 1.0))
    same(mine, total)
    work = dist.all_reduce(mine := torch.arange(6.0).view(2, 3).t(), async_op=True)
    same(work.get_future().then(lambda done: done.value()[0]).wait(), torch.arange(6.0).view(2, 3).t() * size)
    assert work.wait() and work.is_completed()
    dist.all_reduce(mine := torch.full((2,), complex(rank + 1, 1)))
    same(mine, complex(total, size))
    dist.all_reduce(mine := torch.tensor([1 << rank]), dist.ReduceOp.BOR)
    same(mine, [(1 << size) - 1])
    dist.all_reduce(sparse := torch.sparse_coo_tensor(torch.tensor([[rank, size]]), torch.ones(2), (size + 1,)))
    same(sparse.to_dense(), torch.tensor([1.0] * size + [size]))
    dist.reduce(mine := torch.full((3,), rank + 1.0), 0)
    same(mine, rank + 1.0 if rank else total)
    dist.reduce_scatter_single(out := torch.empty(3), torch.arange(3.0 * size))
    same(out, torch.arange(3.0 * rank, 3 * rank + 3) * size)


def moves(rank, size):
    dist.broadcast(mine := torch.full((3,), rank, dtype=torch.complex64), size - 1)
    same(mine, size - 1)
    dist.all_gather(parts := [torch.empty(2, 3).t() for _ in range(size)], torch.full((3, 2), float(rank)))
    same(parts, torch.arange(float(size)).view(-1, 1, 1))
    for out in (torch.empty(size, 2), torch.empty(2, size).t()):
        dist.all_gather_single(out, torch.full((2,), float(rank)))
        same(out, torch.arange(float(size))[:, None])
    dist.all_to_all_single(out := torch.empty(size), torch.arange(float(size)) + 10 * rank)
    same(out, 10 * torch.arange(size) + rank)
    rows = torch.full((sum(range(size)),), float(rank))  # k of them to rank k
    dist.all_to_all_single(out := torch.empty(rank * size), rows, [rank] * size, list(range(size)))
    same(out, torch.arange(size).repeat_interleave(rank))
    dist.gather(torch.full((2,), float(rank)), parts := [torch.empty(2) for _ in range(size)] * (rank == 0) or None)
    same(parts or torch.empty(0), torch.arange(float(size))[:, None] if rank == 0 else [])
    dist.scatter(out := torch.empty(2), [torch.full((2,), float(k)) for k in range(size)] if rank == 0 else None)
    same(out, rank)
    (dist.send if rank == 0 else dist.recv)(mine := torch.full((2, 2), float(rank)).t(), 1 - rank)
    same(mine, 0)
    (dist.send if rank == 0 else dist.recv)(mine := torch.full((2,), float(rank)), *[1] * (rank == 0))
    same(mine, 0)


def ddp(rank):
    torch.manual_seed(1)
    model = torch.nn.Linear(3, 1)
    parallel = torch.nn.parallel.DistributedDataParallel(model, bucket_cap_mb=1e-5)
    parallel(torch.full((1, 3), float(rank + 1))).sum().backward()
    same(model.weight.grad, 1.5)
    dist.barrier()


@as_ranks(2)
def test_every_call_goes_by_nccl():
    with backend("hvdlite") as (rank, size), on_gpu(rank), warnings.catch_warnings():
        warnings.filterwarnings("error", "hvdlite")
        sent = ("ncclAllReduce", "ncclReduceScatter", "ncclAllGather", "ncclSend", "ncclRecv", "ncclBroadcast")
        before = {name: gpus.calls(name) for name in sent}
        reductions(rank, size), moves(rank, size), ddp(rank)
        print({name: gpus.calls(name) - before[name] for name in sent}, gpus.calls("cuMemcpyDtoH"))


@as_ranks(2)
def test_ranks_that_share_a_gpu_go_by_way_of_the_cpu():
    with backend("hvdlite") as (rank, size), on_gpu(4), warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        before = gpus.calls("ncclAllReduce"), gpus.calls("cuMemcpyDtoH")
        reductions(rank, size), moves(rank, size), ddp(rank)
        assert gpus.calls("ncclAllReduce") == before[0]
        print(gpus.calls("cuMemcpyDtoH") - before[1], [str(each.message)[:60] for each in said])
