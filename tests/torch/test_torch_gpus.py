"""PyTorch's tensors on GPUs, over a GPU that is none (gpus.py): which way they go, and that results are right."""

import contextlib
import io
import os
import subprocess
import sys
import warnings

import gpus
import pytest
import torch
from ranks import as_ranks

import hvdlite.torch as hvd
from hvdlite.torch.optimizer import gradient_memory


@pytest.fixture(scope="module", autouse=True)
def stub():
    gpus.build_stub()


def ragged_and_rooted(rank, size):
    """Rows that differ, none at all, groups, and what is made of alltoall."""
    splits = [(rank + to) % 3 for to in range(size)]
    given = torch.arange(float(sum(splits)))[:, None] + 100 * rank
    rows, counts = hvd.alltoall(given, splits)
    assert counts.tolist() == [(r + rank) % 3 for r in range(size)]
    due = [100 * r + sum((r + to) % 3 for to in range(rank)) + i for r in range(size) for i in range((r + rank) % 3)]
    assert rows[:, 0].tolist() == due
    empty, some = hvd.grouped_allgather([torch.zeros(0, 3), torch.full((2 * (rank % 2), 1), rank, dtype=torch.int32)])
    assert empty.shape == (0, 3) and some[:, 0].tolist() == [r for r in range(size) for _ in range(2 * (r % 2))]
    got = hvd.gather(torch.full((rank + 1,), rank), size - 1)
    assert got.tolist() == ([r for r in range(size) for _ in range(r + 1)] if rank == size - 1 else [])
    part = hvd.scatter(torch.arange(2.0 * size) if rank == 0 else None, 0)
    assert part.tolist() == [2.0 * rank, 2.0 * rank + 1]
    if size > 1 and rank < 2:
        sent = torch.full((2,), float(rank))
        (hvd.send if rank == 0 else hvd.recv)(sent, 1 - rank, name="sent")
        assert sent.tolist() == [0.0, 0.0]


def every_collective():
    rank, size = hvd.rank(), hvd.size()
    total = size * (size - 1) / 2
    assert torch.equal(hvd.allreduce(torch.full((5,), float(rank)), op=hvd.Sum), torch.full((5,), total))
    several = hvd.grouped_allreduce([torch.ones(3) * rank, torch.ones(4, dtype=torch.float64)], op=hvd.Sum)
    assert several[0].tolist() == [total] * 3 and several[1].tolist() == [size] * 4
    whole = hvd.allreduce(torch.tensor([10 * rank + 1]), op=hvd.Average)
    assert whole.item() == (10 * total + size) // size
    sent = torch.full((2, 2), rank)
    assert hvd.broadcast_(sent, size - 1).tolist() == [[size - 1] * 2] * 2 and sent[0, 0] == size - 1
    rows = hvd.allgather(torch.full((rank + 1, 2), rank))
    assert rows[:, 0].tolist() == [r for r in range(size) for _ in range(r + 1)]
    assert hvd.alltoall(torch.arange(size) + 10 * rank).tolist() == [10 * r + rank for r in range(size)]
    ragged_and_rooted(rank, size)
    part = hvd.reducescatter(torch.arange(2.0 * size + 1), op=hvd.Sum)  # the first gets one more
    first = 2 * rank + (rank > 0)
    assert part.tolist() == [size * float(i) for i in range(first, first + 2 + (rank == 0))]
    root = hvd.reduce(torch.tensor([float(rank)]), size - 1, op=hvd.Max)
    assert root.tolist() == ([size - 1] if rank == size - 1 else [])


@as_ranks(1, 2, 3)
def test_tensors_on_gpus_go_by_nccl():
    with gpus.on_gpus(hvd.rank()), warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(2):  # with greetings and without
            sums, roots, copies = map(gpus.calls, ("ncclAllReduce", "ncclReduce", "cuMemcpyDtoH"))
            every_collective()
            assert gpus.calls("ncclAllReduce") > sums
            assert gpus.calls("cuMemcpyDtoH") == copies + (hvd.size() > 1)  # the average of integers
            assert gpus.calls("ncclReduce") == roots + 1 + (hvd.size() > 1) * hvd.size()  # uneven shares: one each
        hvd.barrier()
        waits = gpus.calls("cuStreamWaitEvent")
        hvd.synchronize(hvd.allreduce_async(torch.ones(3)))  # the stub's streams wait, no ready event is given
        assert gpus.calls("cuStreamWaitEvent") == waits + 1


@as_ranks(1, 2, 3)
def test_an_adasum_on_gpus_has_the_bits_that_it_has_on_the_cpu():
    """Also beside a rank that has joined."""
    given = torch.arange(50.0) * (hvd.rank() + 1) % 7 - 3
    for joined in range(min(2, hvd.size())):
        if hvd.rank() >= joined:
            due = hvd.allreduce(given, op=hvd.Adasum)
            with gpus.on_gpus(hvd.rank()):
                before = gpus.calls("cuMemcpyDtoH")
                assert torch.equal(hvd.allreduce(given, op=hvd.Adasum), due)
                assert gpus.calls("cuMemcpyDtoH") == before + 1
        if joined:
            hvd.join()
    assert hvd.memory_stats()["pinned"] >= 2 * given.nbytes  # what went down and what came up
    hvd.barrier()


@as_ranks(2)
def test_a_group_is_one_group_of_calls():
    rank, size = hvd.rank(), hvd.size()
    total = size * (size - 1) / 2
    with gpus.on_gpus(rank):
        hvd.grouped_allreduce([torch.ones(2), torch.ones(3)])  # the ranks have greeted each other
        before = gpus.calls("ncclGroupEnd")
        given = [torch.full((n,), float(rank)) for n in range(1, 40)]
        got = hvd.grouped_allreduce(given, op=hvd.Average, prescale_factor=2)
    assert all(torch.equal(one, torch.full((n + 1,), 2 * total / size)) for n, one in enumerate(got))
    assert gpus.calls("ncclGroupEnd") == before + 1


@as_ranks(2)
def test_gradients_of_rows_and_sparse_sums_go_by_nccl():
    rank, size = hvd.rank(), hvd.size()
    with gpus.on_gpus(rank):
        hvd.allreduce(torch.ones(1))
        sends, gathers = gpus.calls("ncclSend"), gpus.calls("ncclBroadcast")
        mine = torch.full((rank + 1, 2), float(rank), requires_grad=True)
        whole = hvd.allgather(mine, exact_grad=True)
        (whole * torch.arange(1.0, len(whole) + 1)[:, None]).sum().backward()
        assert mine.grad[:, 0].tolist() == ([2.0] if rank == 0 else [4.0, 6.0])
        given = torch.arange(3.0, requires_grad=True)
        rows, came = hvd.alltoall(given, [1 + rank, 2 - rank])
        assert came.tolist() == ([1, 2] if rank == 0 else [2, 1])
        (rows * (rank + 1)).sum().backward()
        assert given.grad.tolist() == ([1.0, 2.0, 2.0] if rank == 0 else [1.0, 1.0, 2.0])
        at = torch.sparse_coo_tensor([[rank, 2]], torch.tensor([1.0, 2.0]), (4,))
        handle = hvd.sparse_allreduce_async(at, name="sparse", op=hvd.Sum)
        total = handle() if callable(handle) else hvd.synchronize(handle)
        assert total.to_dense().tolist() == [1.0, 1.0, 2.0 * size, 0.0]
        assert gpus.calls("ncclSend") > sends and gpus.calls("ncclBroadcast") > gathers


@as_ranks(2)
def test_float8_is_added_and_another_one_is_refused_with_what_to_do_instead_and_that_works():
    eighth = torch.tensor([1.5, hvd.rank()]).to(torch.float8_e4m3fn)
    other = torch.tensor([1.5, hvd.rank()]).to(torch.float8_e4m3fnuz)
    for where in (contextlib.nullcontext(), gpus.on_gpus(hvd.rank())):
        with where:
            assert hvd.allreduce(eighth, op=hvd.Sum).float().tolist() == [3.0, 1.0]
            assert hvd.allgather(eighth).float().tolist() == [1.5, 0.0, 1.5, 1.0]
            with pytest.raises(ValueError, match=r"float8_e4m3fnuz.*tensor.to\(torch.bfloat16\).*view\(torch.uint8\)"):
                hvd.allreduce(other)
            assert hvd.allreduce(other.to(torch.bfloat16), op=hvd.Sum).tolist() == [3.0, 1.0]
            moved = hvd.allgather(other.view(torch.uint8)).view(torch.float8_e4m3fnuz)
            assert moved.float().tolist() == [1.5, 0.0, 1.5, 1.0]


def test_what_is_there_is_told_and_options_name_other_files():
    ask = "import hvdlite as hvd; print(hvd.cuda_built(), hvd.nccl_built())"
    both = {"HVDLITE_CUDA_LIBRARY": str(gpus.STUB), "HVDLITE_NCCL_LIBRARY": str(gpus.STUB)}
    for more, told in (
        (both, "True 22105"),
        ({**both, "STUB_NCCL_VERSION": "23003"}, "True 23003"),
        ({**both, "HVDLITE_NCCL_LIBRARY": "/none/libnccl.so.2"}, "True 0"),
        ({**both, "HVDLITE_CUDA_LIBRARY": "/none/libcuda.so.1"}, "False 0"),
    ):
        line = [sys.executable, "-c", ask]
        done = subprocess.run(line, env={**os.environ, **more}, capture_output=True, text=True, timeout=120)
        assert done.stdout.strip() == told, (more, done.stderr)


@as_ranks(2)
def test_two_ranks_on_one_gpu_go_by_way_of_the_cpu_and_are_told_so_once():
    hvd.shutdown()
    hvd.init()
    before = gpus.calls("ncclAllReduce")
    with gpus.on_gpus(4), warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        every_collective()
    assert gpus.calls("ncclAllReduce") == before
    texts = [str(one.message) for one in said]
    assert len(texts) == (hvd.rank() == 0), texts
    text = "ranks 0 and 1 use the same GPU (device 4, uuid ababababababababababababababab04, PCI 0000:05:00.0), which "
    text += "NCCL 2.21.5 does not support: give each its own, with torch.cuda.set_device(hvd.local_rank())"
    assert hvd.rank() or text in texts[0] and "go through host memory in process set 0" in texts[0], texts
    hvd.shutdown()


@as_ranks(2)
def test_a_tensor_of_the_cpu_beside_one_on_a_gpu_is_named():
    with gpus.on_gpus(hvd.rank()):
        hvd.allreduce(torch.ones(1))
    mine = torch.ones(2)
    text = r"tensor 'allreduce.mixed': ranks disagree on the device: rank 0 said a GPU, rank 1 said the CPU\."
    text += r".*move the tensor with \.cuda\(\) or \.cpu\(\)"
    with pytest.raises(hvd.HvdMismatchError, match=text):
        if hvd.rank():
            hvd.allreduce(mine, name="mixed")
        else:
            with gpus.on_gpus(0):
                hvd.allreduce(mine, name="mixed")
    with gpus.on_gpus(hvd.rank()):
        assert hvd.allreduce(torch.ones(1), op=hvd.Sum) == 2


@as_ranks(2)
def test_gradients_that_are_views_of_one_memory_are_reduced_where_they_lie():
    torch.manual_seed(1)
    layers = [layer for _ in range(6) for layer in (torch.nn.Linear(5, 5), torch.nn.Tanh())]
    model, size = torch.nn.Sequential(*layers), hvd.size()
    parameters = list(model.parameters())
    flat, at = torch.zeros(sum(one.numel() for one in parameters)), 0
    for one in parameters:
        one.grad = flat[at : at + one.numel()].view(one.shape)
        at += one.numel()
    with gpus.on_gpus(hvd.rank()):
        optimizer = hvd.DistributedOptimizer(torch.optim.SGD(parameters, 0.0), model.named_parameters())
        for step in range(8):
            optimizer.zero_grad(set_to_none=False)
            model(torch.full((1, 5), float(hvd.rank()))).sum().backward()
            optimizer.step()
            if step == 0:
                first, calls = flat.clone(), gpus.calls("ncclAllReduce")
            assert torch.allclose(flat, first, atol=1e-6)
    assert gpus.calls("ncclAllReduce") > calls
    mine = torch.autograd.grad(model(torch.full((1, 5), float(hvd.rank()))).sum(), parameters)
    both = hvd.allreduce(torch.cat([one.flatten() for one in mine]), op=hvd.Sum)
    assert torch.allclose(flat, both / size, atol=1e-6)


@as_ranks(2)
def test_what_is_saved_after_the_last_step_holds_the_averages():
    """At once, with nothing between: torch.save copies from the device, behind what the current stream waits for."""
    model = torch.nn.Linear(3, 2)
    with gpus.on_gpus(hvd.rank()):
        hvd.broadcast_parameters(model.state_dict(), 0)
        before = {name: value.clone() for name, value in model.state_dict().items()}
        optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), 0.5), model.named_parameters())
        waits, sums = gpus.calls("cuStreamWaitEvent"), gpus.calls("ncclAllReduce")
        for _ in range(2):
            optimizer.zero_grad()
            model(torch.full((1, 3), float(hvd.rank()))).sum().backward()
            optimizer.step()
        saved = io.BytesIO()
        torch.save({"model": model.state_dict(), "grads": [one.grad for one in model.parameters()]}, saved)
        assert gpus.calls("cuStreamWaitEvent") >= waits + 4 and gpus.calls("ncclAllReduce") > sums
    saved.seek(0)
    loaded = torch.load(saved)
    assert [one.flatten().tolist() for one in loaded["grads"]] == [[0.5] * 6, [1.0] * 2]
    assert torch.allclose(loaded["model"]["weight"], before["weight"] - 0.5)
    assert torch.allclose(loaded["model"]["bias"], before["bias"] - 1.0)


@as_ranks(2)
def test_a_sparse_gradient_goes_there_with_its_indices():
    rank, rows = hvd.rank(), torch.nn.Embedding(4, 2, sparse=True)
    with gpus.on_gpus(rank):
        optimizer = hvd.DistributedOptimizer(torch.optim.SGD(rows.parameters(), 1.0), rows.named_parameters())
        hvd.broadcast_parameters(rows.state_dict(), 0)
        before, gathers = rows.weight.detach().clone(), gpus.calls("ncclAllGather")
        rows(torch.tensor([rank, 3])).sum().backward()
        optimizer.step()
        assert gpus.calls("ncclAllGather") == gathers + 2
    assert (before - rows.weight.detach())[:, 0].tolist() == pytest.approx([0.5, 0.5, 0.0, 1.0])


def test_a_sparse_gradient_without_rows_lies_where_its_parameter_does():
    nothing = gradient_memory.no_rows(torch.empty(4, 2, device="meta"), 1)
    assert nothing.device.type == "meta" and nothing.is_sparse and nothing.shape == (4, 2)


@as_ranks(2)
def test_without_such_tensors_nothing_of_cuda_is_loaded():
    hvd.allreduce(torch.ones(3))
    with open("/proc/self/maps", encoding="utf-8") as maps:
        loaded = maps.read()
    assert "libcuda.so" not in loaded and "libnccl.so" not in loaded
