"""The listener and the connecting side under attack: whatever strangers say or leave unsaid, ranks link up, soon."""

import random
import socket
import threading
import time

import pytest
from linking import (
    JOB,
    SECONDS,
    addresses,
    claiming,
    ends,
    exactly,
    impostor,
    listeners,
    soon,
    still_links,
    stranger,
    together,
    verdict,
)
from ranks import everything

from hvdlite import transport
from hvdlite.errors import HvdInitError
from hvdlite.security import connection_limits, handshake
from hvdlite.transport import address as places
from hvdlite.transport import connector, peer_claim


def settled(made):
    """No stranger is left at the listener."""
    limit = soon()
    while made._strangers and time.monotonic() < limit:
        time.sleep(0.01)
    return not made._strangers


@pytest.mark.parametrize("seed", range(25))
def test_random_bytes_never_join_and_never_stall(seed):
    chance = random.Random(seed)
    with listeners(2) as made:
        held = []
        for _ in range(20):
            sock = stranger(made[0])
            held.append(sock)
            try:
                sock.sendall(chance.randbytes(chance.choice([0, 1, 8, 40, *range(194, 197), 5000])))
                if chance.random() < 0.3:
                    sock.shutdown(socket.SHUT_WR)
                    assert ends(sock)
                elif chance.random() < 0.5:
                    sock.close()
            except OSError:  # it has hung up on us, as it should
                pass
        assert still_links(*made)
        assert not made[0]._kept
        for sock in held:
            sock.close()
        assert settled(made[0])


@pytest.mark.parametrize("seed", range(25))
def test_a_true_claim_with_one_changed_bit_is_refused(seed):
    chance = random.Random(seed)
    with listeners(2) as made:
        for _ in range(8):
            sock, me, answer = claiming(made[0])
            message = bytearray(answer)
            message[chance.randrange(len(message))] ^= 1 << chance.randrange(8)
            sock.sendall(message)
            assert verdict(sock, me) == handshake.UNKNOWN
            assert ends(sock)
            sock.close()
        assert settled(made[0]) and not made[0]._kept


def test_a_claim_in_random_pieces_is_understood():
    chance = random.Random(1)
    with listeners(1) as made:
        sock, me, message = claiming(made[0])
        at = 0
        while at < len(message):
            step = chance.randrange(1, 20)
            sock.sendall(message[at : at + step])
            at += step
        assert verdict(sock, me) == handshake.WELCOME
        sock.sendall(peer_claim.CONFIRMED + b"and then the core's bytes")
        got = transport.connect(made[0], {7: made[0].address}, "test", soon())[7]
        got.settimeout(10)
        assert exactly(got, 25) == b"and then the core's bytes"
        got.close()
        sock.close()


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"epoch": 1}, peer_claim.EPOCH),
        ({"epoch": 2**32 - 1}, peer_claim.EPOCH),
        ({"job": JOB ^ 1}, peer_claim.JOB),
        ({"wire": 0}, peer_claim.WIRE),
        ({"target": 3}, peer_claim.TARGET),
        ({"source": 0}, peer_claim.TARGET),
        ({"purpose": ""}, handshake.WELCOME),
        ({"proves": handshake.STORE}, handshake.UNKNOWN),
    ],
)
def test_who_knows_the_secret_but_is_wrong_is_told_so(changes, expected):
    with listeners(1) as made:
        sock, me, answer = claiming(made[0], **changes)
        sock.sendall(answer)
        assert verdict(sock, me) == expected
        if expected != handshake.WELCOME:
            assert ends(sock)
        sock.close()
        assert settled(made[0]) and not made[0]._kept


def test_a_claim_whose_purpose_is_no_text_is_refused():
    mine = peer_claim.Claim(4, JOB, 0, 2, 1, "test")
    packed = peer_claim.pack(mine)
    assert peer_claim.unpack(packed) == mine
    astray = peer_claim.unpack(packed.replace(b"test", b"\xfftes"))
    assert peer_claim.verdict_on(astray, mine) == peer_claim.PURPOSE


def _reflects(sock, answer):
    return bytes((handshake.WELCOME,)) + handshake.ends_of(sock, connects=False) + answer[-handshake.PROOF_BYTES :]


def _denies(sock, answer):
    return bytes((handshake.UNKNOWN,)).ljust(handshake.VERDICT_BYTES, b"\0")


@pytest.mark.parametrize(
    ("told", "failure"),
    [(_reflects, "what listens there does not know the secret"), (_denies, "it does not know this rank's secret")],
)
def test_an_acceptor_that_proves_nothing_is_no_peer_and_ends_nothing(told, failure):
    asked = []

    def treat(sock):
        sock.sendall(handshake.greeting())
        asked.append(exactly(sock, peer_claim.ANSWER_BYTES))
        sock.sendall(told(sock, asked[-1]))

    with listeners(2) as made, impostor(treat) as address:
        with pytest.raises(HvdInitError, match=f"could not be reached: {failure}"):
            transport.connect(made[1], {0: address}, "denied", soon(0.5))
        assert len(asked) > 1


def test_a_relay_that_poses_as_another_rank_gets_no_stream():
    """The claim names both ranks: passed on to a third rank it is worth nothing there."""
    with listeners(3) as made:

        def relay(sock):
            with stranger(made[1]) as behind:
                sock.sendall(exactly(behind, handshake.GREETING_BYTES))
                behind.sendall(exactly(sock, peer_claim.ANSWER_BYTES))
                sock.sendall(exactly(behind, handshake.VERDICT_BYTES))

        with impostor(relay) as address, pytest.raises(HvdInitError, match="another rank than the one that is wanted"):
            transport.connect(made[2], {0: address}, "posed", soon(0.5))
        assert not made[1]._kept


def test_silent_strangers_are_dropped_in_time_and_stall_nobody(monkeypatch):
    monkeypatch.setattr(connection_limits, "HANDSHAKE_S", 0.3)
    with listeners(2) as made:
        silent = [stranger(made[0]) for _ in range(10)]
        half, _, answer = claiming(made[0])
        half.sendall(answer[:100])
        assert still_links(*made)
        for sock in [*silent, half]:
            assert ends(sock)
            sock.close()


def test_more_strangers_than_there_is_room_for_lock_nobody_out():
    with listeners(2) as made:
        crowd = [stranger(made[0]) for _ in range(connection_limits.STRANGERS_MAX + 40)]
        assert still_links(*made)
        assert len(made[0]._strangers) <= connection_limits.STRANGERS_MAX
        for sock in crowd:
            sock.close()
        assert settled(made[0])


def test_a_crowd_of_strangers_does_not_end_who_has_proved_itself(monkeypatch):
    """It believes that it is connected from the answer on, and nobody would connect again."""
    monkeypatch.setattr(connection_limits, "HANDSHAKE_S", SECONDS)
    with listeners(2) as made:
        peer, me, answer = claiming(made[0], source=1)
        peer.sendall(answer)
        assert verdict(peer, me) == handshake.WELCOME
        crowd = [stranger(made[0]) for _ in range(connection_limits.STRANGERS_MAX + 10)]
        assert ends(crowd[0])  # so there was no room any more
        peer.sendall(peer_claim.CONFIRMED + b"first bytes")
        got = transport.connect(made[0], addresses([made[1]]), "test", soon())
        assert exactly(got[1], 11) == b"first bytes"
        for sock in [peer, *crowd, *got.values()]:
            sock.close()


@pytest.mark.parametrize("seed", range(6))
def test_ranks_link_up_while_strangers_come_and_go(seed):
    chance = random.Random(seed)
    stop = threading.Event()
    with listeners(3) as made:

        def attack():
            mine = random.Random(chance.random())
            held = []
            while not stop.is_set():
                try:
                    sock = stranger(made[mine.randrange(3)])
                    sock.sendall(mine.randbytes(mine.choice([1, 40, 168, 400])))
                    held.append(sock)
                except OSError:
                    pass
                if len(held) > 30:
                    held.pop(mine.randrange(len(held))).close()
                stop.wait(0.001)
            for sock in held:
                sock.close()
            return True

        def work():
            try:
                for number in range(3):
                    assert still_links(made[0], made[1], f"a{number}") and still_links(made[1], made[2], f"b{number}")
            finally:
                stop.set()
            return True

        outcomes = together([attack, attack, work])
        assert outcomes == [True] * 3, outcomes


@pytest.mark.parametrize("seed", [*range(5), *everything(*range(5, 20))])
def test_random_bytes_from_what_is_connected_to_are_no_peer(seed):
    """The connecting side: whatever a listener that is none of ours says, in time it gives up and names it."""
    chance = random.Random(seed)

    def babble(sock):
        if chance.random() < 0.7:
            sock.sendall(handshake.greeting())
        sock.sendall(chance.randbytes(chance.choice([0, 1, 36, 40, 76, 300])))
        sock.settimeout(0.02)
        sock.recv(1000)

    with listeners(2) as made, impostor(babble) as address:
        began = time.monotonic()
        with pytest.raises(HvdInitError, match="rank 0 at 127"):
            transport.connect(made[1], {0: address}, "babble", soon(0.3))
        assert time.monotonic() - began < 10


def test_a_listener_that_never_speaks_is_given_up_and_asked_again(monkeypatch):
    monkeypatch.setattr(connector, "ATTEMPT_S", 0.1)
    with listeners(2) as made, socket.create_server(("127.0.0.1", 0)) as server:
        own = places.unpack(made[0].address)
        end = places.End(*server.getsockname()[:2])
        with pytest.raises(HvdInitError, match=r"no answer within 0\.1 s"):
            transport.connect(made[1], {0: places.pack(own._replace(ends=(end,)))}, "mute", soon(0.6))
        server.settimeout(5)
        tries = [server.accept()[0] for _ in range(2)]
        for sock in tries:
            sock.close()


def test_an_idle_listener_uses_no_processor():
    with listeners(2) as made:
        assert still_links(*made)
        before = time.process_time()
        threading.Event().wait(0.5)
        assert time.process_time() - before < 0.1
