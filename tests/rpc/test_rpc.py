"""Do calls from rank to rank give what the function gives, raise what it raises, and end when a rank does?

Functions of this module are called, so they stand at its top. Where a process dies or leaves, a job of its own runs.
Counts of references are looked at on their owners until they are 0: what is dropped is told by messages.
"""

import concurrent.futures
import functools
import math
import os
import re
import socket
import sys
import threading
import time
import traceback

import pytest
import zmq
from hosts import needs_hosts
from launching import launch
from ranks import as_ranks
from test_hosts_collectives import passes

import hvdlite as hvd
from hvdlite.rpc import calls
from hvdlite.rpc.messages import BODY_MAX, pickled
from hvdlite.security.curve import MESSAGE_MAX, Keys

heard = []


class Odd(Exception):
    """Cannot be made again from its args."""

    def __init__(self, a, b):
        super().__init__(f"{a} and {b}")


class Box:
    def __init__(self, *items):
        self.items = list(items)

    def add(self, item):
        self.items.append(item)
        return self


class Ends:
    """Asks to end the process that pickles it, or unpickles it."""

    def __init__(self, when):
        self.when = when

    def __reduce__(self):
        return (sys.exit, (7,)) if self.when == "unpickled" else sys.exit(7)


class Tool:
    @classmethod
    def made(cls, n):
        return n + 1

    @staticmethod
    def plain(n):
        return n + 2


def same(value):
    return value


def fails(error):
    raise error


def fails_oddly():
    raise Odd(1, 2)


def hear(n):
    heard.append(n)


def heard_here():
    return [heard.pop(0) for _ in range(len(heard))]


def lock():
    return threading.Lock()


def zeros(n):
    return bytes(n)


def nested(depth):
    return depth and 1 + hvd.rpc.call((hvd.rank() + 1) % hvd.size(), nested, depth - 1)


def items(ref):
    return len(ref.get().items), ref.rank


def kept():
    return len(calls.running().kept.values)


def anew():
    hvd.shutdown()
    hvd.init()


def test_before_init():
    for call in (hvd.rpc.start, hvd.rpc.serve, lambda: hvd.rpc.call(0, same, 1), lambda: hvd.rpc.remote(0, Box)):
        with pytest.raises(hvd.HvdNotInitializedError):
            call()


@as_ranks(1, 3)
def test_ten_thousand_calls_at_once():
    hvd.rpc.start()
    hvd.rpc.start()
    if hvd.rank() == 0:
        futures = [hvd.rpc.call_async(n % hvd.size(), same, n) for n in range(10_000)]
        for future in concurrent.futures.as_completed(futures[:100], 20):
            assert future.done() and not future.cancel()
        assert [future.result() for future in futures] == list(range(10_000))
    last = hvd.size() - 1
    assert hvd.rpc.call(last, "operator:mul", hvd.rank(), 2, timeout=None) == 2 * hvd.rank()
    assert hvd.rpc.call(last, dict, [(1, 2)], rank=3, f=4) == {1: 2, "rank": 3, "f": 4}
    for _ in range(hvd.rank() == 0 and 3):
        hvd.rpc.call(last, same, 1)
    hvd.rpc.serve()
    hvd.rpc.serve()


@as_ranks(2)
def test_exceptions_come_back_as_themselves():
    hvd.rpc.start()
    there = 1 - hvd.rank()
    for error in (KeyError("boom"), TimeoutError("its own")) * 3:
        with pytest.raises(type(error)) as caught:
            hvd.rpc.call(there, fails, error)
        assert caught.value.args == error.args and "in fails" in caught.value.remote_traceback
        if sys.version_info >= (3, 11):
            assert f"raised by test_rpc:fails on rank {there}" in caught.value.__notes__[0]
    with pytest.raises(hvd.HvdError, match=r"(?s)fails_oddly on rank . raised .*1 and 2.*in fails_oddly.*\[HVD046\]$"):
        hvd.rpc.call(there, fails_oddly)
    for error in (SystemExit(3), KeyboardInterrupt(3), GeneratorExit(3)):  # which would end this rank
        said = (
            rf"(?s)test_rpc:fails on rank {there} raised what cannot be sent: {type(error).__name__}: 3\n.*\[HVD046\]$"
        )
        with pytest.raises(hvd.HvdError, match=said):
            hvd.rpc.call(there, fails, error)
    with pytest.raises(TypeError, match=r"the result of test_rpc:Ends on rank . cannot be unpickled: SystemExit: 7"):
        hvd.rpc.call(there, Ends, "unpickled")
    with pytest.raises(hvd.HvdError, match=r"(?s)raised what cannot be sent: SystemExit: 7"):
        hvd.rpc.call(there, Ends, "pickled")
    with pytest.raises(ModuleNotFoundError):
        hvd.rpc.call(there, "no_such_module:f")
    with pytest.raises(hvd.HvdTimeoutError, match=rf"rank {there} did not answer time:sleep within 0.1 s.*HVD043"):
        hvd.rpc.call(there, time.sleep, 0.4, timeout=0.1)
    hvd.barrier()


@as_ranks(2)
def test_what_cannot_be_sent():
    hvd.rpc.start()
    there = 1 - hvd.rank()
    for f in (lambda: 0, Box().add, "nothing", ":f", 7):
        with pytest.raises(TypeError, match=r"has no name .*\[HVD041\]$"):
            hvd.rpc.call(there, f)
    with pytest.raises(TypeError, match=r"an argument of test_rpc:same cannot be pickled: .*lock.*\[HVD042\]$"):
        hvd.rpc.call(there, same, threading.Lock())
    with pytest.raises(TypeError, match=rf"the result of test_rpc:lock on rank {there} cannot be pickled.*\[HVD042\]$"):
        hvd.rpc.call(there, lock)
    with pytest.raises(ValueError, match=r"an argument of test_rpc:same is .* bytes.*\[HVD045\]$"):
        hvd.rpc.call(there, same, bytes(MESSAGE_MAX))
    with pytest.raises(ValueError, match=rf"the result of test_rpc:zeros on rank {there} is .*\[HVD045\]$"):
        hvd.rpc.call(there, zeros, MESSAGE_MAX)
    if hvd.rank() == 0:
        beside = len(pickled("", ("test_rpc:same", (bytes(1 << 20),), {}))[0]) - (1 << 20)
        longest = BODY_MAX - beside
        assert len(hvd.rpc.call(there, same, bytes(longest))) == longest
    for f, gives in (
        (Tool.made, 6), (Tool.plain, 7), (functools.partial(pow, 2), 32), (math.sqrt, math.sqrt(5)),
        (functools.partial(functools.partial(divmod, 17)), (3, 2)), (functools.partial(dict, n=1), {"n": 1, 5: 5}),
    ):  # fmt: skip
        assert hvd.rpc.call(there, f, {5: 5} if isinstance(gives, dict) else 5) == gives
    for rank in (-1, 2):
        with pytest.raises(ValueError, match=rf"there is no rank {rank} in a job of 2 ranks \[HVD216\]"):
            hvd.rpc.call(rank, same, 1)
    assert hvd.rpc.call(there, same, 1) == 1
    hvd.barrier()


@as_ranks(2)
def test_order_and_calls_within_calls():
    """A pool of one thread shows the order; one of 8 does 8 levels on each of two ranks."""
    anew()
    hvd.rpc.start(threads=1)
    if hvd.rank() == 0:
        futures = [hvd.rpc.call_async(1, hear, n) for n in range(1000)]
        assert all(future.result() is None for future in futures)
        assert hvd.rpc.call(1, heard_here) == list(range(1000))
    hvd.barrier()
    anew()
    hvd.rpc.start()
    assert hvd.rpc.call(1 - hvd.rank(), nested, 7) == 7  # both ranks at once: 4 threads of each for either
    hvd.barrier()


@as_ranks(2)
def test_a_new_life_and_what_is_left():
    anew()
    left = [len(os.listdir(f"/proc/self/{each}")) for each in ("fd", "task")]
    for _ in range(3):
        with pytest.raises(hvd.HvdError, match=r"call hvd.rpc.start\(\) on all ranks.*\[HVD040\]"):
            hvd.rpc.call(0, same, 1)
        with pytest.raises(ValueError, match="HVD047"):
            hvd.rpc.start(threads=0)
        hvd.rpc.start()
        ref = hvd.rpc.remote(1 - hvd.rank(), Box)
        unread = hvd.rpc.call_async(1 - hvd.rank(), time.sleep, 0.2)
        anew()
        assert unread.result(0) is None  # shutdown has waited for it
        with pytest.raises(hvd.HvdError, match="HVD044"):
            ref.get()
        until = time.monotonic() + 20  # a thread that is joined may be in /proc for a moment longer
        while any(len(os.listdir(f"/proc/self/{each}")) > most for each, most in zip(("fd", "task"), left)):
            assert time.monotonic() < until, left
            time.sleep(0.01)
    hvd.rpc.start()
    ref = hvd.rpc.remote(1 - hvd.rank(), Box)
    pid = os.fork()
    if pid == 0:
        try:
            with pytest.raises(hvd.HvdForkError):
                hvd.rpc.call(0, same, 1)
            del ref  # not what TensorFlow has left, whose locks other threads may have held
            os._exit(7)
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(8)
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    assert code == 7, code
    assert ref.get().items == []
    hvd.barrier()


@as_ranks(1)
def test_strangers_change_nothing():
    hvd.rpc.start()
    us = calls.running()
    end = us.sockets.proxy.address
    with (
        socket.create_connection((end[6:].split(":")[0], int(end.rpartition(":")[2]))) as raw,
        zmq.Context() as context,
    ):
        raw.sendall(os.urandom(4096))
        for way in ("plain", "another key", "another job", "too large"):
            dealer = context.socket(zmq.DEALER)
            dealer.linger = 0
            if way != "plain":
                keys = Keys(bytes(32), "rpc", zmq) if way == "another job" else us.sockets.door._keys
                keys.connect_to(dealer, 0)
            if way == "another key":
                dealer.curve_publickey, dealer.curve_secretkey = zmq.curve_keypair()
            dealer.connect(end)
            body = (
                bytes(MESSAGE_MAX + 1) if way == "too large" else b"cposix\nabort\n(tR."
            )  # unpickled, it would end us
            dealer.send_multipart([bytes(8), b"call", body])
            assert not dealer.poll(300), way
            assert hvd.rpc.call(0, same, way) == way
            dealer.close()
    assert us.sockets.door.refused >= 1


@needs_hosts
@pytest.mark.parametrize(("slots", "ipv6"), [((2, 1), False), ((1, 1), True)])
def test_all_of_it_over_hosts(hosts, slots, ipv6):
    modules = ("test_rpc", "test_rpc_references")[: slots[0]]  # whose test has three ranks
    assert sum(passes(hosts, slots, module, ipv6=ipv6) for module in modules) > 1


DIES = """
import os, signal, sys, time
import hvdlite as hvd
class Mine(Exception):
    pass
def fails():
    raise Mine
hvd.init()
hvd.rpc.start()
if hvd.rank() == 0:
    try:
        hvd.rpc.call(1, fails)
    except Mine:  # the class of this process, not a copy
        pass
    waits = hvd.rpc.call_async(2, time.sleep, 60)
    pid = hvd.rpc.call(2, os.getpid)
    begun = time.monotonic()
    hvd.rpc.call_async(2, hvd.shutdown) if sys.argv[1:] else os.kill(pid, signal.SIGKILL)
    try:
        waits.result()
    except hvd.HvdPeerLostError as error:
        print(f"after {time.monotonic() - begun:.2f} s, rank {error.rank}: {error}", flush=True)
elif sys.argv[1:]:
    time.sleep(3)
elif hvd.rank() == 1:
    hvd.rpc.serve()
else:
    hvd.barrier()
"""


@pytest.mark.parametrize("leaves", [False, True])
def test_a_rank_that_ends_while_it_is_waited_for(leaves, tmp_path):
    (tmp_path / "dies.py").write_text(DIES)
    words = ["leaves"] if leaves else []
    code, out, err = launch("-np", 3, sys.executable, tmp_path / "dies.py", *words, HVDLITE_LEAVE_TIMEOUT="0.5")
    ((seconds, says),) = re.findall(r"after (\S+) s, rank 2: (.*)", out)
    assert float(seconds) < 5 and ("HVD451" if leaves else "HVD450") in says, out + err
    assert leaves or code != 0
