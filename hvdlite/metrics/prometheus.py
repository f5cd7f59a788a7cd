"""The job's numbers as Prometheus reads them: its text format, version 0.0.4.

A table lists the metrics: name, type, help. A sample has the labels rank and host of the rank that it is of,
and what else distinguishes it: plane, device, direction. Counters end in _total and only grow, until the job begins
anew; times are seconds and amounts bytes, as is the custom. What a rank has sent once stays, and
hvdlite_report_age_seconds is its age: a rank that has ended does not vanish from the pictures.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple


class Metric(NamedTuple):
    """One row of METRICS."""

    name: str
    type: str
    help: str


METRICS = (
    Metric("hvdlite_ranks", "gauge", "Ranks of the job."),
    Metric("hvdlite_report_age_seconds", "gauge", "Seconds since a rank sent its numbers."),
    Metric("hvdlite_steps_total", "counter", "Training steps."),
    Metric("hvdlite_step_seconds_total", "counter", "Time in training steps; the first holds all since init."),
    Metric("hvdlite_exposed_seconds_total", "counter", "Time that threads of the script waited for collectives."),
    Metric("hvdlite_negotiation_seconds_total", "counter", "Time that submitted tensors waited for other ranks."),
    Metric("hvdlite_data_wait_seconds_total", "counter", "Time that the training loop waited for data, if measured."),
    Metric("hvdlite_optimizer_seconds_total", "counter", "Time in the optimizers' own steps, if measured."),
    Metric("hvdlite_tensors_total", "counter", "Tensors that were given to collectives."),
    Metric("hvdlite_rounds_total", "counter", "Agreements among the ranks."),
    Metric("hvdlite_plane_bytes_total", "counter", "Bytes of tensors, by what carried them."),
    Metric("hvdlite_plane_messages_total", "counter", "Buckets, by what carried them."),
    Metric("hvdlite_plane_busy_seconds_total", "counter", "Time in which a bucket was under way."),
    Metric("hvdlite_link_bytes_total", "counter", "Bytes to and from ranks of other hosts, votes included."),
    Metric("hvdlite_bucket_bytes", "histogram", "Sizes of buckets."),
    Metric("hvdlite_memory_bytes", "gauge", "Memory in use, by device."),
    Metric("hvdlite_core_memory_bytes", "gauge", "Memory of hvdlite itself, by what for."),
    Metric("hvdlite_lateness_seconds", "gauge", "How much later than the first rank a rank was, in the last steps."),
    Metric("hvdlite_last_ratio", "gauge", "Share of the last steps in which a rank was the last."),
)
_SIMPLE = {
    "hvdlite_steps_total": ("steps", 1.0),
    "hvdlite_step_seconds_total": ("step_ns", 1e-9),
    "hvdlite_exposed_seconds_total": ("exposed_ns", 1e-9),
    "hvdlite_negotiation_seconds_total": ("negotiation_ns", 1e-9),
    "hvdlite_data_wait_seconds_total": ("data_ns", 1e-9),
    "hvdlite_optimizer_seconds_total": ("optimizer_ns", 1e-9),
    "hvdlite_tensors_total": ("submits", 1.0),
    "hvdlite_rounds_total": ("rounds", 1.0),
}
_BY = {
    "hvdlite_plane_bytes_total": ("bytes", "plane", 1.0),
    "hvdlite_plane_messages_total": ("messages", "plane", 1.0),
    "hvdlite_plane_busy_seconds_total": ("busy_ns", "plane", 1e-9),
    "hvdlite_link_bytes_total": ("links", "direction", 1.0),
    "hvdlite_memory_bytes": ("memory", "device", 1.0),
    "hvdlite_core_memory_bytes": ("core_memory", "use", 1.0),
}
_Sample = tuple[str, dict[str, str], float]


def _escaped(value: str) -> str:
    return value.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")


def _sizes(labels: dict[str, str], report: Mapping[str, Any]) -> Iterator[_Sample]:
    """A histogram: how many buckets were not larger than each bound."""
    name, so_far = "hvdlite_bucket_bytes", 0.0
    for bound, count in report["sizes"].items():
        so_far += count
        yield f"{name}_bucket", {**labels, "le": "+Inf" if bound == "larger" else f"{float(bound):.10g}"}, so_far
    yield f"{name}_sum", labels, float(sum(report["bytes"].values()))
    yield f"{name}_count", labels, so_far


def _samples(
    metric: str, size: int, reports: Sequence[Mapping[str, Any]], ages: Sequence[float],
    lateness: Mapping[int, Mapping[str, Any]]
) -> Iterator[_Sample]:  # fmt: skip
    if metric == "hvdlite_ranks":
        yield metric, {}, float(size)
        return
    for report, age in zip(reports, ages):
        labels = {"rank": str(report["rank"]), "host": report["host"]}
        late = lateness.get(report["rank"])
        if metric == "hvdlite_report_age_seconds":
            yield metric, labels, age
        elif metric in _SIMPLE:
            key, unit = _SIMPLE[metric]
            yield metric, labels, round(report[key] * unit, 9)
        elif metric in _BY:
            key, label, unit = _BY[metric]
            yield from (
                (metric, {**labels, label: each}, round(value * unit, 9)) for each, value in report[key].items()
            )
        elif metric == "hvdlite_bucket_bytes":
            yield from _sizes(labels, report)
        elif late is not None and metric == "hvdlite_last_ratio":
            yield metric, labels, late["last_share"]
        elif late is not None and metric == "hvdlite_lateness_seconds":
            for share in (50, 90, 99):
                yield metric, {**labels, "quantile": f"{share / 100:g}"}, late[f"p{share}_ms"] / 1000


def exposition(
    size: int, reports: Sequence[Mapping[str, Any]], ages: Sequence[float], lateness: Mapping[int, Mapping[str, Any]]
) -> str:  # fmt: skip
    """The text. reports: what ranks have sent (payload.py), ages: how many seconds ago; lateness: as judged."""
    lines = []
    for metric in METRICS:
        samples = list(_samples(metric.name, size, reports, ages, lateness))
        if not samples:
            continue
        lines += [f"# HELP {metric.name} {metric.help}", f"# TYPE {metric.name} {metric.type}"]
        for name, labels, value in samples:
            joined_labels = ",".join(f'{label}="{_escaped(each)}"' for label, each in labels.items())
            lines.append(f"{name}{{{joined_labels}}} {value!r}" if joined_labels else f"{name} {value!r}")
    return "\n".join(lines) + "\n"
