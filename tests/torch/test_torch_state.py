"""Weights and state of every kind are the root's on all ranks afterwards, bits and types: optimizers, schedulers."""

import warnings

import pytest
from ranks import as_ranks

torch = pytest.importorskip("torch")

import hvdlite.torch as hvd  # noqa: E402

SKIPPED = {"Optimizer", "SparseAdam"}  # the base class; sparse gradients have a test of their own
OPTIMIZERS = sorted(
    name
    for name, kind in vars(torch.optim).items()
    if isinstance(kind, type) and issubclass(kind, torch.optim.Optimizer) and name not in SKIPPED
)


def network(seed=0, dtype=torch.float32):
    torch.manual_seed(seed)
    return torch.nn.Sequential(torch.nn.Linear(3, 4, bias=False), torch.nn.Linear(4, 2, bias=False)).to(dtype)


def steps(model, optimizer, count):
    for step in range(count):
        rows = torch.randn(5, 3, generator=torch.Generator().manual_seed(step)).to(next(model.parameters()).dtype)

        def closure(rows=rows):
            optimizer.zero_grad()
            loss = model(rows).float().pow(2).mean()
            loss.backward()
            return loss

        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            optimizer.step(closure)


def shown(part):
    """A nested structure with tensors as text, types included."""
    if isinstance(part, torch.Tensor):
        return f"{part.dtype} {tuple(part.shape)} {part.stride()} {part.double().tolist()}"
    if isinstance(part, dict):
        return {key: shown(value) for key, value in part.items()}
    if isinstance(part, (list, tuple)):
        return type(part).__name__, [shown(value) for value in part]
    return type(part).__name__, repr(part)


def assert_same_everywhere(value):
    first, *others = hvd.allgather_object(shown(value))
    for other in others:
        assert other == first


@pytest.mark.parametrize("name", OPTIMIZERS)
@as_ranks(2)
def test_every_optimizer_of_torch(name):
    """Only the root has made steps; the others have other hyperparameters. Afterwards all go on alike."""
    kind = getattr(torch.optim, name)
    model = network()
    optimizer = kind(model.parameters(), lr=0.01 * (1 + hvd.rank()))
    if hvd.rank() == 0:
        steps(model, optimizer, 2)
    before, parameters = shown(optimizer.state_dict()), [p.detach().clone() for p in model.parameters()]
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)
    assert all(torch.equal(p, kept) for p, kept in zip(model.parameters(), parameters))
    if hvd.rank() == 0:
        assert shown(optimizer.state_dict()) == before
    assert_same_everywhere(optimizer.state_dict())
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    steps(model, optimizer, 2)
    assert_same_everywhere([model.state_dict(), optimizer.state_dict()])


@pytest.mark.parametrize("name", OPTIMIZERS)
@as_ranks(1, 2)
def test_a_fresh_optimizer_of_any_kind_stays_fresh(name):
    model = network()
    optimizer = getattr(torch.optim, name)(model.parameters(), lr=0.5)
    before = [p.detach().clone() for p in model.parameters()], shown(optimizer.state_dict()["state"])
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)
    assert all(torch.equal(p, kept) and p.grad is None for p, kept in zip(model.parameters(), before[0]))
    assert shown(optimizer.state_dict()["state"]) == before[1]


@as_ranks(1, 3)
def test_the_state_of_several_groups_becomes_that_of_any_root():
    """As after a restart, where only the root has loaded a checkpoint: it has state, the others have none."""
    root, model = hvd.size() - 1, network()
    rate = 0.01 if hvd.rank() == root else 0.5
    groups = [{"params": [p], "lr": rate * i} for i, p in enumerate(model.parameters(), 1)]
    optimizer = torch.optim.SGD(groups, momentum=0.9)
    if hvd.rank() == root:
        steps(model, optimizer, 3)
    mine = shown(optimizer.state_dict())
    hvd.broadcast_optimizer_state(optimizer, root_rank=root)
    assert_same_everywhere(optimizer.state_dict())
    assert hvd.rank() != root or shown(optimizer.state_dict()) == mine


@as_ranks(2)
def test_state_that_the_root_has_not_is_dropped():
    model = network()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    if hvd.rank() == 1:
        steps(model, optimizer, 1)
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)
    assert not optimizer.state_dict()["state"]


@as_ranks(1, 2)
def test_a_distributed_optimizer_and_a_model_argument_are_welcome():
    model = network()
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1 + hvd.rank(), momentum=0.9))
    steps(model, optimizer, 1)
    hvd.broadcast_optimizer_state(optimizer, 0, model=model)
    assert optimizer.param_groups[0]["lr"] == 0.1
    assert_same_everywhere(optimizer.state_dict())


@as_ranks(1, 2, 3)
def test_parameters_and_buffers_become_the_roots_from_any_list_of_them():
    root = hvd.size() - 1

    def made(seed):
        return torch.nn.Sequential(network(seed), torch.nn.BatchNorm1d(2))

    model, other, expected = made(hvd.rank()), made(hvd.rank()), made(root).state_dict()
    hvd.broadcast_parameters(model.state_dict(), root_rank=root)
    hvd.broadcast_parameters(other.named_parameters(), root_rank=root)
    hvd.broadcast_parameters(list(other.buffers()), root_rank=root)
    for name, tensor in expected.items():
        assert torch.equal(model.state_dict()[name], tensor) and torch.equal(other.state_dict()[name], tensor), name


@as_ranks(2)
def test_models_that_differ_are_told_apart_by_name():
    width = 4 if hvd.rank() == 0 else 5
    with pytest.raises(hvd.HvdMismatchError, match=r"rank 0 has weight \[2, 4\] float32; rank 1 has weight \[2, 5\]"):
        hvd.broadcast_parameters(torch.nn.Linear(width, 2).state_dict(), root_rank=0)
    assert hvd.allreduce(torch.ones(1), op=hvd.Sum).item() == 2


@as_ranks(1, 2)
def test_what_is_no_set_of_parameters_is_refused():
    for bad in (3, "weights", torch.ones(2), {"a": 1}, [("a", torch.ones(1)), ("a", torch.ones(1))], [1.0]):
        with pytest.raises(ValueError, match="invalid params"):
            hvd.broadcast_parameters(bad, root_rank=0)


@as_ranks(2)
def test_state_of_another_dtype_than_the_parameter_keeps_its_bits():
    """torch's load_state_dict would round it to the parameter's dtype, on all ranks but the root."""
    model = network(dtype=torch.bfloat16)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    if hvd.rank() == 0:
        for p in model.parameters():
            optimizer.state[p] = {"master": torch.full_like(p, 1.0, dtype=torch.float64) / 3, "deep": [{"count": 3}]}
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)
    assert_same_everywhere(optimizer.state_dict())
    assert all(optimizer.state[p]["master"].dtype is torch.float64 for p in model.parameters())


@as_ranks(2)
def test_hyperparameters_keep_their_python_types():
    model = network()
    optimizer = torch.optim.Adam(model.parameters(), lr=torch.tensor(0.25), betas=(0.5, 0.75), foreach=False)
    if hvd.rank() == 1:
        optimizer.param_groups[0].update(lr=1, betas=[0, 0], amsgrad=None, foreach=True)
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)
    group = optimizer.param_groups[0]
    assert isinstance(group["lr"], torch.Tensor) and group["lr"].item() == 0.25
    assert (group["betas"], group["amsgrad"], group["foreach"]) == ((0.5, 0.75), False, False)


@as_ranks(2)
def test_optimizers_of_other_parameters_are_told_apart_on_all_ranks():
    model = network()
    groups = [{"params": [p]} for p in model.parameters()] if hvd.rank() == 0 else model.parameters()
    optimizer = torch.optim.SGD(groups, lr=0.1)
    with pytest.raises(hvd.HvdMismatchError, match="rank 0 has group 1 parameter 0"):
        hvd.broadcast_optimizer_state(optimizer, root_rank=0)
    hvd.barrier()


@as_ranks(2)
def test_tensors_of_every_dtype_and_shape_travel():
    names = "float64 float32 float16 bfloat16 int64 int32 int16 int8 uint8 bool complex64 complex128 float8_e5m2"
    names += " float8_e4m3fnuz uint16"
    for root in range(hvd.size()):
        tensors = {}
        for name in filter(lambda name: hasattr(torch, name), names.split()):
            source = torch.arange(6).reshape(2, 3) % 2 if hvd.rank() == root else torch.zeros(2, 3)
            tensors[name] = source.to(getattr(torch, name))
            tensors[name + " transposed"] = tensors[name].clone().t()
            tensors[name + " scalar"] = tensors[name][0, 1].clone()
            tensors[name + " empty"] = tensors[name][:0].clone()
        hvd.broadcast_parameters(tensors, root_rank=root)
        whole = torch.tensor([[0, 1, 0], [1, 0, 1]], dtype=torch.complex128)
        wanted = {"": whole, "transposed": whole.t(), "scalar": whole[0, 1], "empty": whole[:0]}
        for key, value in tensors.items():
            assert torch.equal(value.to(torch.complex128), wanted[key.partition(" ")[2]]), key


@as_ranks(2)
def test_tied_weights_buffers_and_order_of_names():
    model = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.BatchNorm1d(3), torch.nn.Linear(3, 3))
    with torch.no_grad():
        for p in model.parameters():
            p.fill_(1 + hvd.rank())
    model[2].weight = model[0].weight
    model[1].num_batches_tracked.fill_(7 + hvd.rank())
    entries = list(model.state_dict().items())
    hvd.broadcast_parameters(dict(entries if hvd.rank() else reversed(entries)), root_rank=1)
    assert model[2].weight is model[0].weight and model[0].weight.eq(2).all()
    assert model[1].num_batches_tracked == 8


class Scaled(torch.nn.Module):
    """Has a buffer that is not saved and state that is no tensor."""

    def __init__(self, factor):
        super().__init__()
        self.factor = factor
        self.weight = torch.nn.Parameter(torch.full((2,), float(factor)))
        self.register_buffer("unsaved", torch.full((2,), float(factor)), persistent=False)

    def get_extra_state(self):
        return {"factor": self.factor}

    def set_extra_state(self, state):
        self.factor = state["factor"]


@as_ranks(1, 2, 3)
def test_one_call_brings_everything():
    root = hvd.size() - 1
    mine = 1 + hvd.rank()
    model = Scaled(mine)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1 * mine)
    scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=mine)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**mine)
    scaler.scale(torch.ones(1))
    if hvd.rank() == root:
        model.weight.sum().backward()
        optimizer.step()
        scheduler.step(0.5)
    extra = hvd.broadcast_state(model, optimizer, scheduler, scaler, {"epoch": mine}, root_rank=root)
    assert extra == {"epoch": root + 1}
    assert model.factor == root + 1 and model.unsaved.eq(root + 1).all()
    assert scheduler.patience == root + 1 and scheduler.best == 0.5
    assert scaler.get_scale() == 2.0 ** (root + 1)
    assert_same_everywhere([model.weight, optimizer.state_dict(), scheduler.state_dict()])
    assert hvd.broadcast_state([model, Scaled(mine)], root_rank=root) is None


@as_ranks(2)
def test_ranks_that_give_different_things_are_told_so():
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1) if hvd.rank() == 0 else None
    with pytest.raises(hvd.HvdMismatchError, match=r"rank 0 has 1 optimizers; rank 1 has 0 optimizers"):
        hvd.broadcast_state(model, optimizer)
    hvd.barrier()


@as_ranks(3)
def test_consistency_names_the_first_tensor_and_the_ranks():
    model = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.BatchNorm1d(3))
    hvd.broadcast_state(model)
    hvd.check_consistency(model)
    hvd.check_consistency(model.state_dict())
    with torch.no_grad():
        if hvd.rank() == 1:
            model[0].bias[0] += 1e-7
        if hvd.rank() == 2:
            model[1].running_var[2] = -0.0
    with pytest.raises(hvd.HvdMismatchError, match=r"'0\.bias' on rank 1 is not what .* the first of 2"):
        hvd.check_consistency(model)
    hvd.broadcast_parameters(model.named_parameters(), root_rank=0)
    with pytest.raises(hvd.HvdMismatchError, match=r"'1\.running_var' on rank 2 is not"):
        hvd.check_consistency(model)
    hvd.broadcast_state(model)
    hvd.check_consistency(model)


@as_ranks(2)
def test_consistency_of_optimizers_and_of_not_numbers():
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    steps(model, optimizer, 1)
    with torch.no_grad():
        model[0].weight[0, 0] = float("nan")
    hvd.check_consistency(model, optimizer)
    optimizer.param_groups[0]["lr"] = 0.1 * (1 + hvd.rank())
    with pytest.raises(hvd.HvdMismatchError, match=r"'optimizer\.param_groups\.0\.lr' on rank 1"):
        hvd.check_consistency(model, optimizer)


@as_ranks(1)
def test_one_rank_alone_and_nobody():
    model = network()
    optimizer = torch.optim.Adam(model.parameters())
    hvd.check_consistency(model, optimizer)
    assert hvd.broadcast_state(model, optimizer, extra=3) == 3
    hvd.shutdown()
    for call in (
        lambda: hvd.broadcast_state(model),
        lambda: hvd.check_consistency(model),
        lambda: hvd.broadcast_parameters(model.state_dict(), 0),
        lambda: hvd.broadcast_optimizer_state(optimizer, 0),
    ):
        with pytest.raises(ValueError, match="not been initialized"):
            call()
