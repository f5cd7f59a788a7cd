"""Strangers at a port: all that whoever knows no secret can send, at most 10 million bytes a second in all."""

import itertools
import os
import socket
import struct
import threading
import time

BYTES_A_SECOND = 10_000_000
HELD = 200  # connections that the crowd keeps open
BLOCK = b"x" * 50_000
ZMTP = b"\xff" + bytes(8) + b"\x7f\x03\x01" + b"CURVE".ljust(20, b"\0") + bytes(32)
CLAIMS = (  # the beginning of a message of 60 MB, as the protocols of a job have it
    ZMTP + b"\x06" + struct.pack(">Q", 60 << 20) + b"\x05HELLO",
    b"hvdlite5" + bytes(100) + struct.pack("<I", 60 << 20),
    struct.pack(">I", 60 << 20),
    b"POST / HTTP/1.1\r\nHost: localhost\r\nContent-Length: 60000000\r\n\r\n",
)


class Attack:
    """`with Attack("127.0.0.1", port):` every kind of stranger is there meanwhile. `tried` says how often each came."""

    def __init__(self, host, port):
        self._where = host, port
        self._over = threading.Event()
        self._sent, self._began, self._lock = 0, time.monotonic(), threading.Lock()
        kinds = (self.crowd, self.trickle, self.half, self.claims, self.headers, self.wrong_host, self.unread)
        self.tried = {kind.__name__: 0 for kind in kinds}
        self.let_in = 0  # replies to a wrong Host that were no refusal
        self._threads = [threading.Thread(target=self._repeat, args=(kind,), daemon=True) for kind in kinds]

    def __enter__(self):
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_):
        self._over.set()
        for thread in self._threads:
            thread.join()

    def _repeat(self, kind):
        while not self._over.is_set():
            open_now = []
            try:
                kind(open_now)
            except OSError:  # it was hung up on, as it should be
                pass
            finally:
                for sock in open_now:
                    sock.close()
            self.tried[kind.__name__] += 1
            self._over.wait(0.002)

    def _come(self, open_now, said=b"", receive_buffer=None):
        sock = socket.socket()
        open_now.append(sock)
        sock.settimeout(1.0)
        if receive_buffer is not None:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
        sock.connect(self._where)
        self._say(sock, said)
        return sock

    def _say(self, sock, said):
        with self._lock:
            self._sent += len(said)
            early = self._began + self._sent / BYTES_A_SECOND - time.monotonic()
        self._over.wait(max(0.0, early))
        sock.sendall(said)

    def crowd(self, open_now):
        for _ in range(HELD):
            self._come(open_now)
            if self._over.is_set():
                return
        self._over.wait(0.5)

    def trickle(self, open_now):
        for first in (b"\xff", b"h", b"G"):
            self._come(open_now, first)
        while not self._over.wait(0.02):
            for sock in open_now:
                self._say(sock, b"\0")

    def half(self, open_now):
        for said in (ZMTP[:11], ZMTP, ZMTP + b"\x04\xc8\x05HELLO", b"hvdlite5" + os.urandom(32), os.urandom(2000)):
            self._come(open_now, said)
        self._over.wait(0.2)

    def claims(self, open_now):
        for _, said in zip(range(20), itertools.cycle(CLAIMS)):
            self._come(open_now, said)
        for sock in itertools.islice(itertools.cycle(list(open_now)), 20 * 1100):  # 55 MB each, unless one hangs up
            try:
                self._say(sock, BLOCK)
            except OSError:
                sock.close()
                if all(each.fileno() < 0 for each in open_now):
                    return

    def headers(self, open_now):
        sock = self._come(open_now, b"GET / HTTP/1.1\r\nHost: localhost\r\n")
        while not self._over.is_set():
            self._say(sock, b"X-More: %b\r\n" % BLOCK[:1000])

    def wrong_host(self, open_now):
        sock = self._come(open_now, b"GET / HTTP/1.1\r\nHost: evil.example\r\n\r\n")
        self.let_in += sock.recv(100).startswith(b"HTTP/1.1 2")

    def unread(self, open_now):
        for path in (b"/", b"/metrics", b"/numbers.json") * 10:
            self._come(open_now, b"GET %b HTTP/1.1\r\nHost: localhost\r\n\r\n" % path, receive_buffer=4096)
        self._over.wait(0.5)


def listening(pid):
    """TCP ports of 127.0.0.1 at which this process listens."""
    with open(f"/proc/{pid}/net/tcp", encoding="ascii") as file:
        rows = [line.split() for line in file.read().splitlines()[1:]]
    ports = {f"socket:[{row[9]}]": int(row[1].rpartition(":")[2], 16) for row in rows if row[3] == "0A"}
    return [ports[link] for link in open_files(pid) if link in ports]


def open_files(pid):
    """What its descriptors are."""
    found = []
    for name in os.listdir(f"/proc/{pid}/fd"):
        try:
            found.append(os.readlink(f"/proc/{pid}/fd/{name}"))
        except FileNotFoundError:  # closed meanwhile
            pass
    return found


def resident(pid):
    """Bytes of memory."""
    with open(f"/proc/{pid}/statm", encoding="ascii") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
