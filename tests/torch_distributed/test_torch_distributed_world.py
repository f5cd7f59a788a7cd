"""PyTorch's own world over backend "hvdlite": weights and values are those over Gloo, bit by bit on 2 ranks."""

import copy
import gc
import tempfile

import pytest
from ranks import as_ranks, everything

torch = pytest.importorskip("torch")

import torch.distributed as dist  # noqa: E402
from test_torch_distributed import VERSION, backend  # noqa: E402
from torch import nn  # noqa: E402
from torch.nn.parallel import DistributedDataParallel  # noqa: E402

import hvdlite.torch as hvd  # noqa: E402
from hvdlite.torch.distributed import bucket_memory  # noqa: E402

PATIENCE_S = 90.0  # the first DDP of a process imports the compiler


def network(normed=False, seed=0):
    torch.manual_seed(seed)
    layers = [[nn.Linear(64, 64), *([nn.BatchNorm1d(64)] if normed else []), nn.ReLU()] for _ in range(4)]
    return nn.Sequential(*(layer for each in layers for layer in each))


def trained(model, optimizer=None, steps=4, seed=100, synchronized=1):
    """All parameters after some steps; gradients are synchronized in one of so many passes."""
    optimizer = optimizer or torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    rows = torch.Generator().manual_seed(seed + dist.get_rank())
    for _ in range(steps):
        optimizer.zero_grad()
        for left in reversed(range(synchronized)):
            if synchronized > 1:
                model.require_backward_grad_sync = left == 0  # what no_sync() sets
            model(torch.randn(8, 64, generator=rows)).square().mean().backward()
        optimizer.step()
    return weights(model)


def weights(model):
    whole = [each.full_tensor() if hasattr(each, "full_tensor") else each for each in model.parameters()]
    return torch.cat([each.detach().reshape(-1) for each in whole])


def ddp(steps=4, synchronized=1, normed=False, **more):
    model = DistributedDataParallel(network(normed), **more)
    found = trained(model, steps=steps, synchronized=synchronized)
    return torch.cat([found, *(each.reshape(-1).float() for each in model.buffers())])


class Branching(nn.Module):
    """Each pass uses another part, another one on each rank."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(1)
        self.first, self.even, self.odd, self.passes = nn.Linear(64, 64), nn.Linear(64, 64), nn.Linear(64, 64), 0

    def forward(self, rows):
        self.passes += 1
        return (self.even if (self.passes + dist.get_rank()) % 3 else self.odd)(self.first(rows))


def unused():
    return trained(DistributedDataParallel(Branching(), find_unused_parameters=True))


def hooked(name):
    from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook

    model = DistributedDataParallel(network())
    if name == "powerSGD":
        state = powerSGD_hook.PowerSGDState(None, matrix_approximation_rank=2, start_powerSGD_iter=2)
        model.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
    else:
        model.register_comm_hook(None, getattr(default_hooks, name))
    return trained(model, steps=6)


def joined():
    from torch.distributed.algorithms.join import Join

    model = DistributedDataParallel(network())
    with Join([model]):
        return trained(model, steps=3 + 2 * dist.get_rank())


def zero():
    from torch.distributed.optim import ZeroRedundancyOptimizer

    model = DistributedDataParallel(network())
    optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.Adam, lr=1e-2)
    found = trained(model, optimizer)
    optimizer.consolidate_state_dict(0)
    return found


def sharded(dtype=None, plane_memory=False, optimizer=torch.optim.AdamW):
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    model, policy = network(), MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32 if dtype else None)
    for layer in model:
        if isinstance(layer, nn.Linear):
            fully_shard(layer, mp_policy=policy)
    fully_shard(model, mp_policy=policy)
    if plane_memory and dist.get_backend() == "hvdlite":
        for layer in model.modules():
            if hasattr(layer, "set_allocate_memory_from_process_group_for_comm"):
                layer.set_allocate_memory_from_process_group_for_comm(True)
    return trained(model, optimizer(model.parameters(), 1e-2))


def fully_sharded_1():
    from torch.distributed.fsdp import FullyShardedDataParallel

    model = FullyShardedDataParallel(network(), device_id=torch.device("cpu"))
    trained(model, torch.optim.SGD(model.parameters(), 1e-2))
    with FullyShardedDataParallel.summon_full_params(model):
        return weights(model).clone()


def tensor_parallel():
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    plan = {"0": ColwiseParallel(), "2": RowwiseParallel()}
    model = parallelize_module(network(), init_device_mesh("cpu", (dist.get_world_size(),)), plan)
    return trained(model, seed=5 - dist.get_rank())  # the same rows on all ranks


def meshed():
    """DTensors are redistributed, and a mesh of two dimensions has groups of some ranks."""
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor, init_device_mesh

    size = dist.get_world_size()
    mesh = init_device_mesh("cpu", (2, size // 2), mesh_dim_names=("data", "tensor"))
    found = []
    for name in ("data", "tensor"):
        dist.all_reduce(mine := torch.full((3,), float(dist.get_rank())), group=mesh[name].get_group())
        found.append(mine)
        assert dist.get_backend(mesh[name].get_group()) == dist.get_backend(), name
    flat = init_device_mesh("cpu", (size,))
    torch.manual_seed(0)
    rows = distribute_tensor(torch.randn(8, 8), flat, [Shard(0)])
    columns = rows.redistribute(flat, [Shard(1)])
    product = (rows @ columns.redistribute(flat, [Replicate()]).t()).redistribute(flat, [Replicate()])
    return torch.cat([*found, product.to_local().reshape(-1), columns.full_tensor().reshape(-1)])


def piped():
    from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe

    rank, size, found = dist.get_rank(), dist.get_world_size(), []
    torch.manual_seed(0)
    layer = [nn.Sequential(nn.Linear(64, 64), nn.ReLU()) for _ in range(size)][rank]
    stage = PipelineStage(layer, rank, size, torch.device("cpu"))
    for schedule in (ScheduleGPipe, Schedule1F1B):
        rows, wanted = torch.randn(2, 16, 64, generator=torch.Generator().manual_seed(9))
        given = {0: (rows,)}.get(rank, ())
        more = {"target": wanted} if rank == size - 1 else {}
        layer.zero_grad()
        schedule(stage, 4, loss_fn=nn.functional.mse_loss).step(*given, **more)
        found += [each.grad.reshape(-1) for each in layer.parameters()]
    return torch.cat(found)


def functional():
    import torch.distributed._functional_collectives as calls

    group, mine = dist.group.WORLD, torch.arange(8.0) + dist.get_rank()
    whole = calls.all_gather_tensor(mine, 0, group)
    found = [calls.all_reduce(mine, "sum", group), whole, calls.reduce_scatter_tensor(whole, "avg", 0, group)]
    found += [calls.all_to_all_single(mine, None, None, group), calls.broadcast(mine, 0, group)]
    found += calls.all_reduce_coalesced([mine, mine * 2], "sum", group)
    found += calls.all_gather_into_tensor_coalesced([mine, mine * 2], group)
    if hasattr(torch.library, "get_kernel") and hasattr(torch.ops._c10d_functional, "batch_p2p_ops"):
        import hvdlite.torch.distributed.group  # noqa: F401  our kernels of these leave Gloo's groups to torch's

        rank, size, name = dist.get_rank(), dist.get_world_size(), group.group_name
        ops, out, near = torch.ops._c10d_functional, torch.empty(8 * size), [(rank + 1) % size, (rank - 1) % size]
        found += [ops.wait_tensor(ops.all_gather_into_tensor_out(mine, size, name, out=out)), out]
        moved = ops.batch_p2p_ops(["isend", "irecv"], near, [0, 0], [mine, torch.empty(8)], name)
        found += [ops.wait_tensor(each) for each in moved]
    return torch.cat([each + 0 for each in found])


def checkpointed():
    import torch.distributed.checkpoint as checkpoint
    from torch.distributed.fsdp import fully_shard

    folder = [tempfile.mkdtemp() if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(folder, 0)
    model, other = fully_shard(network()), fully_shard(network(seed=7))
    found = trained(model, torch.optim.SGD(model.parameters(), 0.1))
    checkpoint.save({"model": model.state_dict()}, checkpoint_id=folder[0])
    state = {"model": other.state_dict()}
    checkpoint.load(state, checkpoint_id=folder[0])
    other.load_state_dict(state["model"])
    assert torch.equal(weights(other), found)
    return found


def compiled():
    """Functional collectives, plain ones and DDP inside of torch.compile."""
    import torch.distributed._functional_collectives as calls

    @torch.compile
    def step(rows):
        doubled = rows * 2
        dist.all_reduce(doubled)
        whole = calls.all_gather_tensor(calls.all_reduce(doubled, "sum", dist.group.WORLD), 0, dist.group.WORLD)
        return whole.sin() + 1

    found = step(torch.arange(4.0) + dist.get_rank())
    model = DistributedDataParallel(network())
    trained(torch.compile(model))
    return torch.cat([found, weights(model)])


CASES = {
    "ddp": ddp,
    "BatchNorm": lambda: ddp(normed=True),
    "static graph": lambda: ddp(static_graph=True),
    "unused": unused,
    "no_sync": lambda: ddp(synchronized=3),
    "bucket views": lambda: ddp(gradient_as_bucket_view=True, bucket_cap_mb=0.02),
    "fp16": lambda: hooked("fp16_compress_hook"),
    "allreduce_hook": lambda: hooked("allreduce_hook"),
    "Join": joined,
    "ZeRO": zero,
    "FSDP2": sharded,
    "FSDP2 of bf16": lambda: sharded(torch.bfloat16),
    "FSDP2 in plane memory": lambda: sharded(plane_memory=True),
    "FSDP1": fully_sharded_1,
    "tensor parallel": tensor_parallel,
    "mesh": meshed,
    "pipeline": piped,
    "functional": functional,
    "checkpoint": checkpointed,
}


SINCE = {"FSDP2": (2, 7), "FSDP2 of bf16": (2, 7), "FSDP2 in plane memory": (2, 8), "checkpoint": (2, 7)}
SINCE |= {"pipeline": (2, 5), "mesh": (2, 5)}


def case_of(name):
    least = SINCE.get(name, (2, 2))
    return pytest.param(name, marks=pytest.mark.skipif(least > VERSION, reason=f"torch has it from {least} on"))


@pytest.mark.parametrize("case", [case_of(each) for each in CASES])
@as_ranks(2, 4)
def test_the_same_as_over_gloo(case):
    compare(CASES[case])


@pytest.mark.parametrize("views", [False, True])
@as_ranks(2, 3)
def test_buckets_move_to_plane_memory(views):
    """They are freed with the model; a gradient that lies in one keeps it."""
    least, bucket_memory.LEAST_BYTES = bucket_memory.LEAST_BYTES, 1 << 10
    try:
        compare(lambda: ddp(gradient_as_bucket_view=views, bucket_cap_mb=0.02))
        with backend("hvdlite"):
            model = DistributedDataParallel(network(), gradient_as_bucket_view=views, bucket_cap_mb=0.02)
            trained(model)
            moved = [storage for storage, block, _ in bucket_memory._moved.values() if block is not None]
            assert len(moved) > 1 and hvd.memory_stats()["arena"] > 0
            kept = next(model.parameters()).grad
            wanted = kept.clone()
            del model
            gc.collect()
            assert torch.equal(kept, wanted) and sum(each.expired() for each in moved) >= len(moved) - 1
    finally:
        bucket_memory.LEAST_BYTES = least


@as_ranks(2, 4)
def test_callbacks_of_futures_start_collectives():
    """PowerSGD's do. Gloo now and then ends by SIGABRT in destroy_process_group after it, so it is not compared."""
    with backend("hvdlite") as (_, size):
        found = hooked("powerSGD")
        everyone = [torch.empty_like(found) for _ in range(size)]
        dist.all_gather(everyone, found)
    assert all(torch.equal(each, found) for each in everyone) and found.isfinite().all()


@as_ranks(*everything(2, 4))
def test_compiled_the_same_as_over_gloo():
    compare(compiled)


def compare(case):
    with backend("gloo"):
        wanted = copy.deepcopy(case())
    with backend("hvdlite"):
        found = case()
    exact = hvd.size() == 2
    torch.testing.assert_close(found, wanted, **({"rtol": 0, "atol": 0} if exact else {"rtol": 1e-3, "atol": 1e-4}))
