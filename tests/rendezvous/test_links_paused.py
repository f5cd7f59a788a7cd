"""A peer that has proved itself and says no more: it may be paused, or come again, and is not to be lost."""

from linking import carries, claiming, close_all, ends, listeners, soon, still_links, stranger, verdict
from test_links_hostile import settled

from hvdlite import transport
from hvdlite.security import connection_limits, handshake
from hvdlite.transport import peer_claim


def test_a_peer_that_proves_itself_and_never_confirms_is_no_stream():
    with listeners(2) as made:
        sock = proved(made[0])
        sock.close()
        assert settled(made[0]) and not made[0]._kept
        wrong, _, answer = claiming(made[0])
        wrong.sendall(answer + b"\x07")
        assert ends(wrong)
        wrong.close()
        assert not made[0]._kept and still_links(*made)


def proved(made, **changes):
    """A connection whose claim was welcome, before it confirms."""
    sock, me, answer = claiming(made, **changes)
    sock.sendall(answer)
    assert verdict(sock, me) == handshake.WELCOME
    return sock


def asked_for(made, sock):
    """Rank 7 confirms; what rank 0 gets when it asks for that stream is this one."""
    sock.sendall(peer_claim.CONFIRMED)
    got = transport.connect(made[0], {7: made[1].address}, "test", soon())
    try:
        return carries(sock, got[7])
    finally:
        close_all([got, {7: sock}])


def test_a_peer_that_was_paused_before_it_confirms_is_still_connected(monkeypatch):
    """It has been told that it is welcome: once it confirms, it believes that it has a stream."""
    monkeypatch.setattr(connection_limits, "HANDSHAKE_S", 0.3)
    with listeners(2) as made:
        sock = proved(made[0])
        later = stranger(made[0])
        assert ends(later)  # whose time began after that of `sock`
        later.close()
        assert asked_for(made, sock)


def test_a_peer_that_comes_again_before_it_has_confirmed_replaces_its_first_connection():
    with listeners(2) as made:
        first = proved(made[0])
        other = proved(made[0], source=6)
        second = proved(made[0])
        assert ends(first) and asked_for(made, second)
        other.sendall(peer_claim.CONFIRMED)
        got = transport.connect(made[0], {6: made[1].address}, "test", soon())
        assert carries(other, got[6])  # nobody else's
        close_all([got, {0: first, 1: other}])


def test_a_claim_that_is_heard_late_does_not_replace_the_one_that_followed_it():
    with listeners(2) as made:
        first, _, answer = claiming(made[0])
        second = proved(made[0])
        first.sendall(answer)
        assert ends(first)
        first.close()
        assert asked_for(made, second)
