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
    return kind.from_pretrained(torch.from_numpy(table.weight.copy()), freeze=False, **more)


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


@pytest.mark.parametrize("mode", ["sum", "mean"])
def test_embedding_bag_has_the_bits_of_torchs(mode):
    table = OneTable()
    ours, theirs = hvd.ps.EmbeddingBag(table, mode), dense(table, torch.nn.EmbeddingBag, mode=mode)
    ids = torch.randint(0, 20, (60,), generator=torch.Generator().manual_seed(2))
    same(ours, theirs, table, ids.reshape(12, 5))
    same(ours, theirs, table, ids.reshape(30, 2).T)
    same(ours, theirs, table, ids, torch.tensor([0, 0, 7, 7, 59, 60]))  # empty bags
    same(ours, theirs, table, ids[:0], torch.tensor([0, 0]))
    with pytest.raises(ValueError, match="HVD025"):
        hvd.ps.EmbeddingBag(table, "max")


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
    embedding, bag = hvd.ps.Embedding(table), hvd.ps.EmbeddingBag(table, "sum")
    weight = embedding.materialize()
    sgd = torch.optim.SGD(weight.parameters(), lr=table.lr)
    halved = torch.optim.lr_scheduler.StepLR(sgd, 3, 0.5)
    random = torch.Generator().manual_seed(hvd.rank())
    for step in range(10):
        ids = torch.randint(0, 100, (40, 3), generator=random) ** 2 % 200
        if step % 2:
            bag(ids).pow(2).mean().backward()
            torch.nn.functional.embedding_bag(ids, weight.weight, mode="sum").pow(2).mean().backward()
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
    with contextlib.suppress(hvd.HvdError):
        hvd.shutdown()
