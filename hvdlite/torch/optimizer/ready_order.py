"""Order in which gradients become ready, and the ones after which the engine is woken.

Waking it for each of hundreds of gradients costs more than the gradients; waking it once leaves nothing to overlap. So
gradients are gathered into runs: the first is small, that reduction begins early; each next one is twice as long, since
it can move while the one before still does; and what is left for the end of backward, when no rank computes any more,
is small again.

Measured with a ResNet-50's backward on two ranks that fill both CPUs of their machine (median milliseconds over a step
without communication): first runs of 1 MB 26, of 4 MB 34, of 16 MB 30; DistributedDataParallel over Gloo 130.

None has a priority over another: step() needs all averages. A script that begins the next forward with some of them
uses `allreduce_async_(priority=...)`.

The order is learned. Backward goes roughly from the last parameter to the first, which is what the first pass assumes;
each round notes how it was, and the next one is cut accordingly. Nothing here is agreed between ranks: the plan
decides what is sent together, and a rank with another order only wakes its engine at other moments.
"""

from __future__ import annotations

from collections.abc import Sequence

FIRST_BYTES = 1 << 20
LONGEST_BYTES = 32 << 20
LAST_BYTES = 1 << 20


def cut(order: Sequence[int], bytes_of: Sequence[int]) -> set[int]:
    """The parameters, in this order of readiness, before which a run ends."""
    left = sum(bytes_of[number] for number in order)
    length, last = min(FIRST_BYTES, left // 4), min(LAST_BYTES, left // 4)
    ends, held = set(), 0
    for number in order:
        closes = left <= last < left + held  # what comes from here on is small enough for the end
        if held and (held >= length or closes):
            ends.add(number)
            held, length = 0, min(2 * length, LONGEST_BYTES)
        held += bytes_of[number]
        left -= bytes_of[number]
    return ends


class ReadyOrder:
    """What has become ready in this round, in order, and the ends of runs that follow from the rounds before.

    `ends[number]` is 1 where a run ends before this parameter; hooks hold on to it, and it is changed in place.
    """

    def __init__(self) -> None:
        self.ends = bytearray()
        self.bytes_of: list[int] = []
        self._known: list[int] | None = None
        self._seen: list[int] = []

    def add(self, size: int) -> None:
        """One more parameter, of so many bytes."""
        self.bytes_of.append(size)
        self.ends.append(0)
        self._known = None

    def begin(self) -> None:
        """A round begins."""
        if self._known is None:
            self._lay_out(list(reversed(range(len(self.ends)))))

    def _lay_out(self, order: list[int]) -> None:
        self._known = order
        ends = cut(order, self.bytes_of)
        self.ends[:] = bytes(number in ends for number in range(len(self.ends)))

    def ready(self, numbers: Sequence[int]) -> None:
        """These have become ready, in this order."""
        self._seen += numbers

    def round_over(self) -> None:
        """Everything of a round has completed."""
        if self._seen and self._seen != self._known:
            self._lay_out(self._seen)
        self._seen = []
