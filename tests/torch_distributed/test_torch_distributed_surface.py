"""Does each call of torch.distributed do over hvdlite what the tables of docs/guides/torch-distributed.md say?"""

import functools
import re
import time
from datetime import timedelta
from pathlib import Path

import pytest
from ranks import as_ranks

torch = pytest.importorskip("torch")

import torch.distributed as dist  # noqa: E402
import torch.distributed._functional_collectives as functional  # noqa: E402
from test_torch_distributed import VERSION, backend, same  # noqa: E402

from hvdlite.torch.distributed import rendezvous  # noqa: E402

PAGE = (Path(__file__).resolve().parents[2] / "docs/guides/torch-distributed.md").read_text(encoding="utf-8")
WORKS, _, RAISES = PAGE.partition("## Which calls work\n")[2].partition("\n## ")[0].partition("| raises |")
LIMIT = timedelta(seconds=30)


def on(tensor, call):
    """The tensor, after a call that writes to it."""
    call(tensor)
    return tensor


def on_root(value):
    return value if dist.get_rank() == 0 else None


def either(first, second):
    """Rank 0 calls one, rank 1 the other."""
    return second() if dist.get_rank() else first()


def batched(mine):
    peer, out = 1 - dist.get_rank(), torch.empty(2)
    for work in dist.batch_isend_irecv([dist.P2POp(dist.isend, mine, peer), dist.P2POp(dist.irecv, out, peer)]):
        work.wait()
    return out


def begun():
    return dist.all_reduce(torch.ones(2), async_op=True)


def waited(then):
    work = begun()
    work.wait(LIMIT)
    return then(work)


def hooked(kind):
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(2, 1, bias=False))
    model._register_builtin_comm_hook(kind)
    model(torch.full((1, 2), dist.get_rank() + 1.0)).sum().backward()
    return model.module.weight.grad[0]


def collectives():
    """By the name on the page: a call, and what it gives (None: nobody looks)."""
    rank, op = dist.get_rank(), dist.ReduceOp
    ones, mine, both = torch.ones(2), torch.full((2,), float(rank)), [torch.ones(2), torch.ones(2)]
    pair, new = [[0.0, 0.0], [1.0, 1.0]], functools.partial(torch.ones, 2)
    return {
        "all_reduce": lambda: (on(new(), dist.all_reduce), 2),
        "AVG": lambda: (on(mine.clone(), lambda out: dist.all_reduce(out, op.AVG)), 0.5),
        "PREMUL_SUM": lambda: (on(new(), lambda out: dist.all_reduce(out, dist._make_nccl_premul_sum(2.0))), 4),
        "BXOR": lambda: (on(mine.long(), lambda out: dist.all_reduce(out, op.BXOR)), 1),
        "all_reduce of a sparse tensor": lambda: (on(ones.to_sparse(), dist.all_reduce).to_dense(), 2),
        "all_reduce_coalesced": lambda: (on(new(), lambda out: dist.all_reduce_coalesced([out, new()])), 2),
        "reduce": lambda: (on(new(), lambda out: dist.reduce(out, 0)), 1 + (rank == 0)),
        "broadcast": lambda: (on(mine.clone(), lambda out: dist.broadcast(out, 1)), 1),
        "all_gather": lambda: (on([new(), new()], lambda outs: dist.all_gather(outs, mine)), pair),
        "all_gather_coalesced": lambda: (
            on([[new()], [new()]], lambda outs: dist.all_gather_coalesced(outs, [mine]))[1][0],
            1,
        ),
        "all_gather_into_tensor": lambda: (on(new(), lambda out: dist.all_gather_into_tensor(out, mine[:1])), [0, 1]),
        "reduce_scatter": lambda: (on(new(), lambda out: dist.reduce_scatter(out, [ones, ones])), 2),
        "reduce_scatter_tensor": lambda: (on(new(), lambda out: dist.reduce_scatter_tensor(out, torch.ones(4))), 2),
        "all_to_all": lambda: (on([new(), new()], lambda outs: dist.all_to_all(outs, [mine, mine])), pair),
        "all_to_all_single": lambda: (
            on(
                torch.empty(2 + 2 * rank),
                lambda out: dist.all_to_all_single(out, torch.ones(3), [1 + rank] * 2, [1, 2]),
            ),
            1,
        ),
        "gather": lambda: (on(on_root([new(), new()]), lambda outs: dist.gather(mine, outs, 0)) or both, None),
        "scatter": lambda: (on(new(), lambda out: dist.scatter(out, on_root([ones, ones * 2]), 0)), 1 + rank),
        "barrier": lambda: (dist.barrier(), None),
        "send": lambda: (either(lambda: dist.send(ones, 1, tag=3), lambda: dist.recv(new(), tag=3)), None),
        "recv": lambda: (either(lambda: dist.recv(torch.empty(()), 1), lambda: dist.send(torch.ones(()), 0)), None),
        "batch_isend_irecv": lambda: (batched(mine), 1 - rank),
        "all_gather_object": lambda: (
            torch.tensor(on([0, 0], lambda outs: dist.all_gather_object(outs, rank))),
            [0, 1],
        ),
        "gather_object": lambda: (dist.gather_object(rank, on_root([0, 0]), 0), None),
        "broadcast_object_list": lambda: (torch.tensor(on([rank], lambda it: dist.broadcast_object_list(it, 1))), 1),
        "scatter_object_list": lambda: (
            torch.tensor(on([9], lambda it: dist.scatter_object_list(it, on_root([0, 1]), 0))),
            rank,
        ),
        "send_object_list": lambda: (
            either(lambda: dist.send_object_list([1], 1), lambda: dist.recv_object_list([None], 0)),
            None,
        ),
    }


def others():
    """The same, of groups, Works and functional calls."""
    world, rank, op, ops = dist.group.WORLD, dist.get_rank(), dist.ReduceOp, torch.ops._c10d_functional
    ones, mine, both = torch.ones(2), torch.full((2,), float(rank)), [torch.ones(2), torch.ones(2)]
    name, leaf, new = world.group_name, torch.ones(2, requires_grad=True), functools.partial(torch.ones, 2)
    wait = ops.wait_tensor
    return {
        "new_subgroups": lambda: (on(new(), lambda out: dist.all_reduce(out, group=dist.new_subgroups(1)[0])), 1),
        "new_subgroups_by_enumeration": lambda: (
            dist.new_subgroups_by_enumeration([[1], [0]])[0].allreduce(ones),
            None,
        ),
        "get_backend": lambda: (torch.tensor(dist.get_backend() == "hvdlite"), True),
        "get_process_group_ranks": lambda: (torch.tensor(dist.get_process_group_ranks(world)), [0, 1]),
        "work.wait(timeout)": lambda: (torch.tensor(begun().wait(LIMIT)), True),
        "work.is_completed": lambda: (
            waited(lambda work: torch.tensor(work.is_completed() and work.is_success())),
            True,
        ),
        "work.result": lambda: (waited(lambda work: work.result()[0]), 2),
        "work.exception": lambda: (torch.tensor(waited(lambda work: work.exception() is None)), True),
        "work.get_future": lambda: (begun().get_future().then(lambda it: it.value()[0] + 1).wait(), 3),
        "group.set_timeout": lambda: (world.set_timeout(timedelta(minutes=30)), None),
        "group.monitored_barrier": lambda: (world.monitored_barrier(LIMIT), None),
        "group.reduce": lambda: (on(new(), lambda out: world.reduce(out, 1, op.SUM).wait()), 1 + rank),
        "group.gather": lambda: (world.gather(on_root([new(), new()]) or [], mine, 0).wait(), None),
        "group.scatter": lambda: (on(new(), lambda out: world.scatter(out, on_root(both) or [], 0).wait()), 1),
        "group.reduce_scatter": lambda: (on(new(), lambda out: world.reduce_scatter(out, both, op.MAX).wait()), 1),
        "BuiltinCommHookType.ALLREDUCE": lambda: (hooked(dist.BuiltinCommHookType.ALLREDUCE), 1.5),
        "_c10d_functional.all_reduce": lambda: (wait(ops.all_reduce(mine, "sum", name)), 1),
        "all_reduce_coalesced_": lambda: (wait(ops.all_reduce_coalesced_([new()], "avg", name)[0]), 1),
        "reduce_scatter_tensor_out": lambda: (
            wait(ops.reduce_scatter_tensor_out(ones, "sum", 2, name, out=torch.empty(1))),
            2,
        ),
        "all_gather_tensor_autograd": lambda: (
            on(leaf, lambda it: functional.all_gather_tensor_autograd(it, 0, world).sum().backward()).grad,
            2,
        ),
    }


def raising():
    """By the name on the page: a call that raises."""
    world, cpu, ones = dist.group.WORLD, torch.device("cpu"), torch.ones(2)
    return {
        "torch.distributed.monitored_barrier": dist.monitored_barrier,
        "torch.distributed.split_group": lambda: dist.split_group(split_ranks=[[0], [1]]),
        "group.split_group": lambda: world.split_group([0]),
        "group.merge_remote_group": lambda: world.merge_remote_group(world.get_group_store(), 2),
        "shrink_group": lambda: dist.shrink_group([1]),
        "group._register_on_completion_hook": lambda: world._register_on_completion_hook(print),
        "group._start_coalescing": lambda: world._start_coalescing(cpu),
        "_time_estimator": lambda: dist._time_estimator(device=cpu).__enter__(),
        "BuiltinCommHookType.FP16_COMPRESS": lambda: hooked(dist.BuiltinCommHookType.FP16_COMPRESS),
        "work.get_future_result": lambda: begun().get_future_result(),
        "a root that the group lacks": lambda: world.broadcast(ones, 2),
        "broadcast of a sparse tensor": lambda: dist.broadcast(ones.to_sparse(), 0),
    }


@pytest.mark.skipif(VERSION < (2, 9), reason="the page says what recent versions have")
@as_ranks(2)
def test_each_row_of_the_page():
    with backend("hvdlite"):
        calls = collectives() | others() | raising()
        for name in (works := re.findall("`([^`]+)`", WORKS.partition("| --- |")[2])):
            found, wanted = calls.pop(name)()
            if wanted is not None:
                same(found, wanted)
        errors = re.findall(r"^\| `(.*?)` \| `(\w+)`.*? \|", RAISES, re.MULTILINE)
        for name, error in errors:
            with pytest.raises(Exception) as caught:
                calls.pop(name)()
            assert type(caught.value).__name__ == error, (name, caught.value)
        assert not calls and len(works) > 40 and len(errors) > 8, calls.keys()


@as_ranks(2)
def test_a_group_stands_when_all_have_read_what_the_store_has_for_it():
    """So rank 0 may end at once, and the store with it."""
    marks, read = [], rendezvous.Exchange._read

    def late(exchange, key, rank):
        time.sleep(0.2 * exchange._rank)
        parts = read(exchange, key, rank)
        exchange._store.set(f"read/{exchange._rank}", "")
        marks.append(exchange)
        return parts

    rendezvous.Exchange._read = late
    try:
        with backend("hvdlite") as (rank, _):
            assert marks[-1]._store.check([f"read/{1 - rank}"])
            for _ in range(3):  # a group under the name of one that is gone
                again = dist.new_group([0, 1], use_local_synchronization=True)
                dist.all_reduce(mine := torch.ones(2), group=again)
                same(mine, 2)
                dist.destroy_process_group(again)
    finally:
        rendezvous.Exchange._read = read
