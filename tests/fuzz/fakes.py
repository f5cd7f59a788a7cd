"""What decoders.py puts in place of the world: an input that is read, sockets that hold bytes, a clock that is set.

Only as much of each as hvdlite/transport/listener.py, hvdlite/transport/connector.py and store.py use. A socket gives
at most `piece` bytes in one call and takes at most `room` in all; a selector knows which of its sockets have something
to say.
"""

import random
import selectors
from types import SimpleNamespace
from typing import Any

_EXTREMES = (0, 1, 2, 3, 0x7F, 0x80, 0xFF, 0x7FFFFFFF, 0x80000000, 0xFFFFFFFF)


class Input:
    """Bytes that are read as choices; beyond the end all is 0."""

    def __init__(self, given: bytes) -> None:
        self._given, self._at = given, 0

    @property
    def left(self) -> int:
        """Bytes that were not read yet."""
        return max(0, len(self._given) - self._at)

    def below(self, bound: int) -> int:
        """0 <= choice < bound <= 256."""
        byte = self._given[self._at] if self._at < len(self._given) else 0
        self._at += 1
        return byte % bound

    def take(self, count: int) -> bytes:
        """As many bytes, or what is left."""
        taken = self._given[self._at : self._at + count]
        self._at += len(taken)
        return taken


def damaged(given: Input, message: bytearray) -> bool:
    """Changes the message as the input says, mostly not at all; whether it is another one now."""
    before, times = bytes(message), max(0, given.below(256) - 180) % 4
    for _ in range(times if message else 0):
        at, how = (given.below(256) * 256 + given.below(256)) % len(message), given.below(6)
        if how == 0:
            message[at] ^= 1 << given.below(8)
        elif how == 1:
            message[at] = given.below(256)
        elif how == 2:
            value = _EXTREMES[given.below(len(_EXTREMES))].to_bytes(4, "big")
            message[at : at + 4] = value[: len(message) - at]
        elif how == 3:
            piece = given.take(1 + given.below(16))
            message[at : at + len(piece)] = piece[: len(message) - at]
        elif how == 4:
            source = given.below(256) % len(message)
            piece = message[source : source + 8]
            message[at : at + len(piece)] = piece[: len(message) - at]
        else:
            message[at] = (message[at] + given.below(3) - 1) % 256
    return bytes(message) != before


class Clock:
    """The module `time`, as far as it is asked."""

    def __init__(self) -> None:
        self.now = 1000.0

    def monotonic(self) -> float:
        return self.now


class Os:
    """The module `os`, as far as it is asked: other bytes in every call, the same in every run."""

    def __init__(self) -> None:
        self.calls = 0

    def urandom(self, count: int) -> bytes:
        self.calls += 1
        return self.calls.to_bytes(count, "big")

    def strerror(self, code: int) -> str:
        return f"error {code}"


class Selector:
    """Those of its sockets are ready that have bytes, an end, or room for more."""

    def __init__(self) -> None:
        self.keys: dict[Any, SimpleNamespace] = {}

    def register(self, source: Any, events: int, data: Any = None) -> None:
        assert source not in self.keys
        self.keys[source] = SimpleNamespace(fileobj=source, events=events, data=data)

    def modify(self, source: Any, events: int, data: Any = None) -> None:
        self.keys[source] = SimpleNamespace(fileobj=source, events=events, data=data)

    def unregister(self, source: Any) -> None:
        del self.keys[source]

    def get_key(self, source: Any) -> SimpleNamespace:
        return self.keys[source]

    def select(self, timeout: Any = None) -> "list[tuple[SimpleNamespace, int]]":
        assert timeout is not None
        ready = [(key, key.events & key.fileobj.ready()) for key in self.keys.values()]
        return [(key, events) for key, events in ready if events]

    def close(self) -> None:
        pass


class Socket:
    """A connection: bytes that come, bytes that were sent."""

    def __init__(self, selector: Selector) -> None:
        self._selector = selector
        self._come = bytearray()
        self.sent = bytearray()
        self.piece, self.room = 1 << 20, 1 << 20
        self.taken = 0
        self.over = self.closed = False

    family = None  # as of a unix socket: it has no addresses

    def getsockname(self) -> str:
        return ""

    getpeername = getsockname

    def detach(self) -> "Socket":
        return self

    def comes(self, message: bytes) -> None:
        self._come += message

    @property
    def unread(self) -> int:
        """Bytes that have come and were not received."""
        return len(self._come)

    def unread_after(self, count: int) -> bool:
        """Was nothing received beyond the first `count` bytes?"""
        return self.taken <= count

    def ready(self) -> int:
        return (selectors.EVENT_READ if self._come or self.over else 0) | (selectors.EVENT_WRITE if self.room else 0)

    def recv(self, count: int) -> bytes:
        assert not self.closed and count > 0
        if not self._come and not self.over:
            raise BlockingIOError
        piece = bytes(self._come[: min(count, self.piece)])
        del self._come[: len(piece)]
        self.taken += len(piece)
        return piece

    def send(self, message: bytes) -> int:
        assert not self.closed
        if self.room == 0:
            raise BlockingIOError
        count = min(len(message), self.room)
        self.sent += message[:count]
        self.room -= count
        return count

    def close(self) -> None:
        assert self not in self._selector.keys, "closed, and still watched"
        self.closed = True

    def setblocking(self, flag: bool) -> None:
        assert not flag

    def setsockopt(self, *option: int) -> None:
        pass


class Listening:
    """A socket that connections come from."""

    def __init__(self) -> None:
        self.waiting: list[Socket] = []

    def ready(self) -> int:
        return selectors.EVENT_READ if self.waiting else 0

    def accept(self) -> "tuple[Socket, None]":
        if not self.waiting:
            raise BlockingIOError
        return self.waiting.pop(0), None

    def close(self) -> None:
        pass


class Stream:
    """What a listener makes of a connection that is proved."""

    def __init__(self, fileno: Socket) -> None:
        self.sock = fileno

    def setblocking(self, blocking: bool) -> None:
        pass

    def close(self) -> None:
        self.sock.close()


def mutated(kept: "list[bytes]", chance: random.Random) -> bytes:
    """An input that is kept, changed a little."""
    made = bytearray(chance.choice(kept))
    for _ in range(chance.randrange(1, 6)):
        at = chance.randrange(len(made) + 1)
        how = chance.randrange(4)
        if how == 0 and at < len(made):
            made[at] = chance.randrange(256)
        elif how == 1:
            del made[at : at + chance.randrange(1, 16)]
        elif how == 2:
            made[at:at] = chance.randbytes(chance.randrange(1, 9))
        else:
            other = chance.choice(kept)
            start = chance.randrange(len(other) + 1)
            made[at:at] = other[start : start + chance.randrange(1, 24)]
    return bytes(made[:512])
