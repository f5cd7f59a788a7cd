"""Layers on a table have the bits of torch's own layers, rows and gradients, and push when they should, never else."""

import contextlib
import math

import numpy as np
import pytest
from one_table import OneTable
from ranks import as_ranks

torch = pytest.importorskip("torch")

import hvdlite.torch as hvd  # noqa: E402


def dense(table, kind=torch.nn.Embedding, **more):
    made = kind.from_pretrained(torch.from_numpy(table.weight.copy()), freeze=False, **more)
    if more.get("padding_idx") is not None:
        made.weight.data[more["padding_idx"]] = 0  # as in a new one
    return made


def same(ours, theirs, table, *ids):
    """Forward and backward of both, with other gradients at each place."""
    got, expected = ours(*ids), theirs(*ids)
    assert got.dtype == torch.float32 and torch.equal(got, expected) and got.requires_grad
    scale = torch.randn(got.shape, generator=torch.Generator().manual_seed(1))
    theirs.weight.grad = None
    (got * scale).sum().backward()
    (expected * scale).sum().backward()
    assert np.array_equal(table.pushed(), theirs.weight.grad.numpy())


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32])
@pytest.mark.parametrize("shape", [(), (0,), (7,), (300,), (6, 0, 2), (5, 3, 2)])
def test_embedding_has_the_bits_of_torchs(shape, dtype):
    table = OneTable()
    ids = torch.randint(0, 12, shape, generator=torch.Generator().manual_seed(2)).to(dtype)
    same(hvd.ps.Embedding(table), dense(table), table, ids)


@pytest.mark.parametrize("mode", ["sum", "mean", "max"])
def test_embedding_bag_has_the_bits_of_torchs(mode):
    table = OneTable()
    ours, theirs = hvd.ps.EmbeddingBag(table, mode), dense(table, torch.nn.EmbeddingBag, mode=mode)
    ids = torch.randint(0, 20, (60,), generator=torch.Generator().manual_seed(2))
    same(ours, theirs, table, ids.reshape(12, 5))
    same(ours, theirs, table, ids.reshape(30, 2).T)
    same(ours, theirs, table, ids, torch.tensor([0, 0, 7, 7, 59, 60]))  # empty bags
    same(ours, theirs, table, ids[:0], torch.tensor([0, 0]))
    ours, theirs = (hvd.ps.EmbeddingBag(table, mode, True), dense(table, torch.nn.EmbeddingBag, mode=mode,
                                                                  include_last_offset=True))  # fmt: skip
    same(ours, theirs, table, ids, torch.tensor([0, 0, 7, 60]))


@pytest.mark.parametrize("padding", [3, -2])
def test_padding_is_neither_pulled_nor_pushed_and_does_not_count(padding):
    table, random = OneTable(rows=6), torch.Generator().manual_seed(2)
    ids = torch.randint(0, 6, (40,), generator=random)
    ids[8:12] = padding % 6
    ours, theirs = hvd.ps.Embedding(table, padding), dense(table, padding_idx=padding)
    for some in (ids.reshape(10, 4), ids[8:12], ids[8], ids[:0], ids[ids != padding % 6]):
        same(ours, theirs, table, some)
    assert torch.equal(ours.materialize().weight, theirs.weight) and ours.materialize().padding_idx == padding % 6
    table.pulls.clear()
    for mode in ("sum", "mean", "max"):
        ours = hvd.ps.EmbeddingBag(table, mode, padding_idx=padding)
        theirs = dense(table, torch.nn.EmbeddingBag, mode=mode, padding_idx=padding)
        same(ours, theirs, table, ids.reshape(10, 4))
        same(ours, theirs, table, ids, torch.tensor([0, 0, 8, 12, 13, 40]))  # empty, all padding
        ours(ids.reshape(10, 4)).sum().backward()
        assert all(padding % 6 not in some for some, _ in table.pushes) and len(table.pushes) == 1
        table.pushes.clear()
    assert len(table.pulls) == 9 and all(padding % 6 not in some for some in table.pulls)
    assert f"padding_idx={padding % 6}" in repr(ours)


def test_weights_of_samples_get_their_gradient():
    table, random = OneTable(), torch.Generator().manual_seed(2)
    ids, offsets = torch.randint(0, 20, (30,), generator=random), torch.tensor([0, 0, 7, 29])
    for more in ({}, {"padding_idx": int(ids[3])}):
        ours = hvd.ps.EmbeddingBag(table, "sum", **more)
        theirs = dense(table, torch.nn.EmbeddingBag, mode="sum", **more)
        weights = [torch.linspace(-1, 2, 30, requires_grad=True) for _ in range(2)]
        got, expected = (layer(ids, offsets, per_sample_weights=each) for layer, each in zip((ours, theirs), weights))
        assert torch.equal(got, expected)
        got.pow(2).sum().backward()
        expected.pow(2).sum().backward()
        torch.testing.assert_close(weights[0].grad, weights[1].grad)
        assert np.array_equal(table.pushed(), theirs.weight.grad.numpy())


def test_arguments_that_cannot_be_are_refused():
    table, ids = OneTable(), torch.tensor([[1, 2]])
    for wrong in (50, -51, 1.0):
        with pytest.raises(ValueError, match=r"'users': padding_idx=.* from -50 to 49 \[HVD025\]$"):
            hvd.ps.Embedding(table, padding_idx=wrong)
    with pytest.raises(ValueError, match=r"'users'.*not 'median' \[HVD025\]$"):
        hvd.ps.EmbeddingBag(table, "median")
    for mode, weights in (("mean", torch.ones(1, 2)), ("sum", torch.ones(2)), ("sum", torch.ones(1, 2).double())):
        with pytest.raises(ValueError, match=r"'users': per_sample_weights needs .*\[HVD025\]$"):
            hvd.ps.EmbeddingBag(table, mode)(ids, per_sample_weights=weights)
    assert not table.pulls


def test_rows_are_pushed_once_for_each_backward_and_never_where_nobody_learns():
    table = OneTable()
    embedding, ids = hvd.ps.Embedding(table), torch.tensor([4, 4, 9])
    for quiet in (torch.no_grad, torch.inference_mode, table.frozen):
        with quiet():
            rows = embedding(ids)
        assert not rows.requires_grad and torch.equal(rows, torch.from_numpy(table.weight[[4, 4, 9]]))
    rows = embedding(ids)
    with table.frozen():
        rows.sum().backward(retain_graph=True)
    weight = torch.ones((), requires_grad=True)
    torch.autograd.grad((rows * weight).sum(), weight)  # does not ask for rows
    assert not table.pushes
    rows.sum().backward()
    assert [ids.tolist() for ids, _ in table.pushes] == [[4, 9]] and table.pushed()[4].tolist() == [2.0] * 4


@pytest.mark.filterwarnings("ignore:Using backward")
def test_gradients_of_gradients_are_torchs():
    table, ids = OneTable(), torch.tensor([1, 2, 2])
    theirs = dense(table)
    for layer in (hvd.ps.Embedding(table), theirs):
        rows = layer(ids)
        (gradient,) = torch.autograd.grad(rows.pow(3).sum(), rows, create_graph=True)
        (gradient.pow(2).sum() + rows.sum()).backward(create_graph=True)
    assert np.array_equal(table.pushed(), theirs.weight.grad.detach().numpy())


def test_two_uses_and_a_checkpoint_are_two_pushes_and_one():
    table = OneTable()
    embedding, ids = hvd.ps.Embedding(table), torch.tensor([1, 2])
    (embedding(ids) + embedding(ids)).sum().backward()
    assert len(table.pushes) == 2 and table.pushed()[1].tolist() == [2.0] * 4
    torch.utils.checkpoint.checkpoint(lambda: embedding(ids).tanh().sum(), use_reentrant=False).backward()
    assert len(table.pushes) == 1


def test_a_model_has_neither_parameters_nor_rows_of_it(tmp_path):
    table = OneTable()
    model = torch.nn.Sequential(hvd.ps.Embedding(table), torch.nn.Linear(4, 1)).to("cpu", torch.float64).float()
    state = model.state_dict()
    assert len(list(model.parameters())) == 2 and set(state) == {"0._extra_state", "1.weight", "1.bias"}
    assert all(isinstance(each, torch.Tensor) for each in state.values())  # what broadcast_parameters takes
    assert state["0._extra_state"].numel() == len("users")
    torch.save(state, tmp_path / "model.pt")
    model.load_state_dict(torch.load(tmp_path / "model.pt", weights_only=True))
    with pytest.raises(ValueError, match=r"'users'.*'items'.*\[HVD034\]$"):
        torch.nn.Sequential(hvd.ps.EmbeddingBag(OneTable(name="items"))).load_state_dict(state, strict=False)
    assert "table='users'" in repr(model)


def test_materialize_gives_all_rows_to_torch(monkeypatch):
    table = OneTable()
    monkeypatch.setattr("hvdlite.torch.ps._SLICE", 16)
    made = hvd.ps.Embedding(table).materialize()
    assert np.array_equal(made.weight.detach().numpy(), table.weight) and made.weight.requires_grad
    assert [len(ids) for ids in table.pulls] == [16, 16, 16, 2] and not table.pushes


@pytest.mark.parametrize("ids", [[0, 50], [-1], [0.0]])
def test_what_is_no_row_is_refused_before_anything_is_pulled(ids):
    table = OneTable()
    with pytest.raises(ValueError, match=r"\[HVD027\]$"):
        hvd.ps.Embedding(table)(torch.tensor(ids))
    assert not table.pulls


def test_torch_compile_breaks_its_graph_there():
    table = OneTable()
    model = torch.nn.Sequential(hvd.ps.Embedding(table), torch.nn.Linear(4, 3), torch.nn.Tanh())
    ids = torch.tensor([[1, 2], [2, 49]])
    model(ids).sum().backward()
    expected = table.pushed()
    compiled = torch.compile(model, backend="eager")
    for _ in range(2):
        got = compiled(ids)
        assert torch.equal(got, model(ids))
        got.sum().backward()
        assert len(table.pushes) == 1 and np.array_equal(table.pushed(), expected)


def test_names_of_tables_are_here_too():
    assert {"Embedding", "EmbeddingBag", "Table", "Adagrad", "step"} <= set(hvd.ps.__all__)
    assert all(hasattr(hvd.ps, name) for name in hvd.ps.__all__)


@as_ranks(2)
def test_ranks_learn_what_they_learn_with_a_dense_table_and_allreduce():
    hvd.ps.serve(2)
    table = hvd.ps.Table("users", rows=200, dim=4, optimizer=hvd.ps.Sgd(0.5), init=hvd.ps.uniform(1.0, seed=2))
    embedding, bag = hvd.ps.Embedding(table), hvd.ps.EmbeddingBag(table, "max", padding_idx=100)
    weight = embedding.materialize()
    sgd = torch.optim.SGD(weight.parameters(), lr=table.lr)
    halved = torch.optim.lr_scheduler.StepLR(sgd, 3, 0.5)
    random = torch.Generator().manual_seed(hvd.rank())
    for step in range(10):
        ids = torch.randint(0, 100, (40, 3), generator=random) ** 2 % 200
        if step % 2:
            bag(ids).pow(2).mean().backward()
            theirs = torch.nn.functional.embedding_bag(ids, weight.weight, mode="max", padding_idx=100)
            theirs.pow(2).mean().backward()
        else:
            embedding(ids).pow(3).sum().backward()
            weight(ids).pow(3).sum().backward()
        table.step()
        weight.weight.grad = hvd.allreduce(weight.weight.grad)
        sgd.step()
        sgd.zero_grad()
        halved.step()
        table.lr = halved.get_last_lr()[0]
    assert (
        table.lr == 0.0625
        and torch.equal(embedding.materialize().weight, weight.weight)
        and weight.weight.isfinite().all()
    )
    for wrong in (math.nan, 1e39, "fast", None):
        with pytest.raises(ValueError, match=r"'users': lr=.*\[HVD025\]$"):
            table.lr = wrong
    counts, sparse = hvd.ps.Table("c", 9, 1, hvd.ps.Add()), hvd.ps.Table("f", 9, 1, hvd.ps.Ftrl(0.5))
    assert (counts.lr, sparse.lr) == (None, 0.5)
    for fixed, rule in ((counts, "Add"), (sparse, "Ftrl")):
        with pytest.raises(ValueError, match=rf"rate of optimizer {rule} cannot.*\[HVD025\]$"):
            fixed.lr = 0.1
    table.lr = 1 + hvd.rank()
    embedding(torch.tensor([1])).sum().backward()
    with pytest.raises(hvd.HvdMismatchError, match=r"'users': rank 1 ends step 11 with lr=2.0.*\[HVD026\]$"):
        table.step()
        embedding(torch.tensor([1]))
    hvd.barrier()  # a rank that leaves earlier ends its server, which is another error
    with contextlib.suppress(hvd.HvdError):
        hvd.shutdown()
