"""A tensor is given other memory while the core works on it: `tensor.data = other` does that, and with it module.half()
and its kind, to every gradient. What the core reads and writes is the memory that it was given."""

import gc

import pytest
from ranks import as_ranks

torch = pytest.importorskip("torch")

import hvdlite.torch as hvd  # noqa: E402

COUNT = 1 << 18  # floats: so much memory malloc gives back to the system
FORMS = {  # what to call, and what rank 1 gets where the ranks give 1 and 100
    "allreduce": (lambda tensor: hvd.allreduce_async(tensor, op=hvd.Sum, name="x"), 101),
    "allreduce_": (lambda tensor: hvd.allreduce_async_(tensor, op=hvd.Sum, name="x"), 101),
    "group": (lambda tensor: hvd.grouped_allreduce_async([tensor] * 2, op=hvd.Sum, name="x"), 101),
    "group_": (lambda tensor: hvd.grouped_allreduce_async_([tensor], op=hvd.Sum, name="x"), 101),
    "reduce": (lambda tensor: hvd.reduce_async(tensor, 1, op=hvd.Sum, name="x"), 101),
    "reducescatter": (lambda tensor: hvd.reducescatter_async(tensor, op=hvd.Sum, name="x"), 101),
    "broadcast": (lambda tensor: hvd.broadcast_async(tensor, 0, name="x"), 1),
    "broadcast_": (lambda tensor: hvd.broadcast_async_(tensor, 0, name="x"), 1),
    "allgather": (lambda tensor: hvd.allgather_async(tensor, name="x"), 1),
    "group of rows": (lambda tensor: hvd.grouped_allgather_async([tensor], name="x"), 1),
    "alltoall": (lambda tensor: hvd.alltoall_async(tensor, name="x"), 1),
    "gather": (lambda tensor: hvd.gather_async(tensor, 1, name="x"), 1),
    "send": (lambda tensor: (hvd.send_async if hvd.rank() == 0 else hvd.recv_async)(tensor, 1 - hvd.rank()), 1),
}


@pytest.mark.parametrize("form", FORMS)
@as_ranks(2)
def test_what_was_given_stays_while_the_tensor_gets_other_memory(form):
    start, due = FORMS[form]
    for _ in range(2):  # the second time by the short way
        tensor = torch.full((COUNT,), 1.0 if hvd.rank() == 0 else 100.0)
        if hvd.rank() == 0:
            handle = start(tensor)
            tensor.data = torch.zeros(1)
            gc.collect()
            mine = [torch.full((COUNT,), 7.0) for _ in range(4)]
            hvd.barrier()
            hvd.synchronize(handle)
            assert all((each == 7.0).all() for each in mine)
        else:
            hvd.barrier()
            result = hvd.synchronize(start(tensor))
            result = result[0] if isinstance(result, (list, tuple)) else result
            assert result[: COUNT // 2].unique().tolist() == [due]


@as_ranks(2)
def test_a_model_that_is_cast_while_its_gradients_are_under_way():
    weight = torch.nn.Linear(1, COUNT, bias=False)
    sgd = torch.optim.SGD(weight.parameters(), 1.0)
    optimizer = hvd.DistributedOptimizer(sgd, weight.named_parameters(), op=hvd.Sum)
    optimizer.wait_in_backward = False
    if hvd.rank() == 1:
        hvd.barrier()
    weight(torch.full((1, 1), 1.0 + hvd.rank())).sum().backward()
    if hvd.rank() == 0:
        weight.half()
        gc.collect()
        mine = [torch.full((COUNT,), 7.0) for _ in range(4)]
        hvd.barrier()
    optimizer.synchronize()
    if hvd.rank() == 0:
        assert all((each == 7.0).all() for each in mine)
    else:
        assert weight.weight.grad.unique().tolist() == [3.0]
