"""Somebody in the middle of the connections of agents: who reports by way of him, and what he makes of their output."""

import contextlib
import socket
import sys
import threading
import time

import pytest
from launching import Launch, free_port
from linking import SECONDS, soon
from relaying import CHANGES, SEEN, Relay, changes, mustering
from storing import SECRET

from hvdlite.launcher.agent import agent
from hvdlite.launcher.control import registration
from hvdlite.launcher.control.agent_link import reported
from hvdlite.security import connection_limits, handshake


def test_a_launcher_behind_a_relay_is_refused():
    with mustering() as (place, arrivals), Relay(place.address) as relay:
        with pytest.raises(registration.ReportError, match="connection is not direct"):
            registration.report(relay.address, SECRET, {"host": 1}, soon(5))
        assert relay.seen == 1 and not arrivals


def test_a_stranger_that_speaks_while_it_makes_room_for_another_ends_nothing(monkeypatch):
    """Both are news in one turn: of the oldest, which is dropped for the newest, nothing is left to be read."""
    monkeypatch.setattr(connection_limits, "STRANGERS_MAX", 3)
    place = registration.Registration(SECRET, "127.0.0.1")
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
        assert held[0].recv(200, socket.MSG_WAITALL)[:8] == handshake.MAGIC  # and then the end
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
            for byte in handshake.MAGIC + bytes(100):
                sock.sendall(bytes((byte,)))
                time.sleep(0.2)

    thread = threading.Thread(target=drip)
    thread.start()
    began = time.monotonic()
    with server, pytest.raises(registration.ReportError, match=r"no launcher answers at 127.*\[HVD110\]"):
        registration.report(server.getsockname(), SECRET, {"host": 1}, soon(1))
    assert time.monotonic() - began < 15  # not the 20 s of all his bytes
    thread.join(SECONDS)


def test_a_handshake_of_a_store_is_worth_nothing_to_a_launcher():
    """Both have the job's secret."""
    raised = pytest.raises(handshake.HandshakeError)
    with mustering() as (place, arrivals), socket.create_connection(place.address, timeout=SECONDS) as sock, raised:
        handshake.shake_hands(sock, SECRET, handshake.STORE, soon())
    assert not arrivals


@contextlib.contextmanager
def linking():
    """The AgentLink of an agent that has reported, and the agent's ends: {stream: (socket, session)}."""
    with mustering() as (place, arrivals):
        hello = {"silence": 5}
        far = {name: registration.report(place.address, SECRET, hello, soon()) for name in ("control", "output")}
        end = soon()
        while len(arrivals) < 2:
            assert time.monotonic() < end
            time.sleep(0.005)
        by_port = {each.sock.getpeername()[1]: each for each in arrivals}
        control, output = (by_port[far[name][0].getsockname()[1]] for name in ("control", "output"))
        link = reported(1, "b", control, output)
        link.output.setblocking(True)
        try:
            yield link, far
        finally:
            for sock, _ in far.values():
                sock.close()


def both_have_ended(far):
    for sock, _ in far.values():
        sock.settimeout(SECONDS)
        assert sock.recv(1) == b""
    return True


PONG = b'\0\0\0\0{"what": "pong"}'
STREAMS = pytest.mark.parametrize("stream", ["control", "output"])


@pytest.mark.parametrize("how", CHANGES)
@STREAMS
def test_what_an_agent_has_not_sent_ends_its_streams_with_a_text(how, stream):
    with linking() as (link, far):
        sock, session = far[stream]
        sock.sendall(changes(session, 1, PONG)[how])
        read = link.news if stream == "control" else link.read_output
        assert read() is None and SEEN in link.why
        assert both_have_ended(far)


@STREAMS
def test_what_came_whole_before_a_forged_frame_is_used(stream):
    with linking() as (link, far):
        sock, session = far[stream]
        said = b'{"what": "pong"}' if stream == "control" else b"\0\0\0\7a last line"
        true = session.pack(1, said)
        sock.sendall(true + changes(session, 1, said)["changed body"] + true)
        read = link.news if stream == "control" else link.read_output
        assert read() == ([{"what": "pong"}] if stream == "control" else [(1, 7, b"a last line")])
        assert SEEN in link.why and read() is None and both_have_ended(far)


@STREAMS
def test_a_stream_that_ends_within_a_frame_is_told(stream):
    with linking() as (link, far):
        sock, session = far[stream]
        sock.sendall(session.pack(1, PONG)[:-1])
        sock.shutdown(socket.SHUT_WR)
        read = link.news if stream == "control" else link.read_output
        assert read() == [] and not link.why
        assert read() is None and "the connection ended within frame 1" in link.why


@pytest.mark.parametrize("told", [False, True])
def test_output_that_ends_before_its_ranks_do_is_told_whatever_control_has_said_by_then(told):
    with linking() as (link, far):
        (control, news), (output, said) = far["control"], far["output"]
        link.ranks = {0, 3}
        started = news.pack(1, b'{"what": "started", "rank": 0}') + news.pack(1, b'{"what": "started", "rank": 3}')
        if told:
            control.sendall(started)
            assert len(link.news()) == 2
        output.sendall(said.pack(agent.STDOUT, b"\0\0\0\3line") + said.pack(agent.ENDED, b"\0\0\0\0"))
        output.close()
        assert link.read_output() == [(agent.STDOUT, 3, b"line"), (agent.ENDED, 0, b"")] and link.read_output() is None
        link.output.close()
        assert bool(link.why) == told
        if not told:
            control.sendall(started)
            assert len(link.news()) == 2
        assert not link.cut
        link.done = True
        assert "output from host b is lost: its connection ended before the output of rank 3 did" in link.cut


MEDDLING = """
import socket, sys
from hvdlite.launcher.agent import agent; from hvdlite.launcher import cli
emit, how = agent.Agent._emit, sys.argv[1]
del sys.argv[1:5]  # and how the launcher is started otherwise

def meddled(self, kind, rank, chunk):
    before = len(self._unsent)
    if kind == agent.STDOUT and b"last" in chunk:
        if how == "reset":
            self._output.shutdown(socket.SHUT_RDWR)
        else:
            self._flush = lambda: None
            emit(self, kind, rank, chunk)
            del self._flush
            self._unsent[before + 2] += 1
            return self._flush()
    emit(self, kind, rank, chunk)

agent.Agent._emit = meddled
sys.exit(cli.main())
"""


@pytest.mark.parametrize("how", ["reset", "longer"])
def test_the_last_lines_of_a_rank_do_not_vanish_in_silence(how):
    words = ("--nnodes", 2, "--rdzv-endpoint", f"127.0.0.1:{free_port()}", "--node-rank")
    body = ("sh", "-c", "echo first $RANK; sleep 0.3; echo last $RANK")
    settings = {"HVDLITE_SECRET_KEY": SECRET.hex()}
    meddling = (sys.executable, "-c", MEDDLING, how)
    with Launch(*words, 1, *body, under=meddling, **settings) as b, Launch(*words, 0, *body, **settings) as a:
        codes = a.wait(), b.wait()
    assert "last 1" not in a.out and codes[0] != 0, (codes, a.out, a.err)
    assert ("before the output of rank 1 did" if how == "reset" else SEEN) in a.err, a.err
