"""Pending requests of a rank to servers, and the messages of each.

A pull or a push of a caller is one question. It is a message to each server that has some of its rows, and is answered
when all of them are. client.py sends them, and sends them again.

Several threads may wait for one question.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any

from .. import _core
from .._api import Handle
from ..errors import HvdTimeoutError
from ..system.interrupts import Deferred
from . import messages
from .server import has_news, receive


class Question:
    """Something in flight: messages to servers that are not answered. `rows` is what a pull fills."""

    __slots__ = ("answer", "clock", "left", "rows", "table")

    def __init__(self, table: Any = None, rows: Any = None, clock: int = 0) -> None:
        self.table, self.rows, self.clock = table, rows, clock
        self.left = 0  # messages
        self.answer: Any = None


class Awaited(Handle):
    """A pull or a push in flight, for hvd.synchronize. made: makes the result when it is answered."""

    __slots__ = ("_question",)

    def __init__(self, question: Question, made: Callable[[], Any]) -> None:
        super().__init__([], lambda pending: made())
        self._question = question

    def done(self) -> bool:
        client = self._question.table.ready()
        with Deferred(), client.lock:
            client.turn()
            return not self._question.left

    def wait(self, timeout: Any = None) -> Any:
        table = self._question.table
        table.wait(self._question, _core.seconds_of(timeout))
        if self._question.left:
            error = HvdTimeoutError(f"table {table.name!r}: servers did not answer within {timeout} s [HVD031]")
            error.handle = self
            raise error
        return super().wait()


class Sent:
    """A message that is not answered. where: which of the question's rows a pull fills; else None."""

    __slots__ = ("at", "frames", "question", "wait", "where")

    def __init__(self, question: Question, frames: list[Any], where: Any, wait: float) -> None:
        self.question, self.frames, self.where = question, frames, where
        self.at = time.monotonic()
        self.wait = wait


class Link:
    """The way to one server."""

    def __init__(self, socket: Any) -> None:
        self.socket, self.ended = socket, ""  # how, once it has
        self.pushes, self.push_bytes = 0, 0  # numbers given out; of those that are not done
        self.sent: dict[int, dict[int, Sent]] = {messages.PULL: {}, messages.PUSH: {}, messages.CALL: {}}
        self.last_received = time.monotonic()

    def received(self) -> Iterator[list[Any]]:
        """Until there is no more."""
        while not self.ended and has_news(self.socket):
            yield receive(self.socket)
