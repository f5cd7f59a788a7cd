"""allreduce_, allreduce_async_ and synchronize in C (csrc/python): each way in and out beside Python's own functions.

A call reaches C from its third time on, so each case repeats its calls. One test counts the calls that Python has run,
so that these tests cannot pass because C never did anything.
"""

import copy
import gc
import signal
import threading
import time

import pytest
from ranks import as_ranks

torch = pytest.importorskip("torch")


def filled(like, value):
    return torch.full_like(like, value)


@as_ranks(2)
def test_kinds_of_tensors_and_words_give_the_sums_that_python_gives():
    import hvdlite.torch as hvd

    mine = hvd.rank() + 1.0
    kinds = [
        torch.empty(7), torch.empty(7, dtype=torch.float64), torch.empty(3, 4), torch.empty(()), torch.empty(0, 3),
        torch.empty(4, 4).t(), torch.empty(4, 4)[:, 1], torch.empty(100)[10:20], torch.empty(3, dtype=torch.int32),
        torch.empty(2, 2, dtype=torch.bfloat16), torch.empty(300_000),
    ]  # fmt: skip
    for _ in range(6):
        for tensor in kinds:
            version = tensor.fill_(mine)._version
            assert hvd.allreduce_(tensor, op=hvd.Sum) is tensor and tensor._version > version
            assert torch.equal(tensor, filled(tensor, 3))
            assert hvd.synchronize(hvd.allreduce_async_(tensor.fill_(mine), name="async", op=hvd.Max)) is tensor
            assert torch.equal(tensor, filled(tensor, 2))
    for words, want in [
        ({"op": hvd.Average}, 1.5), ({"average": True}, 1.5), ({"op": hvd.Min}, 1),
        ({"name": "f", "op": hvd.Sum, "prescale_factor": 0.5}, 1.5),
        ({"name": "t", "op": hvd.Sum, "timeout": 60}, 3), ({}, 1.5),
        ({"op": hvd.Sum, "process_set": hvd.global_process_set}, 3),
    ]:  # fmt: skip
        for _ in range(4):
            assert hvd.allreduce_(torch.full((3,), mine), **words).tolist() == [want] * 3, words
    weight = torch.nn.Parameter(torch.empty(4))
    with torch.inference_mode():
        inference = torch.empty(4)
    for _ in range(5):
        weight.data.fill_(mine)
        assert hvd.allreduce_(weight, None, "weight", hvd.Sum).tolist() == [3] * 4
        negative = torch.complex(torch.zeros(4), torch.full((4,), -mine)).conj().imag
        assert negative.is_neg() and hvd.allreduce_(negative, name="negative", op=hvd.Sum).tolist() == [3] * 4
        assert hvd.allreduce_(torch.full((4,), mine), name="negative", op=hvd.Sum).tolist() == [3] * 4
        with torch.inference_mode():
            assert hvd.allreduce_(inference.fill_(mine), name="inference", op=hvd.Sum).tolist() == [3] * 4


@as_ranks(2)
def test_a_call_that_comes_again_runs_in_c_and_in_the_next_job_too():
    import hvdlite.torch as hvd
    from hvdlite.torch.ops import collectives

    python = []
    again, collectives._again = collectives._again, lambda *args: (python.append(args), again(*args))[1]
    for _ in range(2):
        tensor, before = torch.empty(5), len(python)
        for i in range(10):
            tensor.fill_(hvd.rank() + 1)
            assert hvd.allreduce_(tensor, name=f"same{i % 2}", op=hvd.Sum).tolist() == [3] * 5
            assert (
                hvd.synchronize(hvd.allreduce_async_(tensor, name=f"async{i % 2}", op=hvd.Average)).tolist() == [3] * 5
            )
        assert len(python) - before <= 12, "beside the first two calls of each kind"
        hvd.shutdown()
        with pytest.raises(ValueError, match="init"):
            hvd.allreduce_(tensor, name="same0", op=hvd.Sum)
        with pytest.raises(ValueError, match="init"):
            hvd.allreduce_async_(tensor, name="async0", op=hvd.Sum)
        hvd.init()


@as_ranks(2)
def test_a_tensor_that_got_other_memory_is_looked_at_again():
    import hvdlite.torch as hvd

    tensor, mine = torch.empty(5), hvd.rank() + 1.0
    for i in range(8):
        tensor.data = torch.full((5,), mine, dtype=torch.float64 if i % 2 else torch.float32)
        assert hvd.allreduce_(tensor, name="data", op=hvd.Sum).tolist() == [3] * 5
    shrunk = torch.full((5,), mine)
    for _ in range(4):
        hvd.allreduce_(shrunk, name="shrunk", op=hvd.Average)
    for size in (0, 4):
        shrunk.untyped_storage().resize_(size)
        with pytest.raises(ValueError, match="storage"):
            hvd.allreduce_(shrunk, name="shrunk", op=hvd.Average)


@as_ranks(2)
def test_what_is_refused_is_refused_by_python():
    import hvdlite.torch as hvd

    good = torch.ones(3)
    for _ in range(4):
        hvd.allreduce_(good, name="once", op=hvd.Average)
    for tensor, words, error in [
        (3.0, {}, TypeError), (good.to_sparse(), {}, ValueError), (good, {"op": 99}, ValueError),
        (good, {"nonsense": 1}, TypeError), (good, {"op": True}, ValueError),
        (torch.ones(2).expand(3, 2), {}, ValueError), (good.to(torch.complex64), {}, ValueError),
    ]:  # fmt: skip
        for _ in range(3):
            with pytest.raises(error):
                hvd.allreduce_(tensor, **words)
    with pytest.raises(TypeError):
        hvd.allreduce_()
    with pytest.raises(ValueError):
        hvd.synchronize(good)
    handle = hvd.allreduce_async_(good, name="once", op=hvd.Average)
    for call in (hvd.allreduce_, hvd.allreduce_async_):
        with pytest.raises(ValueError, match="once"):
            call(good, name="once", op=hvd.Average)
    hvd.synchronize(handle)
    assert hvd.synchronize(handle) is good and hvd.poll(handle) and torch.equal(good, torch.ones(3))


@as_ranks(2)
def test_a_dropped_handle_keeps_its_memory_until_it_is_over():
    import hvdlite.torch as hvd
    from hvdlite import _core
    from hvdlite.ops.fast_path import DirectHandle

    tensor = torch.ones(1000)
    for _ in range(3):
        handle = hvd.allreduce_async_(tensor, name="dropped")
        hvd.synchronize(handle)
    assert type(handle) is not DirectHandle and isinstance(handle, DirectHandle)  # it was made in C
    if hvd.rank() == 0:
        handle = hvd.allreduce_async_(tensor, name="dropped")
        assert not _core.abandoned
        del handle, tensor
        (flight,) = _core.abandoned
        assert flight.free and flight.keep.nbytes() == 4000
        del flight
    hvd.barrier()
    if hvd.rank() == 1:
        hvd.synchronize(hvd.allreduce_async_(tensor, name="dropped"))
    hvd.barrier()

    class Holder:
        def __del__(self):  # after that of the handle, which is older
            with pytest.raises(ValueError, match="a garbage collection has dropped this handle"):
                hvd.synchronize(self.handle)
            ends.append(1)

    ends = []
    gc.collect()
    for call, name in (hvd.allreduce_async_, "dropped"), (hvd.allgather_async, None):
        handle = call(torch.ones(1000), name=name)  # made in C; and one that has a Pending
        assert isinstance(handle, DirectHandle) == (name is not None)
        holder = Holder()
        holder.handle, holder.itself = handle, holder
        del holder, handle
    gc.collect()
    with pytest.raises(TypeError, match="cannot be copied"):
        copy.copy(hvd.allreduce_async(torch.ones(1), name="copied"))
    hvd.barrier()
    hvd.allreduce(torch.ones(1), name="next")
    assert len(ends) == 2
    assert not _core.abandoned and not _core.in_flight


@as_ranks(2)
def test_many_in_flight_use_their_flights_again():
    import hvdlite.torch as hvd
    from hvdlite._core import inflight

    counts = []
    for _ in range(5):
        handles = [hvd.allreduce_async_(torch.ones(4), name=f"many{i}") for i in range(400)]
        for handle in handles:
            hvd.synchronize(handle)
        del handle, handles
        counts.append(len(inflight._flights))
    assert counts[4] == counts[2] >= 400


@as_ranks(2)
def test_a_mismatch_is_told_by_both_forms_and_told_again():
    import hvdlite.torch as hvd

    for _ in range(4):
        hvd.allreduce_(torch.ones(3), name="shape", op=hvd.Sum)
        hvd.synchronize(hvd.allreduce_async_(torch.ones(3), name="later", op=hvd.Sum))
    other = torch.ones(3 + hvd.rank())
    for _ in range(3):
        with pytest.raises(hvd.HvdMismatchError, match="shape"):
            hvd.allreduce_(other, name="shape", op=hvd.Sum)
        handle = hvd.allreduce_async_(other, name="later", op=hvd.Sum)
        for _ in range(2):
            with pytest.raises(hvd.HvdMismatchError, match="later"):
                hvd.synchronize(handle)


@as_ranks(2)
def test_an_interrupt_while_a_peer_is_late_loses_nothing():
    import hvdlite.torch as hvd

    class Stop(Exception):
        pass

    def stop(*_):
        raise Stop

    tensor = torch.empty(4)
    for _ in range(4):
        hvd.allreduce_(tensor.fill_(hvd.rank() + 1), name="late", op=hvd.Sum)
        hvd.synchronize(hvd.allreduce_async_(tensor.fill_(hvd.rank() + 1), name="late.async", op=hvd.Sum))
    for call in (
        lambda each: hvd.allreduce_(each, name="late", op=hvd.Sum),
        lambda each: hvd.synchronize(hvd.allreduce_async_(each, name="late.async", op=hvd.Sum)),
    ):
        mine = torch.full((4,), hvd.rank() + 1.0)
        hvd.barrier()
        if hvd.rank() == 0:
            old = signal.signal(signal.SIGALRM, stop)
            signal.setitimer(signal.ITIMER_REAL, 0.05)
            with pytest.raises(Stop):
                call(mine)
            signal.signal(signal.SIGALRM, old)
            storage = mine.untyped_storage()
            mine = torch.empty(0).set_(storage, 0, (4,))
        else:
            time.sleep(0.3)
            call(mine)
        hvd.barrier()
        gc.collect()
        hvd.allreduce_(torch.ones(1), op=hvd.Sum)
        assert mine.tolist() == [3] * 4


@as_ranks(2)
def test_threads_call_at_once_and_wait_for_one_handle():
    import hvdlite.torch as hvd

    wrong = []

    def many(number):
        tensor = torch.empty(10 if number else 20_000)
        for _ in range(150):
            hvd.allreduce_(tensor.fill_(hvd.rank() + 1), name=f"thread{number}", op=hvd.Sum)
            if not torch.equal(tensor, filled(tensor, 3)):
                wrong.append(number)

    def waits(handle, out):
        out.append(hvd.synchronize(handle))

    threads = [threading.Thread(target=many, args=(number,)) for number in range(3)]
    for _ in range(20):
        out = []
        handle = hvd.allreduce_async_(torch.full((3,), hvd.rank() + 1.0), name="shared", op=hvd.Sum)
        both = [threading.Thread(target=waits, args=(handle, out)) for _ in range(2)]
        threads = [*threads, *both]
        for thread in both:
            thread.start()
        for thread in both:
            thread.join()
        assert [each.tolist() for each in out] == [[3] * 3] * 2
    for thread in threads[:3]:
        thread.start()
    for thread in threads[:3]:
        thread.join()
    assert wrong == []
