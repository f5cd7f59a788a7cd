"""Seals: nothing is unpickled that a rank of the job has not sent, as it was sent, for this."""

import contextlib
import pickle
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from ranks import as_ranks

import hvdlite.numpy as hvd
from hvdlite._core import byte_exchange
from hvdlite.errors import HvdPeerLostError
from hvdlite.security import signed_pickle

SECRET = bytes(range(32))
WHAT = "broadcast_object 'x' in process set 0"


def pair(secret=SECRET, job=7, epoch=0):
    """The seals of ranks 0 and 1."""
    return signed_pickle.Seals(SECRET, 7, 0, 0), signed_pickle.Seals(secret, job, epoch, 1)


def refused(seals, purpose, sender, block):
    with pytest.raises(HvdPeerLostError, match=rf"rank {sender} for {purpose} .*\[HVD458\]") as raised:
        seals.opened(purpose, sender, block)
    assert raised.value.rank == sender


@pytest.mark.parametrize("body", [b"", b"x", bytes(1000), b"abc" * 100_000])
def test_what_was_sealed_is_opened_in_place_once(body):
    one, other = pair()
    for _ in range(3):
        block = one.sealed(WHAT, body)
        assert len(block) == signed_pickle.SEAL_BYTES + len(body)
        found = other.opened(WHAT, 0, block)
        assert found == body and found.obj is block
        refused(other, WHAT, 0, block)


def test_what_is_not_as_it_was_sealed_is_refused():
    one, other = pair()
    block = one.sealed(WHAT, b"body")
    for at in range(len(block)):
        changed = bytearray(block)
        changed[at] ^= 0x40
        refused(other, WHAT, 0, changed)
    for changed in (block + b"\0", block[:-1], block[: signed_pickle.SEAL_BYTES - 1], bytearray()):
        refused(other, WHAT, 0, changed)
    refused(other, "broadcast_object 'y' in process set 0", 0, block)
    refused(other, WHAT, 2, block)
    for foreign in ({"secret": bytes(32)}, {"job": 8}, {"epoch": 1}):
        refused(pair(**foreign)[1], WHAT, 0, block)
    assert other.opened(WHAT, 0, block) == b"body"


def test_numbers_may_come_out_of_order_and_memory_is_bounded():
    one, other = pair()
    blocks = [one.sealed(WHAT, b"") for _ in range(10)]
    for block in (*blocks[5:], *blocks[:5]):
        other.opened(WHAT, 0, block)
    for block in blocks:
        refused(other, WHAT, 0, block)
    for _ in range(2 * signed_pickle._REMEMBERED):
        last = one.sealed(WHAT, b"")
        other.opened(WHAT, 0, last)
    assert len(other._senders[0].above) <= signed_pickle._REMEMBERED
    for block in (blocks[0], last):
        refused(other, WHAT, 0, block)


def test_objects_of_threads_with_names_of_their_own_are_all_opened():
    one, other = pair()

    def send(name):
        for i in range(200):
            assert other.opened(name, 0, one.sealed(name, b"%d" % i)) == b"%d" % i

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(send, "0123", timeout=60))


@contextlib.contextmanager
def tampered(broadcast=lambda block: None, allgather=lambda parts: parts):
    """On rank 2 these treat the bytes of each collective as they arrive."""
    true = byte_exchange.broadcast_bytes, byte_exchange.allgather_bytes

    def broadcast_bytes(block, *given):
        true[0](block, *given)
        broadcast(block)

    if hvd.rank() == 2:
        byte_exchange.broadcast_bytes = broadcast_bytes
        byte_exchange.allgather_bytes = lambda *given: allgather(true[1](*given))
    try:
        yield
    finally:
        byte_exchange.broadcast_bytes, byte_exchange.allgather_bytes = true


EXPLODED = []


def explode():
    EXPLODED.append(True)


class Bomb:
    """Unpickling it is seen."""

    def __reduce__(self):
        return explode, ()


@as_ranks(3)
def test_what_somebody_on_the_way_puts_in_the_place_of_an_object_is_never_unpickled():
    """The bytes of a broadcast and of an allgather are replaced as they arrive."""
    evil = pickle.dumps(Bomb())
    assert hvd.broadcast_object({"a": 1}, root_rank=1) == {"a": 1}

    def broadcast(block):
        if len(block) > 32:
            block[-len(evil) :] = evil

    with tampered(broadcast, lambda parts: [parts[0], parts[1][: signed_pickle.SEAL_BYTES] + evil, parts[2]]):
        for call in (lambda: hvd.broadcast_object("x" * 500, root_rank=1), lambda: hvd.allgather_object(hvd.rank())):
            if hvd.rank() == 2:
                with pytest.raises(HvdPeerLostError, match=r"data from rank 1 for .*_object in process set 0"):
                    call()
            else:
                assert call() in ("x" * 500, [0, 1, 2])
    assert not EXPLODED
    assert hvd.allreduce(np.ones(1), op=hvd.Sum)[0] == 3  # the job is none the worse


@as_ranks(3)
def test_a_length_that_somebody_has_changed_allocates_nothing():
    def broadcast(block):
        if len(block) == 32:
            block[24:] = b"\xff" * 8

    with tampered(broadcast):
        if hvd.rank() == 2:
            with pytest.raises(HvdPeerLostError, match="rank 0 for the length of broadcast_object 'it'"):
                hvd.broadcast_object(None, name="it")
            body = bytearray(len(pickle.dumps(5)) + signed_pickle.SEAL_BYTES)
            byte_exchange.broadcast_bytes(body, 0, "broadcast_object.it")
        else:
            assert hvd.broadcast_object(5 if hvd.rank() == 0 else None, name="it") == 5
