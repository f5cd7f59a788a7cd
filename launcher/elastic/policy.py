"""What does the end of a process mean where ranks come and go, and when is another one started?

A rank that a signal has killed, and one whose host is lost, is gone: the others go on (membership.py says with which
ranks), and where there is room another process is started. A rank that ends with an error of its own (an exception of
the script, sys.exit(3)) ends the job, as in every job: it would come again. A process that was in no epoch yet is
nobody's loss, whatever its end; before the first epoch one that ends with 0 fails those that call init. The first rank
that ends with 0 means that training is over: no process is started any more, and those that have not joined are ended.

Hosts are those of the command line, or what the discovery script prints (discovery.py); capacity.py says which of them
may get a process now. SIGTERM and SIGUSR1 announce that the machine will be taken away: ranks are told to save at their
next commit and to end with code 75, which is then the job's, or with 74 if no file has that commit.
"""

from __future__ import annotations

import signal
import time
from typing import TYPE_CHECKING

from .. import process
from ..branch import Branch
from ..ending import LOST, Abort, blamed, how
from ..fixed import TIMEOUT, FixedRanks
from ..hosts import Slot
from ..places import is_here
from ..plan import Elastic
from ..store import StoreServer
from . import texts
from .arrivals import Arrival, Arrivals
from .capacity import Capacity
from .members import Events, expected_place
from .membership import Membership

if TYPE_CHECKING:
    from ..epochs import Tell
    from ..job import Job

PREEMPTED, UNKEPT = 75, 74  # EX_TEMPFAIL of sysexits.h: try again later; EX_IOERR: no file has the last commit
STORE_MAX = 1024  # connections, where nobody has said how many ranks there may be


class ElasticRanks(FixedRanks):
    """Of one job."""

    def __init__(self, job: Job, elastic: Elastic) -> None:
        super().__init__(job)
        self._elastic = elastic
        own = None if job.own is None else job.own.name
        if elastic.script is None and all(slot.host != own for slot in job.far.slots):  # srun starts agents here, too
            own = next(filter(is_here, dict.fromkeys(slot.host for slot in job.far.slots)), own)
        self._capacity = Capacity(elastic.listed, own, elastic.cooldown, elastic.failures)
        self._host_of = {slot.rank: slot.host for slot in job.far.slots}
        number = 1 + max((each.number for each in job.branches), default=0)
        self._arrivals = Arrivals(job.plan, job.far.secret, elastic.gather, job.signals.ring, number)
        self._offered = self._capacity.offer(elastic.listed)
        self._released: set[int] = set()  # numbers of agents that end, since their hosts are offered no more
        self._said: dict[int, str] = {}  # why a rank ends, in its own words
        self._early = set(self._host_of)  # those that were no ranks yet
        self._finishing = self._over = False  # a rank has ended with one of the codes below; all have ended
        self._codes: set[int] = set()  # of ranks that have ended well: 0, PREEMPTED, UNKEPT
        self._first_end = ""  # of a rank, with 0; until it is told
        self._heard: list[int] = []  # signals that announce the end; of SIGTERM the second one is passed on
        self._end_by: float | None = None  # when ranks that are preempted are no longer waited for
        self._gone: dict[int, str] = {}  # what texts call those that have ended
        job.ending.named = self._who

    # The store and its book of members.

    def open_store(self, number: int) -> StoreServer:
        """The store of this job's number."""
        job, terms = self._job, self._elastic.terms
        events = Events(self._opened, self._cannot, self._kill, self._news, job.console.say)

        def book(tell: Tell) -> Membership:
            self._members = Membership(terms, number, tell, events)
            for slot in job.far.slots:
                self._members.started(slot.rank, slot.host, slot.local_rank)
            return self._members

        if self._elastic.script is not None:
            job.watch(self._elastic.script, lambda: None)  # `act` looks
        size, where = terms.max_np or STORE_MAX, job.far.address
        others = [name for name in self._capacity.names() if job.own is None or name != job.own.name]
        if where == "127.0.0.1" and (others or self._elastic.script is not None):
            where = self._arrivals.reached_at(others)
        return StoreServer(size, job.far.secret, number, self.aborted, address=where, book=book)

    def _opened(self, number: int, members: list[int]) -> None:
        say = self._job.console.say
        for name in {self._host_of[member] for member in self._early.intersection(members)}:
            self._capacity.became_rank(name)
        self._early.difference_update(members)
        if self._first_end:
            say(texts.over(self._first_end))
            self._first_end = ""
        if number or self._job.plan.verbose:
            say(texts.opened(number, members, self._job.ending.pids))

    def _news(self) -> None:
        self._job.store.news()

    def _kill(self, member: int, text: str) -> None:
        self._job.console.say(f"{text}; hvdlite-run kills it")
        self._signal(member, signal.SIGKILL)

    def _signal(self, member: int, number: int) -> None:
        for each in self._job.branches:
            if member in each.ranks and each.alive:
                each.order(do="signal", number=int(number), group=True, rank=member)

    def _cannot(self, text: str) -> None:
        if self._goes_on():
            self._job.fail(text, 1)
            self._job.ending.aborted(time.monotonic(), Abort(0, 0, text))  # whoever is left gets its time to end

    def aborted(self, reporter: int, culprit: int, code: int, text: str) -> None:
        """A rank has said why its epoch ends. One that keeps the others waiting is ended, as --collective-timeout has
        it; of one that blames itself the words are kept for its end."""
        who = self._members.who(culprit)
        self._job.tell(f"abort record of {self._members.who(reporter)}: {who}, code {code}: {text}")
        if reporter == culprit:
            self._said[reporter] = text
        elif code == TIMEOUT:
            self._kill(culprit, f"{who} kept the others waiting: {text}")

    # Ends.

    def _who(self, rank: int) -> str:
        return self._gone.get(rank) or self._members.who(rank)

    def _goes_on(self) -> bool:
        ending = self._job.ending
        return ending.asked is None and ending.culprit() is None and self._job.failure is None

    def started(self, rank: int) -> None:
        """Its process runs."""
        self._members.process(rank, self._job.ending.pids[rank])

    def ended(self, rank: int, code: int) -> None:
        """Its process has ended; code is negative for a signal."""
        self._ended(rank, code, f"{self._who(rank)} {how(code)}")

    def lost(self, rank: int) -> None:
        """It is lost with its host."""
        self._ended(rank, LOST, f"{self._who(rank)} is lost with its host", gone=True)

    def unstarted(self, each: Branch, rank: int, code: int) -> None:
        """There is no process. At the job's start those after it in the order were not started either."""
        first = not self._members.size_now()
        self.ended(rank, code)
        if first:
            self._job.ending.living -= each.ranks - set(self._job.ending.pids)

    def _ended(self, rank: int, code: int, text: str, gone: bool = False) -> None:
        job, members = self._job, self._members
        self._gone[rank] = self._who(rank)
        job.drain(rank)
        job.store.hear(rank)  # its last words come before its end
        words = job.console.last_words(rank) if code else ""
        new = self._goes_on() and members.is_new(rank)
        if self._goes_on() and members.is_removed(rank, told=True):
            job.ending.living.discard(rank)
            job.store.rank_ended(rank, text)
        elif not new and (code == 0 or (code in (PREEMPTED, UNKEPT) and self.preempted)):
            self._codes.add(code)
            self._ended_well(rank, code, text)
        elif new or (self._goes_on() and (gone or code < 0) and (members.size_now() or not self._finishing)):
            self._ended_early(rank, code, text, words)
        else:
            if rank in self._said and self._goes_on():
                job.ending.aborted(time.monotonic(), Abort(rank, rank, self._said[rank]))
            job.ending.ended(time.monotonic(), rank, code, words)
            members.over(blamed(text + words, code))
            job.store.rank_ended(rank, blamed(text + words, code))
        job.tell(f"{text} after {time.monotonic() - job.began:.2f} s")
        self._let_go()

    def _ended_well(self, rank: int, code: int, text: str) -> None:
        self._first_end = self._first_end if self._finishing or code else self._who(rank)
        self._finishing = True
        self._job.ending.ended(time.monotonic(), rank, 0)
        self._job.store.rank_ended(rank, text, True)
        for member in self._members.remove_new("training is over") if self._members.size_now() else ():
            self._signal(member, signal.SIGTERM)

    def _ended_early(self, rank: int, code: int, text: str, words: str) -> None:
        """The others go on without it."""
        now, new, name = time.monotonic(), self._members.is_new(rank), self._host_of[rank]
        self._job.ending.living.discard(rank)
        self._capacity.failed(name, now, new, unfit=new and rank not in self._early)
        remedy = "" if self._finishing else self._capacity.remedy(name, now)
        if not (new and self._finishing):  # which were told to end
            self._job.console.say(blamed(f"{text}{words if new else ''}; the others go on{remedy}", code))
        self._job.store.rank_ended(rank, blamed(text, code))

    def _let_go(self) -> None:
        """Agents end once nobody is left and nobody will come."""
        if self._job.ending.living or self._over:
            return
        if self._goes_on() and PREEMPTED in self._codes:
            self._job.fail(texts.KEPT, PREEMPTED)
        if self._goes_on() and UNKEPT in self._codes:
            self._job.fail(texts.UNKEPT, 128 + self._heard[0])
        if self._goes_on() and not self._finishing and self._capacity.hopeless():
            self._job.fail("no host is left to run on: all have failed too often [HVD423]", 1)
        if self._finishing or not self._goes_on():
            self._over = True
            self._job.order(do="release")

    def host_lost(self, each: Branch, why: str) -> None:
        """Another host is heard of no more. Its living ranks follow by `lost`."""
        if not self._goes_on():
            super().host_lost(each, why)
            return
        self._job.console.say(f"host {each.name} is lost: {why} [HVD403]")
        self._capacity.failed(each.name, time.monotonic(), False)

    # Preemption.

    @property
    def preempted(self) -> bool:
        """Whether the ranks were told to save and to end."""
        return self._members.ends

    def signalled(self, number: int) -> bool:
        """The launcher got this signal: whether nothing else is to be done about it."""
        if number not in (signal.SIGTERM, signal.SIGUSR1) or not self._goes_on():
            return False
        if number == signal.SIGTERM:
            if number in self._heard or not self._members.size_now():  # there is nothing to save before the first epoch
                return False
            self._end_by = time.monotonic() + self._job.plan.graces.after(number) / 2
        if not self.preempted:
            when = "next" if self._members.size_now() else "first"
            self._job.console.say(f"{process.signal_name(number)}: the ranks save at their {when} commit and end")
            self._members.end()
        self._heard.append(number)
        return True

    # Beginnings.

    def due(self) -> float | None:
        """When `act` has something to do; None: never."""
        times = [self._capacity.due(time.monotonic()), self._end_by]
        if self._elastic.script is not None and not self._finishing and self._goes_on():
            times.append(self._elastic.script.due())
        return min((at for at in times if at is not None), default=None)

    def act(self, now: float) -> None:
        """Does what is due."""
        if self._end_by is not None and now >= self._end_by and self._goes_on():
            self._end_by = None
            self._job.signalled(bytes((signal.SIGTERM,)))  # they do not commit
        if not self._goes_on() or self._finishing or self.preempted:
            self.close()
            self._let_go()
            return
        self._discover(now)
        for arrival in self._arrivals.turn():
            self._arrived(arrival, now)
        self._fill(now)
        self._release()

    def children(self) -> set[int]:
        """The discovery script, which is waited for here."""
        return set() if self._elastic.script is None else {self._elastic.script.pid}

    def close(self) -> None:
        """No process is started any more."""
        self._arrivals.close()
        if self._elastic.script is not None:
            self._elastic.script.close()

    def _discover(self, now: float) -> None:
        script = self._elastic.script
        if script is None:
            return
        _, told = script.turn(now)
        if told:
            self._job.console.say(told)
        new = [host.name for host in script.latest if not self._capacity.knows(host.name)]
        for name in new:
            self._arrivals.look_up(name, self._capacity.look_up)
        if new or (offered := self._capacity.offer(script.latest)) == self._offered:
            return
        self._offered = offered
        self._job.console.say(texts.offers(offered))
        for name in self._capacity.names():
            slots = self._capacity.slots(name)
            for member in sorted(self._staying(name))[slots:]:  # the newest
                self._members.remove(member, texts.removed(name, slots))

    def _staying(self, name: str | None = None) -> list[int]:
        """Living members that are not to go; name: of this host."""
        living = (m for m in self._members.living() if not self._members.is_removed(m))
        return [m for m in living if name is None or self._host_of[m] == name]

    def _fill(self, now: float) -> None:
        """Starts processes where there is room."""
        most = self._elastic.terms.max_np
        for name in self._capacity.names():
            while self._capacity.can_start(name, now) and not self._arrivals.awaits(name):
                here = sum(self._host_of[m] == name for m in self._members.living())
                if here >= self._capacity.slots(name) or (most is not None and len(self._staying()) >= most):
                    break
                branch = next(iter(self._agents(name)), None)
                if branch is None:
                    self._arrivals.send_for(name)
                    break
                self._start(name, branch)

    def _agents(self, name: str) -> list[Branch]:
        """Of this host, that live and are to stay: one or none."""
        agents = (each for each in self._job.branches if each.name == name and each.alive)
        return [each for each in agents if each.pid is not None or each.number not in self._released]

    def _release(self) -> None:
        """Nothing stays on other hosts that are offered no more."""
        at_work = {self._host_of[member] for member in self._members.living()}
        for name in self._capacity.names():
            if not self._capacity.slots(name) and name not in at_work:
                for each in (each for each in self._agents(name) if each.pid is None):
                    self._released.add(each.number)
                    each.order(do="release")

    def _start(self, name: str, branch: Branch) -> None:
        """One more process. It prepares beside the others, and takes a place for its own that it may get."""
        job, number, slot = self._job, len(self._host_of), self._members.free_slot(name)
        self._host_of[number] = name
        self._early.add(number)
        job.console.admit(number, name)
        job.ending.admit(number)
        branch.ranks.add(number)
        self._members.started(number, name, slot)
        slots = self._capacity.slots(name)
        order = job.starts.of([number], name, branch is job.own, [Slot(number, name, slot, slots, 0, 1)])
        environ = order["ranks"][0]["environ"]
        if self._members.size_now():
            hosts = [self._host_of[member] for member in self._staying()]
            environ["HVDLITE_EXPECTED_PLACE"] = expected_place(hosts, name, slot, slots)
        branch.order(**order)

    def _arrived(self, arrival: Arrival, now: float) -> None:
        """The agent of a host that comes later, or why there is none."""
        if arrival.branch is None:
            self._capacity.unreached(arrival.name, now)
            self._job.console.say(f"{arrival.trouble}{self._capacity.remedy(arrival.name, now)}")
            return
        self._job.admit(arrival.branch, arrival.sessions)
