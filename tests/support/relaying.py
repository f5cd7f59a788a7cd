"""Somebody in the middle: listens at one port, passes everything on to another, and changes what it likes."""

import contextlib
import socket
import threading

from linking import SECONDS
from storing import SECRET

from hvdlite.launcher.control import registration
from hvdlite.security import framing


class Relay:
    """Passes connections on to `target`. `down` and `up` change chunks on their way from and to it: bytes to bytes."""

    def __init__(self, target, down=lambda chunk: chunk, up=lambda chunk: chunk, port=0):
        self.seen = 0
        self._target, self._down, self._up = target, down, up
        self._server = socket.create_server(("127.0.0.1", port))
        self._socks = []
        self.address = self._server.getsockname()[:2]
        self._threads = [threading.Thread(target=self._serve, daemon=True)]
        self._threads[0].start()

    def _serve(self):
        while True:
            try:
                sock, _ = self._server.accept()
                onward = socket.create_connection(self._target)
            except OSError:
                return
            self.seen += 1
            self._socks += [sock, onward]
            for source, drain, change in ((sock, onward, self._up), (onward, sock, self._down)):
                self._threads.append(threading.Thread(target=_pump, args=(source, drain, change), daemon=True))
                self._threads[-1].start()

    def __enter__(self):
        return self

    def __exit__(self, *_):
        with contextlib.suppress(OSError):
            self._server.shutdown(socket.SHUT_RDWR)
        self._server.close()
        for sock in self._socks:
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)
        for thread in self._threads:
            thread.join(30)
            assert not thread.is_alive()
        for sock in self._socks:
            sock.close()


def _pump(source, drain, change):
    with contextlib.suppress(OSError):
        while chunk := source.recv(1 << 16):
            drain.sendall(change(chunk))
    for sock in (source, drain):
        with contextlib.suppress(OSError):
            sock.shutdown(socket.SHUT_RDWR)


def mustering():
    """A Registration that a thread turns, and its arrivals."""
    return turning(registration.Registration(SECRET, "127.0.0.1"))


@contextlib.contextmanager
def turning(place):
    """What a thread turns, and its arrivals."""
    arrivals, stop = [], threading.Event()

    def turn():
        while not stop.wait(0.005):
            arrivals.extend(place.turn() or ())

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


def changes(session, kind, body):
    """What somebody on the way makes of the next frame, by name: the bytes that arrive, and the next frame is lost."""
    true, second = session.pack(kind, body), session.pack(kind, body)
    length = int.from_bytes(true[:4], "big")
    reflected = framing.Session(session.keys[32:], session.keys[:32])
    return {
        "changed body": true[:9] + bytes((true[9] ^ 1,)) + true[10:],
        "changed kind": true[:8] + bytes((true[8] ^ 1,)) + true[9:],
        "longer": (length + 1000).to_bytes(4, "big") + true[4:],
        "only a head, of a longer one": (length + 1000).to_bytes(4, "big") + true[4:8],
        "changed tag": true[:-1] + bytes((true[-1] ^ 1,)),
        "cut": (length - 1).to_bytes(4, "big") + true[4:-1],
        "without a tag": framing.Session().pack(kind, body),
        "next first": second,
        "sent back": reflected.pack(kind, body),
    }


SEEN = "is not what the other end sent: it was changed, repeated or removed"
CHANGES = ["changed body", "changed kind", "changed tag", "longer", "only a head, of a longer one", "cut"]
CHANGES += ["without a tag", "next first", "sent back"]
