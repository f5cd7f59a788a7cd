"""Points that hvd.StepLogger sends to a tracker: the costs of the last steps, and the ranks that were late.

hvd.stats() looks back over 511 steps; a chart over time wants those since its last point. So this takes just these, and
all ranks send when they had submitted what each of them needed: 16 bytes a step.

It is imported when there is a first point.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from .. import _core
from .._core.byte_exchange import allgather_bytes
from .step_rows import KEPT, Step
from .stragglers import clock_offset
from .summary import MS, compute_ns, exposed_ns


def point(steps: Sequence[Step], every: int) -> dict[str, float]:
    """Of these steps, by tag. A collective."""
    found = {**costs(steps), **lateness(steps, min(every, KEPT))}
    return {f"hvdlite/{name}": value for name, value in found.items()}


def send(log: Any, found: Mapping[str, float], step: int) -> None:
    """In the words of the tracker."""
    if hasattr(log, "add_scalar"):
        for tag, value in found.items():
            log.add_scalar(tag, value, step)
    elif hasattr(log, "log_metrics"):
        log.log_metrics({**found}, step=step)
    else:
        getattr(log, "log", log)({**found, "hvdlite/step": step})


def costs(steps: Sequence[Step]) -> dict[str, float]:
    """Means of these steps."""
    parts: dict[str, Callable[[Step], int]] = {
        "step_ms": lambda step: step.ns, "compute_ms": compute_ns, "exposed_ms": exposed_ns,
        "data_wait_ms": lambda step: step.of("data_ns"),
    }  # fmt: skip
    sums = {name: sum(map(part, steps)) for name, part in parts.items()}
    return {
        name: whole * MS / len(steps) for name, whole in sums.items() if steps and (whole or name != "data_wait_ms")
    }


def lateness(steps: Sequence[Step], most: int) -> dict[str, float]:
    """Of this rank and of the latest. A collective, also of ranks that have no steps or no clock to report.

    most: ranks report at most so many steps, in messages of one size: each new one would push a request of the
    training's out of what the core knows by heart."""
    rank, size, clock = _core.rank(), _core.size(), clock_offset()
    if size == 1:
        return {}
    arrivals = {step.number: step.arrived_ns + clock[0] for step in steps[-most:] if step.arrived_ns} if clock else {}
    unused = [0] * (most - len(arrivals))  # no step has this number
    payload = array("q", [*arrivals, *unused, *arrivals.values(), *unused]).tobytes()
    of_all = [array("q", part) for part in allgather_bytes(payload, "hvdlite.StepLogger")]
    times = [dict(zip(each[:most], each[most:])) for each in of_all]
    shared = set(times[0]).intersection(*times[1:]) - {0}
    if not shared:
        return {}
    first, last = (sum(pick(each[step] for each in times) for step in shared) for pick in (min, max))
    arrived = [sum(each[step] for step in shared) for each in times]
    latest = max(range(size), key=arrived.__getitem__)
    scale = MS / len(shared)
    return {
        "late_ms": (arrived[rank] - first) * scale, "ahead_ms": (last - arrived[rank]) * scale,
        "last_rank": float(latest), "last_late_ms": (arrived[latest] - first) * scale,
    }  # fmt: skip
