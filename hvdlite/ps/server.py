"""A process that holds shares of tables: one loop, one thread of Python; ZeroMQ's own thread moves and encrypts bytes.

It is no rank and runs nothing of the script. Its starter gives it a `ServerOptions` and a `Source`: the launcher
(server_main.py) or a rank (server_child.py). It ends when the source ends it, or when its parent has ended. All state
is in memory.
"""

from __future__ import annotations

import contextlib
import functools
import os
import time
from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

from ..security import curve
from . import checkpoint, messages, protocol
from .socket_watch import SocketWatch

SILENCE_MS = 10_000  # of a connection, after which it is made anew
_LOOK_MS = 1000  # how often it is looked whether the parent is there
_MORE, _NOBLOCK, _EVENTS, _POLLIN = 2, 1, 15, 1  # ZMQ_SNDMORE, ZMQ_DONTWAIT: pyzmq's enums are slower
_AT_ONCE = 64  # messages that are taken before other news is looked at


class ServerOptions(NamedTuple):
    """What a server gets when it is started."""

    number: int
    servers: int
    secret: bytes
    job: int  # distinguishes jobs where nothing is encrypted
    encrypted: bool
    host: str  # the address at which it listens


class Source(Protocol):
    """The process that has started it."""

    def fileno(self) -> int:
        """Readable when there is news."""
        ...

    def ended(self, report: Callable[[int, str], None]) -> bool:
        """Takes the news; tell(number, text): another server has ended. True: this one is to end."""
        ...


def send(socket: Any, frames: list[Any]) -> int:
    """The bytes of these frames. They are copied: a thread of pyzmq's would have to free what is handed over."""
    count, last = 0, len(frames) - 1
    for number, each in enumerate(frames):
        count += memoryview(each).nbytes
        socket.send(each, _MORE if number < last else 0)
    return count


def has_news(socket: Any) -> bool:
    """Whether a message has come. The descriptor of a ZeroMQ socket is readable only once for all that has come, and a
    send may take that, so this precedes each wait for the descriptor."""
    return bool(socket.get(_EVENTS) & _POLLIN)


def receive(socket: Any) -> list[Any]:
    """The frames of a message, which must have come: else zmq.Again. A frame has the flag whether another follows;
    recv_multipart asks the socket after each."""
    frames = [socket.recv(_NOBLOCK, copy=False)]
    while frames[-1].more:
        frames.append(socket.recv(_NOBLOCK, copy=False))
    return frames


def run(order: ServerOptions, source: Source, announce: Callable[[str], None]) -> None:
    """Serves until the source ends it. announce(address) is called once it listens."""
    zmq = curve.zmq_for("hvd.ps")
    context, watch, parent = zmq.Context(), SocketWatch(), os.getppid()
    router, door = context.socket(zmq.ROUTER), None
    keys = curve.Keys(order.secret, "ps", zmq)
    if order.encrypted:
        door = curve.Door(context, keys, zmq)  # before the router binds
        watch.register(door.socket.FD)
        keys.serve(router, order.number)
    curve.bounded(router, SILENCE_MS)
    router.linger = 0
    router.router_handover = 1  # a worker that connects again has the name that it had
    proxy = keys.listen(router, order.host)
    watch.register(router.FD)
    watch.register(source.fileno())
    left = functools.partial(_left, zmq, router)
    calls: dict[str, Callable[..., Any]] = {**checkpoint.CALLS, "stats": _stats, "left": left}
    state = protocol.Protocol(order.number, order.servers, order.job, calls)

    def answer(answers: list[protocol.Answer]) -> None:
        for worker, frames in answers:
            send(router, [b"%d" % worker, *frames])

    announce(proxy.address)
    is_empty = False
    while os.getppid() == parent:
        ready = watch.wait(_LOOK_MS if is_empty else 0)
        if source.fileno() in ready and source.ended(lambda number, text: answer(state.server_ended(number, text))):
            parent = -1
        while door is not None and has_news(door.socket):
            door.turn()
        state.now = time.monotonic()
        is_empty = _take(router, state, answer)
    context.destroy(linger=0)
    proxy.close()


def _take(router: Any, state: protocol.Protocol, answer: Callable[[list[protocol.Answer]], None]) -> bool:
    """Messages that have come; whether there are no more. Those of another job or session are counted and not
    answered."""
    for _ in range(_AT_ONCE):
        if not has_news(router):
            return True
        name, *frames = receive(router)
        head = messages.unpack(frames[0].buffer, state.me) if frames else None
        if head is None or (name.bytes != b"%d" % head.worker and head.kind != messages.GONE):
            state.strange += 1
            continue
        answer(state.take(head, [each.buffer for each in frames[1:]]))
    return False


def _left(zmq: Any, router: Any, server: protocol.Protocol, table: Any, request: dict[str, Any]) -> Any:
    """How many workers have yet to report that they have left, and how many of these are connected."""
    waiting, connected = set(range(server.workers)) - server.left, 0
    router.router_mandatory = 1  # a send to an unknown peer is an error
    for worker in waiting:
        with contextlib.suppress(zmq.ZMQError):
            router.send_multipart([b"%d" % worker, server.head(messages.ANSWER, worker)])  # to no question
            connected += 1
    router.router_mandatory = 0
    return {"waiting": len(waiting), "connected": connected}


def _stats(server: protocol.Protocol, table: Any, request: dict[str, Any]) -> Any:
    shard = table.shard
    return {
        "rows": shard.used,
        "bytes": shard.bytes,
        "clocks": [None if each == protocol.LEFT else int(each) for each in table.clocks],
        "lead": table.lead,
        "pushes": table.applied,
        "duplicates": table.duplicates,
        "pulls": table.pulls,
        "waited": table.waited,
        "waited_s": table.waited_s,
        "strange": server.strange,
        "cpu_s": time.process_time(),
        "pid": os.getpid(),
    }
