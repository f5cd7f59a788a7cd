"""Somebody in the middle of any connection of a job: what is passed on, changed, repeated or sent back ends it."""

import contextlib
import re
import socket
import threading
import time

import pytest
from linking import SECONDS, addresses, listeners, soon
from relaying import Relay
from storing import JOB, SECRET, Line, frame, joined, joining, served, stranger, together

from hvdlite import _handshake, _store, _wire, links
from hvdlite.errors import HvdError, HvdInitError
from hvdlite.launcher import muster
from hvdlite.launcher.branch import reported
from hvdlite.links import address as places
from hvdlite.links import rendezvous
from hvdlite.links.job import JobLinks


@contextlib.contextmanager
def unbound(monkeypatch):
    """A handshake whose proofs leave the ends out, as that of old did: who is in the middle gets in."""
    with monkeypatch.context() as patched:
        patched.setattr(_handshake, "ends_of", lambda sock, connects: bytes(_handshake.ENDS_BYTES))
        yield


def test_a_store_behind_a_relay_is_refused():
    with served(1) as store, Relay(store.address) as relay:
        with pytest.raises(HvdInitError, match=r"rank 0: the store at 127.*connection is not direct.*\[HVD127\]"):
            _store.connect(*relay.address, SECRET, rank=0, size=1, version="1", wire=1, timeout=5)
        assert relay.seen == 1 and not store.aborts
        assert store.connect(0, 1).job == JOB  # and nobody is the worse for it


def test_a_rank_behind_a_relay_is_refused():
    with listeners(2) as made:
        (end,) = places.unpack(made[0].address).ends
        with Relay((end.ip, end.port)) as relay:
            astray = places.unpack(made[0].address)._replace(ends=(places.End(*relay.address),))
            with pytest.raises(HvdInitError, match=r"rank 0 at .* refuses .*connection is not direct.*NAT"):
                links.connect(made[1], {0: places.pack(astray)}, "relayed", soon())
        assert not made[0]._kept


@contextlib.contextmanager
def mustering():
    """A Muster that a thread turns, and its arrivals."""
    place, arrivals, stop = muster.Muster(SECRET, "127.0.0.1"), [], threading.Event()

    def turn():
        while not stop.wait(0.005):
            arrivals.extend(place.turn())

    thread = threading.Thread(target=turn)
    thread.start()
    try:
        yield place, arrivals
    finally:
        stop.set()
        thread.join(SECONDS)
        place.close()
        for arrival in arrivals:
            arrival.sock.close()


def test_a_launcher_behind_a_relay_is_refused():
    with mustering() as (place, arrivals), Relay(place.address) as relay:
        with pytest.raises(muster.ReportError, match="connection is not direct"):
            muster.report(relay.address, SECRET, {"host": 1}, soon(5))
        assert relay.seen == 1 and not arrivals


def test_a_stranger_that_speaks_while_it_makes_room_for_another_ends_nothing(monkeypatch):
    """Both are news in one turn: of the oldest, which is dropped for the newest, nothing is left to be read."""
    monkeypatch.setattr(muster, "_STRANGERS_MAX", 3)
    place = muster.Muster(SECRET, "127.0.0.1")
    held = []
    try:
        for count in range(1, 4):
            held.append(socket.create_connection(place.address))
            while len(place._strangers) < count:
                assert place.turn() == []
        held.append(socket.create_connection(place.address))
        for sock in held[:3]:
            sock.sendall(b"hvd")
        time.sleep(0.05)
        assert place.turn() == [] and len(place._strangers) == 3
        assert held[0].recv(200, socket.MSG_WAITALL)[:8] == _handshake.MAGIC  # and then the end
    finally:
        place.close()
        for sock in held:
            sock.close()


def test_a_launcher_that_speaks_byte_by_byte_is_not_waited_for_longer_than_any():
    """Somebody sits at the port, and each byte of his comes within the time for one."""
    server = socket.create_server(("127.0.0.1", 0))

    def drip():
        sock, _ = server.accept()
        with sock, contextlib.suppress(OSError):
            for byte in _handshake.MAGIC + bytes(100):
                sock.sendall(bytes((byte,)))
                time.sleep(0.2)

    thread = threading.Thread(target=drip)
    thread.start()
    began = time.monotonic()
    with server, pytest.raises(muster.ReportError, match=r"nobody answers at 127.*\[HVD110\]"):
        muster.report(server.getsockname(), SECRET, {"host": 1}, soon(1))
    assert time.monotonic() - began < 3
    thread.join(SECONDS)


def test_a_handshake_of_a_store_is_worth_nothing_to_a_launcher():
    """Both have the job's secret."""
    raised = pytest.raises(_handshake.HandshakeError)
    with mustering() as (place, arrivals), socket.create_connection(place.address, timeout=SECONDS) as sock, raised:
        _handshake.shake_hands(sock, SECRET, _handshake.STORE, soon())
    assert not arrivals


def test_ends_are_the_same_however_an_address_is_spelt():
    with socket.create_server(("::", 0), family=socket.AF_INET6, dualstack_ipv6=True) as server:
        near = socket.create_connection(("127.0.0.1", server.getsockname()[1]))
        far, _ = server.accept()
        with near, far:
            assert _handshake.ends_of(near, connects=True) == _handshake.ends_of(far, connects=False)
            assert "127.0.0.1:" in _handshake.passed_on(*[_handshake.ends_of(near, connects=True)] * 2)
    one, other = socket.socketpair()
    with one, other:
        assert _handshake.ends_of(one, connects=True) == bytes(_handshake.ENDS_BYTES)


def test_an_older_or_newer_hvdlite_is_told_apart_from_a_wrong_secret():
    server = socket.create_server(("127.0.0.1", 0))
    thread = threading.Thread(target=lambda: server.accept()[0].sendall(b"hvdlite1" + bytes(32)))
    thread.start()
    with server, pytest.raises(HvdInitError, match="no store of this hvdlite: install the same version"):
        _store.connect(*server.getsockname(), SECRET, rank=0, size=1, version="1", wire=1, timeout=5)
    thread.join(SECONDS)


def test_ports_of_others_are_passed_over_and_a_relay_is_called_one():
    with served(2) as store, Relay(store.address) as relay, socket.create_server(("127.0.0.1", 0)) as silent:
        foreign = threading.Thread(target=lambda: silent.accept()[0].close())
        foreign.start()
        tried = [relay.address[1], silent.getsockname()[1], store.address[1]]
        assert rendezvous._seek(1, "127.0.0.1", tried, SECRET, 20) == ("127.0.0.1", store.address[1])
        foreign.join(SECONDS)
        with pytest.raises(
            HvdInitError, match=rf"ports {relay.address[1]}: the store at that port: the connection is not direct"
        ):
            rendezvous._seek(1, "127.0.0.1", tried[:1], SECRET, 0.5)


def changes(session, kind, body):
    """What somebody on the way makes of the next frame, by name: the bytes that arrive, and the next frame is lost."""
    true, second = session.pack(kind, body), session.pack(kind, body)
    reflected = _wire.Session(session.keys[32:], session.keys[:32])
    return {
        "changed body": true[:5] + bytes((true[5] ^ 1,)) + true[6:],
        "changed kind": true[:4] + bytes((true[4] ^ 1,)) + true[5:],
        "changed tag": true[:-1] + bytes((true[-1] ^ 1,)),
        "cut": (len(true) - 5).to_bytes(4, "big") + true[4:-1],
        "without a tag": _wire.Session().pack(kind, body),
        "next first": second,
        "sent back": reflected.pack(kind, body),
    }


SEEN = re.compile("is not what the other end sent|a frame announces")
CHANGES = ["changed body", "changed kind", "changed tag", "cut", "without a tag", "next first", "sent back"]


@pytest.mark.parametrize("how", CHANGES)
def test_what_a_rank_has_not_sent_ends_its_connection_and_the_job_with_a_text(how):
    with served(2) as store:
        one, other = joined(store)
        one.sendall(changes(one.session, _wire.ALLGATHER, _wire.pack_round(1, b"mine"))[how])
        kind, body = frame(other)
        culprit, _, text = _wire.unpack_end(body)
        assert (kind, culprit) == (_wire.LOST, 0) and SEEN.search(text), text
        assert store.slowest_turn < 1.0


def test_a_frame_that_is_repeated_is_seen():
    with served(1) as store:
        one = stranger(store, True)
        said = one.session.pack(*joining(0, size=1))
        one.sendall(said)
        assert frame(one)[0] == _wire.JOINED
        one.sendall(said)
        kind, body = frame(one)
        assert kind == _wire.REFUSED and b"frame 1 is not what the other end sent" in body


@pytest.mark.parametrize("how", CHANGES)
def test_what_the_store_has_not_sent_is_an_error_of_the_rank(how):
    """The round comes from somebody on the cable, who changes it."""
    server = socket.create_server(("127.0.0.1", 0))

    def pretend():
        sock = Line(server.accept()[0])
        greeting = _handshake.greeting()
        sock.sendall(greeting)
        answer = sock.recv(_handshake.ANSWER_BYTES, socket.MSG_WAITALL)
        ends = _handshake.ends_of(sock.sock, connects=False)
        verdict, sock.session = _handshake.judge(SECRET, _handshake.STORE, ends, greeting, answer)
        sock.sendall(verdict)
        assert frame(sock)[0] == _wire.JOIN
        sock.say(_wire.JOINED, b'{"epoch": 0, "job": 7}')
        assert frame(sock)[0] == _wire.ALLGATHER
        sock.sendall(changes(sock.session, _wire.GATHERED, _wire.pack_gathered(1, [b"theirs"]))[how])
        with contextlib.suppress(ConnectionError):
            while sock.recv(4096):
                pass
        sock.close()

    def rank():
        with server:
            store = _store.connect(*server.getsockname(), SECRET, rank=0, size=1, version="1", wire=1, timeout=20)
            with pytest.raises(HvdError, match=r"rank 0: what came from the store is not .*\[HVD(458|112)\]"):
                store.allgather(b"mine")
            assert store.fileno() == -1  # nothing that comes over it is believed any more
            store.bye()

    outcomes = together(2, lambda number: (pretend, rank)[number]())
    assert outcomes == [None, None], outcomes


@pytest.mark.parametrize("how", CHANGES)
@pytest.mark.parametrize("stream", ["control", "output"])
def test_what_an_agent_has_not_sent_ends_its_streams_with_a_text(how, stream):
    with mustering() as (place, arrivals):
        hello = {"silence": 5}
        far = {name: muster.report(place.address, SECRET, hello, soon()) for name in ("control", "output")}
        end = soon()
        while len(arrivals) < 2:
            assert time.monotonic() < end
            time.sleep(0.005)
        by_port = {each.sock.getpeername()[1]: each for each in arrivals}
        control, output = (by_port[far[name][0].getsockname()[1]] for name in ("control", "output"))
        branch = reported(1, "b", control, output)
        sock, session = far[stream]
        sock.sendall(changes(session, 1, b'\0\0\0\0{"what": "pong"}')[how])
        branch.output.setblocking(True)
        read = branch.news if stream == "control" else branch.said
        assert read() is None and SEEN.search(branch.why)
        for each, _ in far.values():
            each.settimeout(SECONDS)
            assert each.recv(1) == b""
            each.close()


def test_who_is_in_the_middle_of_a_handshake_of_old_would_read_and_write(monkeypatch):
    """The attack that the ends in the proof are for, where they are left out: the relay gets in, but even then what it
    changes is seen."""
    changed = []

    def down(chunk):
        if b"a job" in chunk:
            changed.append(True)
            return chunk.replace(b"a job", b"evil!")
        return chunk

    with unbound(monkeypatch), served(1) as store, Relay(store.address, down=down) as relay:
        mine = _store.connect(*relay.address, SECRET, rank=0, size=1, version="1", wire=1, timeout=5)
        began = time.monotonic()
        with pytest.raises(HvdInitError, match=r"not what it sends: frame 1 .*\[HVD458\]"):
            mine.allgather(b"a job")
        assert changed and time.monotonic() - began < 5


@pytest.mark.parametrize("signs", [False, True])
def test_votes_have_keys_always_and_tensors_where_they_are_to_be_signed(signs):
    with listeners(2) as made:
        known = list(addresses(made).values())
        outcomes = together(
            2, lambda rank: JobLinks(made[rank], known, [0, 1], SECONDS, signs).rows("signed", range(2))
        )
        for rank, rows in enumerate(outcomes):
            peer = 1 - rank
            own = slice(64 * rank, 64 * rank + 64)
            assert rows.vote_keys[own] == bytes(64) and len(rows.vote_keys) == 128
            assert (rows.tensor_keys is not None) == signs
            for row in (rows.votes, rows.tensors):
                assert row[rank] == -1
                socket.close(row[peer])
        near, far = outcomes
        assert near.vote_keys[64:] == far.vote_keys[32:64] + far.vote_keys[:32] != bytes(64)
        if signs:
            assert near.tensor_keys[64:] == far.tensor_keys[32:64] + far.tensor_keys[:32]
            assert near.tensor_keys != near.vote_keys


def test_streams_have_keys_that_both_ends_and_nobody_else_know():
    with listeners(3) as made:
        outcomes = together(
            3,
            lambda rank: links.connect(
                made[rank], {r: a for r, a in addresses(made).items() if r != rank}, "keys", soon()
            ),
        )
        keys = [streams[rank].keys for streams in outcomes for rank in streams]
        assert len({half for each in keys for half in (each[:32], each[32:])}) == 6
        for one in range(3):
            for other in range(one):
                near, far = outcomes[one][other].keys, outcomes[other][one].keys
                assert len(near) == 64 and near == far[32:] + far[:32]
        for streams in outcomes:
            for stream in streams.values():
                stream.close()
