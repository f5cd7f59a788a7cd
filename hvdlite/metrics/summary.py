"""From steps to the numbers that `hvd.stats()` shows: means of the last steps, percentiles, totals since init.

Everything is in one dict that JSON can hold: names end in their unit, None is what is not known, and planes and devices
are keys of dicts of their own.

The first step is not among those that means are of, as soon as there are others: it began with init, and holds all that
a script does before it trains.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Sequence
from typing import Any

from .. import _core
from .._core.memory import memory_stats
from .step_rows import CARRIERS, INDEX, SIZES, Step

MS = 1e-6  # of a ns
_LINKS = ("bytes_out", "bytes_in", "messages_out", "messages_in")


def percentile(ordered: Sequence[float], share: float) -> float:
    """The number that `share` per cent of these, ascending, do not exceed; 0.0 of none."""
    return ordered[min(len(ordered) - 1, math.ceil(share / 100 * len(ordered)) - 1)] if ordered else 0.0


def spread(values: Sequence[float]) -> dict[str, float]:
    """Of these numbers the mean and percentiles."""
    ordered = sorted(values)
    found = {"mean": sum(ordered) / len(ordered)} if ordered else {"mean": 0.0}
    return {**found, **{f"p{share}": percentile(ordered, share) for share in (50, 90, 99)}}


def devices() -> dict[str, int]:
    """Bytes in use by device: of this process on the CPU, and of PyTorch's tensors on each GPU that it uses."""
    try:
        with open("/proc/self/statm") as counts:
            found = {"cpu": int(counts.read().split()[1]) * _page()}
    except (OSError, ValueError, IndexError):  # another system than Linux
        found = {}
    torch = sys.modules.get("torch")
    cuda = getattr(torch, "cuda", None)
    if cuda is not None and cuda.is_available() and cuda.is_initialized():
        for device in range(cuda.device_count()):
            used = cuda.memory_allocated(device)
            if used or device == cuda.current_device():
                found[f"cuda:{device}"] = int(used)
    return found


def _page() -> int:
    import resource

    return resource.getpagesize()


def exposed_ns(step: Step) -> int:
    """How long the step's threads waited for collectives, at most as long as it took."""
    return min(step.of("exposed_ns"), step.ns)


def compute_ns(step: Step) -> int:
    """What is neither that nor waiting for data."""
    return max(0, step.ns - exposed_ns(step) - step.of("data_ns"))


def recent(steps: Sequence[Step]) -> list[Step]:
    """Those that means are of."""
    return [step for step in steps if step.number > 1] or list(steps)


def local(steps: Sequence[Step], now: tuple[int, ...], host: str, since_ns: int) -> dict[str, Any]:
    """This rank's numbers, see `hvd.stats`."""
    of = recent(steps)

    def mean(what: Callable[[Step], float]) -> float | None:
        return sum(map(what, of)) / len(of) if of else None

    def mean_ms(name: str) -> float | None:
        value = mean(lambda step: step.of(name))
        return value * MS if value else None

    whole = sum(step.ns for step in of)
    shown = [carrier for carrier in CARRIERS if now[INDEX[f"messages.{carrier}"]]]
    exposed, compute = mean(exposed_ns), mean(compute_ns)
    negotiation = mean(lambda step: step.of("negotiation_ns"))
    return {
        "rank": _core.rank(),
        "size": _core.size(),
        "host": host,
        "seconds": (now[2] - since_ns) / 1e9,
        "steps": now[0],
        "window": len(of),
        "step_ms": spread([step.ns * MS for step in of]) if of else None,
        "compute_ms": None if compute is None else compute * MS,
        "exposed_ms": None if exposed is None else exposed * MS,
        "exposed_share": sum(map(exposed_ns, of)) / whole if whole else None,
        "negotiation_ms": None if negotiation is None else negotiation * MS,
        "data_wait_ms": mean_ms("data_ns"),
        "optimizer_ms": mean_ms("optimizer_ns"),
        "bytes": _per_step(of, "bytes", shown),
        "messages": _per_step(of, "messages", shown),
        "bandwidth": {carrier: _bandwidth(of, now, carrier) for carrier in shown},
        "buckets": _buckets(of, now),
        "memory": devices(),
        "core_memory": memory_stats(),
        "totals": totals(now, shown),
    }


def totals(now: tuple[int, ...], shown: Sequence[str]) -> dict[str, Any]:
    """Since init, with or without steps."""
    return {
        "tensors": now[INDEX["submits"]],
        "buckets": now[INDEX["buckets"]],
        "rounds": now[INDEX["rounds"]],
        "exposed_ms": now[INDEX["exposed_ns"]] * MS,
        "negotiation_ms": now[INDEX["negotiation_ns"]] * MS,
        "data_wait_ms": now[INDEX["data_ns"]] * MS,
        "bytes": {carrier: now[INDEX[f"bytes.{carrier}"]] for carrier in shown},
        "messages": {carrier: now[INDEX[f"messages.{carrier}"]] for carrier in shown},
        "links": {name: now[INDEX[f"link_{name}"]] for name in _LINKS},
    }


def _per_step(of: Sequence[Step], what: str, shown: Sequence[str]) -> dict[str, float]:
    return {carrier: sum(step.of(f"{what}.{carrier}") for step in of) / len(of) for carrier in shown} if of else {}


def _bandwidth(of: Sequence[Step], now: tuple[int, ...], carrier: str) -> float | None:
    """Bytes per second while a bucket was in flight: in these steps, or since init if nothing was in them."""
    moved = sum(step.of(f"timed_bytes.{carrier}") for step in of)
    busy = sum(step.of(f"busy_ns.{carrier}") for step in of)
    if not busy:
        moved, busy = now[INDEX[f"timed_bytes.{carrier}"]], now[INDEX[f"busy_ns.{carrier}"]]
    return moved / (busy / 1e9) if busy else None


def _buckets(of: Sequence[Step], now: tuple[int, ...]) -> dict[str, Any]:
    count = sum(step.of("buckets") for step in of)
    moved = sum(step.of(f"bytes.{carrier}") for step in of for carrier in CARRIERS)
    tensors = sum(step.of("submits") for step in of)
    sizes = {size: now[INDEX[f"size.{size}"]] for size in SIZES}
    return {
        "per_step": count / len(of) if of else None,
        "mean_bytes": moved / count if count else None,
        "mean_tensors": tensors / count if count else None,
        "sizes": {size: number for size, number in sizes.items() if number},
    }
