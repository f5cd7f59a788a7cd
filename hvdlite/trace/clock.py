"""Offset of this rank's clock from that of rank 0: none on one host, bounded between hosts.

Ranks stamp events with CLOCK_MONOTONIC, which counts from each host's own start. When a job begins on several hosts,
ranks exchange a few numbers: in each round a rank says when it spoke, on its own clock, and notes when it had heard
all. What rank 0 said was said before this rank heard it, and what this rank said before rank 0 heard it. So every round
bounds the offset from both sides, and the tightest bounds of all rounds are kept: the best round counts, as the least
round trip does in a ping-pong. The estimate lies in the middle, and half of what is between the bounds is its error,
half a round trip of the way that the exchange takes. Nothing is assumed of how long the two ways take.

Clocks drift: some millionths, so some milliseconds an hour between hosts without NTP. The bound is of the job's begin.
"""

from __future__ import annotations

import struct
import time
from collections.abc import Callable, Sequence

ROUNDS = 6
_PAIR = struct.Struct("!qq")


def offset(
    rank: int,
    host_of: Sequence[int] | None,
    allgather: Callable[[bytes], list[bytes]] | None,
    now: Callable[[], int] = time.monotonic_ns,
) -> tuple[int, int]:
    """(offset_ns, error_ns): added to this rank's CLOCK_MONOTONIC it is that of rank 0, give or take the error.

    host_of: the number of each rank's host; None, or one host: (0, 0), and no rank is asked. Else all ranks call it:
    `allgather` gives every rank's bytes in rank order. Raises what that raises.
    """
    if host_of is None or allgather is None or len(set(host_of)) < 2:
        return 0, 0
    low, high = bounds(rank, allgather, now)
    parts = allgather(_PAIR.pack(low, high))  # ranks of a host have one clock: what one knows is true for all
    same = [_PAIR.unpack(part) for part, host in zip(parts, host_of) if host == host_of[rank]]
    if host_of[rank] == host_of[0]:
        return 0, 0
    low, high = max(pair[0] for pair in same), min(pair[1] for pair in same)
    return (low + high) // 2, (abs(high - low) + 1) // 2


def bounds(rank: int, allgather: Callable[[bytes], list[bytes]], now: Callable[[], int]) -> tuple[int, int]:
    """The least and the greatest that the offset of this rank can be, in ns."""
    lows, highs, received, sent = [], [], 0, 0
    for number in range(ROUNDS + 1):
        sent_before, sent = sent, now()
        parts = allgather(_PAIR.pack(sent, received))
        sent_by_first, received_by_first = _PAIR.unpack(parts[0])
        received = now()
        if number:
            highs.append(received_by_first - sent_before)
        lows.append(sent_by_first - received)
    return max(lows), min(highs)
