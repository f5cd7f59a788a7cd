"""Wait for other ranks within the bound of staleness, and the report meanwhile.

A pull, or the end of a step, waits for ranks that are too many steps behind. Once a second it asks for their clocks,
since a server's message may have been lost.

After HVDLITE_STALL_CHECK_TIME the late ranks are named, and after HVDLITE_COLLECTIVE_TIMEOUT the wait is an error.
"""

from __future__ import annotations

import sys
import time
from typing import Any, NamedTuple

import numpy as np

from ..errors import HvdTimeoutError
from .protocol import LEFT

_ASK_S = 1.0


class Limits(NamedTuple):
    """Seconds."""

    peer: float  # that a server may be silent
    warn: float  # of waiting for ranks, before they are named; 0: never
    end: float  # of waiting for ranks; 0: without limit
    start: float  # in which servers answer first


class Patience:
    """While a table waits for other ranks: asks for their clocks again, names late ranks, gives up in the end."""

    def __init__(self, client: Any, table: Any) -> None:
        self._client, self._table, self._since = client, table, time.monotonic()
        self._last_look, self._warned = self._since - 0.8 * _ASK_S, False  # at first soon, to know which ranks to name
        limits = client.limits
        self._first = self._since + min(0.2 * _ASK_S, limits.end or _ASK_S, limits.warn or _ASK_S)

    def look(self) -> None:
        """Called in each turn of the wait. Raises HvdTimeoutError."""
        now, limits = time.monotonic(), self._client.limits
        if now < self._first:
            return
        if now - self._last_look > _ASK_S:
            self._last_look = now
            self._client.ask_clock(self._table.number)
        for limit, ends in ((limits.end, True), (limits.warn, False)):
            if not limit or now - self._since < limit or ((self._warned or self._table.clocks is None) and not ends):
                continue
            text = f"table {self._table.name!r}: {self._late()}, for more than {limit:g} s"
            if ends:
                error = HvdTimeoutError(f"{text} (HVDLITE_COLLECTIVE_TIMEOUT sets the limit) [HVD031]")
                self._client.fail(error, f"has waited too long: {text}")
                raise error
            self._warned = True
            print(f"hvdlite: rank {self._client.rank}: {text} [HVD032]", file=sys.stderr, flush=True)

    def _late(self) -> str:
        clocks = self._table.clocks
        if clocks is None:
            return "waits for a server that has not told other ranks' steps"
        low, here = int(clocks.min()), sorted(int(each) for each in np.nonzero(clocks > clocks.min())[0])
        late = ", ".join(str(each) for each in np.nonzero(clocks == low)[0])
        ended = f"which {'has' if ',' not in late else 'have'} ended {'all' if low == LEFT else low} steps"
        return f"step {self._table.clock + 1} waits for rank {late}, {ended} (ranks {here} are there)"
