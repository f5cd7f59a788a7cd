"""Plane memory and its account: what hvd.empty gives, who frees it when, and what the core uses in all."""

import copy
import gc
import multiprocessing
import os
import subprocess
import threading

import numpy as np
import pytest
from ranks import as_ranks

import hvdlite as hvd

torch = pytest.importorskip("torch")

import hvdlite.torch as hvt  # noqa: E402


def arena():
    return hvd.memory_stats()["arena"]


@pytest.mark.parametrize("dtype", ["float32", "float64", "float16", "int32", "uint8", "bool", "bfloat16"])
@as_ranks(2, 3)
def test_arrays_of_plane_memory_are_reduced_like_any_other(dtype):
    before = arena()
    shape = (3, 50_001)
    tensor = hvt.empty(shape, dtype=getattr(torch, dtype))
    assert tensor.shape == shape and tensor.is_contiguous() and arena() - before >= tensor.nbytes
    tensor.fill_(1)
    hvt.allreduce_(tensor, op=hvd.Max if dtype == "bool" else hvd.Sum)
    assert tensor.eq(1 if dtype == "bool" else hvd.size()).all()
    if dtype != "bfloat16":
        array = hvd.empty(shape, dtype)
        assert array.shape == shape and array.dtype == dtype and array.flags.c_contiguous and array.flags.writeable
        array[...] = 1
        hvd.allreduce_(array, op=hvd.Max if dtype == "bool" else hvd.Sum)
        assert (array == (1 if dtype == "bool" else hvd.size())).all()


@as_ranks(2)
def test_some_ranks_may_have_plane_memory_and_others_not():
    tensor = hvt.empty(100_000) if hvd.rank() == 0 else torch.empty(100_000)
    for _ in range(3):
        tensor.fill_(hvd.rank() + 1.0)
        hvt.allreduce_(tensor, name="mixed", op=hvd.Sum)
        assert tensor.eq(3).all()


@as_ranks(2)
def test_the_last_view_frees_the_block():
    before = arena()
    whole = hvt.empty((2, 1_000_000))
    part, array = whole[1, 5:], whole.numpy()[0]
    del whole
    gc.collect()
    assert arena() - before >= 8_000_000
    part.fill_(2), array.fill(3)
    del part
    gc.collect()
    assert arena() > before and (array == 3).all()
    del array
    gc.collect()
    assert arena() == before


@as_ranks(2)
def test_plane_memory_outlives_the_job_and_serves_the_next_as_memory():
    tensor = hvt.empty(200_000).fill_(hvd.rank())
    array = hvd.empty(1000)
    array[:] = 7
    hvd.shutdown()
    assert tensor.eq(tensor[0]).all() and (array == 7).all()
    with pytest.raises(ValueError, match="init"):
        hvd.memory_stats()
    with pytest.raises(ValueError, match="init"):
        hvt.empty(3)
    hvd.init()
    assert arena() == 0  # they belong to an earlier life
    hvt.allreduce_(tensor, op=hvd.Sum)
    assert tensor.eq(sum(range(hvd.size()))).all()
    del tensor, array
    gc.collect()


@as_ranks(2)
def test_copies_have_memory_of_their_own():
    before = arena()
    tensor = hvt.empty(100_000)
    used = arena()
    twin, clone = copy.deepcopy(tensor), tensor.clone()
    assert arena() == used > before
    assert twin.data_ptr() != tensor.data_ptr() != clone.data_ptr()


@as_ranks(2)
def test_a_forked_child_that_drops_its_views_takes_nothing_away():
    tensor = hvt.empty(1_000_000).fill_(5)
    array = hvd.empty(1_000_000)
    array[:] = 6
    child = os.fork()
    if child == 0:
        del tensor, array
        gc.collect()
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    assert tensor.eq(5).all() and (array == 6).all()


@as_ranks(2)
def test_what_a_forked_child_writes_stays_in_it():
    """Also what its own child writes; collectives of the rank go on in the memory that all map."""
    tensor = hvt.empty(1_000_000).fill_(5)
    small = hvd.empty(3)
    small[:] = 6
    child = os.fork()
    if child == 0:
        kept = tensor.eq(5).all() and (small == 6).all()
        tensor.fill_(7), small.fill(8)
        if os.fork() == 0:
            tensor.fill_(9)
            os._exit(0)
        os.wait()
        os._exit(0 if kept and tensor.eq(7).all() else 1)
    assert os.waitpid(child, 0)[1] == 0
    assert tensor.eq(5).all() and (small == 6).all()
    hvt.allreduce_(tensor, op=hvd.Sum)
    assert tensor.eq(10).all()


@as_ranks(1, 2)
def test_a_forked_child_sees_what_was_there_at_the_fork():
    """Also its own child, a process of multiprocessing and one from another thread, and each fork sees its own."""
    tensor, array = hvt.empty(1_000_000), hvd.empty(3)
    context, results = multiprocessing.get_context("fork"), []

    def child(written, value, again):
        written.wait(30)
        code = int(tensor.eq(value).all() and (array == value).all())
        if again:
            grandchild = context.Process(target=child, args=(written, value, False))
            grandchild.start(), grandchild.join()
            code = code if grandchild.exitcode == 5 else 0
        os._exit(5 * code)

    def fork(value):
        tensor.fill_(value), array.fill(value)
        written = context.Event()
        children = [context.Process(target=child, args=(written, value, again)) for again in (True, False)]
        for one in children:
            one.start()
        tensor.fill_(-1), array.fill(-1)
        written.set()
        for one in children:
            one.join()
        results.extend(one.exitcode for one in children)

    fork(1), fork(2)
    hvt.allreduce_(tensor, op=hvd.Sum)
    assert tensor.eq(-hvd.size()).all()
    thread = threading.Thread(target=fork, args=(3,))
    thread.start(), thread.join()
    assert results == [5] * 6, results
    assert (array == -1).all()


@as_ranks(2)
def test_the_copy_for_children_goes_when_a_collective_works_in_plane_memory():
    tensor, used = hvt.empty(1_000_000).fill_(1), arena()
    subprocess.run(["true"], check=True)
    assert arena() == used
    for _ in range(2):
        if os.fork() == 0:
            os._exit(0)
        assert arena() == 2 * used and os.wait()[1] == 0
    hvt.allreduce_(tensor, op=hvd.Sum)
    assert arena() == used and tensor.eq(2).all()


@as_ranks(1, 2)
def test_shapes_and_dtypes_that_cannot_be():
    for module, dtype in ((hvd, "float32"), (hvt, torch.float32)):
        assert module.empty((), dtype).shape == () and module.empty(4, dtype).shape == (4,)
        assert module.empty((0, 3), dtype).shape == (0, 3) and module.empty([2, 3], dtype).shape == (2, 3)
        with pytest.raises(ValueError, match="negative"):
            module.empty((2, -1), dtype)
        with pytest.raises(ValueError, match="exceeds every memory"):
            module.empty((2**70,), dtype)
        with pytest.raises(TypeError, match="shape"):
            module.empty(2.5, dtype)
        with pytest.raises(TypeError, match="shape"):
            module.empty("23", dtype)
    with pytest.raises(ValueError, match="not supported"):
        hvd.empty(3, "complex64")
    with pytest.raises(ValueError, match="not supported"):
        hvd.empty(3, object)
    with pytest.raises(ValueError, match="not supported"):
        hvt.empty(3, torch.complex64)
    with pytest.raises(TypeError, match=r"torch\.dtype"):
        hvt.empty(3, "float32")


@as_ranks(1)
def test_one_rank_has_memory_of_its_own():
    assert hvt.empty((2, 2)).shape == (2, 2) and hvd.empty(3).shape == (3,) and arena() == 0


@as_ranks(2)
def test_results_that_nobody_has_picked_up_are_counted():
    before = hvd.memory_stats()["results"]
    handle = hvd.allgather_async(np.zeros(100_000, "float32"))
    while not hvd.poll(handle):
        pass
    assert hvd.memory_stats()["results"] - before == 800_000
    hvd.synchronize(handle)
    assert hvd.memory_stats()["results"] == before


@as_ranks(2, 4)
def test_a_model_with_one_megabyte_of_gradients_costs_at_most_two():
    hvd.shutdown()  # what earlier tests have used stays resident
    hvd.init()
    model = torch.nn.Sequential(*[torch.nn.Linear(256, 256) for _ in range(4)])
    assert 1_000_000 < sum(4 * p.numel() for p in model.parameters()) < 1_100_000
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer = hvt.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
    for set_to_none in (True, False):
        for _ in range(4):
            optimizer.zero_grad(set_to_none=set_to_none)
            model(torch.randn(8, 256)).sum().backward()
            optimizer.step()
        stats = hvd.memory_stats()
        assert stats["total"] == sum(bytes for kind, bytes in stats.items() if kind != "total")
        assert stats["lanes"] > 0 and stats["records"] > 0
        assert stats["total"] <= 2_000_000, stats
