"""Has each table of a group the bits that it would have alone, in one message instead of one for each?

Layers of PyTorch are compared with torch's own on tables of their own; calls by hand with those of Table.
"""

import numpy as np
import pytest
from ranks import as_ranks
from test_ps_regressions import folder_of_rank_0

import hvdlite as hvd
from hvdlite import ps
from hvdlite.ps import cluster

pytest.importorskip("zmq")
SIZES, DIM = {"user": 400, "item": 30, "day": 7}, 8
FIRST = {name: ps.uniform(1 / rows, seed=rows) for name, rows in SIZES.items()}


def drawn(step, shape):
    random = np.random.default_rng((hvd.rank(), step))
    return {name: random.integers(0, rows, shape) for name, rows in SIZES.items()}


@as_ranks(2)
def test_a_group_has_the_bits_of_its_tables_and_one_message_for_all():
    cluster.serve(2)
    group = ps.TableGroup("all", SIZES, DIM, ps.Adam(0.1), init=FIRST)
    alone = {n: ps.Table(n, rows, DIM, ps.Adam(0.1), init=FIRST[n]) for n, rows in SIZES.items()}
    every = {name: np.arange(rows) for name, rows in SIZES.items()}
    before = group.ready().messages_out
    group.pull(every)
    assert group.ready().messages_out - before <= 2
    folder = folder_of_rank_0()
    for step in range(4):
        ids = drawn(step, (16, 3))
        ids.pop("day" if step == 2 else "", None)  # not all tables in each step
        rows = group.pull(ids)
        grads = {name: each + np.float32(step) for name, each in rows.items()}
        group.push(ids, grads)
        group.prefetch(drawn(step + 1, (16, 3)))
        group.step()
        for name in ids:
            assert np.array_equal(rows[name], alone[name].pull(ids[name]))
            alone[name].push(ids[name], grads[name])
        ps.step(*alone.values())
        if step == 1:
            group.save(folder)
            kept = group.pull(every)
    for name, rows in group.pull(every).items():
        assert np.array_equal(rows, alone[name].pull(every[name])), name
    group.load(folder)
    assert all(np.array_equal(rows, kept[name]) for name, rows in group.pull(every).items())
    other = ps.TableGroup("other", {"item": 30, "user": 400, "day": 7}, DIM, ps.Adam(0.1))
    with pytest.raises(ValueError, match=r"the save has tables=\[\['user', 400\].*but this table has tables=.*HVD034"):
        other.load(folder)
    with pytest.raises(hvd.HvdMismatchError, match=r"table 'odd': rank 1 has tables=.*rank 0 has tables=.*HVD026"):
        ps.TableGroup("odd", dict(sorted(SIZES.items(), reverse=hvd.rank() == 1)), DIM, ps.Adam(0.1))
    hvd.shutdown()


@as_ranks(2)
def test_collections_have_the_bits_of_torchs_layers():
    torch = pytest.importorskip("torch")
    from hvdlite.torch import ps as layers

    cluster.serve(1)
    group = ps.TableGroup("all", SIZES, DIM, ps.Sgd(0.5), init=FIRST, reduce="sum")
    weights = {n: torch.nn.Parameter(torch.from_numpy(FIRST[n].rows(np.arange(r), DIM))) for n, r in SIZES.items()}
    optimizer = torch.optim.SGD(weights.values(), 0.5)
    for step, mode in enumerate(("rows", "sum", "mean")):
        ids = {name: torch.from_numpy(each) for name, each in drawn(step, (5, 3)).items()}
        ids["day"] = ids["day"].reshape(-1)
        ids["item"] = ids["item"][: 0 if hvd.rank() and step == 0 else 5]
        offsets = {"day": torch.tensor([0, 4, 4, 11])}  # an empty bag
        for name, each in ids.items():
            own = weights[name]
            if mode == "rows":
                out = torch.nn.functional.embedding(each, own)
            else:
                out = torch.nn.functional.embedding_bag(each, own, offsets.get(name), mode=mode)
            (out**2).sum().backward()
        if mode == "rows":
            made = layers.EmbeddingCollection(group)(ids)
        else:
            made = layers.EmbeddingBagCollection(group, mode)(ids, offsets)
        sum((each**2).sum() for each in made.values()).backward()
        group.step()
        for own in weights.values():
            own.grad = torch.from_numpy(hvd.allreduce(own.grad.numpy(), op=hvd.Sum, name="grad"))
        optimizer.step()
        optimizer.zero_grad()
        for name, rows in group.pull({n: np.arange(r) for n, r in SIZES.items()}).items():
            assert np.array_equal(rows, weights[name].detach().numpy()), (mode, name)
    bags = layers.EmbeddingBagCollection(group)
    for wrong in ({"user": torch.tensor([1, 2])}, {"user": torch.tensor(1)}):
        with pytest.raises(ValueError, match=r"ids of 'user' have the shape .*HVD025"):
            bags(wrong)
    with group.frozen():
        assert not bags({"user": torch.tensor([[1, 2]])})["user"].requires_grad
    hvd.shutdown()


@as_ranks(1)
def test_what_is_no_group_or_not_of_it_is_named():
    cluster.serve(1)
    for words, wrong in (
        ("tables=", {"tables": {}}), (r"'g\.b': rows=0", {"tables": {"a": 1, "b": 0}}), ("tables=", {"tables": {1: 2}}),
        (r"init has \['a'\]", {"tables": {"a": 1, "b": 1}, "init": {"a": ps.uniform(1)}}),
    ):  # fmt: skip
        with pytest.raises(ValueError, match=rf"{words}.*HVD025"):
            ps.TableGroup("g", dim=2, optimizer=ps.Add(), **wrong)
    group = ps.TableGroup("g", {"a": 5, "b": 3}, 2, ps.Add())
    for words, ids in (
        ("table 'b' of group 'g' has rows 0 to 2: there is no row 3", {"a": [0, 4], "b": [1, 3]}),
        ("table 'a' of group 'g' has rows 0 to 4: there is no row -1", {"a": [-1], "b": [1]}),
        (r"table 'a' of group 'g': ids must be integers", {"a": [1.5]}),
        (r"not \['c'\]; they are \['a', 'b'\]", {"c": [1]}), ("not ndarray", np.array([1])), (r"not \[\]", {}),
    ):  # fmt: skip
        with pytest.raises(ValueError, match=rf"{words}.*HVD027"):
            group.pull(ids)
    for grads in ({"a": np.ones((1, 2))}, {"a": np.ones((1, 2)), "b": np.ones((2, 2))}):
        with pytest.raises(ValueError, match=r"table group 'g': push needs gradients of .*HVD028"):
            group.push({"a": [1], "b": [2]}, grads)
    assert (group.pull({"b": [[2, 0]]})["b"] == np.zeros((1, 2, 2))).all()
    hvd.shutdown()
