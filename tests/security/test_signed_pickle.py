"""Seals: nothing is unpickled that a rank of the job has not sent, as it was sent, for this."""

import pickle
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from ranks import as_ranks

import hvdlite.numpy as hvd
from hvdlite._core import byte_exchange
from hvdlite.errors import HvdNotInitializedError, HvdPeerLostError
from hvdlite.security import signed_pickle

SECRET = bytes(range(32))
WHAT = "broadcast_object 'x' in process set 0"


def pair(secret=SECRET, job=7, epoch=0):
    """The seals of ranks 0 and 1."""
    return signed_pickle.Seals(SECRET, 7, 0, 0), signed_pickle.Seals(secret, job, epoch, 1)


@pytest.mark.parametrize("body", [b"", b"x", bytes(1000), b"abc" * 100_000])
def test_what_was_sealed_is_opened_in_place(body):
    one, other = pair()
    for _ in range(3):
        block = one.sealed(WHAT, body)
        assert len(block) == signed_pickle.SEAL_BYTES + len(body)
        found = other.opened(WHAT, 0, block)
        assert found == body and found.obj is block


@pytest.mark.parametrize("at", range(signed_pickle.SEAL_BYTES + 4))
def test_a_changed_byte_is_seen_wherever_it_is(at):
    one, other = pair()
    block = one.sealed(WHAT, b"body")
    block[at] ^= 0x40
    with pytest.raises(HvdPeerLostError, match=r"rank 0 for broadcast_object 'x' .*\[HVD458\]") as raised:
        other.opened(WHAT, 0, block)
    assert raised.value.rank == 0


@pytest.mark.parametrize(
    "keyword", [{"secret": bytes(32)}, {"job": 8}, {"epoch": 1}], ids=["secret", "job", "another life"]
)
def test_seals_of_another_job_or_life_are_worth_nothing(keyword):
    one, other = pair(**keyword)
    with pytest.raises(HvdPeerLostError):
        other.opened(WHAT, 0, one.sealed(WHAT, b"body"))


def test_a_seal_is_for_one_purpose_of_one_sender_once():
    one, other = pair()
    block = one.sealed(WHAT, b"body")
    for purpose, sender, what in (
        ("broadcast_object 'y' in process set 0", 0, block),
        (WHAT, 2, block),
        (WHAT, 0, block + b"\0"),
        (WHAT, 0, block[:-1]),
        (WHAT, 0, block[: signed_pickle.SEAL_BYTES - 1]),
        (WHAT, 0, bytearray()),
    ):
        with pytest.raises(HvdPeerLostError):
            other.opened(purpose, sender, what)
    assert other.opened(WHAT, 0, block) == b"body"
    with pytest.raises(HvdPeerLostError):  # said twice
        other.opened(WHAT, 0, block)


def test_numbers_may_come_out_of_order_and_memory_is_bounded():
    one, other = pair()
    blocks = [one.sealed(WHAT, b"") for _ in range(10)]
    for block in (*blocks[5:], *blocks[:5]):
        other.opened(WHAT, 0, block)
    for block in blocks:
        with pytest.raises(HvdPeerLostError):
            other.opened(WHAT, 0, block)
    for _ in range(2 * signed_pickle._REMEMBERED):
        last = one.sealed(WHAT, b"")
        other.opened(WHAT, 0, last)
    assert len(other._senders[0].above) <= signed_pickle._REMEMBERED
    for block in (blocks[0], last):
        with pytest.raises(HvdPeerLostError):
            other.opened(WHAT, 0, block)


def test_objects_of_threads_with_names_of_their_own_are_all_opened():
    one, other = pair()

    def send(name):
        for i in range(200):
            assert other.opened(name, 0, one.sealed(name, b"%d" % i)) == b"%d" % i

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(send, "0123", timeout=60))


def test_objects_need_init(monkeypatch):
    monkeypatch.setattr(signed_pickle, "_current", None)
    with pytest.raises(HvdNotInitializedError):
        signed_pickle.current()


class Bomb:
    """Unpickling it is seen."""

    exploded = 0

    def __reduce__(self):
        return _explode, ()


def _explode():
    Bomb.exploded += 1


@as_ranks(3)
def test_what_somebody_on_the_way_puts_in_the_place_of_an_object_is_never_unpickled():
    """The bytes of a broadcast and of an allgather are replaced as they arrive."""
    evil = pickle.dumps(Bomb())
    assert hvd.broadcast_object({"a": 1}, root_rank=1) == {"a": 1}
    true_broadcast, true_allgather = byte_exchange.broadcast_bytes, byte_exchange.allgather_bytes

    def broadcast(block, *given):
        true_broadcast(block, *given)
        if hvd.rank() == 2 and len(block) > 32:
            block[-len(evil) :] = evil

    def allgather(*given):
        parts = true_allgather(*given)
        return parts if hvd.rank() != 2 else [parts[0], parts[1][: signed_pickle.SEAL_BYTES] + evil, parts[2]]

    byte_exchange.broadcast_bytes, byte_exchange.allgather_bytes = broadcast, allgather
    try:
        for call in (lambda: hvd.broadcast_object("x" * 500, root_rank=1), lambda: hvd.allgather_object(hvd.rank())):
            if hvd.rank() == 2:
                with pytest.raises(HvdPeerLostError, match=r"data from rank 1 for .*_object in process set 0"):
                    call()
            else:
                assert call() in ("x" * 500, [0, 1, 2])
    finally:
        byte_exchange.broadcast_bytes, byte_exchange.allgather_bytes = true_broadcast, true_allgather
    assert Bomb.exploded == 0
    assert hvd.allreduce(np.ones(1), op=hvd.Sum)[0] == 3  # the job is none the worse


@as_ranks(3)
def test_a_length_that_somebody_has_changed_allocates_nothing():
    true = byte_exchange.broadcast_bytes

    def broadcast(block, *given):
        true(block, *given)
        if hvd.rank() == 2 and len(block) == 32:
            block[24:] = b"\xff" * 8

    byte_exchange.broadcast_bytes = broadcast
    try:
        if hvd.rank() == 2:
            with pytest.raises(HvdPeerLostError, match="rank 0 for the length of broadcast_object 'it'"):
                hvd.broadcast_object(None, name="it")
            true(bytearray(len(pickle.dumps(5)) + signed_pickle.SEAL_BYTES), 0, "broadcast_object.it")
        else:
            assert hvd.broadcast_object(5 if hvd.rank() == 0 else None, name="it") == 5
    finally:
        byte_exchange.broadcast_bytes = true


@as_ranks(3)
def test_objects_in_a_set_of_some_ranks_are_those_of_its_members():
    some = hvd.add_process_set([0, 2])
    if hvd.rank() != 1:
        assert hvd.allgather_object(hvd.rank(), process_set=some) == [0, 2]
        assert hvd.broadcast_object(hvd.rank(), root_rank=2, process_set=some) == 2
    assert hvd.allgather_object(hvd.rank()) == [0, 1, 2]
    hvd.remove_process_set(some)
