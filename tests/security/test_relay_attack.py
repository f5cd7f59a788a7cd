"""Somebody in the middle of any connection of a rank: what is passed on, changed, repeated or sent back ends it."""

import contextlib
import socket
import threading
import time

import pytest
from linking import SECONDS, addresses, listeners, soon
from relaying import CHANGES, SEEN, Relay, changes
from storing import JOB, SECRET, Line, frame, joined, joining, served, stranger, together

from hvdlite import transport
from hvdlite.errors import HvdError, HvdInitError
from hvdlite.executors import worker
from hvdlite.launcher import function_server
from hvdlite.rendezvous import standalone_store, store_client
from hvdlite.rendezvous.discovery import Place
from hvdlite.security import framing, handshake
from hvdlite.transport import address as places
from hvdlite.transport.mesh import JobLinks


def test_a_store_behind_a_relay_is_refused():
    with served(1) as store, Relay(store.address) as relay:
        with pytest.raises(HvdInitError, match=r"rank 0: the store at 127.*connection is not direct.*\[HVD127\]"):
            store_client.connect(*relay.address, SECRET, rank=0, size=1, version="1", wire=1, timeout=5)
        assert relay.seen == 1 and not store.aborts
        assert store.connect(0, 1).job == JOB  # and nobody is the worse for it


def test_a_rank_behind_a_relay_is_refused():
    with listeners(2) as made:
        (end,) = places.unpack(made[0].address).ends
        with Relay((end.ip, end.port)) as relay:
            astray = places.unpack(made[0].address)._replace(ends=(places.End(*relay.address),))
            with pytest.raises(HvdInitError, match=r"rank 0 at .* refuses .*connection is not direct.*NAT"):
                transport.connect(made[1], {0: places.pack(astray)}, "relayed", soon())
        assert not made[0]._kept


def test_ends_are_the_same_however_an_address_is_spelt():
    with socket.create_server(("::", 0), family=socket.AF_INET6, dualstack_ipv6=True) as server:
        near = socket.create_connection(("127.0.0.1", server.getsockname()[1]))
        far, _ = server.accept()
        with near, far:
            assert handshake.ends_of(near, connects=True) == handshake.ends_of(far, connects=False)
            assert "127.0.0.1:" in handshake.passed_on(*[handshake.ends_of(near, connects=True)] * 2)
    one, other = socket.socketpair()
    with one, other:
        assert handshake.ends_of(one, connects=True) == bytes(handshake.ENDS_BYTES)


def test_an_older_or_newer_hvdlite_is_told_apart_from_a_wrong_secret():
    server = socket.create_server(("127.0.0.1", 0))
    thread = threading.Thread(target=lambda: server.accept()[0].sendall(b"hvdlite1" + bytes(32)))
    thread.start()
    with server, pytest.raises(HvdInitError, match="not a store of this hvdlite: install the same version"):
        store_client.connect(*server.getsockname(), SECRET, rank=0, size=1, version="1", wire=1, timeout=5)
    thread.join(SECONDS)


def test_ports_of_others_are_passed_over_and_a_relay_is_called_one():
    with served(2) as store, Relay(store.address) as relay, socket.create_server(("127.0.0.1", 0)) as silent:
        foreign = threading.Thread(target=lambda: silent.accept()[0].close())
        foreign.start()
        tried = [relay.address[1], silent.getsockname()[1], store.address[1]]
        assert standalone_store._seek(1, "127.0.0.1", tried, SECRET, 20, {}, "") == ("127.0.0.1", store.address[1])
        foreign.join(SECONDS)
        with pytest.raises(
            HvdInitError, match=rf"ports {relay.address[1]}: the store at that port: the connection is not direct"
        ):
            standalone_store._seek(1, "127.0.0.1", tried[:1], SECRET, 0.5, {}, "")


def test_a_stranger_at_the_first_address_of_a_name_hides_no_store(monkeypatch):
    with served(2) as store, socket.create_server(("127.0.0.2", store.address[1])) as stranger:
        ends = [
            (socket.AF_INET, socket.SOCK_STREAM, 6, "", (ip, store.address[1])) for ip in ("127.0.0.2", "127.0.0.1")
        ]
        monkeypatch.setattr(standalone_store.socket, "getaddrinfo", lambda *_, **__: ends)
        foreign = threading.Thread(target=lambda: stranger.accept()[0].sendall(b"SSH-2.0-OpenSSH_9.2\r\n" + bytes(64)))
        foreign.start()
        assert standalone_store._seek(1, "node", [store.address[1]], SECRET, 20, {}, "") == (
            "127.0.0.1",
            store.address[1],
        )
        foreign.join(SECONDS)


@pytest.mark.parametrize("nodes, looks_at", [("here", "127.0.0.1"), ("here,there", "here")])
def test_ranks_of_one_node_meet_at_home_whatever_its_name_leads_to(monkeypatch, nodes, looks_at):
    seen = []
    monkeypatch.setattr(standalone_store, "_seek", lambda rank, node, *_: seen.append(node) or (node, 1))
    monkeypatch.setattr(standalone_store, "_known", {})
    environ = {"SLURM_JOB_ID": "7", "SLURM_STEP_ID": "0", "SLURM_STEP_NODELIST": nodes}
    values = {"store_addr": None, "store_port": None, "secret_key": SECRET, "start_timeout": 1.0}
    standalone_store.found(Place(1, 2, 1, 2, 0, 1, "Slurm"), environ, values)
    assert seen == [looks_at]


@pytest.mark.parametrize("how", CHANGES)
def test_what_a_rank_has_not_sent_ends_its_connection_and_the_job_with_a_text(how):
    with served(2) as store:
        one, other = joined(store)
        one.sendall(changes(one.session, framing.ALLGATHER, framing.pack_round(1, b"mine"))[how])
        kind, body = frame(other)
        culprit, _, text = framing.unpack_end(body)
        assert (kind, culprit) == (framing.LOST, 0) and SEEN in text, text
        assert store.slowest_turn < 1.0


def test_a_frame_that_is_repeated_is_seen():
    with served(1) as store:
        one = stranger(store, True)
        said = one.session.pack(*joining(0, size=1))
        one.sendall(said)
        assert frame(one)[0] == framing.JOINED
        one.sendall(said)
        kind, body = frame(one)
        assert kind == framing.REFUSED and b"frame 1 is not what the other end sent" in body


def test_a_rank_whose_connection_ends_within_a_frame_is_lost_and_that_is_told():
    with served(2) as store:
        one, other = joined(store)
        one.sendall(one.session.pack(framing.ALLGATHER, framing.pack_round(1, b"mine"))[:-1])
        one.close()
        kind, body = frame(other)
        culprit, _, text = framing.unpack_end(body)
        assert (kind, culprit) == (framing.LOST, 0) and "the connection ended within frame 1" in text, text


def test_a_call_that_ends_within_a_frame_is_no_call():
    near, far = socket.socketpair()
    with near, far:
        far.sendall(framing.Session(SECRET, bytes(32)).pack(function_server.CALL, b"f(1)")[:-1])
        far.shutdown(socket.SHUT_WR)
        with pytest.raises(framing.WireError, match=r"ended within frame 0: .*\[HVD458\]"):
            worker._fetched(near, framing.Session(bytes(32), SECRET))


@pytest.mark.parametrize("how", CHANGES)
def test_what_the_store_has_not_sent_is_an_error_of_the_rank(how):
    """The round comes from somebody on the cable, who changes it."""
    server = socket.create_server(("127.0.0.1", 0))

    def pretend():
        sock = Line(server.accept()[0])
        greeting = handshake.greeting()
        sock.sendall(greeting)
        answer = sock.recv(handshake.ANSWER_BYTES, socket.MSG_WAITALL)
        ends = handshake.ends_of(sock.sock, connects=False)
        verdict, sock.session = handshake.judge(SECRET, handshake.STORE, ends, greeting, answer)
        sock.sendall(verdict)
        assert frame(sock)[0] == framing.JOIN
        sock.say(framing.JOINED, b'{"epoch": 0, "job": 7}')
        assert frame(sock)[0] == framing.ALLGATHER
        sock.sendall(changes(sock.session, framing.GATHERED, framing.pack_gathered(1, [b"theirs"]))[how])
        with contextlib.suppress(ConnectionError):
            while sock.recv(4096):
                pass
        sock.close()

    def rank():
        with server:
            store = store_client.connect(*server.getsockname(), SECRET, rank=0, size=1, version="1", wire=1, timeout=20)
            with pytest.raises(HvdError, match=r"rank 0: the store sent invalid data: .*\[HVD(458|112)\]"):
                store.allgather(b"mine")
            assert store.fileno() == -1  # nothing that comes over it is believed any more
            store.bye()

    outcomes = together(2, lambda number: (pretend, rank)[number]())
    assert outcomes == [None, None], outcomes


def test_who_is_in_the_middle_of_a_handshake_of_old_would_read_and_write(monkeypatch):
    """The attack that the ends in the proof are for, where they are left out: the relay gets in, but even then what it
    changes is seen."""
    changed = []

    def down(chunk):
        if b"a job" in chunk:
            changed.append(True)
            return chunk.replace(b"a job", b"evil!")
        return chunk

    monkeypatch.setattr(handshake, "ends_of", lambda sock, connects: bytes(handshake.ENDS_BYTES))
    with served(1) as store, Relay(store.address, down=down) as relay:
        mine = store_client.connect(*relay.address, SECRET, rank=0, size=1, version="1", wire=1, timeout=5)
        began = time.monotonic()
        with pytest.raises(HvdInitError, match=r"invalid data: frame 1 .*\[HVD458\]"):
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
            lambda rank: transport.connect(
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
