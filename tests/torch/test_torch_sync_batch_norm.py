"""SyncBatchNorm on several ranks is torch's BatchNorm on all their rows in one batch: values, gradients, statistics."""

import copy

import pytest
from ranks import as_ranks

torch = pytest.importorskip("torch")

import hvdlite.torch as hvd  # noqa: E402

PLAIN = {2: torch.nn.BatchNorm1d, 3: torch.nn.BatchNorm1d, 4: torch.nn.BatchNorm2d, 5: torch.nn.BatchNorm3d}
ROWS = {"equal": lambda rank: 4, "unequal": lambda rank: 2 + 3 * rank, "none on rank 0": lambda rank: 3 * rank}


def batch(rows, dims, dtype, seed=0, channels=3):
    """(the rows of all ranks, where this rank's begin, how many they are)."""
    torch.manual_seed(seed)
    counts = [rows(rank) for rank in range(hvd.size())]
    shape = (sum(counts), channels, 2, 3, 2)[:dims]
    whole = (
        torch.randn(shape, dtype=torch.float64).mul_(3).add_(torch.arange(channels).view([1, -1] + [1] * (dims - 2)))
    )
    return whole.to(dtype), sum(counts[: hvd.rank()]), counts[hvd.rank()]


def pair(dims, dtype=torch.float64, **arguments):
    """The reference and the layer under test with equal, unusual weights."""
    torch.manual_seed(1)
    plain, synced = PLAIN[dims](3, dtype=dtype, **arguments), hvd.SyncBatchNorm(3, dtype=dtype, **arguments)
    if plain.affine:
        for one, other in zip(plain.parameters(), synced.parameters()):
            with torch.no_grad():
                other.copy_(one.normal_())
    return plain, synced


def compare(plain, synced, rows, dims, dtype, tolerance, seed=0):
    whole, begin, count = batch(rows, dims, dtype, seed)
    upstream = torch.randn(whole.shape, generator=torch.Generator().manual_seed(seed + 9)).to(dtype)
    whole.requires_grad_()
    mine = whole.detach()[begin : begin + count].clone().requires_grad_()
    expected, found = plain(whole), synced(mine)
    assert found.dtype == dtype and found.shape == mine.shape
    expected.backward(upstream)
    found.backward(upstream[begin : begin + count])
    torch.testing.assert_close(found, expected[begin : begin + count], **tolerance)
    torch.testing.assert_close(mine.grad, whole.grad[begin : begin + count], **tolerance)
    for one, other in zip(plain.parameters(), synced.parameters()):
        torch.testing.assert_close(hvd.allreduce(other.grad, op=hvd.Sum), one.grad, **tolerance)
    for name, buffer in plain.named_buffers():
        torch.testing.assert_close(dict(synced.named_buffers())[name], buffer, **tolerance)


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("dims", [2, 3, 4, 5])
@as_ranks(1, 2, 3)
def test_it_is_batch_norm_of_the_whole_batch(dims, rows):
    if hvd.size() == 1 and rows == "none on rank 0":
        return
    plain, synced = pair(dims)
    for step in range(2):
        for layer in (plain, synced):
            layer.zero_grad()
        compare(plain, synced, ROWS[rows], dims, torch.float64, {"rtol": 1e-9, "atol": 1e-9}, step)


@pytest.mark.parametrize(
    "arguments",
    [{"momentum": None}, {"momentum": 0.9, "eps": 0.1}, {"affine": False}, {"track_running_stats": False}],
    ids=str,
)
@as_ranks(2)
def test_arguments_mean_what_they_mean_to_batch_norm(arguments):
    plain, synced = pair(4, **arguments)
    for step in range(3):
        for layer in (plain, synced):
            layer.zero_grad()
        compare(plain, synced, ROWS["unequal"], 4, torch.float64, {"rtol": 1e-9, "atol": 1e-9}, step)
    plain.eval()
    synced.eval()
    whole, begin, count = batch(ROWS["unequal"], 4, torch.float64, 7)
    mine = whole[begin : begin + count]
    torch.testing.assert_close(synced(mine), plain(mine))


@pytest.mark.parametrize(
    ("dtype", "parameters", "tolerance"),
    [
        (torch.float32, torch.float32, {"rtol": 1e-4, "atol": 1e-4}),
        (torch.float16, torch.float32, {"rtol": 1e-2, "atol": 1e-2}),
        (torch.bfloat16, torch.float32, {"rtol": 5e-2, "atol": 5e-2}),
        (torch.bfloat16, torch.bfloat16, {"rtol": 5e-2, "atol": 5e-2}),
    ],
    ids=str,
)
@as_ranks(2)
def test_low_precision_input(dtype, parameters, tolerance):
    """Against the reference in float32, since torch has no batch norm of every such pair on the CPU."""
    plain, synced = pair(4, torch.float32)
    synced = synced.to(parameters)
    whole, begin, count = batch(ROWS["unequal"], 4, dtype)
    whole = whole.float().requires_grad_()
    mine = whole.detach()[begin : begin + count].to(dtype).requires_grad_()
    expected, found = plain(whole), synced(mine)
    assert found.dtype == dtype
    upstream = torch.randn(whole.shape, generator=torch.Generator().manual_seed(3))
    expected.backward(upstream)
    found.backward(upstream[begin : begin + count].to(dtype))
    torch.testing.assert_close(found.float(), expected[begin : begin + count], **tolerance)
    torch.testing.assert_close(mine.grad.float(), whole.grad[begin : begin + count], **tolerance)
    torch.testing.assert_close(synced.running_var.float(), plain.running_var, **tolerance)


@as_ranks(2)
def test_a_mean_far_from_zero_loses_nothing():
    """Naive sums of squares in float32 would give a variance of rounding errors here."""
    torch.manual_seed(0)
    whole = (torch.randn(64, 2, dtype=torch.float64) + 1e4).float()
    expected = torch.nn.BatchNorm1d(2, dtype=torch.float64)(whole.double())
    mine = hvd.SyncBatchNorm(2)(whole.chunk(hvd.size())[hvd.rank()])
    torch.testing.assert_close(mine.double(), expected.chunk(hvd.size())[hvd.rank()], rtol=2e-3, atol=2e-3)


@as_ranks(2)
def test_all_ranks_have_the_same_statistics_bit_by_bit():
    layer = hvd.SyncBatchNorm(5)
    torch.manual_seed(hvd.rank())
    for _ in range(3):
        layer(torch.randn(4, 5, 3))
    hvd.check_consistency(layer)


@as_ranks(1, 2)
def test_input_that_cannot_be_is_refused():
    layer = hvd.SyncBatchNorm(3)
    with pytest.raises(ValueError, match="at least 2D"):
        layer(torch.ones(3))
    with pytest.raises(ValueError, match="3 channels"):
        layer(torch.ones(2, 4))
    if hvd.size() == 2:
        with pytest.raises(ValueError, match="more than 1 value per channel"):
            layer(torch.ones(hvd.rank(), 3))


@pytest.mark.parametrize("track", [True, False])
@pytest.mark.parametrize("momentum", [0.1, None])
@as_ranks(1, 2)
def test_eval_mode_is_batch_norm_of_one_rank_and_needs_nobody_else(track, momentum):
    plain, synced = pair(4, track_running_stats=track, momentum=momentum)
    rows = batch(ROWS["equal"], 4, torch.float64)[0]
    plain.eval()
    synced.eval()
    if hvd.rank() == 0:
        assert torch.equal(synced(rows), plain(rows))
    hvd.barrier()


@as_ranks(1, 2)
def test_conversion_keeps_parameters_buffers_and_structure():
    norm = torch.nn.BatchNorm2d(4, eps=0.1, momentum=None)
    model = torch.nn.ModuleDict(
        {
            "a": torch.nn.Sequential(torch.nn.Conv2d(3, 4, 1), norm),
            "b": norm,
            "c": torch.nn.BatchNorm1d(2, affine=False),
        }
    )
    model["none"] = torch.nn.InstanceNorm2d(4)
    model["c"].eval()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    before, keys = dict(model.named_parameters()), list(model.state_dict())
    converted = hvd.convert_sync_batchnorm(model)
    assert converted is model and list(model.state_dict()) == keys
    assert isinstance(model["a"][1], hvd.SyncBatchNorm) and model["a"][1] is model["b"]
    assert (model["b"].eps, model["b"].momentum, model["b"].training, model["c"].training) == (0.1, None, True, False)
    assert model["c"].weight is None and type(model["none"]) is torch.nn.InstanceNorm2d
    assert all(p is before[name] for name, p in model.named_parameters())
    assert {id(p) for g in optimizer.param_groups for p in g["params"]} == {id(p) for p in model.parameters()}
    assert model["b"].running_mean is norm.running_mean
    assert isinstance(hvd.convert_sync_batchnorm(torch.nn.BatchNorm1d(3)), hvd.SyncBatchNorm)
    again = model["b"]
    assert hvd.convert_sync_batchnorm(model)["b"] is again
    with pytest.raises(ValueError, match="one batch"):
        hvd.convert_sync_batchnorm(torch.nn.LazyBatchNorm1d())
    copied = copy.deepcopy(model)
    copied["a"](torch.randn(2, 3, 2, 2))
    assert copied["b"].num_batches_tracked == 1


@as_ranks(2)
def test_training_with_it_equals_one_process():
    def network():
        torch.manual_seed(0)
        layers = torch.nn.Linear(4, 6), torch.nn.BatchNorm1d(6), torch.nn.ReLU(), torch.nn.Linear(6, 2)
        return torch.nn.Sequential(*layers).double()

    alone, ours = network(), hvd.convert_sync_batchnorm(network())
    one = torch.optim.SGD(alone.parameters(), lr=0.1, momentum=0.9)
    many = hvd.DistributedOptimizer(torch.optim.SGD(ours.parameters(), lr=0.1, momentum=0.9), ours.named_parameters())
    for step in range(5):
        rows = torch.randn(8, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(step))
        mine = rows.chunk(hvd.size())[hvd.rank()]
        for model, optimizer, part in ((alone, one, rows), (ours, many, mine)):
            optimizer.zero_grad()
            model(part).pow(2).mean().backward()
            optimizer.step()
    for (name, mine), theirs in zip(ours.state_dict().items(), alone.state_dict().values()):
        torch.testing.assert_close(mine, theirs, rtol=1e-9, atol=1e-9, msg=name)
