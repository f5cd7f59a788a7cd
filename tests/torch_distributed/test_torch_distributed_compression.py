"""DDP with `compress_hook` between pretended hosts: near the uncompressed average, the same bits on all ranks."""

import pytest
from pretended_hosts import pretend
from ranks import as_ranks

torch = pytest.importorskip("torch")

import torch.distributed as dist  # noqa: E402
from test_torch_distributed import backend  # noqa: E402
from torch.nn.parallel import DistributedDataParallel  # noqa: E402

import hvdlite.torch as hvd  # noqa: E402
from hvdlite import HvdMismatchError  # noqa: E402
from hvdlite.torch.distributed import CompressionState, compress_hook  # noqa: E402

INT8, INT4 = hvd.Compression.int8(least_bytes=200), hvd.Compression.int4(least_bytes=200)


class Network(torch.nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(1)
        self.body, self.head, self.unused = (torch.nn.Linear(*shape) for shape in ((30, 64), (64, 3), (64, 20)))
        self.both = False  # whether backward reaches all

    def forward(self, x):
        x = self.body(x).tanh()
        return self.head(x).square().mean() + (self.unused(x).square().mean() if self.both else 0.0)


def wrapped(state, hook=compress_hook, dtype=torch.float32, **options):
    options = {"find_unused_parameters": True, "bucket_cap_mb": 0.01, **options}
    ddp = DistributedDataParallel(Network().to(dtype), **options)
    if state is not None:
        ddp.register_comm_hook(state, hook)
    return ddp


def train(ddp, steps=6, passes=1):
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.3)
    for step in range(steps):
        optimizer.zero_grad()
        ddp.module.both = step % 3 == 0 or not ddp.find_unused_parameters
        for index in range(passes):
            chance = torch.Generator().manual_seed(100 * step + 10 * index + dist.get_rank(ddp.process_group))
            ddp.require_backward_grad_sync = index == passes - 1  # as no_sync() has it
            ddp(torch.randn(16, 30, generator=chance).to(ddp.module.head.weight.dtype)).backward()
        optimizer.step()
    return torch.cat([each.detach().reshape(-1).float() for each in ddp.parameters()])


def near(found, wanted, most, group=None):
    every = [torch.empty_like(found) for _ in range(dist.get_world_size(group))]
    dist.all_gather(every, found, group)
    start = torch.cat([each.detach().reshape(-1) for each in Network().parameters()])
    assert all(torch.equal(each, found) for each in every)
    off = float((found - wanted).norm() / (wanted - start).norm())
    assert 0 < off < most, off


@as_ranks(2, 4)
def test_models_with_int8_and_int4_are_near_the_uncompressed_one():
    pretend(1 if hvd.size() == 2 else 2)
    with backend("hvdlite"):
        wanted, twice = train(wrapped(None)), train(wrapped(None), passes=2)
        for compression, most in ((INT8, 0.01), (INT4, 0.15), (INT4(False), 0.3)):
            near(train(wrapped(CompressionState(compression))), wanted, most)
        near(train(wrapped(CompressionState(INT8), gradient_as_bucket_view=True)), wanted, 0.01)
        near(train(wrapped(CompressionState(INT8)), passes=2), twice, 0.01)
        near(train(wrapped(CompressionState(INT8), dtype=torch.bfloat16)), wanted, 0.2)
        for narrow in (hvd.Compression.fp16, hvd.Compression.bf16):
            near(train(wrapped(CompressionState(narrow))), wanted, 0.05)
        options = {"find_unused_parameters": False, "static_graph": True}
        near(train(wrapped(CompressionState(INT8), **options)), train(wrapped(None, **options)), 0.01)


@as_ranks(2)
def test_buckets_that_are_built_anew_lose_nothing():
    pretend(1)
    layouts, found = [], []

    def hook(state, bucket):
        layouts.extend([[]] if bucket.index() == 0 else [])
        layouts[-1].append([each.numel() for each in bucket.parameters()])
        return compress_hook(state, bucket)

    with backend("hvdlite"):
        for state in (CompressionState(hvd.Compression.none), CompressionState(INT4)):
            ddp = wrapped(state, hook, find_unused_parameters=False, bucket_cap_mb=0.004)
            ddp.module.both, total = True, 0
            for _ in range(3):
                ddp.zero_grad()
                ddp(torch.full((4, 30), hvd.rank() + 0.5)).backward()
                total = total + torch.cat([each.grad.reshape(-1) for each in ddp.parameters()])
            lost = torch.cat([state.residual(each) for each in ddp.module.parameters()])
            dist.all_reduce(lost, dist.ReduceOp.AVG)
            found.append((total, total + lost))
        assert len(layouts) == 6 and layouts[0] != layouts[1] == layouts[2]
        assert not torch.equal(found[1][0], found[0][0])
        torch.testing.assert_close(found[1][1], found[0][0], rtol=1e-4, atol=1e-6)


@as_ranks(3)
def test_a_group_of_some_ranks_one_host_and_ranks_that_differ():
    with backend("hvdlite"):
        assert torch.equal(train(wrapped(CompressionState(INT8))), train(wrapped(None)))
    pretend(1)
    with backend("hvdlite"):
        pair = dist.new_group([0, 2])
        if hvd.rank() != 1:
            found = train(wrapped(CompressionState(INT8, pair), process_group=pair))
            near(found, train(wrapped(None, process_group=pair)), 0.01, pair)
        ddp = wrapped(CompressionState(INT8 if hvd.rank() else INT4))
        with pytest.raises(HvdMismatchError, match="compress_hook.*int[48].*int[48]"):
            train(ddp, 1)
        gloo = dist.new_group(backend="gloo")
        with pytest.raises(ValueError, match="HVD208"):
            train(wrapped(CompressionState(INT8, gloo), process_group=gloo), 1)
    with pytest.raises(ValueError, match="HVD208"):
        CompressionState("int8")
