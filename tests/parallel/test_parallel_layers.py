"""Layers that are cut over ranks against the whole layers in one process: results, gradients, what is sent, and what is
refused."""

from types import SimpleNamespace

import pytest
from ranks import as_ranks

torch = pytest.importorskip("torch")

import torch.nn.functional as F  # noqa: E402
from gpt import Block, gpt  # noqa: E402
from torch import nn  # noqa: E402

import hvdlite.torch as hvd  # noqa: E402
from hvdlite import parallel as par  # noqa: E402
from hvdlite.parallel.tensor import part_of  # noqa: E402

TP, ONE = hvd.global_process_set, SimpleNamespace(size=lambda: 1, rank=lambda: 0)


def perceptron(group):
    """Whole, if the group has one rank. 32 is the width inside."""
    torch.manual_seed(3)
    return nn.Sequential(par.ColumnLinear(12, 32, group), nn.ReLU(), par.RowLinear(32, 12, group, name="r"))


def part(whole, mine):
    """This rank's part of a whole parameter (or its gradient), as `mine` is cut."""
    return whole.chunk(hvd.size(), mine.cut)[hvd.rank()] if hasattr(mine, "cut") else whole


def learned(model, x, y):
    """The result, and the gradients of x and of all parameters."""
    x = x.clone().requires_grad_()
    out = model(x)
    out.backward(y)
    return [out, x.grad, *(each.grad for each in model.parameters())]


@as_ranks(2, 4)
def test_column_relu_row_in_integers_is_bitwise_the_whole():
    whole, cut = perceptron(ONE), perceptron(TP)
    with torch.no_grad():
        for a, b in zip(whole.parameters(), cut.parameters()):
            assert torch.equal(b, part(a, b))  # the same weights from the same seed
            a.copy_(torch.randint(-2, 3, a.shape))
            b.copy_(part(a, b))
    assert [getattr(each, "cut", None) for each in cut.parameters()] == [0, 0, 1, None]
    x, y = torch.randint(-3, 4, (5, 12)).float(), torch.randint(-2, 3, (5, 12)).float()
    wanted, found = learned(whole, x, y), learned(cut, x, y)
    likes = [None, None, *cut.parameters()]
    for a, b, like in zip(wanted, found, likes):
        assert torch.equal(part(a, like), b)
    wrong = nn.Sequential(cut[0], cut[1], Wrong(cut[2]))  # allreduce: the gradient of the sum of all ranks' losses
    for each in cut.parameters():
        each.grad = None
    bad = learned(wrong, x, y)
    assert torch.equal(bad[0], found[0]) and torch.equal(bad[1], hvd.size() * found[1])


class Wrong(nn.Module):
    def __init__(self, row):
        super().__init__()
        self.row = row

    def forward(self, x):
        return hvd.allreduce(F.linear(x, self.row.weight), op=hvd.Sum) + self.row.bias


@as_ranks(2, 4)
def test_floats_are_added_in_the_order_of_ranks():
    whole, cut, n = perceptron(ONE), perceptron(TP), hvd.size()
    x, y = torch.randn(5, 12), torch.randn(5, 12)
    found = learned(cut, x, y)
    xs = [x.clone().requires_grad_() for _ in range(n)]
    first, last = whole[0], whole[2]
    pieces = zip(xs, first.weight.chunk(n), first.bias.chunk(n), last.weight.chunk(n, 1))
    out = sum(F.linear(F.relu(F.linear(x, a, b)), w) for x, a, b, w in pieces) + last.bias
    out.backward(y)
    assert torch.equal(found[0], out) and torch.equal(found[1], sum(x.grad for x in xs))
    for a, b in zip(learned(perceptron(ONE), x, y), found):
        torch.testing.assert_close(b, a if a.shape == b.shape else b)


@as_ranks(4)
def test_a_vocabulary_of_55_words():
    torch.manual_seed(5)
    table = nn.Embedding(55, 8)
    torch.manual_seed(5)
    mine = par.VocabEmbedding(55, 8, TP)
    ids, upstream = torch.randint(55, (3, 7)), torch.randn(3, 7, 8)
    first, last = part_of(55, TP)
    table(ids).backward(upstream)
    mine(ids).backward(upstream)
    assert torch.equal(mine(ids), table(ids)) and torch.equal(mine.weight.grad, table.weight.grad[first:last])
    for bad in (ids + 55, ids - 56):
        with pytest.raises(ValueError, match=r"ids from .* has 55 rows \[HVD017\]"):
            mine(bad)


@pytest.mark.parametrize("scale", [1, 1e4])
@pytest.mark.parametrize("dtype", ["float32", "float64", "bfloat16"])
@as_ranks(1, 4)
def test_cross_entropy_over_ranks(scale, dtype):
    torch.manual_seed(6)
    dtype, (first, last) = getattr(torch, dtype), part_of(55, TP)
    scores, target = (torch.randn(3, 7, 55) * scale).to(dtype), torch.randint(55, (3, 7))
    target[0, :2], target[1, 3] = -100, 54
    for ignored in (-100, 54):
        target = target.masked_fill(target == -100, ignored)
        whole = scores.to(torch.promote_types(dtype, torch.float32), copy=True).requires_grad_()
        mine = scores[..., first:last].clone().requires_grad_()
        wanted = F.cross_entropy(whole.flatten(0, 1), target.flatten(), ignore_index=ignored)
        found = par.vocab_cross_entropy(mine, target, 55, TP, ignore_index=ignored)
        (3 * wanted).backward()
        (3 * found).backward()
        assert torch.isfinite(found) and mine.grad.dtype == dtype
        torch.testing.assert_close(found, wanted)
        torch.testing.assert_close(mine.grad, whole.grad[..., first:last].to(dtype))
    with pytest.raises(ValueError, match="ids from .* to 55, but the table has 55 rows .HVD017"):
        par.vocab_cross_entropy(mine, target + 1, 55, TP)
    with pytest.raises(ValueError, match=f"scores cover {last - first - 1} words.*HVD017"):
        par.vocab_cross_entropy(mine[..., 1:], target, 55, TP)


@as_ranks(2, 4)
def test_a_block_has_four_allreduces_and_a_gpt_is_that_of_one_process():
    block, x = Block(16, 4, TP, "b"), torch.randn(2, 5, 16, requires_grad=True)
    before = hvd.counters()
    block(x).sum().backward()
    moved = {what: hvd.counters()[what] - before[what] for what in ("submits", "elements")}
    assert moved == {"submits": 4, "elements": 4 * 2 * 5 * 16}
    losses, models = [], []
    ids = torch.randint(64, (3, 9), generator=torch.Generator().manual_seed(1))
    for group in (ONE, TP):
        torch.manual_seed(0)
        models.append(nn.Sequential(*gpt(64, 8, 16, 4, 2, group)))
        losses.append(par.vocab_cross_entropy(models[-1](ids[:, :-1]), ids[:, 1:], 64, group))
        losses[-1].backward()
    torch.testing.assert_close(*losses)
    for (name, a), b in zip(models[0].named_parameters(), models[1].parameters()):
        torch.testing.assert_close(
            b.grad, part(a.grad, b), msg=lambda m, name=name: f"{name}: {m}", atol=1e-6, rtol=1e-4
        )


@as_ranks(2)
def test_parallelize_keeps_the_model():
    torch.manual_seed(2)
    shared = nn.Linear(8, 8, dtype=torch.float64)
    names = {
        "up": nn.Linear(8, 16, dtype=torch.float64),
        "act": nn.GELU(),
        "down": nn.Linear(16, 8, dtype=torch.float64),
    }
    model = nn.ModuleDict({"mlp": nn.Sequential(*names.values()), "a": shared, "b": shared, "norm": nn.LayerNorm(8)})
    model.mlp[2].bias.requires_grad_(False)
    run = lambda x: model["b"](model["a"](model["mlp"](x)))  # noqa: E731
    x = torch.randn(3, 8, dtype=torch.float64)
    wanted = run(x)
    tied = nn.ModuleDict({"head": nn.Linear(8, 4), "other": nn.Linear(8, 4)})
    tied["head"].weight = tied["other"].weight
    for bad, patterns, said in (
        (model, {"mlp.0": "column", "*.none": "row"}, "'*.none': it matches no layer.* are: mlp.0, mlp.2, a, b"),
        (model, {"mlp.0": "column", "n*": "row"}, "matches 'norm', a LayerNorm, .* not an nn.Linear"),
        (model, {"a": "columns"}, "neither"), (tied, {"head": "column"}, "shares a parameter"),
    ):  # fmt: skip
        with pytest.raises(ValueError, match=said.replace("*.none", r"\*.none") + r".*\[HVD019\]"):
            par.parallelize(bad, patterns, TP)
    assert type(model["mlp"][0]) is nn.Linear
    before = torch.get_rng_state()
    assert par.parallelize(model, {"mlp.0": "column", "*.2": "row", "mlp.*[02]": "column"}, TP) is model
    assert torch.equal(torch.get_rng_state(), before)
    assert model["mlp"][0].weight.shape == (8, 8) and model["mlp"][2].name == "mlp.2"
    assert [each.requires_grad for each in model["mlp"].parameters()] == [True, True, True, False]
    par.parallelize(model, {"a": "row"}, ONE)
    assert model["a"] is model["b"] is not shared
    torch.testing.assert_close(run(x), wanted)


@as_ranks(4)
def test_what_cannot_be_cut_evenly():
    for make, said in (
        (lambda: par.ColumnLinear(12, 200, TP, unit=40), r"ColumnLinear\(12, 200\): 5 parts of 40 cannot be divided"),
        (lambda: par.RowLinear(17, 3, TP), r"RowLinear\(17, 3\): 17 parts cannot be divided evenly over 4 ranks"),
        (lambda: par.VocabEmbedding(3, 2, TP), "3 words cannot be divided over 4 ranks"),
    ):
        with pytest.raises(ValueError, match=said + r".*\[HVD016\]"):
            make()
    gathered = par.ColumnLinear(4, 8, TP, gather=True, bias=False)
    assert gathered(torch.ones(2, 4)).shape == (2, 8)
