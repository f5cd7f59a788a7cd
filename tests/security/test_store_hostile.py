"""The store under attack: whatever strangers and broken ranks send, the job meets, and soon."""

import contextlib
import os
import random
import socket
import subprocess
import sys
import time

import pytest
from linking import ends, impostor, reach
from ranks import environment, everything
from storing import JOB, SECONDS, SECRET, exactly, frame, joined, joining, served, stranger, together

from hvdlite.errors import HvdInitError
from hvdlite.launcher.store import server
from hvdlite.rendezvous import store_client
from hvdlite.security import connection_limits, framing, handshake

REJECTED = bytes((handshake.UNKNOWN,)).ljust(handshake.VERDICT_BYTES, b"\0")


def job_meets(store, size=2, seconds=5.0):
    """The ranks of the job meet and exchange, in time."""
    began = time.monotonic()

    def rank(number):
        mine = store.connect(number, size)
        parts = mine.allgather(b"%d" % number)
        mine.bye()
        return parts

    expected = [b"%d" % number for number in range(size)]
    assert together(size, rank) == [expected] * size
    assert time.monotonic() - began < seconds


@pytest.mark.parametrize("seed", range(20))
def test_random_bytes_before_the_handshake_are_never_parsed(seed):
    chance = random.Random(seed)
    with served(2) as store:
        for _ in range(20):
            sock = stranger(store)
            with contextlib.suppress(OSError):  # it has hung up on us, as it should
                sock.sendall(chance.randbytes(chance.choice([1, 31, 63, 64, 65, 5000])))
                if chance.random() < 0.5:
                    sock.shutdown(socket.SHUT_WR)
                    assert ends(sock)
            if chance.random() < 0.8:
                sock.close()
        job_meets(store)
        assert store.aborts == []


@pytest.mark.parametrize("seed", [*range(20), *everything(*range(20, 60))])
def test_random_frames_of_somebody_who_knows_the_secret_break_nothing(seed):
    chance = random.Random(seed)
    with served(3) as store:
        sock = stranger(store, shake_hands=True)
        joined = chance.random() < 0.7
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            if joined:
                sock.say(*joining(2, size=3))
            for _ in range(chance.randrange(1, 12)):
                body = chance.randbytes(chance.choice([0, 1, 3, 4, 8, 40, 3000]))
                kind = chance.choice([*range(10), 255])
                mangled = chance.random() < 0.2
                sock.sendall(chance.randbytes(9) if mangled else sock.session.pack(kind, body))
        sock.close()
        time.sleep(0.02)
        assert store.slowest_turn < 1.0
        fresh = stranger(store, shake_hands=True)  # it still serves
        fresh.say(*joining(0, size=3))
        answer = frame(fresh) if joined else None
        assert answer is None or answer[0] in (framing.LOST, framing.REFUSED)
        fresh.close()


@pytest.mark.parametrize("true", [False, True])
@pytest.mark.parametrize("length", [0, 16, 4113, 16 << 20, (16 << 20) + 1, 0x7FFFFFFF, 0xFFFFFFFF])
def test_an_impossible_length_is_refused_before_anything_is_kept(length, true):
    """true: it carries the tag of a length, since a rank has gone mad."""
    with served(2) as store:
        sock = stranger(store, shake_hands=True)
        head = length.to_bytes(4, "big")
        check = framing._tag(sock.session.keys[:32], 0, head)[:4] if true else b"xxxx"
        sock.sendall(head + check + b"x" * 100)
        kind, body = frame(sock)
        assert kind == framing.REFUSED and (str(length) if true else "HVD458").encode() in body
        sock.close()
        job_meets(store)


JOINS = [
    b"",
    b"{}",
    b"[]",
    b"null",
    b"\xff\xfe",
    b"[" * 4000,
    b'{"rank":0,"size":2,"pid":1,"version":"1","wire":1,"timeout":"x"}',
    *(b'{"rank":%b,"size":2,"pid":1,"version":"1","wire":1}' % rank for rank in (b"1e999", b'"a"', b"null")),
    b'{"rank":' + b"9" * 4000 + b',"size":2}',
]


@pytest.mark.parametrize("body", JOINS, ids=range(len(JOINS)))
def test_a_join_that_makes_no_sense_is_refused(body):
    with served(2) as store:
        sock = stranger(store, shake_hands=True)
        sock.say(framing.JOIN, body)
        assert frame(sock)[0] == framing.REFUSED and frame(sock) is None
        job_meets(store)


@pytest.mark.parametrize("timeout", [float("nan"), float("inf"), -1, 0, 1e300])
def test_a_time_limit_that_makes_no_sense_is_replaced(timeout):
    with served(2) as store:
        sock = stranger(store, shake_hands=True)
        sock.say(*joining(0, timeout=timeout))
        sock.settimeout(0.3)
        with pytest.raises(TimeoutError):
            frame(sock)
        sock.close()


def test_a_handshake_cannot_be_replayed():
    with served(2) as store:
        first = stranger(store)
        me = handshake.Connector(SECRET, handshake.STORE, handshake.ends_of(first.sock, connects=True))
        answer = me.answer(exactly(first, handshake.GREETING_BYTES))
        first.sendall(answer)
        assert me.session(exactly(first, handshake.VERDICT_BYTES)).keys
        again = stranger(store)
        exactly(again, handshake.GREETING_BYTES)
        again.sendall(answer)
        assert exactly(again, handshake.VERDICT_BYTES + 1) == REJECTED


@pytest.mark.parametrize(("magic", "side"), [(handshake.MAGIC, b"accepts"), (b"hvdlite4", b"connects")])
def test_a_proof_of_the_server_or_of_another_version_is_no_proof_of_a_client(magic, side):
    with served(2) as store:
        sock = stranger(store)
        greeting, ends = exactly(sock, handshake.GREETING_BYTES), handshake.ends_of(sock.sock, connects=True)
        body = magic + bytes(handshake.NONCE_BYTES) + ends
        sock.sendall(body + handshake.prove(SECRET, side, handshake.STORE, greeting + body))
        assert exactly(sock, handshake.VERDICT_BYTES + 1) == REJECTED


def test_a_false_store_is_seen_through():
    def pretend(sock):
        sock.sendall(handshake.greeting())
        exactly(sock, handshake.ANSWER_BYTES)
        said = bytes((handshake.WELCOME,)) + handshake.ends_of(sock, connects=False)
        sock.sendall(said + os.urandom(handshake.VERDICT_BYTES - len(said)))

    with impostor(pretend) as address, pytest.raises(HvdInitError, match="does not have the secret"):
        store_client.connect(*reach(address), SECRET, rank=0, size=1, version="1", wire=1, timeout=5)


def test_silent_connections_are_dropped_and_hold_nobody_up(monkeypatch):
    monkeypatch.setattr(connection_limits, "HANDSHAKE_S", 0.5)
    with served(2) as store:
        silent = [stranger(store) for _ in range(50)] + [stranger(store, shake_hands=True) for _ in range(5)]
        job_meets(store)
        began = time.monotonic()
        assert all(ends(sock) for sock in silent)
        assert time.monotonic() - began < 5.0


def test_holding_connections_open_locks_nobody_out():
    with served(2) as store:
        held = [stranger(store) for _ in range(connection_limits.STRANGERS_MAX * 3)]
        job_meets(store)
        time.sleep(0.1)
        assert len(store.store._strangers) <= connection_limits.STRANGERS_MAX
        for sock in held:
            sock.close()


def test_a_rank_that_never_reads_does_not_stall_the_others(monkeypatch):
    monkeypatch.setattr(server, "KEPT_MAX", 8 << 20)
    with served(2) as store:
        deaf = stranger(store, shake_hands=True)
        deaf.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        deaf.say(*joining(1))
        mine = store.connect(0, 2)
        assert mine.job == JOB
        for number in range(1, 9):
            try:
                deaf.say(framing.ALLGATHER, framing.pack_round(number, b""))
                assert mine.allgather(b"x" * (4 << 20))[1] == b""
            except Exception as error:
                assert "rank 1" in str(error) and number > 1
                break
        else:
            pytest.fail("32 MB were kept for a reader that does not read")
        deaf.close()


HALVED = """
import hvdlite.numpy as hvd, numpy, sys, time
hvd.init()
print("up", flush=True)
sys.stdin.readline()
began = time.process_time()
time.sleep(1)
print("cpu", time.process_time() - began, flush=True)
hvd.allreduce(numpy.ones(1))
print("went on", flush=True)
"""


@pytest.mark.parametrize("ends", [False, True])
def test_half_a_frame_of_the_store_is_not_looked_at_all_the_time_and_its_end_is_seen(ends):
    with served(2) as store:
        told = {"STORE_ADDR": store.address[0], "STORE_PORT": store.address[1], "SECRET_KEY": SECRET.hex()}
        told.update(SIZE=2, LOCAL_SIZE=2, CROSS_RANK=0, CROSS_SIZE=1, JOB_ID=f"{1:016x}")
        ranks = []
        for rank in range(2):
            told.update(RANK=rank, LOCAL_RANK=rank)
            environ = environment(**{f"HVDLITE_{name}": str(value) for name, value in told.items()})
            streams = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
            ranks.append(subprocess.Popen([sys.executable, "-c", HALVED], env=environ, text=True, **streams))
        assert [rank.stdout.readline() for rank in ranks] == ["up\n"] * 2
        member = store.store._members[0]
        member.sock.sendall(member.session.pack(framing.LOST, framing.pack_end(1, -5, "rank 1 is lost"))[:30])
        if ends:
            member.sock.shutdown(socket.SHUT_RDWR)
        for rank in ranks:
            print(file=rank.stdin, flush=True)
        said = [rank.communicate(timeout=SECONDS)[0] for rank in ranks]
        assert max(float(each.split()[1]) for each in said) < 0.5, said
        assert ["went on" in each for each in said] == [not ends] * 2, said
        assert not ends or "its store closed the connection) [HVD455]" in said[0], said


@pytest.mark.parametrize("number", [0, 2, 0xFFFFFFFF])
def test_an_allgather_out_of_turn_ends_the_epoch_with_the_name_of_its_rank(number):
    with served(2) as store:
        one, other = joined(store)
        one.say(framing.ALLGATHER, framing.pack_round(number, b""))
        assert frame(one)[0] == framing.REFUSED
        kind, body = frame(other)
        assert kind == framing.LOST and framing.unpack_end(body)[0] == 0 and b"rank 0" in body


def test_a_culprit_that_cannot_be_is_the_reporter():
    with served(2) as store:
        one, other = joined(store)
        one.say(framing.ABORT, framing.pack_end(99, -5, "?"))
        assert framing.unpack_end(frame(other)[1])[0] == 0
        assert store.aborts == [(0, 0, -5, "?")]
