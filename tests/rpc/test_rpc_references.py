"""Are references to values on other ranks counted to nothing, whatever becomes of the messages that they travel in?

Counts are looked at on their owners until they are 0: what is dropped is told by messages. Functions of this module are
called, so they stand at its top.
"""

import gc
import threading
import time

import pytest
from ranks import as_ranks
from test_rpc import Box, Ends, fails, items, kept, same

import hvdlite as hvd
from hvdlite.rpc import calls
from hvdlite.security.curve import MESSAGE_MAX


def partly(first, refs):
    """What the caller cannot unpickle, with references before or behind."""
    return [*refs, Ends("unpickled")] if first else [Ends("unpickled"), *refs]


def passed_on(ref, rank):
    return hvd.rpc.call(rank, items, ref)


def is_mine(ref):
    return ref.get() is ref.get() and calls.running().kept.values[ref._number] is ref.get()


def freed():
    """Waits until no rank keeps a value."""
    gc.collect()
    until = time.monotonic() + 10
    while any(left := [hvd.rpc.call(rank, kept) for rank in range(hvd.size())]):
        assert time.monotonic() < until, left
        time.sleep(0.01)


@as_ranks(3)
def test_references_are_counted_to_nothing():
    hvd.rpc.start()
    if hvd.rank() == 0:
        ref = hvd.rpc.remote(1, Box, 1, 2)
        assert ref.rank == 1 and ref.get().items == [1, 2] and ref.get() is not ref.get()
        ref.call("add", 3)
        assert hvd.rpc.call(2, items, ref) == (3, 1)  # a third rank
        assert hvd.rpc.call(2, passed_on, ref, 1) == (3, 1)  # and from there to its owner
        assert hvd.rpc.call(1, is_mine, ref)
        again = hvd.rpc.call(2, same, {"in": [ref, (ref, 5)]})  # there and back, in containers
        assert [each.call("__class__").items for each in (again["in"][0], again["in"][1][0])] == [[], []]
        holder = hvd.rpc.remote(2, Box, ref)  # a value that holds a reference
        del ref, again
        gc.collect()
        time.sleep(0.1)
        assert hvd.rpc.call(1, kept) == 1 and holder.get().items[0].get().items == [1, 2, 3]
        mine = hvd.rpc.remote(0, Box, holder)
        assert mine.get().items[0] is not holder and hvd.rpc.call(1, items, mine) == (1, 0)
        for error in (TypeError, ValueError):  # nothing has left, and nothing was counted
            with pytest.raises(error):
                hvd.rpc.call(2, same, [mine, threading.Lock() if error is TypeError else bytes(MESSAGE_MAX)])
        with pytest.raises(TypeError, match="can be sent only in arguments and results"):
            hvd.broadcast_object(mine)
        for error, what in ((TypeError, [Ends("unpickled"), mine]), (TypeError, [mine, Ends("unpickled"), holder])):
            with pytest.raises(error, match="HVD042"):
                hvd.rpc.call(2, same, what)
            with pytest.raises(error, match="HVD042"):
                hvd.rpc.call(1, partly, what[0] is mine, [mine, holder])
        late = hvd.rpc.call_async(1, passed_on, mine, 2)
        with pytest.raises(KeyError) as caught:
            hvd.rpc.call(2, fails, KeyError(mine))
        assert caught.value.args[0].get() is mine.get() and late.result() == (1, 0)
        del mine, holder, what, late, caught
        freed()
        rounds = [hvd.rpc.remote(n % 3, Box, n) for n in range(300)]
        assert [ref.call("add", 0).items[0] for ref in rounds] == list(range(300))
        del rounds
        freed()
    hvd.barrier()


def own_box(n):
    return hvd.rpc.remote(hvd.rank(), Box, n)


@as_ranks(2)
def test_a_pool_that_is_full_makes_values_of_its_own_rank():
    hvd.shutdown()
    hvd.init()
    hvd.rpc.start(threads=2)
    if hvd.rank() == 0:
        made = [hvd.rpc.call_async(1, own_box, n) for n in range(50)]
        assert [each.result(20).get().items for each in made] == [[n] for n in range(50)]
        with pytest.raises(ZeroDivisionError):
            hvd.rpc.call(1, hvd.rpc.call, 1, "operator:floordiv", 1, 0)
        del made
        freed()
    hvd.barrier()


@as_ranks(3)
def test_a_callback_of_a_call_that_fails_may_send_references():
    hvd.rpc.start()
    if hvd.rank() == 0:
        ref, heard = hvd.rpc.remote(1, Box, 1, 2), []
        lost = hvd.rpc.call_async(1, time.sleep, 0.2)
        waiting = calls.running()._waiting
        lost.add_done_callback(lambda future: heard.append(hvd.rpc.call_async(2, items, ref)))
        waiting.lose(1)  # as if it had left
        until = time.monotonic() + 10
        while not heard:
            assert time.monotonic() < until
            time.sleep(0.01)
        assert heard[0].result(10) == (2, 1) and isinstance(lost.exception(), hvd.HvdPeerLostError)
        del ref, heard, lost
        freed()
    hvd.barrier()
