"""Text of `hvd.report()`: a line for each part of a step.

The dict of `hvd.stats()` in, lines out; nothing is measured or asked here. Milliseconds stand under each other, so that
the largest part of a step is seen at a glance; what is not known has no line. Ranks that are late come first, those
that were the last most often at the top.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

SHOWN = 8  # ranks that are late, at most


def amount(count: float, unit: str = "B") -> str:
    """Of bytes: `1.5 MB`."""
    for prefix in ("", "k", "M", "G"):
        if abs(count) < 1000:
            return f"{count:.4g} {prefix}{unit}"
        count /= 1000
    return f"{count:.4g} T{unit}"


def _line(name: str, text: str) -> str:
    return f"  {name:<13} {text}"


def _part(name: str, value: float | None, whole: float, why: str) -> list[str]:
    if value is None:
        return []
    return [_line(name, f"{value:9.3f} ms {100 * value / whole if whole else 0:5.1f} %  {why}")]


def of_steps(stats: Mapping[str, Any]) -> list[str]:
    """What a mean step was made of."""
    spread = stats["step_ms"]
    if spread is None:
        return [
            _line("steps", "none so far: optimizers of hvdlite count theirs, hvd.stats_step() those of other loops")
        ]
    whole = spread["mean"]
    tail = "p50 {p50:.3f}, p90 {p90:.3f}, p99 {p99:.3f}".format(**spread)
    return [
        _line("step", f"{whole:9.3f} ms          {tail}; of the last {stats['window']} of {stats['steps']} steps"),
        *_part("compute", stats["compute_ms"], whole, "neither of the next two"),
        *_part("exposed", stats["exposed_ms"], whole, "threads waited for collectives"),
        *_part("data wait", stats["data_wait_ms"], whole, "the loop waited for its loader"),
        *_part(
            "negotiation",
            stats["negotiation_ms"],
            whole,
            "tensors waited for other ranks (part of the above)",
        ),
        *_part("optimizer", stats["optimizer_ms"], whole, "the optimizer's own step (part of compute)"),
    ]


def of_traffic(stats: Mapping[str, Any]) -> list[str]:
    """What was carried, by plane and by device."""
    lines = []
    for carrier, total in stats["totals"]["bytes"].items():
        speed = stats["bandwidth"][carrier]
        fast = "" if speed is None else f", {amount(speed, 'B/s')} while a bucket was under way"
        text = f"{amount(total)} in {stats['totals']['messages'][carrier]} messages since init"
        if stats["bytes"]:
            text = f"{amount(stats['bytes'][carrier])} in {stats['messages'][carrier]:.1f} messages a step; {text}"
        lines.append(_line(carrier, text + fast))
    links = stats["totals"]["links"]
    if links["messages_out"]:
        text = f"{amount(links['bytes_out'])} out, {amount(links['bytes_in'])} in, {links['messages_out']} messages out"
        lines.append(_line("other hosts", text))
    buckets = stats["buckets"]
    if buckets["per_step"]:
        of_each = f"{amount(buckets['mean_bytes'])} and {buckets['mean_tensors']:.1f} tensors each"
        lines.append(_line("buckets", f"{buckets['per_step']:.1f} a step, {of_each} on average"))
    memory = ", ".join(f"{device} {amount(used)}" for device, used in stats["memory"].items())
    lines.append(_line("memory", f"{memory}; hvdlite's {amount(stats['core_memory']['total'])}"))
    return lines


def of_lateness(lateness: Mapping[int, Mapping[str, Any]] | None) -> list[str]:
    """The late ranks, the latest first."""
    if lateness is None:
        return [_line("late", "not known: no step in common, or no common clock")]
    order = sorted(lateness, key=lambda rank: (-lateness[rank]["last_share"], -lateness[rank]["p50_ms"], rank))
    lines = []
    for rank in order[:SHOWN]:
        text = (
            "last in {last_share:.0%} of {steps} steps; late by p50 {p50_ms:.3f}, p90 {p90_ms:.3f}, p99 {p99_ms:.3f} ms"
        )
        lines.append(_line(f"rank {rank}", text.format(**lateness[rank])))
    if len(order) > SHOWN:
        lines.append(_line("", f"and {len(order) - SHOWN} other ranks"))
    return lines


def of_ranks(ranks: list[Mapping[str, Any]]) -> list[str]:
    """A line for each rank: mean step and its parts, in ms."""
    lines = [_line("", "step, compute, exposed, data wait (ms)")]
    for each in ranks:
        spread = each["step_ms"]
        parts = [spread["mean"] if spread else None, each["compute_ms"], each["exposed_ms"], each["data_wait_ms"]]
        shown = ", ".join("-" if part is None else f"{part:.3f}" for part in parts)
        lines.append(_line(f"rank {each['rank']}", f"{shown} on {each['host']}"))
    return lines


def report(stats: Mapping[str, Any]) -> str:
    """All of it."""
    head = f"hvdlite: rank {stats['rank']} of {stats['size']} on {stats['host']}, {stats['seconds']:.1f} s since init"
    lines = [head, *of_steps(stats), *of_traffic(stats)]
    if "ranks" in stats:
        lines += ["who is late", *of_lateness(stats["lateness"]), "ranks", *of_ranks(stats["ranks"])]
    return "\n".join(lines)
