"""Gradients on GPUs that are compressed travel in 16 bits, and the kernels that pack them cast them (over a GPU that is
none, gpus.py): nobody casts them one by one, and what comes of them is right."""

import warnings

import gpus
import pytest
import torch
from ranks import as_ranks

import hvdlite.torch as hvd
from hvdlite.torch import compression

LAYERS = 161
BOTH = {"float16": hvd.Compression.fp16, "bfloat16": hvd.Compression.bf16}


@pytest.fixture(scope="module", autouse=True)
def stub():
    gpus.build_stub()


def due(tensors, wire, factor):
    """The sum of all ranks' tensors as they travel, each rounded once and the sum once more."""
    parts = [(tensor * tensor.new_tensor(factor)).to(wire) for tensor in tensors]
    return sum(part.float() for part in parts).to(wire)


class Refusing(compression.FP16Compressor):
    """Ours, but for what it does: another one."""

    asked = 0

    @staticmethod
    def compress(tensor):
        Refusing.asked += 1
        return tensor.to(torch.bfloat16), tensor.dtype


def gradients(rank, dtype=torch.float32):
    """Of a rank, of many sizes. 70000 becomes infinite in float16, and its average does not; 1e-7 is subnormal."""
    seeds = torch.Generator().manual_seed(rank)
    made = [torch.randn(1 + n * 7 % 50, generator=seeds, dtype=dtype) for n in range(LAYERS)]
    made[0][0] = 70000.0 * (rank + 1) / 2
    made[1][0] = 1e-7 * (rank + 1)
    return made


class Straight(torch.nn.Module):
    """A loss whose gradients are what is given."""

    def __init__(self, given):
        super().__init__()
        self.rows = torch.nn.ParameterList(torch.nn.Parameter(torch.zeros_like(one)) for one in given)

    def forward(self, given):
        return sum((row * one).sum() for row, one in zip(self.rows, given))


def no_casts(monkeypatch):
    for kind in BOTH.values():
        for name in ("compress", "decompress"):
            monkeypatch.setattr(kind, name, staticmethod(lambda *_: pytest.fail("a tensor was cast by itself")))


@as_ranks(2)
def test_an_optimizers_gradients_are_cast_while_they_are_packed():
    every = [gradients(rank) for rank in range(hvd.size())]
    mine = every[hvd.rank()]
    with pytest.MonkeyPatch.context() as patch, gpus.on_gpus(hvd.rank()):
        no_casts(patch)
        hvd.allreduce(torch.ones(1))
        for wire, kind in BOTH.items():
            for more in ({}, {"num_groups": 3}, {"op": hvd.Sum, "gradient_predivide_factor": 1.0}):
                model = Straight(mine)
                optimizer = hvd.DistributedOptimizer(
                    torch.optim.SGD(model.parameters(), 1.0), model.named_parameters(), compression=kind, **more
                )
                factor = 1.0 if more.get("op") == hvd.Sum else 0.5
                for _ in range(3):  # the last ones as they were learned
                    optimizer.zero_grad()
                    launches, calls = gpus.calls("cuLaunchKernel"), gpus.calls("ncclAllReduce")
                    model(mine).backward()
                    optimizer.synchronize()
                    launches, calls = gpus.calls("cuLaunchKernel") - launches, gpus.calls("ncclAllReduce") - calls
                    most = more.get("num_groups", LAYERS)  # buckets, each a launch each way, or two
                    assert 2 * calls <= launches <= 2 * calls + 2 and calls <= most, (launches, calls)
                    for row, parts in zip(model.rows, zip(*every)):
                        want = due(parts, getattr(torch, wire), factor).float()
                        assert row.grad.dtype == torch.float32 and torch.equal(row.grad, want), (wire, more)
                    with optimizer.skip_synchronize():
                        optimizer.step()
        hvd.barrier()


@as_ranks(2)
def test_the_op_casts_what_it_can_and_compresses_the_rest():
    rank, size = hvd.rank(), hvd.size()
    three = torch.full((3,), 1 / 3, dtype=torch.float64) * (rank + 1)
    with gpus.on_gpus(rank):
        with pytest.MonkeyPatch.context() as patch:
            no_casts(patch)
            for wire, kind in BOTH.items():
                want = due([three / (rank + 1), three / (rank + 1) * 2], getattr(torch, wire), 1.0).double()
                assert torch.equal(hvd.allreduce(three, compression=kind, op=hvd.Sum), want)
            before = hvd.stats()["totals"]["bytes"].get("nccl", 0)
            top = hvd.allreduce(torch.tensor([1.0, 2.0]) * rank, compression=hvd.Compression.fp16, op=hvd.Max)
            assert hvd.stats()["totals"]["bytes"]["nccl"] == before + 4  # two values as they crossed
            assert top.tolist() == [1.0, 2.0]
        half, whole = torch.full((2,), 1.5, dtype=torch.float16), torch.tensor([rank, 4])
        got = hvd.grouped_allreduce([three, whole, half], compression=hvd.Compression.bf16, op=hvd.Sum)
        assert [one.dtype for one in got] == [torch.float64, torch.int64, torch.float16]
        assert torch.equal(got[0], due([three / (rank + 1), three / (rank + 1) * 2], torch.bfloat16, 1.0).double())
        assert got[1].tolist() == [1, 8] and got[2].tolist() == [3.0, 3.0]
        tracked = torch.ones(2, requires_grad=True)
        hvd.allreduce(tracked, compression=hvd.Compression.fp16, op=hvd.Sum).sum().backward()
        assert tracked.grad.tolist() == [size, size]
        asked = Refusing.asked
        assert hvd.allreduce(torch.full((2,), 1 + 2**-9), compression=Refusing).tolist() == [1.0, 1.0]
        assert Refusing.asked == asked + 1
        assert hvd.allreduce(torch.ones(2), compression=hvd.Compression.none).tolist() == [1.0, 1.0]


@as_ranks(2)
def test_ranks_that_compress_in_different_ways_are_told_who_does_what():
    kind = (hvd.Compression.fp16, hvd.Compression.bf16)[hvd.rank()]
    text = "the dtype: rank 0 said float32 compressed to float16, rank 1 said float32 compressed to bfloat16"
    with gpus.on_gpus(hvd.rank()):
        with pytest.raises(hvd.HvdMismatchError, match=f"tensor 'allreduce.mixed': ranks disagree on {text}"):
            hvd.allreduce(torch.ones(2), name="mixed", compression=kind)
        mine = hvd.Compression.fp16 if hvd.rank() else hvd.Compression.none
        with pytest.raises(
            hvd.HvdMismatchError, match="rank 0 said float32, rank 1 said float32 compressed to float16"
        ):
            hvd.allreduce(torch.ones(2), name="half", compression=mine)
        assert hvd.allreduce(torch.ones(2), name="mixed", compression=hvd.Compression.fp16).tolist() == [1.0, 1.0]


@as_ranks(2)
def test_where_nccl_is_not_used_nothing_is_lost():
    hvd.shutdown()
    hvd.init()
    fine = torch.full((3,), 1 + 2**-20)
    with gpus.on_gpus(0), warnings.catch_warnings():  # both ranks on one
        warnings.simplefilter("ignore")
        assert torch.equal(hvd.allreduce(fine, compression=hvd.Compression.fp16), fine)
    hvd.shutdown()


@as_ranks(2)
def test_a_request_that_cannot_be_cast_is_refused():
    from hvdlite import _core

    half, mine = _core.DTYPES["float16"] + 1, torch.ones(2)
    for kind, dtype, device, wire in (
        (_core.ALLREDUCE, "float32", 0, half),
        (_core.ALLREDUCE, "int32", 1, half),
        (_core.ALLREDUCE, "float32", 1, _core.DTYPES["float32"] + 1),
        (_core.ALLREDUCE, "float32", 1, -7),
        (_core.BROADCAST, "float32", 1, half),
    ):
        with pytest.raises(ValueError, match="cannot travel as dtype"):
            _core.submit(
                kind, hvd.Sum, _core.DTYPES[dtype], "refused", (2,), mine.data_ptr(), mine.data_ptr(), mine,
                device=device, wire=wire,
            )  # fmt: skip
