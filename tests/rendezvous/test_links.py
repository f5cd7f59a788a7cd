"""Ranks make streams to each other: who accepts, who connects, in which order, for what, and what a failure says."""

import os
import socket
import threading
import time

import pytest
from linking import (
    JOB,
    SECRET,
    addresses,
    carries,
    close_all,
    connect_all,
    listener,
    listeners,
    reach,
    soon,
    still_links,
    together,
)

from hvdlite import transport
from hvdlite.errors import HvdInitError
from hvdlite.transport import address as places
from hvdlite.transport import connector
from hvdlite.transport import listener as accepting


def has_ipv6():
    try:
        with socket.socket(socket.AF_INET6) as probe:
            probe.bind(("::1", 0))
        return True
    except OSError:
        return False


@pytest.mark.parametrize("size", [2, 3, 7])
def test_every_pair_of_ranks_gets_a_stream_of_its_own(size):
    with listeners(size) as made:
        streams = connect_all(made, "set 0 tensors")
        for rank in range(size):
            assert sorted(streams[rank]) == [other for other in range(size) if other != rank]
            for other in range(rank):
                word = b"%d to %d" % (rank, other)
                assert carries(streams[rank][other], streams[other][rank], word)
                assert carries(streams[other][rank], streams[rank][other], word[::-1])
        close_all(streams)


def test_streams_are_ready_for_the_core():
    with listeners(2) as made:
        streams = connect_all(made, "test")
        for stream in (streams[0][1], streams[1][0]):
            assert stream.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
            assert not stream.getblocking()
            assert not stream.get_inheritable()
        descriptor = streams[0][1].detach()  # as the core gets it
        assert os.write(descriptor, b"x") == 1
        os.close(descriptor)
        close_all(streams[1:])


def test_streams_for_several_purposes_at_once_are_not_mixed_up():
    purposes = [f"set {number} {what}" for number in range(4) for what in ("votes", "tensors")]
    with listeners(2) as made:

        def body(mine, other, purpose):
            return lambda: transport.connect(mine, {other.rank: other.address}, purpose, soon())[other.rank]

        outcomes = together(
            [body(made[0], made[1], purpose) for purpose in purposes]
            + [body(made[1], made[0], purpose) for purpose in reversed(purposes)]
        )
        accepted = dict(zip(purposes, outcomes[: len(purposes)]))
        connected = dict(zip(reversed(purposes), outcomes[len(purposes) :]))
        for purpose in purposes:
            assert carries(connected[purpose], accepted[purpose], purpose.encode())
        close_all([accepted, connected])


def test_a_stream_that_comes_before_it_is_asked_for_is_kept_with_what_was_sent_on_it():
    with listeners(2) as made:
        early = transport.connect(made[1], addresses(made, [0]), "early", soon())
        early[0].sendall(b"long before")
        late = transport.connect(made[0], addresses(made, [1]), "early", soon())
        late[1].settimeout(10)
        assert late[1].recv(11) == b"long before"
        close_all([early, late])


def test_a_rank_that_connects_anew_has_given_up_the_earlier_stream():
    with listeners(2) as made:
        first = transport.connect(made[1], addresses(made, [0]), "again", soon())
        second = transport.connect(made[1], addresses(made, [0]), "again", soon())
        first[0].settimeout(10)
        assert first[0].recv(1) == b""  # closed by rank 0, once the second one is there
        got = transport.connect(made[0], addresses(made, [1]), "again", soon())
        assert carries(second[0], got[1])
        close_all([first, second, got])


def test_streams_that_nobody_asks_for_are_bounded_and_a_peer_waits_for_room(monkeypatch):
    monkeypatch.setattr(accepting, "KEPT_MAX", 2)
    with listeners(2) as made:
        kept = [transport.connect(made[1], addresses(made, [0]), f"kept {n}", soon()) for n in range(2)]
        with pytest.raises(HvdInitError, match="keeps too many streams"):
            transport.connect(made[1], addresses(made, [0]), "third", soon(0.5))
        taken = transport.connect(made[0], addresses(made, [1]), "kept 1", soon())
        third = transport.connect(made[1], addresses(made, [0]), "third", soon())
        close_all([*kept, taken, third])
        assert still_links(*made)


@pytest.mark.skipif(not has_ipv6(), reason="this machine has no IPv6")
def test_ipv6():
    with listeners(3, towards=("::1", 9)) as made:
        assert all(":" in reach(each)[0] for each in made)
        streams = connect_all(made, "six")
        assert carries(streams[2][0], streams[0][2])
        close_all(streams)


def test_the_address_is_that_of_the_route_to_the_rendezvous():
    for towards in (("127.0.0.1", 5), ("localhost", 5), ("/run/a/store", 0), ("", 0)):
        mine = listener(0, towards=towards)
        ip, port = reach(mine)
        mine.close()
        assert (ip == "::1" or ip.startswith("127.")) and port > 0


def test_without_a_rendezvous_all_addresses_are_told():
    mine, other = listener(0, towards=None), listener(1, towards=None)
    try:
        assert places.unpack(mine.address).ends and len(mine.address) <= 128
        assert still_links(mine, other)
    finally:
        mine.close()
        other.close()


def test_a_rendezvous_without_a_route_is_named():
    with pytest.raises(HvdInitError, match=r"rank 3 on host .*no route to the rendezvous at no-such-host\.invalid:7"):
        listener(3, towards=("no-such-host.invalid", 7))


def test_a_peer_that_never_comes_is_named_with_its_address_and_a_remedy():
    with listeners(2) as made:
        began = time.monotonic()
        with pytest.raises(HvdInitError) as raised:
            transport.connect(made[0], addresses(made, [1]), "set 0 votes", soon(0.3))
        assert 0.3 <= time.monotonic() - began < 10
    text = str(raised.value)
    host, (ip, port) = socket.gethostname(), reach(made[1])
    assert f"rank 1 at {ip}:{port} on host {host} has not connected to us" in text and "'set 0 votes'" in text
    assert text.startswith(f"rank 0 at {ip}:") and "HVDLITE_START_TIMEOUT" in text and "firewall" in text
    assert raised.value.rank == 1


def test_a_peer_that_cannot_be_reached_is_named_with_the_reason():
    with listeners(2) as made:
        told = addresses(made, [0])
        made[0].close()
        with pytest.raises(HvdInitError, match=r"rank 0 at 127.* on host .*could not be reached: .*refused") as raised:
            transport.connect(made[1], told, "gone", soon(0.3))
        assert raised.value.rank == 0


def test_a_peer_that_is_late_is_waited_for():
    with listeners(2) as made:
        there = threading.Event()

        def late():
            there.wait(30)
            return transport.connect(made[0], addresses(made, [1]), "late", soon())

        def early():
            other = threading.Timer(0.3, there.set)
            other.start()
            return transport.connect(made[1], addresses(made, [0]), "late", soon())

        streams = together([late, early])
        assert carries(streams[1][0], streams[0][1])
        close_all(streams)


def test_what_check_raises_ends_the_wait_and_leaves_no_stream():
    class Lost(Exception):
        pass

    def check():
        raise Lost("rank 2 was killed")

    with listeners(3) as made:
        for rank, purpose in ((0, "accepts"), (2, "connects")):
            with pytest.raises(Lost):
                others = {other: packed for other, packed in addresses(made).items() if other != rank}
                transport.connect(made[rank], others, purpose, soon(), check=check)
        assert still_links(made[0], made[1])


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"job": JOB + 1}, "belongs to another job"),
        ({"epoch": 1}, "another life of this job"),
        ({"wire": 99}, "another version of hvdlite"),
    ],
)
def test_ranks_that_do_not_belong_together_refuse_each_other_at_once(changes, reason):
    mine, other = listener(0), listener(1, **changes)
    try:
        with pytest.raises(HvdInitError, match=rf"rank 0 at .* refuses the connection: it .*{reason}") as raised:
            transport.connect(other, addresses([mine]), "test", soon())
        assert raised.value.rank == 0
        assert not mine._kept
    finally:
        mine.close()
        other.close()


def test_a_rank_with_another_secret_is_told_when_the_time_is_up():
    """Who answers has proved nothing either: it may be anybody."""
    mine, other = listener(0), listener(1, secret=SECRET[::-1])
    try:
        with pytest.raises(HvdInitError, match="rank 0 at .*does not know this rank's secret"):
            transport.connect(other, addresses([mine]), "test", soon(0.3))
        assert not mine._kept
    finally:
        mine.close()
        other.close()


def test_an_address_that_leads_to_another_rank_is_tried_again_and_then_told():
    with listeners(3) as made:
        with pytest.raises(HvdInitError, match="it is another rank than the one that is wanted"):
            transport.connect(made[2], {0: made[1].address}, "astray", soon(0.3))
        assert not made[1]._kept


def test_the_next_address_of_a_peer_is_tried_when_the_first_leads_nowhere():
    with listeners(3) as made, socket.create_server(("127.0.0.1", 0)) as foreign:
        known = places.unpack(made[0].address)
        astray = places.unpack(made[1].address).ends[0]
        several = known._replace(ends=(places.End("127.0.0.1", foreign.getsockname()[1]), astray, *known.ends))
        connector.ATTEMPT_S, before = 0.5, connector.ATTEMPT_S  # the foreign server never says a word
        try:
            streams = together(
                [
                    lambda: transport.connect(made[2], {0: places.pack(several)}, "third", soon()),
                    lambda: transport.connect(made[0], addresses(made, [2]), "third", soon()),
                ]
            )
        finally:
            connector.ATTEMPT_S = before
        assert carries(streams[0][0], streams[1][2])
        close_all(streams)


def test_a_loopback_address_of_another_host_is_refused_with_the_remedy():
    with listeners(2) as made:
        known = places.unpack(made[0].address)._replace(mark=b"elsewher", host="nodeB")
        with pytest.raises(HvdInitError, match="rank 0 listens at .* on host nodeB.*HVDLITE_STORE_ADDR"):
            transport.connect(made[1], {0: places.pack(known)}, "far", soon())


@pytest.mark.parametrize("packed", [b"", b"\0" * 128, b"\1" + b"x" * 8 + b"\0", b"\1" + b"x" * 8 + b"\0" + b"\4", b"z"])
def test_what_is_no_address_is_refused(packed):
    with listeners(2) as made, pytest.raises(HvdInitError, match="rank 1: rank 0 gave not the address of a rank"):
        transport.connect(made[1], {0: packed}, "test", soon())


def test_a_secret_that_is_too_short_is_refused():
    with pytest.raises(ValueError, match="is too short"):
        listener(0, secret=b"short")


def test_close_ends_the_thread_and_may_be_repeated():
    before = threading.active_count()
    mine = listener(0)
    assert threading.active_count() == before + 1
    sock = socket.create_connection(reach(mine))
    mine.close()
    mine.close()
    assert threading.active_count() == before
    with pytest.raises(OSError):
        socket.create_connection(reach(mine), timeout=5)
    sock.close()


def test_a_forked_child_closes_its_copies_only():
    with listeners(2) as made:
        child = os.fork()
        if child == 0:
            made[0].close()
            made[1].close()
            os._exit(0)
        assert os.waitpid(child, 0)[1] == 0
        assert still_links(*made)


def test_hosts_are_told_apart_by_more_than_their_name():
    parts = transport.host_id().split()
    assert parts[0] == socket.gethostname() and len(parts) == 4
    assert transport.hosts_of(["b", "a", "b", "c", "a"]) == [0, 1, 0, 2, 1]
