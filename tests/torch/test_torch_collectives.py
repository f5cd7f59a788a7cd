"""The collectives on tensors, on 1 to 3 ranks: every op and dtype, bfloat16 among them, layouts, and gradients."""

import functools
import operator
from importlib.util import find_spec

import pytest
from ranks import as_ranks

torch = pytest.importorskip("torch")

import hvdlite.torch as hvd  # noqa: E402

SIZES = (1, 2, 3)
DTYPES = ["uint8", "int8", "uint16", "int16", "int32", "int64", "float16", "bfloat16", "float32", "float64", "bool"]
FLOAT8 = ["float8_e4m3fn", "float8_e5m2"]
DTYPES += FLOAT8
OPS = ["Average", "Sum", "Min", "Max", "Product"]


def given(rank, count, dtype):
    numbers = (torch.arange(count) * 7 + rank * 3) % 5
    return (numbers > 1) if dtype == "bool" else numbers.to(getattr(torch, dtype))


def reduced(tensors, op):
    dtype = tensors[0].dtype
    wide = torch.stack(tensors).to(torch.float64)
    if dtype == torch.bool:
        return wide.amax(0).bool() if op in ("Sum", "Max") else wide.amin(0).bool()
    result = {
        "Average": lambda: wide.sum(0) / len(tensors),
        "Sum": lambda: wide.sum(0),
        "Min": lambda: wide.amin(0),
        "Max": lambda: wide.amax(0),
        "Product": lambda: wide.prod(0),
    }[op]()
    return result.to(torch.float32).to(dtype) if dtype.is_floating_point else result.trunc().to(dtype)


@pytest.mark.parametrize("op", OPS)
@as_ranks(*SIZES)
def test_allreduce_reduces_every_dtype(op):
    for dtype in DTYPES:
        for count in (1, 7, 3001):
            tensors = [given(rank, count, dtype) for rank in range(hvd.size())]
            if dtype == "bool" and op == "Average":
                with pytest.raises(ValueError, match="bool"):
                    hvd.allreduce(tensors[hvd.rank()])
                continue
            result = hvd.allreduce(tensors[hvd.rank()], op=getattr(hvd, op))
            wanted = reduced(tensors, op)
            assert result.dtype == wanted.dtype
            if dtype in FLOAT8:  # compared by their bits: with so few there is no tolerance
                result, wanted = result.view(torch.uint8), wanted.view(torch.uint8)
            torch.testing.assert_close(result, wanted, msg=lambda m, d=dtype: f"{d}: {m}")


@pytest.mark.parametrize("dtype", DTYPES)
@as_ranks(*SIZES)
def test_allgather_and_broadcast_move_every_dtype(dtype):
    mine = given(hvd.rank(), 4 * (hvd.rank() + 1), dtype).reshape(-1, 2, 2)
    expected = torch.cat([given(r, 4 * (r + 1), dtype).float().reshape(-1, 2, 2) for r in range(hvd.size())])
    assert torch.equal(hvd.allgather(mine).float(), expected)
    root = hvd.size() - 1
    same = given(hvd.rank(), 9, dtype)
    assert torch.equal(hvd.broadcast(same, root).float(), given(root, 9, dtype).float())
    assert hvd.broadcast_(same, root_rank=root, name="b") is same
    assert torch.equal(same.float(), given(root, 9, dtype).float())


@as_ranks(*SIZES)
def test_bfloat16_accumulates_in_float32():
    """1 + 2^-8 is no bfloat16, but the sum of 1 and n * 2^-8 must not lose each small part on the way."""
    mine = torch.full((100,), 256.0 if hvd.rank() == 0 else 1.0, dtype=torch.bfloat16)
    result = hvd.allreduce(mine, op=hvd.Sum)
    exact = torch.full((100,), 256.0 + hvd.size() - 1).to(torch.bfloat16)
    assert torch.equal(result, exact)


def rounded(wide, dtype):
    """The bits of float32 values in a float8, as PyTorch rounds them; its versions before 2.13 made 448 a NaN."""
    bits = wide.to(dtype).view(torch.uint8)
    if dtype == torch.float8_e4m3fn:
        bits = torch.where(wide.abs() > 464, (wide < 0) * 0x80 | 0x7E, bits.int()).to(torch.uint8)
    return torch.where(wide.isnan(), 0x7F, bits)


@as_ranks(1, 2)
def test_float8_is_rounded_once_as_pytorch_does_it():
    """Every value, and every pair of two; then float32 that are not near any, by a factor."""
    size, rank = hvd.size(), hvd.rank()
    first = torch.arange(65536)
    for name in FLOAT8:
        dtype = getattr(torch, name)
        mine = [(first % 256).to(torch.uint8).view(dtype), (first // 256).to(torch.uint8).view(dtype)][:size]
        for factor in (1.0, 0.3, 1.7, 1 / 1024):
            for op, combine in ((hvd.Sum, operator.add), (hvd.Product, operator.mul)):
                got = hvd.allreduce(mine[rank], op=op, postscale_factor=factor).view(torch.uint8)
                wide = functools.reduce(combine, [one.float() for one in mine]) * factor
                due = mine[0].view(torch.uint8) if size == 1 and factor == 1 else rounded(wide, dtype)
                bad = (got != due).nonzero().flatten()
                assert not len(bad), (name, op, factor, [(int(i), int(got[i]), int(due[i])) for i in bad[:5]])


@as_ranks(*SIZES)
def test_forms_and_layouts():
    mine = torch.arange(24.0).reshape(2, 3, 4) + hvd.rank()
    total = torch.arange(24.0).reshape(2, 3, 4) * hvd.size() + sum(range(hvd.size()))
    for tensor, expected in (
        (mine.transpose(0, 2), total.transpose(0, 2)),
        (mine[:, ::2], total[:, ::2]),
        (mine[:, 1], total[:, 1]),
    ):
        kept = tensor.clone()
        assert torch.equal(hvd.allreduce(tensor, op=hvd.Sum), expected)
        assert torch.equal(hvd.synchronize(hvd.allreduce_async(tensor, op=hvd.Sum)), expected)
        assert torch.equal(tensor, kept)
        holder = tensor.clone().transpose(0, 1) if tensor.dim() > 1 else tensor.clone()
        assert hvd.allreduce_(holder, op=hvd.Sum) is holder
        assert torch.equal(holder, expected.transpose(0, 1) if tensor.dim() > 1 else expected)
    image = torch.ones(2, 3, 4, 4).contiguous(memory_format=torch.channels_last) * (hvd.rank() + 1)
    assert (hvd.allreduce_(image, op=hvd.Max) == hvd.size()).all()
    assert image.is_contiguous(memory_format=torch.channels_last)
    group = hvd.grouped_allreduce_([mine.clone(), mine[0].T.clone()], op=hvd.Sum, name="g")
    assert torch.equal(group[0], total) and torch.equal(group[1], total[0].T)


@as_ranks(1)
def test_casting_knows_the_cores_names():
    from hvdlite import _core
    from hvdlite.numpy import NumpyAdapter
    from hvdlite.torch.adapter import TorchAdapter

    for name in _core.DTYPES:
        assert str(TorchAdapter().cast(torch.ones(2), name).dtype) == f"torch.{name}"
        if name in ("bfloat16", *FLOAT8) and find_spec("ml_dtypes") is None:
            with pytest.raises(ValueError, match=f"{name}.*ml_dtypes"):
                NumpyAdapter().cast(torch.ones(2).numpy(), name)
        else:
            assert NumpyAdapter().cast(torch.ones(2).numpy(), name).dtype.name == name
