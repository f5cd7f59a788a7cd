"""A caller's own limit of time: who is missing is named, the job goes on, and so does what was waited for."""

import datetime
import gc
import math

import numpy as np
import pytest
from ranks import as_ranks

import hvdlite as hvd

LONG = 30.0  # never waited for


def everyone_but_the_last_waits(call):
    """What `call` raises on all ranks but the last, which goes on when all others have raised it (they tell it by a
    message). None on the last, before it has called."""
    last = hvd.size() - 1
    if hvd.rank() == last:
        for other in range(last):
            hvd.recv(np.zeros(1), other, name="raised")
        return None
    with pytest.raises(hvd.HvdTimeoutError) as caught:
        call()
    hvd.send(np.zeros(1), last, name="raised")
    return caught.value


@as_ranks(2, 3)
def test_a_monitored_barrier_names_who_is_missing_and_is_the_same_for_all():
    last = hvd.size() - 1
    for name in (None, "epoch"):
        hvd.allreduce(np.ones(2), name="first")
        error = everyone_but_the_last_waits(lambda: hvd.monitored_barrier(0.2, name=name))  # noqa: B023
        if error is not None:
            assert f"missing on rank {last}; rank {last} (pid " in str(error), error
            assert "waited 0.2 s at the barrier 'monitored_barrier." in str(error)
        else:
            gave_up = "rank 0" if last == 1 else "ranks 0, 1"
            with pytest.raises(hvd.HvdTimeoutError, match=f"after {gave_up} had given up on it"):
                hvd.monitored_barrier(LONG, name=name)
        hvd.monitored_barrier(datetime.timedelta(seconds=LONG), hvd.global_process_set, name=name)
        assert hvd.allreduce(np.ones(2), op=hvd.Sum, name="first")[0] == hvd.size()
    hvd.monitored_barrier()
    some = hvd.add_process_set([0])
    if hvd.rank() > 0:
        with pytest.raises(ValueError, match="not part of provided process set"):
            hvd.monitored_barrier(1, some)
    hvd.remove_process_set(some)


@as_ranks(3)
def test_ranks_that_joined_meet_the_others_again_by_order():
    """They have counted less than the others, who went on with what has no name."""
    pair = [np.ones(2), np.ones(3)]
    for _ in range(2):
        hvd.grouped_allreduce(pair)
        hvd.monitored_barrier(LONG)
        for _ in range(hvd.rank()):
            hvd.grouped_allreduce(pair)
            hvd.monitored_barrier(LONG)
            hvd.monitored_barrier(LONG, name="epoch")
        hvd.join()
        hvd.monitored_barrier(LONG, name="epoch")
        hvd.monitored_barrier(LONG)
        assert hvd.grouped_allreduce(pair, op=hvd.Sum)[1][0] == 3.0


CALLS = {
    "allreduce": (lambda **k: hvd.allreduce(np.ones(2), op=hvd.Sum, name="x", **k), "tensor 'allreduce.x'"),
    "allreduce_": (lambda **k: hvd.allreduce_(np.ones(2), op=hvd.Sum, **k), "allreduce without a name"),
    "grouped": (lambda **k: hvd.grouped_allreduce([np.ones(2)] * 2, name="x", **k), "'grouped_allreduce.x_1of2'"),
    "allgather": (lambda **k: hvd.allgather(np.ones(2), name="x", **k), "tensor 'allgather.x'"),
    "broadcast": (lambda **k: hvd.broadcast(np.ones(2), 0, name="x", **k), "tensor 'broadcast.x'"),
    "alltoall": (lambda **k: hvd.alltoall(np.ones(6), name="x", **k), "tensor 'alltoall.x'"),
    "reducescatter": (lambda **k: hvd.reducescatter(np.ones(6), name="x", **k), "tensor 'reducescatter.x'"),
    "reduce": (lambda **k: hvd.reduce(np.ones(2), 0, name="x", **k), "tensor 'reduce.x'"),
    "gather": (lambda **k: hvd.gather(np.ones(2), 0, name="x", **k), "tensor 'gather.x'"),
    "barrier": (lambda **k: hvd.barrier(**k), "barrier without a name"),
}


@as_ranks(2)
def test_every_call_has_a_time_limit():
    for call, what in CALLS.values():
        expected = call(timeout=LONG)
        error = everyone_but_the_last_waits(lambda: call(timeout=0.05))  # noqa: B023
        if error is None:
            result = call()
        else:
            text = str(error)
            parts = "waited its whole timeout of 0.05 s for ", what, "missing on rank 1; rank 1 ("
            assert all(part in text for part in parts), text
            result = hvd.synchronize(error.handle, timeout=LONG)
            assert hvd.synchronize(error.handle) is result  # as of any handle
            if "alltoall" in what:
                result = result[0]  # as of alltoall_async
        assert np.array_equal(result, expected) if expected is not None else result is None
    sent = np.arange(3.0) if hvd.rank() else np.zeros(3)
    if hvd.rank():
        hvd.send(sent, 0, name="y", timeout=LONG)
    else:
        hvd.recv(sent, 1, name="y", timeout=LONG)
    assert sent[2] == 2
    error = everyone_but_the_last_waits(lambda: hvd.recv(sent * 0, 1, name="z", timeout=0.05))
    if error is None:
        hvd.send(sent, 0, name="z")
    else:
        assert "tensor 'send.z'" in str(error) and hvd.synchronize(error.handle)[2] == 2


@as_ranks(2)
def test_a_handle_may_be_waited_for_again_and_again():
    mine = np.full(1000, 1.0 + hvd.rank())
    forms = (hvd.allreduce_async, hvd.allreduce_async, hvd.allreduce_async_)  # known the second time: the short way
    for form in forms:
        before = mine.copy()

        def wait():
            handle = form(before, op=hvd.Sum, name="again")  # noqa: B023
            for _ in range(2):
                with pytest.raises(hvd.HvdTimeoutError) as caught:
                    hvd.synchronize(handle, timeout=0.05)
                assert caught.value.handle is handle and not hvd.poll(handle)
            with pytest.raises(ValueError, match="same name"):  # it is in use as long as it is under way
                hvd.allreduce_async(before, name="again")  # noqa: B023
            raise caught.value

        error = everyone_but_the_last_waits(wait)
        result = hvd.synchronize(error.handle if error else form(before, op=hvd.Sum, name="again"))
        assert (result == 3.0).all()


@as_ranks(2)
def test_memory_that_nobody_waits_for_any_more_stays_until_the_collective_has_ended():
    error = everyone_but_the_last_waits(lambda: hvd.allreduce(np.ones(5000), op=hvd.Sum, name="left", timeout=0.05))
    if error is None:
        assert (hvd.allreduce(np.ones(5000), op=hvd.Sum, name="left") == 2.0).all()
    del error
    gc.collect()
    hvd.barrier()
    assert hvd.allreduce(np.ones(1), op=hvd.Sum, name="left")[0] == 2.0


@as_ranks(1)
def test_what_is_no_time_to_wait_is_refused():
    handle = hvd.allreduce_async(np.ones(1))
    calls = (
        hvd.monitored_barrier,
        lambda timeout: hvd.barrier(timeout=timeout),
        lambda timeout: hvd.broadcast(np.ones(1), 0, timeout=timeout),
        lambda timeout: hvd.synchronize(handle, timeout=timeout),
    )
    for call in calls:
        for bad in (0, -1, -0.5, math.nan, math.inf, -math.inf, datetime.timedelta(0)):
            with pytest.raises(ValueError, match="timeout must be a positive number of seconds"):
                call(bad)
        for bad in ("1", b"1", True, False, [1], object()):
            with pytest.raises(TypeError, match="timeout must be a number of seconds"):
                call(bad)
    assert hvd.synchronize(handle, timeout=None)[0] == 1 and hvd.synchronize(handle, timeout=1)[0] == 1
    assert hvd.monitored_barrier(timeout=LONG) is None
    for bad, said in (({"name": 3}, "name must be a str"), ({"process_set": [0]}, "process_set")):
        with pytest.raises(TypeError, match=said):
            hvd.monitored_barrier(1, **bad)
