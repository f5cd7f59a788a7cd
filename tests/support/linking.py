"""Ranks that link up inside one process: listeners, hostile connections to them, and what to expect of a stream."""

import socket
import threading
import time
from contextlib import contextmanager

from hvdlite import transport
from hvdlite.security import handshake
from hvdlite.transport import address as places
from hvdlite.transport import peer_claim

SECRET = bytes(range(32))
JOB = 0xFEDCBA9876543210
SECONDS = 30.0
HERE = ("127.0.0.1", 9)


def soon(seconds=SECONDS):
    return time.monotonic() + seconds


def listener(rank, towards=HERE, secret=SECRET, job=JOB, epoch=0, **more):
    return transport.listen(towards, secret, job, epoch, rank, **more)


@contextmanager
def listeners(count, towards=HERE):
    made = [listener(rank, towards) for rank in range(count)]
    try:
        yield made
    finally:
        for each in made:
            each.close()


def addresses(made, ranks=None):
    return {each.rank: each.address for each in made if ranks is None or each.rank in ranks}


def together(bodies):
    """Runs the functions at once, each in a thread; their results or exceptions."""
    outcomes = [None] * len(bodies)

    def run(number):
        try:
            outcomes[number] = bodies[number]()
        except BaseException as error:
            outcomes[number] = error

    threads = [threading.Thread(target=run, args=(number,)) for number in range(len(bodies))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(SECONDS * 2)
        assert not thread.is_alive(), "a rank still waits for its streams"
    return outcomes


def connect_all(made, purpose, seconds=SECONDS):
    """Every rank connects with every other: a list of {rank: stream}; exceptions are raised."""

    def body(mine):
        others = {rank: packed for rank, packed in addresses(made).items() if rank != mine.rank}
        return lambda: transport.connect(mine, others, purpose, soon(seconds))

    outcomes = together([body(each) for each in made])
    for each in outcomes:
        if isinstance(each, BaseException):
            raise each
    return outcomes


def close_all(outcomes):
    for streams in outcomes:
        for stream in streams.values():
            stream.close()


def carries(one, other, said=b"through"):
    """Bytes written to `one` come out of `other`, and nothing before them."""
    one.setblocking(True)
    other.settimeout(SECONDS)
    one.sendall(said)
    return exactly(other, len(said)) == said


def exactly(sock, count):
    """`count` bytes, or fewer if the other end closes first."""
    held = b""
    while len(held) < count:
        try:
            chunk = sock.recv(count - len(held))
        except ConnectionError:
            chunk = b""
        if not chunk:
            break
        held += chunk
    return held


def reach(listener_or_address):
    """(ip, port) at which a listener can be reached."""
    packed = getattr(listener_or_address, "address", listener_or_address)
    end = places.unpack(packed).ends[0]
    return end.ip, end.port


def stranger(made):
    """A bare connection to a listener, before it has said anything."""
    return socket.create_connection(reach(made), timeout=SECONDS)


def claiming(made, proves=handshake.LINK, **changes):
    """(connection, the connecting side's handshake, its answer) of rank 7 after the listener's greeting."""
    from hvdlite._core import WIRE_VERSION

    said = {"wire": WIRE_VERSION, "job": JOB, "epoch": 0, "source": 7, "target": made.rank, "purpose": "test"}
    packed = peer_claim.pack(peer_claim.Claim(**{**said, **changes}))
    sock = stranger(made)
    me = handshake.Connector(SECRET, proves, handshake.ends_of(sock, connects=True), packed)
    return sock, me, me.answer(exactly(sock, handshake.GREETING_BYTES))


def verdict(sock, me):
    """What the listener says to the answer, which was sent."""
    try:
        me.session(exactly(sock, handshake.VERDICT_BYTES))
    except handshake.HandshakeError as error:
        return error.verdict
    return handshake.WELCOME


def ends(sock):
    """The other side closes the connection, in bounded time, whatever it says before."""
    sock.settimeout(SECONDS)
    while True:
        try:
            if not sock.recv(65536):
                return True
        except ConnectionError:
            return True


def still_links(first, second, purpose="after"):
    """Two ranks make a stream, and soon, whatever strangers do meanwhile."""
    one, other = connect_all([first, second], purpose, seconds=SECONDS)
    try:
        return carries(one[second.rank], other[first.rank])
    finally:
        close_all([one, other])


@contextmanager
def impostor(treat):
    """Listens where a rank should; `treat(sock)` has each connection. Yields the packed address of rank 0 there."""
    server = socket.create_server(("127.0.0.1", 0))

    def serve():
        while True:
            try:
                sock, _ = server.accept()
            except OSError:
                return
            with sock:
                sock.settimeout(SECONDS)
                try:
                    treat(sock)
                except OSError:
                    pass

    thread = threading.Thread(target=serve)
    thread.start()
    end = places.End(*server.getsockname()[:2])
    try:
        yield places.pack(places.own_address([end], places.host_id()))
    finally:
        server.shutdown(socket.SHUT_RDWR)  # closing alone would wake nobody
        server.close()
        thread.join(SECONDS)
        assert not thread.is_alive()
