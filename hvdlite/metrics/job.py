"""All ranks' numbers at once: a collective, for `hvd.stats(everyone=True)`.

Each rank sends its own numbers and when it arrived in its last steps, and all get all of it, so every rank
computes the same lateness. It is one allgather of a few dozen kilobytes for each rank: for the end of an epoch, and not
for every step. The port for Prometheus has a way of its own (aggregator.py).
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from .._core.byte_exchange import allgather_bytes
from .step_rows import Step
from .stragglers import clock_offset, judge
from .summary import recent


def gathered(mine: dict[str, Any], steps: Sequence[Step]) -> dict[str, Any]:
    """What `hvd.stats(everyone=True)` adds. All ranks call it."""
    clock = clock_offset()
    arrived = {}
    if clock is not None:
        arrived = {step.number: step.arrived_ns + clock[0] for step in recent(steps) if step.arrived_ns}
    payload = json.dumps({"stats": mine, "arrived": arrived}).encode()
    of_all = [json.loads(part) for part in allgather_bytes(payload, "hvdlite.stats")]
    times = [{int(number): time for number, time in each["arrived"].items()} for each in of_all]
    return {"ranks": [each["stats"] for each in of_all], "lateness": judge(times)}
