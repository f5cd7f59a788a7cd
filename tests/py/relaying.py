"""Somebody in the middle: listens at one port, passes everything on to another, and changes what it likes."""

import contextlib
import socket
import threading


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
