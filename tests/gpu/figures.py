"""What collectives and training steps cost on GPUs, beside NCCL's own call, DistributedDataParallel and nothing.

For the ranks of a job of one, or of two that NCCL joins. Each figure is the median of many runs, taken twice, of which
the first warms up; rank 0 tells its own. Whose turn it is, the device has nothing else to do, on no rank: each call
waits for it, and one with others ends on no rank before all have come. So ranks are in step, and no two communicators
are at work at once.
"""

import time

import raw
import torch
from machine import MEASURED, tell_most

import hvdlite.torch as hvd
from hvdlite.torch.optimizer.gradient_codec import Wire
from hvdlite.torch.optimizer.reducer import Exchange

RESNET_TENSORS, RESNET_ELEMENTS = 161, 25_557_032
DEVICE, BACKEND = "cuda", "nccl"  # the tests' are others
SMALL_TIMES, GROUP_TIMES, STEP_TIMES, LARGE_TIMES = 200, 20, 50, 30


def finished():
    """The device has nothing to do any more."""
    torch.cuda.synchronize()


def stream():
    """The number of the stream that is current."""
    return torch.cuda.current_stream().cuda_stream


def timed(call, times):
    """Seconds of one call: the median."""
    seconds = []
    for _ in range(times):
        finished()
        began = time.perf_counter()
        call()
        finished()
        seconds.append(time.perf_counter() - began)
    return sorted(seconds)[times // 2]


def in_turn(calls, times):
    """Seconds of one of each call: the median. They take turns, so that a machine that slows down slows all."""
    seconds = [[] for _ in calls]
    for _ in range(times):
        for taken, call in zip(seconds, calls):
            taken.append(timed(call, 1))
    return [sorted(taken)[times // 2] for taken in seconds]


def a_model(layers, width):
    """Of two tensors a layer."""
    torch.manual_seed(0)
    parts = [one for _ in range(layers) for one in (torch.nn.Linear(width, width), torch.nn.ReLU())]
    return torch.nn.Sequential(*parts).to(DEVICE)


def a_step(model, optimizer, batch):
    """Forward, backward, update."""

    def step():
        optimizer.zero_grad()
        model(batch).sum().backward()
        optimizer.step()

    return step


def plain(model):
    """An optimizer that does nothing with gradients but use them."""
    return torch.optim.SGD(model.parameters(), lr=1e-6)


def ours_of(model):
    """The same, over hvdlite. A DistributedOptimizer of one rank sends nothing, and would cost nothing: this one sends
    all that one of several ranks does."""
    optimizer = hvd.DistributedOptimizer(plain(model), model.named_parameters())
    if hvd.size() > 1:
        return optimizer
    exchange = Exchange(Wire(hvd.Average, 1.0, hvd.Compression.none, hvd.global_process_set, "", True, False), 1)
    for name, parameter in model.named_parameters():
        exchange.add(parameter, name)
    optimizer.__dict__["_hvd"] = exchange
    return optimizer


def told(claim, what, value, limit, unit):
    """By rank 0."""
    if hvd.rank() == 0:
        tell_most(claim, what, value, limit, unit)


def small(claim):
    """4 KB, and gradients of a ResNet-50 as one group, beside NCCL without anything and PyTorch's."""
    import torch.distributed as dist

    def share(mine):
        return hvd.broadcast_object(mine, 0)

    few = torch.ones(1024, device=DEVICE)
    gradients = [torch.ones(RESNET_ELEMENTS // RESNET_TENSORS, device=DEVICE) for _ in range(RESNET_TENSORS)]
    hvd.allreduce_(few, op=hvd.Sum, name="small")  # now NCCL is there, and knows whether it lets ranks share a GPU
    rank, size = hvd.rank(), hvd.size()
    calls = [
        lambda: hvd.allreduce_(few, op=hvd.Sum, name="small"),
        lambda: dist.all_reduce(few),
        raw.allreduce_of(raw.library(), rank, size, share, few, stream()),
    ]
    groups = [
        lambda: hvd.grouped_allreduce_(gradients, op=hvd.Sum, name="step"),
        lambda: [dist.all_reduce(one) for one in gradients],
    ]
    for _ in range(2):
        ours, theirs, bare = in_turn(calls, SMALL_TIMES)
        group, group_theirs = in_turn(groups, GROUP_TIMES)
    what = f"4 KB, beside NCCL's own call, {bare * 1e6:.3f} us, and 10 us (PyTorch's NCCL: {theirs * 1e6:.3f} us)"
    told(claim, what, ours * 1e6, bare * 1e6 + 10, "us")
    if rank == 0:
        more = f"{group * 1e3:.3f} ms, PyTorch's NCCL one by one {group_theirs * 1e3:.3f} ms"
        print(f"{RESNET_TENSORS} gradients on {size} ranks: {more}", flush=True)


def steps(claim):
    """Whole steps: ours and DistributedDataParallel's."""
    batch = torch.randn(64, 400, device=DEVICE)
    model, theirs = a_model(81, 400), torch.nn.parallel.DistributedDataParallel(a_model(81, 400))
    calls = [a_step(model, ours_of(model), batch), a_step(theirs, plain(theirs), batch)]
    for _ in range(2):
        ours, ddp = in_turn(calls, STEP_TIMES)
    told(claim, "a step of 162 gradients, beside DistributedDataParallel's", ours * 1e3, ddp * 1e3, "ms")


def overlap():
    """Of one rank: a whole step, and the same without hvdlite."""
    large, alone = a_model(24, 2048), a_model(24, 2048)  # 100 M parameters
    batch = torch.randn(4096, 2048, device=DEVICE)
    calls = [a_step(large, ours_of(large), batch), a_step(alone, plain(alone), batch)]
    for _ in range(2):
        ours, bare = in_turn(calls, LARGE_TIMES)
    told("overlap", "a step of 100 M parameters, beside its computation", ours * 1e3, 1.05 * bare * 1e3, "ms")


def figures(where):
    """Beside PyTorch's own NCCL, in a process group of the same ranks, all of one machine. where: a key of MEASURED."""
    import torch.distributed as dist

    of_small, of_step = MEASURED[where]
    rank, size = hvd.rank(), hvd.size()
    store = dist.TCPStore("127.0.0.1", 0, size, True, wait_for_workers=False) if rank == 0 else None
    port = hvd.broadcast_object(store.port if rank == 0 else None, 0)
    store = store or dist.TCPStore("127.0.0.1", port, size, False, wait_for_workers=False)
    dist.init_process_group(BACKEND, store=store, rank=rank, world_size=size)
    small(of_small)
    steps(of_step)
    if size == 1:
        overlap()
    hvd.barrier()
    dist.destroy_process_group()
    hvd.barrier()  # rank 0 has the store
