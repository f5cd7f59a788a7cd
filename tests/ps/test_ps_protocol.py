"""Servers' rules on seeded networks that drop, double and reorder, in one process: hvdlite.ps.protocol without sockets.

2 to 4 workers, 1 to 3 servers, staleness 0, 1, 3 or none, one or two copies, perhaps a server that dies, perhaps a
worker that leaves early. Each worker adds 1 to its own column of some rows in each step, and checks what it pulls in
step c: with s = 0 exactly all steps before c, of everyone; with s >= 1 at least those before c - s, all of its own, and
nothing that was not sent; without a bound all of its own. At the end every row is the sum of all pushes on each copy.
"""

import json
import random

import numpy as np
import pytest
from ranks import everything

from hvdlite.ps import messages
from hvdlite.ps.placement import RowPlacement
from hvdlite.ps.protocol import Protocol, _Table

F, STEPS, ROWS, SESSION, JOB = np.float32, 12, 40, 7, 9


class Worker:
    def __init__(self, me, world):
        self.me, self.world, self.step, self.asks = me, world, 0, {}
        self.pushes, self.undone = [0] * world.servers, [{} for _ in range(world.servers)]
        self.low, self.pulls, self.waits = [0] * world.servers, 0, False
        self.drawn = [np.unique(np.random.default_rng((world.seed, me, n)).integers(0, ROWS, 5)) for n in range(STEPS)]
        self.steps = world.r.choice([STEPS, STEPS, STEPS, world.r.randint(1, STEPS)])  # then it leaves

    def head(self, kind, server, **more):
        return messages.pack(kind, self.me, server, SESSION, **more)

    def owner(self, ids):
        lists = self.world.placement.owners_of(ids)
        return np.where(np.isin(lists[:, 0], self.world.alive), lists[:, 0], lists[:, -1])

    def act(self):
        """The next thing that it does by itself."""
        s, low = self.world.staleness, min(self.low[k] for k in self.world.alive)
        if self.waits:
            self.waits = s is not None and low < self.step - s - 1 and self.step < self.steps
        elif not self.asks and self.step < self.steps:
            rng = np.random.default_rng((self.world.seed, 99, self.me, self.step))
            self.ask(rng.permutation(ROWS)[: 1 + self.step % 6].astype(np.int64))

    def ask(self, ids):
        for server in np.unique(self.owner(ids)).tolist():
            self.pulls += 1
            some = ids[self.owner(ids) == server]
            head = self.head(messages.PULL, server, number=self.pulls, clock=self.step, after=self.pushes[server])
            self.asks[self.pulls] = (server, [head, some])

    def push(self):
        ids, lists = self.drawn[self.step], self.world.placement.owners_of(self.drawn[self.step])
        last = messages.LEAVE if self.step == self.steps - 1 < STEPS - 1 else messages.TICK
        for server in self.world.alive:
            some = ids[(lists == server).any(axis=1)]
            grads = np.zeros((len(some), self.world.workers), F)
            grads[:, self.me] = 1
            for flags, body in ((0, [some, grads]), (last, [])) if len(some) else ((last, []),):
                self.pushes[server] += 1
                head = self.head(
                    messages.PUSH, server, number=self.pushes[server], clock=self.step, flags=flags,
                    rows=len(body[0]) if body else 0,
                )  # fmt: skip
                self.undone[server][self.pushes[server]] = [head, *body]
        self.step, self.waits = self.step + 1, True

    def take(self, server, frames):
        head = messages.unpack(frames[0], server)
        assert head.kind != messages.REFUSED, frames[1]
        if head.kind == messages.DONE:
            self.undone[server] = {n: each for n, each in self.undone[server].items() if n > head.number}
        elif head.kind in (messages.CLOCK, messages.WAITS):
            self.low[server] = max(self.low[server], head.clock)
        elif head.kind == messages.ROWS and head.number in self.asks:
            _, (_, ids) = self.asks.pop(head.number)
            self.world.check(self, ids, frames[1])
            if not self.asks:
                self.push()

    def gone(self, server):
        self.undone[server] = {}
        for number in [n for n, (k, _) in self.asks.items() if k == server]:
            self.ask(self.asks.pop(number)[1][1])


class World:
    def __init__(self, seed):
        self.seed, self.r = seed, random.Random(seed)
        self.workers, self.servers = self.r.randint(2, 4), self.r.randint(1, 3)
        self.staleness, replicas = self.r.choice([0, 0, 1, 3, None]), self.r.randint(1, min(2, self.servers))
        self.placement, self.alive = RowPlacement(ROWS, self.servers, replicas), list(range(self.servers))
        self.states = [Protocol(k, self.servers, JOB, {}) for k in self.alive]
        spec = {
            "name": "t", "rows": ROWS, "dim": self.workers, "rule": "Add", "options": {}, "staleness": self.staleness,
            "replicas": replicas, "order": "hash", "reduce": "sum", "scale": 0.0, "seed": 0,
        }  # fmt: skip
        for state in self.states:
            for n, asked in enumerate(
                [{"do": "hello", "job": JOB, "workers": self.workers}, {"do": "open", "spec": spec, "number": 0}]
            ):
                self.tell(
                    state,
                    [messages.pack(messages.CALL, 0, state.me, SESSION, number=n + 1), json.dumps(asked).encode()],
                )
        self.them, self.air, self.lead = [Worker(w, self) for w in range(self.workers)], [], 0
        self.dies = self.r.randint(50, 800) if replicas == 2 and self.r.random() < 0.5 else -1

    def tell(self, state, frames):
        return state.take(messages.unpack(frames[0], state.me), frames[1:])

    def check(self, worker, ids, rows):
        c, s = worker.step, self.staleness
        for each, row in zip(ids.tolist(), rows):
            for other in self.them:
                steps = [n for n in range(other.steps) if each in other.drawn[n]]
                must = sum(n < (c if other is worker or s == 0 else 0 if s is None else c - s) for n in steps)
                may = must if s == 0 else sum(n < other.step for n in steps)
                assert must <= row[other.me] <= may, (self.seed, c, s, each, other.me, row[other.me], must, may)
        lead = c - min((other.step for other in self.them if other.step < other.steps), default=c)
        assert s is None or lead <= s, (self.seed, lead)
        self.lead = max(self.lead, lead)

    def send(self, *message):
        kind = self.r.random()
        self.air += [] if kind < 0.1 else [message, message] if kind < 0.2 else [message]

    def send_again(self):
        """Something that is not answered."""
        for worker in [self.r.choice(self.them)]:
            for server in self.alive:
                for frames in list(worker.undone[server].values())[:3]:
                    self.send(True, server, worker.me, frames)
                if worker.waits:
                    self.send(True, server, worker.me, [worker.head(messages.CLOCK, server)])
            for server, frames in list(worker.asks.values()):
                self.send(True, server, worker.me, frames)

    def over(self):
        return all(w.step == w.steps and not any(w.undone) for w in self.them)

    def run(self):
        for turn in range(200_000):
            if self.over():
                break
            if turn == self.dies:
                dead = self.alive.pop(self.r.randrange(len(self.alive)))
                self.air = [each for each in self.air if each[1] != dead]
                for each in self.them:
                    each.gone(dead)
            self.r.choice(self.them).act()
            if self.r.random() < 0.3 or not self.air:
                self.send_again()
            elif self.air:
                there, server, me, frames = self.air.pop(self.r.randrange(len(self.air)))
                if there:
                    for to, answer in self.tell(self.states[server], frames):
                        self.send(False, server, to, answer)
                else:
                    self.them[me].take(server, frames)
        assert self.over(), f"schedule {self.seed} does not end: {[w.step for w in self.them]}"
        want = np.zeros((ROWS, self.workers), F)
        for worker in self.them:
            for n in range(worker.steps):
                want[worker.drawn[n], worker.me] += 1
        for server in self.alive:
            mine = np.nonzero((self.placement.owners_of(np.arange(ROWS)) == server).any(axis=1))[0]
            assert np.array_equal(self.states[server].tables[0].shard.read(mine), want[mine]), (self.seed, server)
        return self.staleness, self.lead


@pytest.mark.parametrize("schedules", [20, *everything(600)])
def test_numbers_keep_to_the_model_whatever_the_network_does(schedules):
    leads = {}
    for seed in range(schedules):
        s, lead = World(seed).run()
        leads[s] = max(leads.get(s, 0), lead)
    assert leads[0] == 0 and leads[1] == 1 and 2 <= leads[3] <= 3 <= leads[None], leads


def applied_twice(monkeypatch):
    push = Protocol._push
    monkeypatch.setattr(Protocol, "_push", lambda self, head, frames: (
        self._apply(head._replace(flags=0), frames) if head.number <= self._last[head.worker] else None,
        push(self, head, frames))[1])  # fmt: skip


def overtakes_its_own_pushes(monkeypatch):
    monkeypatch.setattr(Protocol, "_may_see", lambda self, table, head: table.may_see(head.clock))


def bound_off_by_one(monkeypatch):
    monkeypatch.setattr(_Table, "may_see", lambda self, c: self.staleness is None or self.low >= c - self.staleness - 1)


def applied_on_arrival(monkeypatch):
    monkeypatch.setattr(
        _Table, "push", lambda self, worker, clock, ids, grads: self.shard.apply(self.shard.slots(ids), grads)
    )


def jumps_over_gaps(monkeypatch):
    push = Protocol._push

    def jumps(self, head, frames):
        self._last[head.worker] = max(self._last[head.worker], head.number - 1)
        return push(self, head, frames)

    monkeypatch.setattr(Protocol, "_push", jumps)


FAULTS = (applied_twice, overtakes_its_own_pushes, bound_off_by_one, applied_on_arrival, jumps_over_gaps)


@pytest.mark.parametrize("fault", FAULTS, ids=lambda each: each.__name__)
def test_these_schedules_find_planted_faults(fault, monkeypatch):
    fault(monkeypatch)
    with pytest.raises(AssertionError):
        for seed in range(25):
            World(seed).run()
