"""Scalars of steps, under names with slashes, for TensorBoard and its like.

A group of numbers becomes a group of charts: step_ms/p50, bytes/shm. What is not known is left out, and comes when it
is. Totals are not among them: their charts only rise.
The caller adds a prefix of its own, and knows the step.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

_DRAWN = (
    "step_ms", "compute_ms", "exposed_ms", "exposed_share", "negotiation_ms", "data_wait_ms", "optimizer_ms", "bytes",
    "messages", "bandwidth", "memory",
)  # fmt: skip


def scalars(stats: Mapping[str, Any]) -> dict[str, float]:
    """Flat, without what is None: {"step_ms/mean": 12.3, "bytes/shm": 1e6, ...}."""
    found: dict[str, float] = {}
    for name in _DRAWN:
        value = stats[name]
        if isinstance(value, Mapping):
            found.update({f"{name}/{key}": float(each) for key, each in value.items() if each is not None})
        elif value is not None:
            found[name] = float(value)
    buckets = stats["buckets"]
    if buckets["per_step"] is not None:
        found["buckets/per_step"] = float(buckets["per_step"])
    found["core_memory/total"] = float(stats["core_memory"]["total"])
    return found
