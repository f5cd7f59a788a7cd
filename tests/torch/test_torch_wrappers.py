"""Tensors that Python shows and whose memory is not where a plain tensor's is: right numbers or a clear error, in every
collective, and never a read at an address that is not the tensor's."""

import pytest
from ranks import as_ranks

torch = pytest.importorskip("torch")

import hvdlite.torch as hvd  # noqa: E402


class Plainly(torch.Tensor):
    """Only a class."""


class Watching(torch.Tensor):
    """It has memory, and looks at what is done with it."""

    @classmethod
    def __torch_dispatch__(cls, function, types, args=(), kwargs=None):
        return super().__torch_dispatch__(function, types, args, kwargs or {})


class Wrapper(torch.Tensor):
    """It has another tensor and no memory, as DTensor and quantized weights are made."""

    @staticmethod
    def __new__(cls, inner):
        return torch.Tensor._make_wrapper_subclass(
            cls, inner.shape, dtype=inner.dtype, requires_grad=inner.requires_grad
        )

    def __init__(self, inner):
        self.inner = inner

    @classmethod
    def __torch_dispatch__(cls, function, types, args=(), kwargs=None):
        inner = [each.inner if isinstance(each, Wrapper) else each for each in args]
        result = function(*inner, **(kwargs or {}))
        return cls(result) if isinstance(result, torch.Tensor) else result


def masked():
    return torch.masked.masked_tensor(torch.ones(4), torch.tensor([True, False, True, True]))


def fake():
    return torch._subclasses.fake_tensor.FakeTensorMode().from_tensor(torch.ones(4))


def resized(count):
    def make():
        tensor = torch.ones(4)
        tensor.untyped_storage().resize_(4 * count)
        return tensor

    return make


def part_of_resized():
    tensor = torch.ones(8)[4:]
    tensor.untyped_storage().resize_(4 * 5)
    return tensor


def strided_beyond():
    tensor = torch.ones(8)[::2]
    tensor.untyped_storage().resize_(4 * 3)
    return tensor


REFUSED = {
    "wrapper": lambda: Wrapper(torch.ones(4)),
    "wrapper without elements": lambda: Wrapper(torch.ones(0)),
    "parameter that wraps": lambda: torch.nn.Parameter(Wrapper(torch.ones(4))),
    "masked": masked,
    "fake": fake,
    "nested": lambda: torch.nested.nested_tensor([torch.ones(2), torch.ones(2)]),
    "jagged": lambda: torch.nested.nested_tensor([torch.ones(2), torch.ones(2)], layout=torch.jagged),
    "meta": lambda: torch.ones(4, device="meta"),
    "sparse": lambda: torch.ones(4).to_sparse(),
    "zeros of nothing": lambda: torch._efficientzerotensor(4),
    "resized to nothing": resized(0),
    "resized": resized(3),
    "part of a resized": part_of_resized,
    "strided beyond": strided_beyond,
    "quantized": lambda: torch.quantize_per_tensor(torch.ones(4), 1.0, 0, torch.qint8),
}
RIGHT = {  # each has the numbers 1 to 4
    "plain class": lambda: (torch.arange(4.0) + 1).as_subclass(Plainly),
    "watching": lambda: (torch.arange(4.0) + 1).as_subclass(Watching),
    "parameter": lambda: torch.nn.Parameter(torch.arange(4.0) + 1, requires_grad=False),
    "strided": lambda: torch.arange(1, 5, 0.5)[::2],
    "flipped": lambda: (4 - torch.arange(4.0)).flip(0),
    "negated": lambda: torch.complex(torch.zeros(4), -1 - torch.arange(4.0)).conj().imag,
    "grown": lambda: torch.arange(1.0, 9.0)[:4],
    "of numpy": lambda: torch.from_numpy((torch.arange(4.0) + 1).numpy()),
}
CALLS = {
    "allreduce": lambda t, n: hvd.allreduce(t, op=hvd.Sum, name=n),
    "allreduce_": lambda t, n: hvd.allreduce_(t, op=hvd.Sum, name=n),
    "compressed": lambda t, n: hvd.allreduce(t, op=hvd.Sum, name=n, compression=hvd.Compression.fp16),
    "grouped_allreduce": lambda t, n: hvd.grouped_allreduce([t, t.detach()], op=hvd.Sum, name=n),
    "broadcast": lambda t, n: hvd.broadcast(t, 0, name=n),
    "broadcast_": lambda t, n: hvd.broadcast_(t, 0, name=n),
    "allgather": lambda t, n: hvd.allgather(t, name=n),
    "alltoall": lambda t, n: hvd.alltoall(t, name=n),
    "reducescatter": lambda t, n: hvd.reducescatter(t, op=hvd.Sum, name=n),
    "splits": lambda t, n: hvd.alltoall(torch.ones(4), splits=t, name=n),
    "broadcast_parameters": lambda t, n: hvd.broadcast_parameters([(n, t)], 0),
}


@as_ranks(2)
def test_what_has_no_memory_of_its_own_is_refused_by_every_collective():
    for kind, make in REFUSED.items():
        for call, run in CALLS.items():
            if (kind, call) == ("quantized", "broadcast_parameters"):
                continue  # it travels as bytes
            with pytest.raises((ValueError, TypeError, RuntimeError, NotImplementedError)) as caught:
                run(make(), f"{kind}.{call}")
            if call in ("allreduce", "allreduce_", "allgather", "broadcast_"):
                assert "[HVD20" in str(caught.value), (kind, call, caught.value)
                assert kind != "sparse" or "to_dense" in str(caught.value), caught.value
    assert hvd.allreduce(torch.ones(2), op=hvd.Sum).tolist() == [2.0, 2.0]


def plain(tensor):
    return torch.empty(tensor.shape).copy_(tensor.detach())


@as_ranks(2)
def test_what_has_memory_of_its_own_gives_right_numbers():
    whole = torch.arange(4.0) + 1
    for kind, make in RIGHT.items():
        for call in ("allreduce", "allreduce_", "compressed"):
            assert torch.equal(plain(CALLS[call](make(), f"{kind}.{call}")), 2 * whole), (kind, call)
        assert torch.equal(plain(hvd.broadcast(make(), 1)), whole), kind
        assert torch.equal(plain(hvd.allgather(make())), whole.repeat(2)), kind


@as_ranks(2)
def test_a_storage_that_shrinks_between_two_equal_calls_is_noticed():
    tensor = torch.ones(4)
    for _ in range(3):
        hvd.allreduce_(tensor, name="again")
    tensor.untyped_storage().resize_(4)
    with pytest.raises(ValueError, match="resized"):
        hvd.allreduce_(tensor, name="again")
    tensor.untyped_storage().resize_(16)
    tensor.fill_(1.0)
    assert torch.equal(hvd.allreduce_(tensor, name="again"), torch.ones(4))


@as_ranks(2)
def test_an_expanded_tensor_is_read_and_never_overwritten():
    assert torch.equal(hvd.allreduce(torch.ones(1).expand(5), op=hvd.Sum), torch.full((5,), 2.0))
    for call in (hvd.allreduce_, lambda tensor: hvd.broadcast_(tensor, 0)):
        with pytest.raises(ValueError, match=r"share memory.*HVD203"):
            call(torch.ones(1).expand(5))


@as_ranks(2)
def test_inside_of_torch_func_the_text_says_so():
    for transform in (torch.func.vmap, torch.func.grad, torch.func.functionalize):
        with pytest.raises(ValueError, match=r"torch.func.*HVD203"):
            transform(lambda rows: hvd.allreduce(rows).sum())(
                torch.ones(4, 2) if transform is torch.func.vmap else torch.ones(4)
            )


@as_ranks(2)
def test_a_parameter_that_wraps_is_refused_by_name_when_the_optimizer_is_wrapped():
    inner = torch.nn.Parameter(Wrapper(torch.ones(4)))
    for op in (hvd.Average, hvd.Adasum):
        with pytest.raises(ValueError, match=r"parameter 'odd[#0-9]*' is a Wrapper, .*HVD203"):
            hvd.DistributedOptimizer(torch.optim.SGD([inner], lr=0.1), [("odd", inner)], op=op)
    frozen = torch.nn.Parameter(Wrapper(torch.ones(4)), requires_grad=False)
    plain = torch.nn.Parameter(torch.ones(4).as_subclass(Plainly))
    named = [("frozen", frozen), ("plain", plain)]
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD([frozen, plain], lr=1.0), named)
    (plain * (hvd.rank() + 1)).sum().backward()
    optimizer.step()
    assert plain.tolist() == [-0.5] * 4
    with pytest.raises(ValueError, match=r"'odd' is a Wrapper, .*HVD235"):
        hvd.broadcast_parameters([("odd", inner)], 0)


@as_ranks(2)
def test_state_that_wraps_is_refused_on_all_ranks():
    parameter = torch.nn.Parameter(torch.ones(4))
    optimizer = torch.optim.SGD([parameter], lr=0.1, momentum=0.9)
    if hvd.rank() == 0:
        optimizer.state[parameter]["momentum_buffer"] = Wrapper(torch.ones(4))
    with pytest.raises(ValueError, match=r"rank 0 cannot send .*Wrapper.*HVD235"):
        hvd.broadcast_optimizer_state(optimizer, 0)


@as_ranks(2)
def test_a_gradient_whose_storage_was_resized_is_an_error_and_no_read():
    parameter = torch.nn.Parameter(torch.ones(1000))
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD([parameter], lr=0.1))
    for _ in range(3):
        parameter.sum().backward()
        optimizer.step()
    optimizer.zero_grad()
    parameter.grad = torch.ones(1000)
    parameter.grad.untyped_storage().resize_(16)
    with pytest.raises(ValueError, match=r"resized.*HVD203"):
        optimizer.step()
    parameter.grad = None
    optimizer.zero_grad()
    parameter.sum().backward()
    assert torch.equal(parameter.grad, torch.ones(1000))


@as_ranks(2)
def test_distributed_tensors_are_refused_and_their_local_parts_travel():
    distributed = pytest.importorskip("torch.distributed.tensor")
    if not hasattr(distributed, "distribute_tensor"):  # before PyTorch 2.5
        distributed = pytest.importorskip("torch.distributed._tensor")
    if not torch.distributed.is_available():
        pytest.skip("torch without torch.distributed")
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    try:
        mesh = torch.distributed.init_device_mesh("cpu", (1,))
        tensor = distributed.distribute_tensor(torch.ones(4, 4), mesh, [distributed.Shard(0)])
        for call, run in CALLS.items():
            with pytest.raises((ValueError, TypeError, RuntimeError)) as caught:
                run(tensor, f"distributed.{call}")
            if call in ("allreduce", "allreduce_", "broadcast_", "allgather"):
                assert "DTensor" in str(caught.value) and "to_local()" in str(caught.value), caught.value
        parameter = torch.nn.Parameter(tensor)
        with pytest.raises(ValueError, match=r"parameter 'weight(#\d+)?' is a DTensor.*to_local\(\).*HVD203"):
            hvd.DistributedOptimizer(torch.optim.SGD([parameter], lr=0.1), [("weight", parameter)])
        local = tensor.to_local()
        assert torch.equal(hvd.allreduce(local * (hvd.rank() + 1), op=hvd.Sum), torch.full((4, 4), 3.0))
        hvd.broadcast_(local, 0)
    finally:
        torch.distributed.destroy_process_group()


class Boasts(torch.Tensor):
    """Says of itself what is not so."""

    @property
    def shape(self):
        return torch.Size([1 << 24])

    def numel(self):
        return 1 << 24

    @classmethod
    def __torch_function__(cls, function, types, args=(), kwargs=None):
        if function in (torch.Tensor.data_ptr, torch.Tensor.storage_offset):
            return 1 << 40
        if function in (torch.Tensor.size, torch.Tensor.stride):
            return (1 << 24,)
        return super().__torch_function__(function, types, args, kwargs or {})


@as_ranks(2)
def test_a_class_that_says_other_things_of_its_memory_than_torch_is_not_believed():
    for number in range(2):
        given = torch.ones(4).as_subclass(Boasts)
        assert hvd.allreduce(given, op=hvd.Sum, name="boasts").tolist() == [2.0] * 4
        assert hvd.allreduce_(given, op=hvd.Sum, name="boasts_") is given
        assert given.as_subclass(torch.Tensor).tolist() == [2.0] * 4, number
        assert len(hvd.allgather(given)) == len(hvd.alltoall(given)) * 2 == 8
        assert len(hvd.grouped_reducescatter([given])[0]) == 2
        hvd.broadcast_(given, 0)
        hvd.check_consistency([given])


@as_ranks(2)
def test_check_consistency_reads_no_memory_that_is_not_there():
    short = torch.ones(1 << 20)
    short.untyped_storage().resize_(16)
    for given, text in ((short, "needs more memory"), (Wrapper(torch.ones(2)), "wraps other tensors")):
        with pytest.raises(ValueError, match=f"check_consistency: 'a'.*{text}"):
            hvd.check_consistency({"a": given})


@as_ranks(2)
def test_a_gradient_that_is_expanded_becomes_one_that_can_be_written():
    weight = torch.nn.Parameter(torch.zeros(4))
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD([weight], 1.0), [("expanded", weight)])

    def expand(parameter):
        parameter.grad = parameter.grad.sum().expand_as(parameter)

    weight.register_post_accumulate_grad_hook(expand)
    for _ in range(3):
        optimizer.zero_grad()
        (weight * (1.0 + 2 * hvd.rank())).sum().backward()
        assert weight.grad.tolist() == [8.0] * 4
        optimizer.step()
