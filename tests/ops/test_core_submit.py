"""What Python hands to the core: quiet submissions and what sends them, priorities, wrong values."""

import threading
import time
import types
from unittest import mock

import numpy as np
import pytest
from ranks import as_ranks

import hvdlite as hvd
from hvdlite import _core
from hvdlite._core.inflight import idle
from hvdlite.errors import HvdMismatchError, HvdNotInitializedError


def submit(name, array, **more):
    return _core.submit(
        _core.ALLREDUCE, hvd.Sum, _core.DTYPES[str(array.dtype)], name, array.shape, array.ctypes.data,
        array.ctypes.data, array, **more,
    )  # fmt: skip


def completed(pending):
    pending.wait()
    pending.release()


@as_ranks(1, 2, 3)
def test_quiet_submissions_are_sent_by_a_kick_a_poll_or_a_wait():
    for step in range(6):
        arrays = [np.full(10, float(hvd.rank() + i)) for i in range(5)]
        pending = [submit(f"quiet.{i}", array, quiet=True) for i, array in enumerate(arrays)]
        if (step + hvd.rank()) % 3 == 0:
            _core.kick()
        elif (step + hvd.rank()) % 3 == 1:
            while not all(each.done() for each in pending):
                pass
        for each in pending:
            completed(each)
        total = sum(range(hvd.size()))
        assert all((array == total + i * hvd.size()).all() for i, array in enumerate(arrays))


@as_ranks(2)
def test_what_is_submitted_quietly_and_forgotten_goes_when_a_peer_wants_it():
    array = np.full(3, 1.0 + hvd.rank())
    hvd.barrier()
    pending = submit("wanted", array, quiet=hvd.rank() == 0)
    if hvd.rank() == 1:
        completed(pending)
    hvd.allgather_object(None)  # rank 1 has its result: rank 0's engine took part with nobody waiting for it
    assert pending.native == 0 or _core.lib.hvd_poll(pending.native) == 0
    if hvd.rank() == 0:
        completed(pending)
    assert (array == 3).all()


@as_ranks(2)
def test_priorities_are_the_same_on_all_ranks_or_an_error():
    array = np.ones(4)
    with pytest.raises(HvdMismatchError, match=r"'late'.*priority"):
        completed(submit("late", array, priority=5 + hvd.rank()))
    for priority in (-(2**31), 2**31 - 1, 0):
        completed(submit("late", array, priority=priority))
    assert (array == 8).all()


@as_ranks(2)
def test_users_give_priorities_to_asynchronous_allreduces():
    for start in (hvd.allreduce_async, hvd.allreduce_async_):
        for _ in range(3):  # the second time takes the short way
            first, last = start(np.ones(4), name="first", priority=2), start(np.ones(4), name="last", priority=-2)
            assert (hvd.synchronize(last) == 1).all() and (hvd.synchronize(first) == 1).all()
        with pytest.raises(HvdMismatchError, match=r"'allreduce.first'.*priority"):
            hvd.synchronize(start(np.ones(4), name="first", priority=hvd.rank()))
        with pytest.raises(ValueError, match="priority"):
            start(np.ones(4), priority=0.5)


@as_ranks(1)
@pytest.mark.parametrize("wrong", [2**31, -(2**31) - 1, 1.0, "1", None, True])
def test_a_priority_that_is_no_int32_is_refused(wrong):
    with pytest.raises(ValueError, match="priority"):
        submit("refused", np.ones(1), priority=wrong)


def test_a_kick_needs_a_job():
    with pytest.raises(HvdNotInitializedError):
        _core.kick()


def test_what_was_abandoned_is_held_though_more_is_abandoned_meanwhile(monkeypatch):
    """As a collection of garbage does that comes while shutdown looks at what is left."""
    from hvdlite._core import inflight

    class Abandons:
        name = None

        @property
        def native(self):
            if len(held) < 3:
                leave(len(held))
            return types.SimpleNamespace(device=1)

    def leave(keep):
        made = inflight.Flight()
        made.keep, made.request = keep, Abandons()
        inflight.abandon(made)

    held = []
    monkeypatch.setattr(inflight, "risk", held.append)
    monkeypatch.setattr(inflight, "let_go", lambda: None)
    leave("first")
    inflight.forget_all()
    assert held[0] == "first" and len(held) > 3 and not inflight.abandoned


@as_ranks(2)
def test_threads_that_wait_for_one_handle_all_get_its_result_and_nothing_of_anothers():
    """The second comes while the first waits, and goes on when the first has the result and others are under way."""
    entered, wait = threading.Event(), _core.Flight.wait

    def slow(flight):
        entered.set()
        time.sleep(0.05)
        return wait(flight)

    for start in (hvd.allreduce_async, lambda *given, **more: hvd.grouped_allreduce_async([*given], **more)):
        for number in range(3):
            entered.clear()
            handle, found = start(np.full(5, number, np.float32), op=hvd.Sum, name="both"), []
            threads = [threading.Thread(target=lambda: found.append(hvd.synchronize(handle))) for _ in range(2)]  # noqa: B023
            with mock.patch.object(_core.Flight, "wait", slow):
                threads[0].start()
                entered.wait(0.2)  # a group waits by itself
                threads[1].start()
                threads[0].join()
            for other in range(4):
                assert hvd.allreduce(np.ones(3, np.float32), op=hvd.Sum, name=f"other.{other}")[0] == 2
            threads[1].join()
            assert [np.max(each) for each in found] == [2 * number] * 2, found
            assert len(set(map(id, idle))) == len(idle), "one flight for two requests"
