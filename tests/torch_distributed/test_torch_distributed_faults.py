"""What users of backend "hvdlite" hear when something is wrong: which group and call, which rank, what to do."""

import inspect
import re
import sys
from datetime import timedelta

import pytest
from launching import launch
from ranks import as_ranks

torch = pytest.importorskip("torch")

import torch.distributed as dist  # noqa: E402
from test_torch_distributed import backend, same  # noqa: E402

import hvdlite.torch as hvd  # noqa: E402

TELLS = "shutdown()" in inspect.getsource(dist.destroy_process_group)  # an old torch tells a group nothing
PYTHON = (sys.executable, "-c")
BEGIN = """
import os, signal, sys, time, torch, torch.distributed as dist
from datetime import timedelta
import hvdlite.torch.distributed
torch.set_num_threads(1)
dist.init_process_group("hvdlite")
rank = dist.get_rank()
def told(call):
    began = time.monotonic()
    try:
        call()
    except Exception as error:
        print(f"{type(error).__name__} after {time.monotonic() - began:.1f} s: {error}", flush=True)
    os._exit(0)
"""
KILLED = """
dist.all_reduce(torch.ones(3))
if rank == 1:
    os.kill(os.getpid(), signal.SIGKILL)
told(lambda: dist.all_reduce(torch.ones(1000)))
"""
KILLED_IN_BACKWARD = """
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(8, 8))
step = lambda: model(torch.ones(2, 8)).sum().backward()
step()
if rank == 1:
    model.register_comm_hook(None, lambda state, bucket: os.kill(os.getpid(), signal.SIGKILL))
told(step)
"""
KILLED_BEFORE_A_GROUP = """
if rank == 1:
    os.kill(os.getpid(), signal.SIGKILL)
told(lambda: dist.new_group([0, 1]))
"""
OUTLIVES = """
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(512, 512), gradient_as_bucket_view=True)
for _ in range(3):
    model(torch.ones(2, 512)).sum().backward()
gradient = model.module.weight.grad
wanted = gradient.clone()
from hvdlite.torch.distributed import bucket_memory
assert any(block is not None for _, block, _ in bucket_memory._moved.values())
dist.destroy_process_group()
assert torch.equal(gradient, wanted)
def child(queue):
    told(queue.get)
if rank == 0:
    import torch.multiprocessing as several
    queue = several.get_context("fork").Queue()
    reader = several.get_context("fork").Process(target=child, args=(queue,))
    reader.start()  # first: a child that forks after the put may find the gradient in torch's cache of what was shared
    queue.put(gradient)
    reader.join()
print("fine")
"""


def test_a_gradient_in_a_bucket_outlives_its_group_and_does_not_travel_as_zeros():
    code, out, err = launch("-np", 2, *PYTHON, BEGIN + OUTLIVES)
    assert code == 0 and out.count("fine") == 2 and "RuntimeError after" in out, (out, err)


@pytest.mark.parametrize(
    "body", [KILLED, KILLED_IN_BACKWARD, KILLED_BEFORE_A_GROUP], ids=["all_reduce", "backward", "new_group"]
)
def test_a_killed_rank_is_named_at_once(body):
    _, out, err = launch("-np", 2, *PYTHON, BEGIN + body)
    said = re.search(r"\[0\]<stdout>:HvdPeerLostError after ([\d.]+) s: (.*)", out)
    assert said and "rank 1 (pid " in said[2] and "is lost" in said[2], (out, err)
    assert "process group '0'" in said[2] or body is KILLED_BEFORE_A_GROUP, out


def test_a_program_that_forgets_to_destroy_ends_cleanly():
    body = "work = dist.all_reduce(torch.ones(4), async_op=True)\nwork.get_future().then(lambda _: None)\n"
    code, out, err = launch("-np", 2, *PYTHON, BEGIN + body)
    assert code == 0 and "terminate" not in err, err


def refused(kind, said, call):
    with pytest.raises(kind, match=said):
        call()


@as_ranks(2)
def test_mismatches_are_errors_on_all_ranks_and_the_group_goes_on():
    with backend("hvdlite") as (rank, size):
        said = (
            r"process group '0' \((default_pg|undefined)\), all_reduce, call 1: .*rank 0 said \[4\], rank 1 said \[5\]"
        )
        refused(hvd.HvdMismatchError, said, lambda: dist.all_reduce(torch.ones(4 + rank)))
        calls = [lambda: dist.all_reduce(torch.ones(4)), lambda: dist.broadcast(torch.ones(4), 0)]
        for each in calls if rank else reversed(calls):
            refused(hvd.HvdMismatchError, "allreduce.*broadcast|broadcast.*allreduce", each)
        ones, said = torch.ones(4 + 2 * rank), r"rank 0 said \[4\], rank 1 said \[6\]"
        refused(hvd.HvdMismatchError, said, lambda: dist.all_to_all_single(ones.clone(), ones))
        refused(hvd.HvdMismatchError, said, lambda: dist.all_gather_into_tensor(torch.empty(2 * len(ones)), ones))
        splits, said = [[2, 2], [2, 2]] if rank else [], r"all_to_all.*rank 0 said \[4\], rank 1 said \[\*\]"
        refused(hvd.HvdMismatchError, said, lambda: dist.all_to_all_single(torch.empty(4), torch.ones(4), *splits))
        work = dist.all_gather([torch.empty(3), torch.empty(2)], torch.ones(3), async_op=True)
        refused(ValueError, r"shape \[2\] \(8 bytes\) cannot hold the 12 received bytes", work.wait)
        dist.all_reduce(mine := torch.ones(4))
        same(mine, size)


@as_ranks(2)
def test_who_does_not_come_in_time_is_named_and_the_call_goes_on():
    with backend("hvdlite", timeout=timedelta(seconds=0.2)) as (rank, size):
        mine, late = torch.ones(2), torch.ones(3)
        if rank == 0:
            refused(hvd.HvdTimeoutError, "0.2 s.*missing on rank 1", lambda: dist.all_reduce(mine))
            work = dist.all_reduce(late, async_op=True)
            refused(hvd.HvdTimeoutError, "0.1 s.*missing on rank 1", lambda: work.wait(timedelta(seconds=0.1)))
            hvd.allgather_object(None, name="late")
            assert work.wait(timedelta(seconds=30))
        else:
            hvd.allgather_object(None, name="late")
            dist.all_reduce(mine)
            dist.all_reduce(late)
        same(late, size)


@as_ranks(2)
def test_what_the_backend_cannot_do_says_so():
    with backend("hvdlite") as (rank, size):
        sparse = torch.sparse_coo_tensor([[0]], [1.0], (2,))
        refused(ValueError, "sparse.*HVD203", lambda: dist.broadcast(sparse, 0))
        refused(ValueError, "sparse_coo.*HVD203", lambda: dist.all_reduce(sparse, dist.ReduceOp.MAX))
        refused(ValueError, "times.*HVD201", lambda: dist.all_gather_into_tensor(torch.empty(3), torch.ones(2)))
        complex_ones, product = torch.ones(2, dtype=torch.complex64), dist.ReduceOp.PRODUCT
        refused(ValueError, "added and averaged.*HVD202", lambda: dist.reduce(complex_ones, 0, product))
        refused(ValueError, "no bits.*HVD202", lambda: dist.all_reduce(torch.ones(2), dist.ReduceOp.BXOR))
        refused(ValueError, "do not add up", lambda: dist.all_to_all_single(torch.empty(2), torch.ones(3)))
        refused(ValueError, "float8_e4m3fnuz.*HVD202", lambda: dist.all_reduce(torch.ones(2).to(torch.float8_e4m3fnuz)))
        group = dist.new_group(list(range(size)))
        dist.destroy_process_group(group)
        if TELLS:
            refused(ValueError, "destroyed", lambda: group.allreduce([torch.ones(2)]).wait())
    if TELLS:
        refused(ValueError, "destroyed|not been initialized", lambda: group.allreduce([torch.ones(2)]).wait())
    with backend("hvdlite"):
        dist.all_reduce(mine := torch.ones(2))
        same(mine, size)


@as_ranks(3)
def test_groups_made_in_other_orders_are_an_error_on_all_ranks():
    with backend("hvdlite", timeout=timedelta(seconds=20)) as (rank, size):
        order = [[0, 1, 2], [0, 1]] if rank != 1 else [[0, 1], [0, 1, 2]]

        def both():
            for ranks in order:
                dist.new_group(ranks)

        refused(hvd.HvdMismatchError, r"of the ranks \[0, 1(, 2)?\], and another .* in the same order.*HVD303", both)
