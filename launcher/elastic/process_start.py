"""Start of a process of an elastic job: when, on which host, and which ranks leave for it.

Hosts are those of the command line, or what the discovery script prints (discovery.py); capacity.py says which of them
may get a process now, new_hosts.py brings agents from hosts that join. A process that is started after the first ones
prepares beside them. It replaces one of the first only where that one has ended before the first rendezvous.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..control.agent_link import AgentLink
from ..control.plan import Elastic
from ..hosts.hosts import Host, Slot
from ..placement.host_flags import is_here
from ..store import elastic_messages
from ..store.elastic_members import expected_rank
from ..store.elastic_membership import Membership
from .capacity import Capacity
from .new_hosts import Arrival, Arrivals

if TYPE_CHECKING:
    from ..job import Job


class Starts:
    """Of one job. early: processes that were no ranks yet."""

    members: Membership

    def __init__(self, job: Job, elastic: Elastic) -> None:
        self._job, self._elastic = job, elastic
        own = None if job.own is None else job.own.name
        if elastic.script is None and all(slot.host != own for slot in job.far.slots):  # srun starts agents here, too
            own = next(filter(is_here, dict.fromkeys(slot.host for slot in job.far.slots)), own)
        self.capacity = Capacity(elastic.listed, own, elastic.cooldown, elastic.failures)
        self.host_of = {slot.rank: slot.host for slot in job.far.slots}
        number = 1 + max((each.number for each in job.links), default=0)
        self.arrivals = Arrivals(job.plan, job.far.secret, elastic.gather, job.signals.ring, number)
        self._offered = self.capacity.offer(elastic.listed)
        self._released: set[int] = set()  # numbers of agents that end, since their hosts are offered no more
        self.early = set(self.host_of)

    def became_ranks(self, members: list[int]) -> None:
        """An epoch has opened with these."""
        for name in {self.host_of[member] for member in self.early.intersection(members)}:
            self.capacity.became_rank(name)
        self.early.difference_update(members)

    def store_address(self) -> str:
        """Where the store listens: all hosts that may come reach it."""
        job, where = self._job, self._job.far.address
        others = [name for name in self.capacity.names() if job.own is None or name != job.own.name]
        if where == "127.0.0.1" and (others or self._elastic.script is not None):
            where = self.arrivals.reached_at(others)
        return where

    def look(self, now: float) -> None:
        """Does what is due."""
        self._discover(now)
        for arrival in self.arrivals.turn():
            self._arrived(arrival, now)
        self._fill(now)
        self._release()

    def _discover(self, now: float) -> None:
        script = self._elastic.script
        if script is None:
            return
        _, trouble = script.turn(now)
        if trouble:
            self._job.console.announce(trouble)
        new = [host.name for host in script.latest if not self.capacity.knows(host.name)]
        for name in new:
            self.arrivals.look_up(name, self.capacity.look_up)
        known = [host for host in script.latest if host.name not in new]
        if new:  # a name server may be slow; it may say that a host which is not offered any more has a new name
            named = {self.capacity.called(host.name) for host in known}
            known += [Host(name, slots) for name, slots in self._offered.items() if name not in named]
        if (offered := self.capacity.offer(known)) == self._offered:
            return
        self._offered = offered
        self._job.console.announce(elastic_messages.offers(offered))
        for name in self.capacity.names():
            slots = self.capacity.slots(name)
            here = [m for m in self.members.living() if self.host_of[m] == name and not self.members.end_of(m).removed]
            for member in sorted(here)[:slots]:
                self.members.remove(member, "")
            for member in sorted(here)[slots:]:  # the newest
                self.members.remove(member, elastic_messages.removed(name, slots))

    def _staying(self, name: str | None = None) -> list[int]:
        """Living members that are not to go; name: of this host."""
        living = (m for m in self.members.living() if not self.members.is_removed(m))
        return [m for m in living if name is None or self.host_of[m] == name]

    def _fill(self, now: float) -> None:
        """Starts processes where there is room."""
        most = self._elastic.terms.max_np
        for name in self.capacity.names():
            while self.capacity.can_start(name, now) and not self.arrivals.awaits(name):
                here = sum(self.host_of[m] == name for m in self.members.living())
                if here >= self.capacity.slots(name) or (most is not None and len(self._staying()) >= most):
                    break
                link = next(iter(self._agents(name)), None)
                if link is None:
                    self.arrivals.send_for(name)
                    break
                self._start(name, link)

    def _agents(self, name: str) -> list[AgentLink]:
        """Of this host, alive and to stay: one or none."""
        agents = (each for each in self._job.links if each.name == name and each.alive)
        return [each for each in agents if each.pid is not None or each.number not in self._released]

    def _release(self) -> None:
        """Nothing stays on other hosts that are offered no more."""
        at_work = {self.host_of[member] for member in self.members.living()}
        for name in self.capacity.names():
            if not self.capacity.slots(name) and name not in at_work:
                for each in (each for each in self._agents(name) if each.pid is None):
                    self._released.add(each.number)
                    each.order(do="release")

    def _start(self, name: str, link: AgentLink) -> None:
        """One more process. It prepares beside the others, with the rank that it may get."""
        job, number, slot = self._job, len(self.host_of), self.members.free_slot(name)
        self.host_of[number] = name
        self.early.add(number)
        job.console.admit(number, name)
        job.ending.admit(number)
        link.ranks.add(number)
        first = sum(not self.members.is_later(member) for member in self.members.living())
        later = self.members.size_now() > 0 or first >= len(job.far.slots)
        self.members.started(number, name, slot, later)
        slots = self.capacity.slots(name)
        order = job.starts.of([number], name, link is job.own, [Slot(number, name, slot, slots, 0, 1)])
        environ = order["ranks"][0]["environ"]
        if later:
            hosts = [self.host_of[member] for member in self._staying()]
            environ["HVDLITE_EXPECTED_PLACE"] = expected_rank(hosts, name, slot, slots)
        link.order(**order)

    def _arrived(self, arrival: Arrival, now: float) -> None:
        """The agent of a host that comes later, or why there is none."""
        if not arrival.name:
            self._job.console.announce(arrival.trouble)
        elif arrival.link is None:
            self.capacity.unreached(arrival.name, now)
            self._job.console.announce(f"{arrival.trouble}{self.capacity.remedy(arrival.name, now)}")
        else:
            self._job.admit(arrival.link, arrival.sessions)
