"""Payload of a rank for the metrics of the job: its counts since init and its arrival in the last steps.

It is JSON, in bytes padded to whole kilobytes: the core remembers requests by their sizes, and a new size each time
would push out what it knows of the training's own. All that is received is checked: ranks of a job trust each other,
but a damaged report must not end the training of a rank.
"""

from __future__ import annotations

import json
from typing import Any

from .._core.memory import memory_stats
from .step_rows import CARRIERS, INDEX, SIZES, History, row
from .stragglers import clock_offset
from .summary import devices, recent

STEPS = 64  # of which a rank reports its arrival, at most
_PADDED = 1024
_COUNTS = ("exposed_ns", "negotiation_ns", "data_ns", "optimizer_ns", "submits", "rounds")


def report(rank: int, host: str, history: History) -> dict[str, Any]:
    """Of this rank, now. Raises HvdNotInitializedError."""
    steps, now, clock = history.steps(), row(0), clock_offset()
    assert now is not None
    used = [carrier for carrier in CARRIERS if now[INDEX[f"messages.{carrier}"]]]
    arrived = {}
    if clock is not None:
        arrived = {step.number: step.arrived_ns + clock[0] for step in recent(steps)[-STEPS:] if step.arrived_ns}
    return {
        "rank": rank, "host": host, "steps": now[0], "step_ns": now[1] - history.since_ns,
        **{name: now[INDEX[name]] for name in _COUNTS},
        "bytes": {carrier: now[INDEX[f"bytes.{carrier}"]] for carrier in used},
        "messages": {carrier: now[INDEX[f"messages.{carrier}"]] for carrier in used},
        "busy_ns": {carrier: now[INDEX[f"busy_ns.{carrier}"]] for carrier in used},
        "links": {"out": now[INDEX["link_bytes_out"]], "in": now[INDEX["link_bytes_in"]]},
        "sizes": {size: now[INDEX[f"size.{size}"]] for size in SIZES},
        "memory": devices(), "core_memory": {use: n for use, n in memory_stats().items() if use != "total"},
        "arrived": arrived,
    }  # fmt: skip


def packed(report: dict[str, Any]) -> bytes:
    """To send."""
    payload = json.dumps(report, separators=(",", ":")).encode()
    return payload + b" " * (-len(payload) % _PADDED)


def unpacked(payload: bytes) -> dict[str, Any] | None:
    """What was sent; None: it is no report."""
    try:
        found = json.loads(payload)
        found["arrived"] = {int(number): int(time) for number, time in found["arrived"].items()}
        return found
    except (ValueError, TypeError, KeyError, AttributeError):
        return None
