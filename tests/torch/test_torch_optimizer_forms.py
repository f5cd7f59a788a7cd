"""In what form gradients travel: compressed, in groups, sparse, scaled; results do not depend on it."""

import warnings

import pytest
from ranks import as_ranks
from test_torch_optimizer import MAKERS, assert_same, batch, loss_of, network, pair

torch = pytest.importorskip("torch")

import hvdlite.torch as hvd  # noqa: E402


class Quarter:
    """A user's own compression: float32 for half the wire, the rows turned round, scaled by a power of two."""

    calls = 0

    @staticmethod
    def compress(tensor):
        Quarter.calls += 1
        return (tensor.flip(0) / 4).to(torch.float32), (tensor.dtype, 4)

    @staticmethod
    def decompress(tensor, ctx):
        return (tensor * ctx[1]).flip(0).to(ctx[0])


def averages(**arguments):
    """This rank's gradients after one backward of a float64 model; the second layer is not reached on odd ranks."""
    model = network()
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), 0.1), model.named_parameters(), **arguments
    )
    whole, mine = batch(0)
    (loss_of(model, mine) if hvd.rank() % 2 == 0 else model[0](mine).sum()).backward()
    gradients = [p.grad.clone() for p in model.parameters()]
    optimizer.step()
    return gradients


@pytest.mark.parametrize(
    "compression, dtype", [(hvd.Compression.fp16, torch.float16), (hvd.Compression.bf16, torch.bfloat16)]
)
@as_ranks(2)
def test_compression_rounds_before_and_after_the_sum_and_nothing_else(compression, dtype):
    model = network().float()
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), 0.1), model.named_parameters(), compression=compression
    )
    _, mine = batch(0)
    with optimizer.no_sync():
        loss_of(model, mine.float()).backward()
    local = [p.grad.clone() for p in model.parameters()]
    optimizer.step()
    for parameter, gradient in zip(model.parameters(), local):
        everyone = hvd.allgather(gradient.to(dtype)[None])
        expected = everyone.float().mean(0).to(dtype).float()
        assert parameter.grad.dtype == torch.float32 and torch.equal(parameter.grad, expected)


@pytest.mark.parametrize("groups", [None, 2], ids=["alone", "in groups"])
@as_ranks(2)
def test_compression_of_the_users_own(groups):
    Quarter.calls = 0
    got = averages(compression=Quarter, groups=groups)
    assert Quarter.calls == 4
    for mine, expected in zip(got, averages()):
        torch.testing.assert_close(mine, expected, rtol=1e-6, atol=1e-7)


@as_ranks(2)
def test_a_compression_that_returns_no_tensor_is_an_error():
    class Wrong(hvd.Compression.none):
        @staticmethod
        def compress(tensor):
            return [tensor], None

    model = network()
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), 0.1), compression=Wrong)
    with pytest.raises(TypeError, match="compress returned list"):
        optimizer.step()


@pytest.mark.parametrize("predivide", [1.0, 3.0])
@pytest.mark.parametrize("how", ["int", "more groups than parameters", "lists"])
@as_ranks(2, 3)
def test_groups_change_no_bit_with_predivide_and_unused_parameters(how, predivide):
    """Horovod forgot the factor in groups, and waited for ever where a member was not reached on one rank."""
    model = network().float()
    parameters = list(model.parameters())
    groups = {"int": 2, "more groups than parameters": 9, "lists": [[parameters[0], parameters[3]], [parameters[2]]]}[
        how
    ]
    results = []
    for grouping in (None, groups):
        optimizer = hvd.DistributedOptimizer(
            torch.optim.SGD(parameters, 0.1), groups=grouping, gradient_predivide_factor=predivide
        )
        for step in range(2):
            optimizer.zero_grad()
            rows = batch(step)[1].float()
            (loss_of(model, rows) if (hvd.rank() + step) % 2 else model[0](rows).pow(3).sum()).backward()
            results.append([p.grad.clone() for p in parameters])
        del optimizer
    assert all(torch.equal(*both) for alone, group in zip(results[:2], results[2:]) for both in zip(alone, group))
    assert any(gradient.abs().max() > 0 for gradient in results[0])


@as_ranks(1, 2)
def test_num_groups_is_groups_with_a_warning_and_frozen_members_stay_out():
    model = network()
    model[0].weight.requires_grad_(False)
    with pytest.warns(DeprecationWarning, match="num_groups"):
        optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), 0.1), num_groups=1)
    loss_of(model, batch(0)[1]).backward()
    model[2].weight.requires_grad_(False)  # frozen later, with a gradient
    optimizer.step()
    assert model[0].weight.grad is None
    optimizer.zero_grad()
    loss_of(model, batch(0)[1]).backward()
    optimizer.step()
    assert model[2].weight.grad is None


class Bag(torch.nn.Module):
    def __init__(self, sparse):
        super().__init__()
        torch.manual_seed(2)
        self.table = torch.nn.Embedding(10, 3, sparse=sparse).double()
        self.head = torch.nn.Linear(3, 1).double()

    def forward(self, rows):
        return self.head(self.table(rows).sum(1))


def indices(step):
    whole = torch.randint(0, 10, (4 * hvd.size(), 5), generator=torch.Generator().manual_seed(step))
    return whole, whole[4 * hvd.rank() : 4 * (hvd.rank() + 1)]


@pytest.mark.parametrize(
    "arguments",
    [{}, {"sparse_as_dense": True}, {"compression": hvd.Compression.none, "op": hvd.Sum}, {"op": "weighted"}],
    ids=["sparse", "as dense", "sum", "weighted"],
)
@as_ranks(1, 2, 3)
def test_sparse_gradients_equal_one_process(arguments):
    model, reference = Bag(True), Bag(True)
    if arguments.get("op") == "weighted":
        arguments = {"op": hvd.WeightedAverage(3.0)}
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), 0.1), model.named_parameters(), **arguments
    )
    plain = torch.optim.SGD(reference.parameters(), 0.1)
    for step in range(4):
        whole, mine = indices(step)
        for this, opt, rows in ((model, optimizer, mine), (reference, plain, whole)):
            opt.zero_grad()
            for _ in range(1 + step % 2):
                factor = hvd.size() if opt is plain and arguments.get("op") == hvd.Sum else 1
                (this(rows).pow(2).mean() * factor).backward()
            opt.step()
        assert model.table.weight.grad.is_sparse
    assert_same(model, reference)


@pytest.mark.parametrize("as_dense", [True, False])
@as_ranks(2)
def test_sparse_adam_where_a_rank_does_not_reach_the_table(as_dense):
    model, reference = Bag(True), Bag(True)

    def make(this):
        return torch.optim.SparseAdam([this.table.weight], lr=0.1)

    optimizer, plain = hvd.DistributedOptimizer(make(model), sparse_as_dense=as_dense), make(reference)
    for step in range(4):
        whole, mine = indices(step)
        optimizer.zero_grad(), plain.zero_grad()
        if step == 0 or hvd.rank() == step % 2:  # in the first step all reach it, so that all know it is sparse
            model(mine).pow(2).sum().backward()
        for rank, part in enumerate(whole.split(4)):
            if step == 0 or rank == step % 2:
                (reference(part).pow(2).sum() / 2).backward()
        optimizer.step(), plain.step()
    assert_same(model.table, reference.table)


@as_ranks(2)
def test_a_sparse_gradient_that_one_rank_takes_for_dense_is_an_error_on_all():
    model = Bag(True)
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), 0.1), model.named_parameters())
    with pytest.raises(hvd.HvdMismatchError, match="table.weight"):
        if hvd.rank() == 0:
            model(indices(0)[1]).sum().backward()
        optimizer.step()
    hvd.barrier()


@as_ranks(2)
def test_sparse_gradients_that_cannot_be_are_refused_with_the_remedy():
    for arguments, text in (({"op": hvd.Max}, "hvd.Average or hvd.Sum"), ({"groups": 1}, "sparse_as_dense")):
        model = Bag(True)
        optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), 0.1), **arguments)
        with pytest.raises(ValueError, match=text):
            model(indices(0)[1]).sum().backward()
            optimizer.step()
        optimizer._hvd.tracker.reset()
        hvd.barrier()


@pytest.mark.parametrize("op", ["Min", "Max", "Product"])
@as_ranks(2)
def test_other_ops_reduce_element_by_element(op):
    model, optimizer, _, _ = pair(op=getattr(hvd, op))
    whole, mine = batch(0)
    with optimizer.no_sync():
        loss_of(model, mine).backward()
    local = [p.grad.clone() for p in model.parameters()]
    optimizer.step()
    for parameter, gradient in zip(model.parameters(), local):
        everyone = hvd.allgather(gradient[None])
        expected = {"Min": everyone.amin(0), "Max": everyone.amax(0), "Product": everyone.prod(0)}[op]
        assert torch.equal(parameter.grad, expected)


@as_ranks(1, 2)
def test_the_signature_is_horovods():
    model = network()
    inner = MAKERS["sgd"](model.parameters())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        optimizer = hvd.DistributedOptimizer(
            inner, model.named_parameters(), hvd.Compression.none, 2, hvd.Average, 2.0, 0, None, False,
            hvd.global_process_set,
        )  # fmt: skip
    assert optimizer.backward_passes_per_step == 2
    loss_of(model, batch(0)[1]).backward()
    optimizer.step()
