"""Simulator of plans: tasks wait for other tasks, then for resources.

Messages of a table, a pipeline's forwards and backwards, and sums of gradients are all played here. A task is ready
when all that it waits for is over, plus a lag (a message's alpha), and starts when all its resources are free. The one
that has been ready longest comes first, ties by number: the same tasks give the same answer. A resource may be held for
less time than the task takes. Times are in any one unit.

Fair sharing of a port is not played: messages pass one after the other, which ends at the same time for equal ones.
"""

from __future__ import annotations

import heapq
from collections.abc import Hashable, Iterable
from typing import Any

import numpy as np

from .links import Links
from .table import FOLD, STAGE, PlanError, Table

CURSORS = ("link", "rank")


class Tasks:
    """Tasks by number, from 0; `tags` says what each is."""

    def __init__(self) -> None:
        self.takes: list[float] = []
        self.holds: list[tuple[tuple[Hashable, float], ...]] = []
        self.after: list[tuple[tuple[int, float], ...]] = []
        self.tags: list[Any] = []

    def add(
        self,
        takes: float,
        holds: Iterable[tuple[Hashable, float]] = (),
        after: Iterable[tuple[int, float]] = (),
        tag: Any = None,
    ) -> int:
        """holds: (resource, how long) of each. after: (task, lag) of each that it waits for."""
        self.takes.append(takes)
        self.holds.append(tuple(holds))
        self.after.append(tuple(after))
        self.tags.append(tag)
        return len(self.takes) - 1

    def play(self) -> tuple[list[float], list[float]]:
        """When each starts and ends. Raises PlanError for tasks that wait for each other."""
        count = len(self.takes)
        left = [len(waits) for waits in self.after]
        then: list[list[tuple[int, float]]] = [[] for _ in range(count)]
        for task, waits in enumerate(self.after):
            for before, lag in waits:
                then[before].append((task, lag))
        ready, start, end = [0.0] * count, [0.0] * count, [0.0] * count
        free: dict[Hashable, float] = {}
        waiting: dict[Hashable, list[tuple[float, int]]] = {}
        number: dict[Hashable, int] = {}
        names: list[Hashable] = []
        # What happens: 0 a resource is freed, 1 a task is ready, 2 a task ends.
        events = [(0.0, 1, task) for task in range(count) if not left[task]]
        heapq.heapify(events)
        done = 0

        def begin(now: float, task: int) -> None:
            for resource, _ in self.holds[task]:
                if free.get(resource, 0.0) > now:
                    heapq.heappush(waiting.setdefault(resource, []), (ready[task], task))
                    return
            start[task], end[task] = now, now + self.takes[task]
            for resource, held in self.holds[task]:
                free[resource] = now + held
                if resource not in number:
                    number[resource] = len(names)
                    names.append(resource)
                heapq.heappush(events, (now + held, 0, number[resource]))
            heapq.heappush(events, (end[task], 2, task))

        while events:
            now, kind, what = heapq.heappop(events)
            if kind == 1:
                begin(now, what)
            elif kind == 0:
                queue = waiting.get(names[what])
                while queue and free[names[what]] <= now:
                    begin(now, heapq.heappop(queue)[1])
            else:
                done += 1
                for task, lag in then[what]:
                    ready[task] = max(ready[task], now + lag)
                    left[task] -= 1
                    if not left[task]:
                        heapq.heappush(events, (ready[task], 1, task))
        if done < count:
            raise PlanError(f"{count - done} tasks wait for each other [HVD001]")
        return start, end


def of_table(table: Table, count_bytes: int, links: Links, cursors: str = "link") -> tuple[Tasks, list[float]]:
    """A table on a buffer of so many bytes, and of each task how much later than its end its bytes are there, in ns.

    A move waits for what brought its chunks to its sender, for what still reads or writes its place, and for the move
    before it on its link; cursors "rank": for the one before it of its sender and of its receiver, as the core's
    interpreter does, which has one cursor each way.
    """
    if links.size != table.size:
        raise PlanError(f"plan {table.name!r} is for {table.size} ranks, but the links are for {links.size} [HVD004]")
    if cursors not in CURSORS:
        raise PlanError(f"cursors are by {' or by '.join(CURSORS)}, not by {cursors!r} [HVD008]")
    tasks, at = Tasks(), table.cut(count_bytes)
    later: list[float] = []
    wrote: dict[tuple[int, int], tuple[int, ...]] = {}  # by (rank, chunk)
    read: dict[tuple[int, int], list[int]] = {}
    kept: dict[tuple[int, int], list[int]] = {}
    last: dict[Any, int] = {}
    same: dict[tuple[int, int, float], tuple[float, tuple[tuple[Hashable, float], ...], float]] = {}
    edges = np.searchsorted(table.moves["step"], np.arange(table.steps + 1))
    for step in range(table.steps):
        rows = table.moves[edges[step] : edges[step + 1]].tolist()
        made = []
        for _, src, dst, first, n, how in rows:
            chunks, size = range(first, first + n), float(at[first + n] - at[first])
            if how == FOLD:  # adding takes no time: the core adds while it receives
                waits = {w for c in chunks for w in (*kept.pop((src, c), ()), *wrote.get((src, c), ()))}
                made.append(tasks.add(0.0, (), [(w, later[w]) for w in waits], ("fold", src)))
                later.append(0.0)
                continue
            if (
                src,
                dst,
                size,
            ) not in same:  # the same tuples again: fewer of them to make, and for Python to look through
                alpha, uses = links.of(src, dst)
                held = tuple((name, min(links.busy, alpha) + size * beta) for name, beta in uses)
                same[src, dst, size] = max(each for _, each in held), held, alpha - min(links.busy, alpha)
            takes, holds, late = same[src, dst, size]
            data = {w for c in chunks for w in wrote.get((src, c), ())}
            order = set()
            if how != STAGE:
                order = {w for c in chunks for w in (*read.get((dst, c), ()), *wrote.get((dst, c), ()))}
            cursor: list[Any] = [(src, dst)] + ([("out", src), ("in", dst)] if cursors == "rank" else [])
            order |= {last[key] for key in cursor if key in last}
            waiting = [(w, later[w]) for w in sorted(data)] + [(w, 0.0) for w in sorted(order - data)]
            made.append(tasks.add(takes, holds, waiting, (src, dst, first, n, how, step)))
            later.append(late)
            last.update(dict.fromkeys(cursor, made[-1]))
        _note(rows, made, wrote, read, kept)
    return tasks, later


def _note(
    rows: list[Any],
    made: list[int],
    wrote: dict[tuple[int, int], tuple[int, ...]],
    read: dict[tuple[int, int], list[int]],
    kept: dict[tuple[int, int], list[int]],
) -> None:
    """What the moves of a step have written and read: all of them read what was there before it."""
    for task, (_, _, dst, first, n, how) in zip(made, rows):
        for c in range(first, first + n):
            if how == STAGE:
                kept.setdefault((dst, c), []).append(task)
            else:
                read.pop((dst, c), None)
                wrote[dst, c] = (task,)
    for task, (_, src, _, first, n, how) in zip(made, rows):
        for c in range(first, first + n) if how != FOLD else ():
            read.setdefault((src, c), []).append(task)


def time_of(table: Table, count_bytes: int, links: Links, cursors: str = "link") -> float:
    """Return the time in ns until all ranks have the result of a plan, by simulation. ``plan.time`` is this function.

    Args:
        table (Table): the plan.
        count_bytes (int): the size of the buffer in bytes.
        links (Links): what joins the ranks.
        cursors (str): ``"link"`` (default) orders the moves of a link; ``"rank"`` those of a rank, as the core does.

    Returns:
        float: nanoseconds.

    Raises:
        PlanError: the links are those of another number of ranks, two ranks have no link, or ``cursors`` is unknown.

    Example:
        >>> from hvdlite import plan
        >>> links = plan.Links.uniform(4, "20us", "1GB/s")
        >>> plan.time(plan.make("ring", size=4), 4_000_000, links)
        6120000.0
    """
    tasks, later = of_table(table, count_bytes, links, cursors)
    _, end = tasks.play()
    return max((e + late for e, late in zip(end, later)), default=0.0)


def busy(table: Table, count_bytes: int, links: Links) -> dict[Hashable, float]:
    """For how many ns each resource is held by bytes alone."""
    found: dict[Hashable, float] = {}
    at = table.cut(count_bytes)
    for _, src, dst, first, n, how in table.moves.tolist():
        for name, beta in links.of(src, dst)[1] if how != FOLD else ():
            found[name] = found.get(name, 0.0) + float(at[first + n] - at[first]) * beta
    return found
