"""Advice from the table of a job: the most important first, each with its numbers and a remedy.

Thresholds are those below which a change would hardly be noticed: a tenth of the step for what all ranks have in
common, twice its fair share and a fiftieth of the step for a rank that others wait for. The first tenth of the steps
is warming up and does not count where there are enough others.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from .table import Array, JobTable, middle

NOTABLE = 0.10  # of a step
LATE = 0.02  # of a step, and at least
LATE_MS = 0.5
SMALL_BUCKET = 1 << 18
ENOUGH = 20  # steps, to speak of changes


def advice(table: JobTable) -> list[str]:
    """Sentences, at least one."""
    if not len(table.steps):
        return ["No step has been written yet."]
    found = list(_all(table))
    if found:
        return found
    return [
        f"Nothing stands out: a step takes {_ms(_typical(table.step))}, {_share(exposed_share(table))} of it waiting "
        "for other ranks, and no rank is late more often than others."
    ]


def _all(table: JobTable) -> Iterator[str]:
    stragglers = list(_stragglers(table))
    yield from stragglers
    yield from _data(table)
    if not stragglers:
        yield from _communication(table)
    yield from _buckets(table)
    yield from _slower(table)
    yield from _spikes(table)
    yield from _memory(table)


def settled(table: JobTable) -> slice:
    """The steps that count: without warming up."""
    count = len(table.steps)
    return slice(count // 10 if count >= ENOUGH else min(1, count - 1), None)


def _typical(values: Array) -> float:
    return float(middle(values))


def _of(table: JobTable, values: Array) -> Array:
    """The median of each rank, without warming up."""
    return middle(values[:, settled(table)], axis=1)


def exposed_share(table: JobTable) -> float:
    """Of the time of those steps, how much the ranks waited for each other."""
    part = settled(table)
    return float(np.nansum(table.exposed[:, part]) / max(np.nansum(table.step[:, part]), 1e-9))


def _stragglers(table: JobTable) -> Iterator[str]:
    ranks = len(table.ranks)
    if ranks < 2:
        return
    if not table.one_clock:
        yield "Who is late cannot be told: nobody knows how far the clocks of the hosts are apart."
        return
    least = max(LATE_MS, LATE * _typical(table.step))
    shares = table.last_share(least)
    for row in np.argsort(-np.nan_to_num(shares)):
        if not shares[row] >= max(0.3, min(0.6, 2 / ranks)):
            break
        late = table.late[row]
        others = np.arange(ranks) != row
        by = float(middle(late[late >= least]))
        yield f"Rank {table.ranks[row]} is late in {_share(float(shares[row]))} of steps, by {_ms(by)}; " + _why(
            table, int(row), others, by
        )


def _why(table: JobTable, row: int, others: Array, by: float) -> str:
    waits, computes = _of(table, table.data_wait), _of(table, table.compute)
    wait = float(np.nan_to_num(waits[row]))
    others_wait = float(np.nan_to_num(middle(waits[others])))
    if wait - others_wait >= by / 3:
        return (
            f"its data wait is {_ms(wait)} (the others': {_ms(others_wait)}). Give it more loader workers, a faster "
            "disk, or a shard of the same size as the others'."
        )
    more = float(computes[row] - middle(computes[others]))
    if more >= by / 3:
        return (
            f"it computes {_ms(more)} longer than the others. Is its processor or GPU slower, shared with another "
            "program or hot, or its share of the batch larger?"
        )
    return f"host {table.hosts[row] or 'unknown'}. Look at what else runs there, and at the step in detail below."


def _data(table: JobTable) -> Iterator[str]:
    waits = np.nan_to_num(_of(table, table.data_wait))
    least = float(waits.min())  # a rank whose data alone is late is named
    share = least / max(_typical(table.step), 1e-9)
    if share >= NOTABLE:
        yield (
            f"All ranks wait for data: {_ms(least)} of a step, {_share(share)} of it. More loader "
            "workers, prefetching or a simpler transformation will help; a faster network will not."
        )


def _communication(table: JobTable) -> Iterator[str]:
    share = exposed_share(table)
    if len(table.ranks) < 2 or share < NOTABLE:
        return
    moved = sum(sum(file.bytes.values()) for file in table.files) / max(sum(map(len, table.files)), 1)
    exposed = float(middle(table.exposed[:, settled(table)]))
    yield (
        f"Communication is exposed for {_ms(exposed)} of a step, {_share(share)} of it, for {_bytes(moved)} a step. A "
        "larger batch, backward_passes_per_step, compression to 16 bits or --autotune make it less."
    )


def _buckets(table: JobTable) -> Iterator[str]:
    sizes = [bucket["bytes"] for file in table.files for each in file.samples.values() for bucket in each["buckets"]]
    steps = sum(len(file.samples) for file in table.files)
    if not steps or len(sizes) < 20 * steps:
        return
    if float(np.median(sizes)) < SMALL_BUCKET and exposed_share(table) >= NOTABLE / 2:
        yield (
            f"Tensors travel in {len(sizes) / steps:.0f} buckets a step, half of them under "
            f"{_bytes(float(np.median(sizes)))}: a greater --fusion-threshold-mb, or --autotune, unites more of them."
        )


def _slower(table: JobTable) -> Iterator[str]:
    times = middle(table.step, axis=0)[settled(table)]
    if len(times) < ENOUGH:
        return
    quarter = len(times) // 4
    early, late = float(np.median(times[:quarter])), float(np.median(times[-quarter:]))
    if late > 1.2 * early:
        yield (
            f"Steps have become longer: {_ms(early)} in the first quarter, {_ms(late)} in the last. Does the script "
            "keep more and more (losses with their graphs, lists), or is a processor throttled?"
        )


def _spikes(table: JobTable) -> Iterator[str]:
    times = np.nanmax(np.nan_to_num(table.step), axis=0)[settled(table)]
    if len(times) < 5 * ENOUGH:
        return
    usual, worst = float(np.median(times)), float(np.percentile(times, 99))
    if worst > 3 * usual:
        lost = float(times[times > 3 * usual].sum() / times.sum())
        yield (
            f"One step in a hundred takes {worst / usual:.1f} times as long as usual, {_share(lost)} of all time: "
            "checkpoints, validation or a loader that begins anew?"
        )


def _memory(table: JobTable) -> Iterator[str]:
    growing: dict[str, list[tuple[int, int, int]]] = {}
    for file in table.files:
        of_device: dict[str, list[int]] = {}
        for each in file.samples.values():
            for device, number in each["memory"].items():
                of_device.setdefault(device, []).append(number)
        for device, numbers in of_device.items():
            if len(numbers) >= 8 and numbers[-1] > 1.2 * numbers[2] and _grows(numbers[2:]):
                growing.setdefault(device, []).append((numbers[-1] - numbers[2], file.rank, numbers[-1]))
    for device, ranks in growing.items():
        more, rank, now = max(ranks)
        others = f", and {len(ranks) - 1} others'" if len(ranks) > 2 else ", and another's" if len(ranks) == 2 else ""
        yield (
            f"Memory of rank {rank} on {device}{others} grows: by {_bytes(more)} to {_bytes(now)}. Something is kept "
            "from step to step."
        )


def _grows(numbers: list[int]) -> bool:
    steps = np.diff(numbers)
    return bool((steps > 0).mean() >= 0.6)


def _ms(value: float) -> str:
    return f"{value:.0f} ms" if value >= 10 else f"{value:.1f} ms" if value >= 0.1 else f"{value * 1000:.0f} us"


def _share(value: float) -> str:
    return f"{100 * value:.0f} %"


def _bytes(value: float) -> str:
    for unit in ("bytes", "KB", "MB"):
        if value < 1000:
            return f"{value:.0f} {unit}" if unit == "bytes" else f"{value:.3g} {unit}"
        value /= 1000
    return f"{value:.3g} GB"
