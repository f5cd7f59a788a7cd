"""Messages of workers and servers: a head of 48 bytes, then arrays as they lie in memory.

    u16 magic | u8 kind | u8 flags | u16 table | u16 worker | u16 server | u16 0 | u32 clock | u64 number | u64 after |
    u64 session | u32 rows | f32 rate                                                                 little-endian

`worker` and `server` are the two ends, `number` counts a worker's pushes to one server (from 1), or its questions.
`after`: a pull is to see all pushes of its worker up to this number, also those that were lost and come again.
`rate` of a push: the learning rate of its worker, where the table's rule has one that may change.
`session` identifies the incarnation of the job's ranks. A head of another magic, session or server is not looked at.

    kind     from, to   frames after the head          answered by
    PULL     w, s       ids (int64, different)         ROWS (float32), once the clocks allow it; until then WAITS, each
                                                       time that it is asked
    PUSH     w, s       ids, gradients (or nothing)    DONE with the number of the last push that was applied
    CLOCK    w, s; s, w (asked: clocks of all, int64)  CLOCK
    CALL     w, s       JSON                           ANSWER with JSON, or REFUSED with a sentence
    GONE     w, s; s, w a sentence: server `number` has ended                  -

No pickle and no schema: bytes of a server or worker are JSON or numbers.
"""

from __future__ import annotations

import struct
from typing import Any, NamedTuple

from ..errors import HvdError, HvdMismatchError, HvdPeerLostError

HEAD = struct.Struct("<HBBHHHHIQQQIf")
MAGIC = 0x7633  # with the version of the protocol
PULL, ROWS, WAITS, PUSH, DONE, CLOCK, CALL, ANSWER, REFUSED, GONE = range(1, 11)
TICK, LEAVE = 1, 2  # flags of a PUSH: the last of its step; the last of its worker (of a REFUSED: worker `number` left)
PIECE_BYTES = 4 << 20  # of rows in one message: heartbeats and short messages get through between two


class Head(NamedTuple):
    """The fields of a head that are not fixed."""

    kind: int
    flags: int
    table: int
    worker: int
    server: int
    clock: int
    number: int
    after: int
    session: int
    rows: int
    rate: float = 0.0


def pack(
    kind: int, worker: int, server: int, session: int, *, flags: int = 0, table: int = 0, clock: int = 0,
    number: int = 0, after: int = 0, rows: int = 0, rate: float = 0.0
) -> bytes:  # fmt: skip
    """The head of a message."""
    return HEAD.pack(MAGIC, kind, flags, table, worker, server, 0, clock, number, after, session, rows, rate)


def unpack(frame: Any, server: int) -> Head | None:
    """None for what is no head, or not of this server."""
    if len(frame) != HEAD.size:
        return None
    magic, kind, flags, table, worker, to, _, clock, number, after, session, rows, rate = HEAD.unpack(frame)
    if magic != MAGIC or to != server or not PULL <= kind <= GONE:
        return None
    return Head(kind, flags, table, worker, to, clock, number, after, session, rows, rate)


def refusal(head: Head, text: str) -> HvdError:
    """The error that a REFUSED is."""
    if not head.flags & LEAVE:
        return HvdMismatchError(text) if text.endswith("[HVD026]") else HvdError(text)
    lost = HvdPeerLostError(text)
    lost.rank = head.number
    return lost


def rows_per_piece(dim: int) -> int:
    """Rows of so many float32 that one message holds."""
    return max(1, PIECE_BYTES // (4 * dim))
