"""Events become spans in lanes, as rows of JSON.

csrc/trace/spans.c says how, and does it: a timeline is written while a job runs, and Python would take its time.
Here are the two ways in, from the ring of this process and from a record in a file, and the way out, text that is
written as it is or read as JSON.
"""

from __future__ import annotations

import errno
import functools
import os
from typing import Any

from .. import _core
from .._core import ffi, lib
from .events import Event

Row = dict[str, Any]


@functools.cache
def _numbers() -> dict[str, int]:
    found: dict[str, int] = {}
    while (name := lib.hvd_trace_name(len(found))) != ffi.NULL:
        found[_core.text_of(name)] = len(found)
    return found


def _bytes(text: str) -> bytes:
    """As C has texts: without a zero, and without half letters."""
    return text.replace("\0", "\N{REPLACEMENT CHARACTER}").encode("utf-8", "replace")


class Spans:
    """The picture of one rank. Its rows come as text, one on a line, oldest first; one thread at a time. OSError:
    there is no memory."""

    def __init__(self, rank: int, title: str, offset_ns: int = 0, mark_cycles: bool = False) -> None:
        made = lib.hvd_timeline_open(rank, _bytes(title), offset_ns, mark_cycles)
        if made == ffi.NULL:
            raise OSError(errno.ENOMEM, os.strerror(errno.ENOMEM))
        self._native = ffi.gc(made, lib.hvd_timeline_close)
        self._follower = ffi.new("struct hvd_follower *")
        self._size = ffi.new("size_t *")

    @property
    def lost(self) -> int:
        """Events of the ring that were overwritten before they could be read."""
        return int(self._follower.lost)

    @property
    def room(self) -> int:
        """How many events the ring holds; 0 before follow."""
        return int(self._follower.room)

    def follow(self) -> int:
        """Takes some thousand of the events that are new in the ring of this process, and returns how many; 0 where
        the job is over. The first call only notes where the ring is. Python's lock is not held."""
        return max(0, int(lib.hvd_timeline_follow(self._native, self._follower)))

    def feed(self, event: Event) -> None:
        """An event of a record; one that is not known makes no rows."""
        name = ffi.NULL if event.name is None else ffi.new("char[]", _bytes(event.name))
        what = _numbers().get(event.what, -1)
        lib.hvd_timeline_feed(self._native, event.t, what, event.tag, event.set, event.value, _bytes(event.by), name)

    def end(self) -> None:
        """Ends what is open: the recording ends here."""
        lib.hvd_timeline_end(self._native)

    def take(self, ending: bytes = b"") -> memoryview:
        """The rows since the last call, a comma and a new line before each, and behind them `ending`. Valid until the
        next call. OSError: there was no memory for them."""
        text = lib.hvd_timeline_take(self._native, ending, self._size)
        if text == ffi.NULL:
            raise OSError(errno.ENOMEM, os.strerror(errno.ENOMEM))
        return memoryview(ffi.buffer(text, self._size[0] + len(ending)))
