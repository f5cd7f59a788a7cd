"""Protocol of a server: a state machine without sockets, threads or clocks; one message in, some out.

Pushes of a worker are applied in the order of their numbers, each once: one that came before is answered again and not
applied, one that comes too early is kept until those before it are there. So messages may be lost, doubled and delayed.

`clocks[w]` of a table is how many steps of worker w have ended: c + 1 once the push with the tick of step c is applied.
low is the least of them (of workers that have not left). A pull in step c is answered once low >= c - s and the pushes
of its worker are applied:

    staleness s = 0   bulk synchronous (BSP): the pushes of a step are kept, and applied when all have ended it: added
                      up by row, first each worker's, then in the order of ranks, as one update. So no worker sees a
                      part of a step, and bits do not depend on the order of arrival.
    s >= 1            stale synchronous (SSP; Ho et al., 2013): applied when they come. A pull in step c sees all steps
                      before c - s of everyone, all of its own, and perhaps more.
    s = None          asynchronous (ASP): never waits.

A rule with a learning rate takes that of the push. With s = 0 it takes that of the ticks of the step, which must agree;
a worker that leaves does not count while another ends the step with a tick.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from . import messages, optimizers
from .messages import Head
from .optimizers import F32
from .shard import Refused, Shard

WINDOW = 64  # pushes of a worker that are not done; a server keeps no more that come too early
LEFT = 0xFFFFFFFF  # the clock of a worker that has left

Answer = tuple[int, list[Any]]  # to which worker, frames


class _Parked(NamedTuple):
    """A pull that is not answered yet."""

    head: Head
    ids: Any
    since: float


class _Table:
    """One table: its shard, the clocks of its workers, what waits."""

    def __init__(self, spec: dict[str, Any], me: int, servers: int, workers: int) -> None:
        self.spec, self.shard = spec, Shard(spec, me, servers)
        self.staleness: int | None = spec["staleness"]
        self._scale = F32(1 / workers) if spec["reduce"] == "mean" else None
        self.clocks, self.low = np.zeros(workers, np.int64), 0  # low: the least of them
        self._kept: dict[int, list[list[tuple[Any, Any]]]] = {}  # BSP, by step and worker: (slots, grads)
        self._rates: dict[int, dict[int, tuple[bool, float]]] = {}  # BSP, by step and worker: (it left, its rate)
        self.parked: list[_Parked] = []
        self.job: Any = None  # a save or a load that is not over (background_checkpoint.py)
        self.broken = ""  # why it can give no rows any more
        self.applied = self.duplicates = self.pulls = self.lead = self.waited = 0
        self.waited_s = 0.0

    def may_see(self, clock: int) -> bool:
        return self.staleness is None or self.low >= clock - self.staleness

    def push(self, head: Head, ids: Any, grads: Any) -> None:
        slots = self.shard.slots(ids)
        if self.staleness == 0:
            self._kept.setdefault(head.clock, [[] for _ in self.clocks])[head.worker].append((slots, grads))
        elif len(slots):
            self._update(slots, grads, head.rate)

    def _update(self, slots: Any, grads: Any, rate: float) -> None:
        if isinstance(rule := self.shard.rule, optimizers.RATED):
            rule.rate = F32(rate)
        self.shard.apply(slots, grads, self._scale)

    def _rate(self, step: int) -> float:
        """On which the workers that ended this step agree."""
        rates = sorted((has_left, worker, rate) for worker, (has_left, rate) in self._rates.pop(step).items())
        _, first, rate = rates[0]
        for has_left, other, its in rates:
            if not has_left and its != rate:
                raise Refused(
                    f"table {self.shard.name!r}: rank {other} ends step {step + 1} with lr={F32(its)}, rank {first} "
                    f"with lr={F32(rate)}: set the same table.lr on all ranks [HVD026]"
                )
        return rate

    def end(self, head: Head) -> bool:
        """This push is the last of its worker's step; whether the slowest clock has moved."""
        before, has_left = self.low, bool(head.flags & messages.LEAVE)
        self.clocks[head.worker] = LEFT if has_left else head.clock + 1
        self.low = int(self.clocks.min())
        if self.staleness == 0:
            self._rates.setdefault(head.clock, {})[head.worker] = (has_left, head.rate)
        if self.low == before:
            return False
        for step in sorted(step for step in self._rates if step < self.low):
            of_worker = [_added(parts) for parts in self._kept.pop(step, []) if parts]
            try:
                rate = self._rate(step)
                if of_worker:
                    self._update(*_added(of_worker), rate)
            except Refused as error:
                self.broken = str(error)
            except Exception as error:  # of a user's rule; the gradient's worker is unknown by now
                text = f"its optimizer raised {type(error).__name__}: {error}"
                self.broken = f"table {self.shard.name!r}: {text}, at the end of step {step + 1}"
        return True

    def replace(self, shard: Shard) -> None:
        """Takes these rows from now on. What is pushed and not applied yet stays pushed."""
        for parts in (parts for of_worker in self._kept.values() for parts in of_worker):
            parts[:] = [(shard.slots(self.shard.ids_at(slots)), grads) for slots, grads in parts]
        self.spec, self.shard = shard.spec, shard


def _added(parts: list[tuple[Any, Any]]) -> tuple[Any, Any]:
    """(different slots, gradients added up in the order of parts). Within a part slots are different."""
    if len(parts) == 1:
        return parts[0]
    slots = np.unique(np.concatenate([some for some, _ in parts]))
    total = np.zeros((len(slots), parts[0][1].shape[1]), F32)
    for some, grads in parts:
        total[np.searchsorted(slots, some)] += grads
    return slots, total


class _Left(Refused):
    """A rank waits for one that has left the job."""

    def __init__(self, text: str, rank: int) -> None:
        super().__init__(text)
        self.rank = rank


class Protocol:
    """One server. `take` gets one message and returns the answers; it raises nothing. `now` is set by the loop.

    calls: what else a worker may ask for, by name: called with this, the table (or None) and what was sent (JSON).
    """

    def __init__(self, me: int, servers: int, job: int, calls: dict[str, Callable[..., Any]]) -> None:
        self.me, self.servers, self.job, self.now = me, servers, job, 0.0
        self._calls = {"hello": _hello, "open": _open, "bye": _bye, **calls}
        self.session = self.workers = self.strange = 0
        self.lost_servers: dict[int, str] = {}
        self._begin(0, 0)

    def _begin(self, session: int, workers: int) -> None:
        """Another incarnation of the job's ranks: tables and numbers begin anew."""
        self.session, self.workers = session, workers
        self.tables: list[_Table] = []
        self.left: set[int] = set()
        self._last = [0] * workers  # number of the last push that was applied
        self._early: list[dict[int, tuple[Head, list[Any]]]] = [{} for _ in range(workers)]
        self._parked_numbers: list[set[int]] = [set() for _ in range(workers)]  # numbers of parked pulls
        self._answered: list[tuple[int, list[Any]]] = [(0, []) for _ in range(workers)]  # the last CALL

    def head(self, kind: int, worker: int, **more: Any) -> bytes:
        return messages.pack(kind, worker, self.me, self.session, **more)

    def take(self, head: Head, frames: list[Any]) -> list[Answer]:
        """frames: what stands behind the head, as buffers, which may be kept."""
        try:
            if head.kind == messages.CALL:
                return self._call(head, frames)
            if head.session != self.session or head.worker >= self.workers:
                self.strange += 1
                return []
            if head.kind == messages.GONE:
                return self.server_ended(int(head.number), bytes(frames[0]).decode())
            if head.table >= len(self.tables):
                raise Refused(f"there is no table {head.table}")
            if self.tables[head.table].broken:
                raise Refused(self.tables[head.table].broken)
            if head.kind == messages.PULL:
                return self._pull(self.tables[head.table], head, frames)
            if head.kind == messages.PUSH:
                return self._push(head, frames)
            if head.kind == messages.CLOCK:
                table = self.tables[head.table]
                self._check_waits(table, int(table.clocks[head.worker]) - 1)
                notices = [
                    self._ended(head.worker, each) for each in self.lost_servers
                ]  # the first message may have been lost
                return [(head.worker, self._clock(messages.CLOCK, head, whole=True)), *notices]
            raise Refused(f"a worker does not send messages of kind {head.kind}")
        except _Left as error:
            refused = self.head(messages.REFUSED, head.worker, flags=messages.LEAVE, number=error.rank)
            return [(head.worker, [refused, str(error).encode()])]
        except Exception as error:  # the worker that asked raises it; others are served
            return [self._refused(head.worker, error)]

    def _refused(self, worker: int, error: Exception) -> Answer:
        text = str(error) if isinstance(error, Refused) else f"{type(error).__name__}: {error}"
        text = text if text.endswith("[HVD026]") else f"{text} [HVD033]"
        return worker, [self.head(messages.REFUSED, worker), f"server {self.me}: {text}".encode()]

    def _call(self, head: Head, frames: list[Any]) -> list[Answer]:
        request = json.loads(bytes(frames[0]))
        if head.session > self.session and request["do"] == "hello" and request["job"] == self.job:
            self._begin(head.session, int(request["workers"]))
        if head.session != self.session or head.worker >= self.workers:
            self.strange += 1
            return []
        number, answer = self._answered[head.worker]
        if head.number < number:
            return []
        if head.number > number:
            table = self.tables[head.table] if head.table < len(self.tables) else None
            result = self._calls[request["do"]](self, table, request)
            answer = [self.head(messages.ANSWER, head.worker, number=head.number), json.dumps(result).encode()]
            self._answered[head.worker] = (head.number, answer)
        notices = [self._ended(head.worker, each) for each in self.lost_servers] if request["do"] == "hello" else []
        return [*notices, (head.worker, answer)]

    def _clock(self, kind: int, head: Head, whole: bool) -> list[Any]:
        table = self.tables[head.table]
        clock = self.head(kind, head.worker, table=head.table, number=head.number, clock=table.low)
        return [clock, table.clocks.copy()] if whole else [clock]

    def _pull(self, table: _Table, head: Head, frames: list[Any]) -> list[Answer]:
        if head.number not in self._parked_numbers[head.worker]:
            ids = np.frombuffer(frames[0], np.int64)
            if self._may_see(table, head):
                return [self._rows(table, head, ids)]
            table.shard.slots(ids)  # refused now, if at all
            self._parked_numbers[head.worker].add(head.number)
            table.parked.append(_Parked(head, ids, self.now))
        self._check_waits(table, head.clock)
        return [(head.worker, self._clock(messages.WAITS, head, whole=True))]

    def _check_waits(self, table: _Table, clock: int) -> None:
        """Refuses to let a worker wait for steps of one that has left the job."""
        if table.staleness is None:
            return
        for each in self.left:
            if table.clocks[each] < clock - table.staleness:
                raise _Left(
                    f"table {table.spec['name']!r}: rank {each} has left the job after {table.clocks[each]} steps, and "
                    "this rank waits for its next one: a rank without more data calls table.leave() [HVD451]",
                    each,
                )

    def _may_see(self, table: _Table, head: Head) -> bool:
        return table.may_see(head.clock) and self._last[head.worker] >= head.after

    def _rows(self, table: _Table, head: Head, ids: Any) -> Answer:
        rows = table.shard.read(ids)
        table.pulls += 1
        table.lead = max(table.lead, head.clock - table.low)
        header = self.head(
            messages.ROWS, head.worker, table=head.table, number=head.number, clock=table.low, rows=len(rows)
        )
        return head.worker, [header, rows]

    def _released(self, table: _Table) -> list[Answer]:
        """Answers to pulls that waited."""
        answers, (parked, table.parked) = [], (table.parked, [])
        for each in parked:
            if not self._may_see(table, each.head):
                table.parked.append(each)
                continue
            self._parked_numbers[each.head.worker].discard(each.head.number)
            table.waited += 1
            table.waited_s += self.now - each.since
            answers.append(self._rows(table, each.head, each.ids))
        return answers

    def _push(self, head: Head, frames: list[Any]) -> list[Answer]:
        worker = head.worker
        last, early = self._last[worker], self._early[worker]
        if head.number > last + WINDOW:
            raise Refused(f"push {head.number} of worker {worker}, of whose pushes {last} were applied")
        if head.number <= last:
            self.tables[head.table].duplicates += 1
        elif head.number > last + 1:
            early[head.number] = (head, frames)
        answers: list[Answer] = []
        following: tuple[Head, list[Any]] | None = (head, frames) if head.number == last + 1 else None
        while following is not None:
            answers += self._apply(*following)
            self._last[worker] += 1
            following = early.pop(self._last[worker] + 1, None)
        for table in self.tables:  # all: a pull may wait for a push of its worker to another table
            if table.parked:
                answers += self._released(table)
        return [*answers, (worker, [self.head(messages.DONE, worker, number=self._last[worker])])]

    def _apply(self, head: Head, frames: list[Any]) -> list[Answer]:
        table = self.tables[head.table]
        if head.rows:
            ids, grads = np.frombuffer(frames[0], np.int64), np.frombuffer(frames[1], F32)
            if len(ids) != head.rows or grads.size != head.rows * table.shard.dim:
                raise Refused(f"{len(ids)} ids and {grads.size} numbers for {head.rows} rows of {table.shard.dim}")
            table.push(head, ids, grads.reshape(head.rows, table.shard.dim))
        table.applied += 1
        if not head.flags:
            return []
        moved = table.end(head)
        if table.broken:
            return [self._refused(each, Refused(table.broken)) for each in range(self.workers)]
        notified = [each for each in range(self.workers) if moved and table.staleness is not None]
        return [(each, self._clock(messages.CLOCK, head._replace(worker=each), whole=False)) for each in notified]

    def server_ended(self, number: int, text: str) -> list[Answer]:
        """The starter of a server reports that it has ended; every worker is notified."""
        self.lost_servers[number] = text
        return [self._ended(each, number) for each in range(self.workers)]

    def _ended(self, worker: int, number: int) -> Answer:
        return worker, [self.head(messages.GONE, worker, number=number), self.lost_servers[number].encode()]


def _hello(server: Protocol, table: _Table | None, request: dict[str, Any]) -> Any:
    return {}


def _open(server: Protocol, table: _Table | None, request: dict[str, Any]) -> Any:
    """One worker opens a table on all servers, under the same number."""
    del server.tables[request["number"] :]  # of one that another server could not open
    try:
        server.tables.append(_Table(request["spec"], server.me, server.servers, server.workers))
    except Exception as error:
        text = str(error) if isinstance(error, Refused) else f"{type(error).__name__}: {error}"
        return {"error": f"{text} [HVD033]"}
    return {}


def _bye(server: Protocol, table: _Table | None, request: dict[str, Any]) -> Any:
    """This worker sends no more."""
    server.left.add(request["worker"])
    return {}
