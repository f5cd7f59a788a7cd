"""Batches of different sizes: weighted averages, and ranks that run out of data."""

import pytest
from ranks import as_ranks
from test_torch_optimizer import MAKERS, assert_same, batch, loss_of, network, pair

torch = pytest.importorskip("torch")

import hvdlite.torch as hvd  # noqa: E402


def uneven_batch(step):
    """The whole batch of a step and this rank's part; parts have 1 + (rank + step) % 3 rows."""
    rows = [1 + (rank + step) % 3 for rank in range(hvd.size())]
    whole = torch.randn(sum(rows), 5, generator=torch.Generator().manual_seed(step), dtype=torch.float64)
    return whole, whole.split(rows)[hvd.rank()]


@pytest.mark.parametrize("how", ["attribute", "callable", "tensor"])
@as_ranks(1, 2, 3)
def test_a_weighted_average_equals_one_process_on_the_concatenated_batch(how):
    mine = torch.zeros(1, 5)
    op = hvd.WeightedAverage((lambda: len(mine)) if how == "callable" else 1.0)
    model, optimizer, reference, plain = pair(op=op)
    for step in range(5):
        whole, mine = uneven_batch(step)
        if how != "callable":
            op.weight = len(mine) if how == "attribute" else torch.tensor(float(len(mine)))
        for this, opt, rows in ((model, optimizer, mine), (reference, plain, whole)):
            opt.zero_grad()
            loss_of(this, rows).backward()
            torch.nn.utils.clip_grad_norm_(this.parameters(), 0.3)
            opt.step()
    assert_same(model, reference)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@as_ranks(2)
def test_large_weights_do_not_leave_the_range_of_16_bits(dtype):
    parameter = torch.nn.Parameter(torch.zeros(3, dtype=dtype))
    op = hvd.WeightedAverage(10000.0 if hvd.rank() == 0 else 30000.0)
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD([parameter], 1.0), op=op)
    (parameter * (8.0 * (hvd.rank() + 1))).sum().backward()
    assert parameter.grad.dtype == dtype and parameter.grad.tolist() == [14.0] * 3
    optimizer.step()


@as_ranks(2)
def test_several_passes_groups_and_unused_parameters_with_weights():
    model, optimizer, reference, plain = pair(op=hvd.WeightedAverage(1.0 + hvd.rank()), groups=2)
    shares = [(1.0 + rank) / 3.0 for rank in range(2)]
    for step in range(3):
        optimizer.zero_grad(), plain.zero_grad()
        for part in range(2):
            whole, mine = batch(10 * step + part)
            (loss_of(model, mine) if hvd.rank() else model[0](mine).sum()).backward()
            parts = whole.split(len(mine))
            (shares[0] * reference[0](parts[0]).sum() + shares[1] * loss_of(reference, parts[1])).backward()
        optimizer.step(), plain.step()
    assert_same(model, reference)


@as_ranks(1, 2)
def test_weights_that_cannot_be():
    for weight in (-1, float("nan"), float("inf"), "2", True, None):
        with pytest.raises(ValueError, match="WeightedAverage: weight"):
            hvd.WeightedAverage(weight)
    op = hvd.WeightedAverage(lambda: -2)
    with pytest.raises(ValueError, match="weight=-2"):
        op.current()


@as_ranks(2)
def test_all_weights_zero_is_an_error_and_one_is_not():
    model, optimizer, _, _ = pair(op=hvd.WeightedAverage(0))
    with pytest.raises(ValueError, match="weights of all ranks are 0"):
        loss_of(model, batch(0)[1]).backward()
    op = hvd.WeightedAverage(hvd.rank())
    model = network()
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), 0.1), op=op)
    with optimizer.no_sync():
        loss_of(model, batch(0)[1]).backward()
    local = hvd.allgather(model[0].weight.grad[None])
    optimizer.step()
    torch.testing.assert_close(model[0].weight.grad, local[1])


@pytest.mark.parametrize("op", ["average", "weighted"])
@as_ranks(1, 2, 3)
def test_ranks_that_run_out_of_data_do_not_stop_the_others(op):
    """Rank r has 2 + 2r batches; a step averages over those that have one, and all end with the model of the last."""
    size, rank = hvd.size(), hvd.rank()
    arguments = {"op": hvd.WeightedAverage(1.0 + rank)} if op == "weighted" else {}
    model, optimizer, reference, plain = pair(MAKERS["adam"], **arguments)
    with hvd.uneven_inputs(optimizer, model=model):
        for step in range(2 + 2 * rank):
            optimizer.zero_grad()
            loss_of(model, batch(step)[1]).backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.2)
            optimizer.step()
    for step in range(2 * size):
        active = [r for r in range(size) if step < 2 + 2 * r]
        weights = [1.0 + r if op == "weighted" else 1.0 for r in range(size)]
        total = sum(weights[r] for r in active)
        plain.zero_grad()
        parts = batch(step)[0].split(4)
        sum(weights[r] / total * loss_of(reference, parts[r]) for r in active).backward()
        torch.nn.utils.clip_grad_norm_(reference.parameters(), 0.2)
        plain.step()
    assert_same(model, reference)
    for this, opt, rows in ((model, optimizer, batch(99)[1]), (reference, plain, batch(99)[0])):
        opt.zero_grad()  # afterwards all take part again, with the same optimizer state
        (loss_of(this, rows) if op == "average" else loss_of(this, rows[:1] * 0 + 1)).backward()
        opt.step()
    assert_same(model, reference)


@as_ranks(2)
def test_uneven_inputs_with_sparse_gradients_and_a_metric_in_the_loop():
    table = torch.nn.Embedding(6, 2, sparse=True).double()
    hvd.broadcast_parameters(table.state_dict(), 0)
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(table.parameters(), 0.1), table.named_parameters())
    start = table.weight.detach().clone()
    sums = []
    with hvd.uneven_inputs(optimizer):
        for step in range(1 + 2 * hvd.rank()):
            optimizer.zero_grad()
            table(torch.tensor([hvd.rank(), step])).sum().backward()
            optimizer.step()
            sums.append(hvd.allreduce(torch.ones(1), op=hvd.Sum, name="metric").item())
    expected = torch.zeros(6)
    expected[[0, 0, 1, 0]] = 0
    for rows, share in (([0, 0], 0.5), ([1, 0], 0.5), ([1, 1], 1.0), ([1, 2], 1.0)):
        for row in rows:
            expected[row] += share
    torch.testing.assert_close(table.weight.detach(), start - 0.1 * expected[:, None].double().expand(6, 2))
    assert sums == ([2.0] if hvd.rank() == 0 else [2.0, 1.0, 1.0])


@as_ranks(2)
def test_uneven_inputs_that_cannot_be():
    model, optimizer, _, plain = pair(op=hvd.Max)
    for wrong, error, text in (
        (plain, TypeError, "DistributedOptimizers, not SGD"),
        (optimizer, ValueError, "uneven_inputs adds zeros"),
    ):
        with pytest.raises(error, match=text), hvd.uneven_inputs(wrong):
            pass
    hooked = hvd.DistributedOptimizer(torch.optim.SGD(network().parameters(), 0.1))
    hooked.register_comm_hook(None, lambda state, bucket: hvd.allreduce_async(bucket.buffer()))
    with pytest.raises(ValueError, match="comm hook"), hvd.uneven_inputs(hooked):
        pass


@as_ranks(2)
def test_an_exception_within_uneven_inputs_goes_on_at_once():
    _, optimizer, _, _ = pair()
    with pytest.raises(KeyError), hvd.uneven_inputs(optimizer):
        raise KeyError
    assert optimizer._hvd.wire.shares is None
    hvd.barrier()


@as_ranks(2)
def test_uneven_inputs_with_weights_and_sparse_gradients():
    table = torch.nn.Embedding(6, 2, sparse=True)
    weighted = hvd.WeightedAverage(1.0)
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(table.parameters(), lr=0.1), op=weighted)
    with hvd.uneven_inputs(optimizer, model=table):
        for step in range(2 + 2 * hvd.rank()):
            optimizer.zero_grad()
            table(torch.tensor([hvd.rank(), step])).sum().backward()
            optimizer.step()
    hvd.check_consistency(table)
