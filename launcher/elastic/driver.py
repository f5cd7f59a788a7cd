"""Elastic driver: what the end of a process means, and when another one is started.

store/elastic_process_end.py judges an end. After a loss the others go on (store/elastic_membership.py says with which
ranks), and where there is room another process is started. A failure of the script ends the job, as in every job.
Before the first epoch a process that ends with 0 fails those that call init. The first rank that ends well means that
training is over: no process is started any more, and those that have not joined are ended. A rank that is lost after
that fails the job, once all have ended.

process_start.py says where a process may be started now. SIGTERM and SIGUSR1 announce that the machine will be taken
away: ranks get the order to save at their next commit and to end with code 75, which is then the job's, or with 74 if
no file has that commit.
"""

from __future__ import annotations

import signal
import time
from typing import TYPE_CHECKING

from ..agent import process
from ..control.agent_link import AgentLink
from ..control.ending import LOST, UNKNOWN, Abort, blamed
from ..control.plan import Elastic
from ..control.static_driver import TIMEOUT, StaticDriver
from ..store import elastic_messages, elastic_process_end
from ..store.elastic_members import Events
from ..store.elastic_membership import Membership
from ..store.elastic_process_end import PREEMPTED, UNKEPT, Meaning
from ..store.server import StoreServer
from .process_start import Starts

if TYPE_CHECKING:
    from ..job import Job
    from ..store.epochs import SendFrame

STORE_MAX = 1024  # connections, where the number of ranks has no limit


class ElasticDriver(StaticDriver):
    """Of one job."""

    def __init__(self, job: Job, elastic: Elastic) -> None:
        super().__init__(job)
        self._elastic = elastic
        self._starts = Starts(job, elastic)
        self._reasons: dict[int, str] = {}  # why a rank ends, in its own words
        self._finishing = self._over = False  # a rank has ended with one of the codes below; all have ended
        self._late: tuple[str, int] | None = None  # the first loss for which no rank could go on, and its exit code
        self._quits = True  # all that have ended in this epoch have called sys.exit(0) within training
        self._codes: set[int] = set()  # of ranks that have ended well: 0, PREEMPTED, UNKEPT
        self._first_end = ""  # of a rank, with 0; until it is reported
        self._signals: list[int] = []  # signals that announce the end; of SIGTERM the second one is passed on
        self._end_by: float | None = None  # when ranks that are preempted are no longer waited for
        self._ended_names: dict[int, str] = {}  # names of ranks that have ended, for texts
        job.ending.named = self._who

    # The store and its membership.

    def open_store(self, number: int) -> StoreServer:
        """The store of this job's number."""
        job, terms = self._job, self._elastic.terms
        events = Events(self._opened, self._cannot, self._kill, self._news, job.console.announce)

        def membership(send_frame: SendFrame) -> Membership:
            self._members = self._starts.members = Membership(terms, number, send_frame, events)
            for slot in job.far.slots:
                self._members.started(slot.rank, slot.host, slot.local_rank)
            return self._members

        if self._elastic.script is not None:
            job.watch(self._elastic.script, lambda: None)  # `act` looks
        size, where = terms.max_np or STORE_MAX, self._starts.store_address()
        return StoreServer(size, job.far.secret, number, self.aborted, address=where, membership=membership)

    def _opened(self, number: int, members: list[int]) -> None:
        announce = self._job.console.announce
        self._starts.became_ranks(members)
        self._quits = True
        for member in members:
            self._reasons.pop(member, None)  # it has gone on since
        if self._first_end:
            announce(elastic_messages.over(self._first_end))
            self._first_end = ""
        if number or self._job.plan.verbose:
            announce(elastic_messages.opened(number, members, self._job.ending.pids))

    def _news(self) -> None:
        self._job.store.news()

    def _kill(self, member: int, text: str) -> None:
        self._job.console.announce(f"{text}; hvdlite-run kills it")
        self._signal(member, signal.SIGKILL)

    def _signal(self, member: int, number: int) -> None:
        for each in self._job.links:
            if member in each.ranks and each.alive:
                each.order(do="signal", number=int(number), group=True, rank=member)

    def _cannot(self, text: str) -> None:
        if self._goes_on():
            self._job.fail(text, 1)
            self._job.ending.aborted(time.monotonic(), Abort(0, 0, text))  # the others get their time to end

    def aborted(self, reporter: int, culprit: int, code: int, text: str) -> None:
        """A rank reports why its epoch ends. One that keeps the others waiting is ended, as --collective-timeout has
        it; of one that blames itself the words are kept for its end."""
        name = self._members.who(culprit)
        self._job.log_verbose(f"abort record of {self._members.who(reporter)}: {name}, code {code}: {text}")
        if reporter == culprit:
            self._reasons[reporter] = text
        elif code == TIMEOUT:
            self._kill(culprit, f"{name} kept the others waiting: {text}")

    # Ends.

    def _who(self, rank: int) -> str:
        return self._ended_names.get(rank) or self._members.who(rank)

    def _goes_on(self) -> bool:
        ending = self._job.ending
        return ending.stop_signal is None and ending.culprit() is None and self._job.failure is None

    def started(self, rank: int) -> None:
        """Its process runs."""
        self._members.process(rank, self._job.ending.pids[rank])

    def ended(self, rank: int, code: int) -> None:
        """Its process has ended; code is negative for a signal."""
        self._ended(rank, code)

    def lost(self, rank: int) -> None:
        """It is lost with its host."""
        self._ended(rank, LOST, lost=True)

    def unstarted(self, each: AgentLink, rank: int, code: int) -> None:
        """There is no process. At the job's start those after it in the order were not started either."""
        first = not self._members.size_now()
        self.ended(rank, code)
        if first:
            self._job.ending.living -= each.ranks - set(self._job.ending.pids)

    def _ended(self, rank: int, code: int, lost: bool = False) -> None:
        job, members = self._job, self._members
        self._ended_names[rank] = self._who(rank)
        job.drain(rank)
        job.store.receive_from(rank)  # its last words come before its end
        words = job.console.last_words(rank) if code else ""
        end = members.end_of(rank)._replace(code=code, with_host=lost, reason=self._reasons.get(rank, ""))
        text = f"{self._who(rank)} {'is lost with its host' if lost else elastic_process_end.text(code, end.training)}"
        meaning = Meaning.FAILURE if code else Meaning.WELL
        if self._goes_on():
            meaning = elastic_process_end.judged(end, self._elastic.tolerated, self.preempted)
        if meaning is Meaning.LOSS and self._all_quit(code == 0 and end.left, end.others):
            meaning = Meaning.WELL
        if meaning is Meaning.REMOVED:
            job.ending.living.discard(rank)
            job.store.rank_ended(rank, text)
        elif meaning is Meaning.WELL:
            self._codes.add(UNKEPT if end.training and self.preempted and not code else code)
            self._ended_well(rank, code, text)
        elif meaning is Meaning.LATE:
            self._ended_late(rank, code, f"{text}{words if code > 0 else ''}")
        elif meaning is not Meaning.FAILURE:
            self._ended_early(rank, code, text, words, meaning is Meaning.UNUSED)
        else:
            self._failed(rank, code or UNKNOWN, text + words)
        job.log_verbose(f"{text} after {time.monotonic() - job.began:.2f} s")
        self._let_go()

    def _all_quit(self, quits: bool, others: int) -> bool:
        """Whether the last rank has ended, each by sys.exit(0) within training: that is how some scripts stop early."""
        self._quits &= quits
        return self._quits and not others

    def _failed(self, rank: int, code: int, text: str) -> None:
        job = self._job
        if self._goes_on() and self._late is not None:
            job.fail(*self._late)  # it may have missed that one
        if rank in self._reasons and self._goes_on():
            job.ending.aborted(time.monotonic(), Abort(rank, rank, self._reasons[rank]))
        job.ending.ended(time.monotonic(), rank, code, job.console.last_words(rank) if code else "")
        self._members.over(blamed(text, code))
        job.store.rank_ended(rank, blamed(text, code))

    def _ended_late(self, rank: int, code: int, text: str) -> None:
        """The job fails when all have ended: a rank that saves a result now must not be cut off."""
        text = blamed(elastic_messages.late(text), code)
        self._late = self._late or (text, 128 - code if code < 0 else code or UNKNOWN)
        self._job.ending.living.discard(rank)
        if self._job.ending.living:  # else it is the last line
            self._job.console.announce(text)
        self._job.store.rank_ended(rank, text)

    def _ended_well(self, rank: int, code: int, text: str) -> None:
        self._first_end = self._first_end if self._finishing or code else self._who(rank)
        self._finishing = True
        self._job.ending.ended(time.monotonic(), rank, 0)
        self._job.store.rank_ended(rank, text, True)
        for member in self._members.remove_new("training is over") if self._members.size_now() else ():
            self._signal(member, signal.SIGTERM)

    def _ended_early(self, rank: int, code: int, text: str, words: str, new: bool) -> None:
        """The others go on without it. new: it was no rank yet."""
        now, starts = time.monotonic(), self._starts
        name, capacity = starts.host_of[rank], starts.capacity
        self._job.ending.living.discard(rank)
        capacity.failed(name, now, new, unfit=new and rank not in starts.early)
        remedy = "" if self._finishing else capacity.remedy(name, now)
        if not (new and self._finishing):  # which have the order to end
            self._job.console.announce(blamed(f"{text}{words if new else ''}; the others go on{remedy}", code))
        self._job.store.rank_ended(rank, blamed(text, code))

    def _let_go(self) -> None:
        """Agents end once no process is left and none will come."""
        if self._job.ending.living or self._over:
            return
        if self._goes_on() and PREEMPTED in self._codes:
            self._job.fail(elastic_messages.KEPT, PREEMPTED)
        if self._goes_on() and self._late is not None:
            self._job.fail(*self._late)
        if self._goes_on() and UNKEPT in self._codes:
            self._job.fail(elastic_messages.UNKEPT, 128 + self._signals[0])
        if self._goes_on() and not self._finishing and self._starts.capacity.hopeless():
            self._job.fail("no host is left to run on: all have failed too often [HVD423]", 1)
        if self._finishing or not self._goes_on():
            self._over = True
            self._job.order(do="release")

    def host_lost(self, each: AgentLink, why: str) -> None:
        """Another host is silent or lost. Its living ranks follow by `lost`."""
        if not self._goes_on():
            super().host_lost(each, why)
            return
        self._job.console.announce(f"host {each.name} is lost: {why} [HVD403]")
        self._starts.capacity.failed(each.name, time.monotonic(), False)

    # Preemption.

    @property
    def preempted(self) -> bool:
        """Whether the ranks have the order to save and to end."""
        return self._members.ends

    def signalled(self, number: int) -> bool:
        """The launcher got this signal: whether nothing else is to be done about it."""
        if number not in (signal.SIGTERM, signal.SIGUSR1) or not self._goes_on():
            return False
        if number == signal.SIGTERM:
            if number in self._signals or not self._members.size_now():  # nothing is to be saved before the first epoch
                return False
            self._end_by = time.monotonic() + self._job.plan.graces.after(number) / 2
        if not self.preempted:
            when = "next" if self._members.size_now() else "first"
            self._job.console.announce(f"{process.signal_name(number)}: the ranks save at their {when} commit and end")
            self._members.end()
        self._signals.append(number)
        return True

    # Beginnings.

    def due(self) -> float | None:
        """When `act` has something to do; None: never."""
        times = [self._starts.capacity.due(time.monotonic()), self._end_by]
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
        self._starts.look(now)

    def children(self) -> set[int]:
        """The discovery script, which is waited for here."""
        return set() if self._elastic.script is None else {self._elastic.script.pid}

    def close(self) -> None:
        """No process is started any more."""
        self._starts.arrivals.close()
        if self._elastic.script is not None:
            self._elastic.script.close()
