"""What happens between the command line and the exit code? One job: its store, its agents, its ranks, its end.

The loop below has four sources of news and no other place to sleep: each host's agent (its control stream: ranks
started, ended; its output stream), the sessions that brought agents to other hosts, the store (abort records), and
signals. Decisions are taken elsewhere and purely: ending.py says who is to blame and what to send when, lines.py what
the output looks like. How agents come to other hosts is not known here: plan.gather does it, and returns Branches.

Order matters in three places. The agent of this host is forked before any thread exists and before the store is bound,
so that it holds nothing of ours. The store hears of a rank's end after it has read that rank's last words. And the last
report is made when the agents are gone, because then all output has come.

If the launcher is killed, the agents end the job; if the agent of this host is killed, the kernel ends its ranks, and
what they left behind becomes our child and ends here; if another host is lost, its ranks count as ended with LOST, and
the others have their usual time to notice. As process 1 of a container we reap whatever is handed to us.
"""

from __future__ import annotations

import os
import selectors
import signal
import time
from collections.abc import Callable
from functools import partial
from typing import Any

from . import agent, environment, looks, process, starting
from .branch import Branch
from .ending import KILL, LOST, Abort, Ending, Send, blamed, how
from .epochs import ranks_named
from .lingering import Lingering
from .logs import Console
from .orders import Orders, shown
from .plan import Gathered, Plan
from .pulse import Pulse
from .signals import ENDING, PASSED_ON, Signals
from .stdin import INPUT, Feed
from .store import StoreServer

TIMEOUT, OUTPUT_S = -7, 2.0  # HVD_ETIMEOUT; after a signal has ended the job, for output that is slow to be read


class Job:
    """Runs one Plan in this process's main thread."""

    def __init__(self, plan: Plan, signals: Signals, own: Branch | None, far: Gathered, strangers: set[int]) -> None:
        self._plan, self._signals, self._far = plan, signals, far
        self._branches = [*([own] if own is not None else []), *far.branches]
        self._own, self._strangers = own, strangers  # the latter: children from before exec, none of ours
        self._slots, self._size = far.slots, len(far.slots)
        self._began = time.monotonic()
        names = [slot.host for slot in far.slots] if far.branches else ()
        self._ending = Ending(self._size, plan.graces, names)
        look = looks.placed(plan.look, far.slots)
        self._console = Console(self._size, look, signals.ring, [slot.host for slot in far.slots])
        self._selector = selectors.DefaultSelector()
        self._pulse = Pulse(self._branches, plan.silence)
        self._lingering = Lingering(self._ending, plan.lingering, self._console.say)
        self._given_up = False  # the agent of this host was killed by us
        self._feed: Feed | None = None  # of rank 0 on another host
        self._interrupts = 0
        self._give_up: float | None = None  # when output that nobody reads stops being waited for
        self._failure: tuple[str, int] | None = None  # what stopped the launcher itself, and the exit code
        for each in self._branches:
            each.ranks = each.ranks or {slot.rank for slot in far.slots if slot.host == each.name}

    def run(self) -> int:
        """Starts the ranks, returns the job's exit code when nothing of it is left."""
        if self._plan.output_folder is not None:
            self._console.open_files(self._plan.output_folder, again=self._plan.attempt > 0)
        self.number, far = (job := int.from_bytes(os.urandom(8), "big")), self._far
        self._store = StoreServer(self._size, far.secret, job, self._aborted, self._ending.missed, address=far.address)
        self._console.start()
        self._order_start(environment.Meeting(*self._store.address, self._far.secret, job))
        self._watch(self._store, lambda: None)  # served every round: deadlines
        self._watch(self._signals, lambda: self._signalled(self._signals.read()))
        for each in self._branches:
            self._watch(each.control, partial(self._listen, each))
        for session in self._far.sessions:
            if session.output >= 0:
                self._watch(session.output, partial(self._overhear, session))
        while any(each.alive or each.output.fileno() >= 0 for each in self._branches):
            self._turn()
        return self._finish()

    def _watch(self, source: Any, act: Callable[[], None]) -> None:
        self._selector.register(source, selectors.EVENT_READ, act)

    def _order_start(self, meeting: environment.Meeting) -> None:
        plan, own = self._plan, self._own
        first = next(each for each in self._branches if 0 in each.ranks)
        if environment.sets_threads(plan.environ, self._slots) and not plan.attempt:
            self._console.say(environment.THREADS_NOTE.format(self._size))
        by = f", agent {own.pid}" if own is not None else ""
        self._tell(f"store on {meeting.address}:{meeting.port}, job {meeting.job:016x}{by}")
        self._tell(f"command: {' '.join(plan.command)}")
        starts = Orders(plan, self._far, meeting, first)
        for each in self._branches:
            order = starts.of(each.ranks, each.name, each is own)
            for text in shown(order, each.name):
                self._tell(text)
            each.order(**order)
        if plan.stdin and first is not own:
            self._feed = Feed(partial(first.send, INPUT), self._selector)
            self._feed.more()

    def _order(self, **order: Any) -> None:
        for each in self._branches:
            if each.alive:
                each.order(**order)

    def _turn(self) -> None:
        """One round of the loop: waits for news, deals with it, does what is due."""
        open_for_output = self._impatient() or not self._console.full
        for each in self._branches:
            if open_for_output and not each.taking and each.output.fileno() >= 0:
                self._watch(each.output, partial(self._take, each))
                each.taking = True
        paused = any(not each.taking and each.output.fileno() >= 0 for each in self._branches)
        give_up = self._give_up if paused else None
        clocks = (self._ending, self._console, self._pulse, self._lingering)
        due = [at for at in (self._store.deadline(), give_up, *(each.due() for each in clocks)) if at is not None]
        patience = max(0.0, min(due) - time.monotonic()) if due else None
        for key, _ in self._selector.select(patience):
            if key.fd in self._selector.get_map():  # not gone by what another has done
                key.data()
        self._store.turn()
        now = time.monotonic()
        self._console.tick(now)
        self._lingering.look(now)
        self._send(self._ending.act(now))
        for each in self._pulse.beat(now):
            self._silent(each)
        if self._console.broken and self._ending.asked is None:
            self._send(self._ending.signalled(now, signal.SIGPIPE)._replace(number=int(signal.SIGTERM)))

    def _listen(self, each: Branch) -> None:
        """News from an agent."""
        heard = each.news()
        if heard is None:
            self._ended_stream(each)
            return
        for news in heard:
            if news["what"] == "started":
                self._ending.pids[news["rank"]] = news["pid"]
                each.started = each.ranks.issubset(self._ending.pids)
                self._tell(f"rank {news['rank']} is process {news['pid']}")
            elif news["what"] == "unstarted":
                where = f" on {each.name}" if self._far.branches else ""
                self._console.say(f"cannot start rank {news['rank']}{where}: {news['text']}")
                self._rank_ended(news["rank"], news["code"])
                self._ending.living -= each.ranks - set(self._ending.pids)  # those after it were not started either
            elif news["what"] == "ended":
                self._rank_ended(news["rank"], news["code"])
            elif news["what"] == "aborted":  # by a rank that knows no store
                self._aborted(each.number, *news["record"])
            elif news["what"] == "pong":
                each.asked = False
            elif news["what"] == "took" and self._feed is not None:
                self._feed.more()
            elif news["what"] == "left":
                where = f"host {each.name}: " if self._far.branches else ""
                self._console.say(where + news["text"])
            elif news["what"] == "done":
                each.done = True
                self._release()
            elif news["what"] == "broken":
                self._failure = (news["text"], 1)
            elif news["what"] == "signalled":
                if each.stays:
                    self._signalled(bytes((news["number"],)))
                else:
                    self._ending.warned(news["number"])

    def _tell(self, text: str) -> None:
        if self._plan.verbose:
            self._console.say(text)

    def _release(self) -> None:
        """Lets agents go that wait for the job's exit code, once nothing runs anywhere."""
        if all(each.done or not each.alive for each in self._branches):
            again = self.failed and self._plan.attempt < self._plan.max_restarts
            for each in (each for each in self._branches if each.stays and each.alive):
                each.order(do="end", code=self._code(), again=again)

    def _rank_ended(self, rank: int, code: int) -> None:
        text = f"{self._ending.who(rank)} {how(code)}"
        for each in (each for each in self._branches if rank in each.ranks and each.taking):
            self._take(each)
        words = self._console.last_words(rank) if code else ""
        self._ending.ended(time.monotonic(), rank, code, words)  # first: who has failed by itself is not merely missed
        self._store.rank_ended(rank, blamed(text + words, code))
        self._tell(f"{text} after {time.monotonic() - self._began:.2f} s")

    def _aborted(self, reporter: int, culprit: int, code: int, text: str) -> None:
        self._tell(f"abort record of rank {reporter}: rank {culprit}, code {code}: {text}")
        self._ending.aborted(time.monotonic(), Abort(reporter, culprit, text, code == TIMEOUT))

    def _take(self, each: Branch) -> None:
        """Output of ranks."""
        said = each.said()
        for kind, rank, text in said or ():
            if kind == agent.ENDED:
                self._console.finish(rank)
            elif not (self._console.full and self._impatient()):
                self._console.take(rank, kind, text)
        if said is None or (self._console.full and not self._impatient()):
            self._selector.unregister(each.output)
            each.taking = False
        if said is None:
            each.output.close()

    def _overhear(self, session: starting.Running) -> None:
        """A session has something to say, which is never good, or has ended."""
        chunk, title = session.listen(), session.session.title
        if chunk is not None:
            names = title or ", ".join(b.name for b in self._far.branches if b.number in session.session.hosts)
            over = all(each.done or not each.alive for each in self._branches)  # an MPI speaks of its agents' ends then
            for line in () if over else chunk.decode(errors="replace").splitlines():
                self._console.say(f"{names}: {line}")
            return
        self._selector.unregister(session.output)
        if title:  # its agents are there still
            code = session.end()
            if code and self._ending.asked is None and self._ending.culprit() is None:
                end = f"was {how(code)} [HVD402]" if code < 0 else f"{how(code)} [HVD401]"
                self._failure = (f"{title} has ended the ranks: it {end}", code if code > 0 else LOST)
                self._send(KILL)
            return
        for each in self._far.branches:
            if each.number in session.session.hosts and each.alive and not each.done:
                self._ended_stream(each, f"{session.session.words[0]}, which led there, has ended")

    def _silent(self, each: Branch) -> None:
        """An agent does not answer: it is stopped, or its host is."""
        if each.pid is not None:
            if self._ending.asked is None and self._ending.culprit() is None:
                text = f"the agent (pid {each.pid}) of the ranks has not answered for {self._plan.silence:g} s [HVD403]"
                self._failure = self._failure or (text, 1)
            process.send(each.pid, signal.SIGKILL)  # the kernel ends its ranks
            self._given_up = True
        else:
            self._ended_stream(each, f"its agent has not answered for {self._plan.silence:g} s (--agent-timeout)")

    def _send(self, send: Send | None) -> None:
        if send == KILL:
            self._order(do="kill")
            self._pulse.hurry()
        elif send is not None:
            self._order(do="signal", number=int(send.number), group=True, spared=send.spared)

    def _signalled(self, numbers: bytes) -> None:
        """Signals to the launcher; a zero byte is the console's ring."""
        for number in numbers:
            if number in ENDING:
                self._interrupts += number == signal.SIGINT
                if self._interrupts >= 3:
                    self._leave_now()
                now = time.monotonic()
                self._send(self._ending.signalled(now, number))
                left = max(0.0, (self._ending.due() or now) - now)
                if self._plan.verbose or number != signal.SIGINT or self._interrupts == 1:
                    again = "; Ctrl-C again kills them" if number == signal.SIGINT else ""
                    name = process.signal_name(number)
                    self._console.say(f"{name}: passed on to the ranks, which have {left:.3g} s to end{again}")
                self._give_up = now if self._interrupts > 1 else now + left + OUTPUT_S
            elif number in PASSED_ON:
                self._order(do="signal", number=number, group=False)
            elif number == signal.SIGTSTP:
                self._order(do="signal", number=int(signal.SIGSTOP), group=True)
                os.kill(os.getpid(), signal.SIGSTOP)
            elif number == signal.SIGCONT:
                self._order(do="signal", number=number, group=True)
            elif number == signal.SIGCHLD and os.getpid() == 1:
                process.reap_adopted({each.pid or 0 for each in self._branches})

    def _ended_stream(self, each: Branch, why: str = "its connection ended") -> None:
        """An agent has ended, or nothing is heard of it any more."""
        self._selector.unregister(each.control)
        each.alive = False
        status = os.waitpid(each.pid, 0)[1] if each.pid is not None else 0
        if each.done:
            return
        why = each.why or why
        lost = each.ranks & self._ending.living
        if each.pid is not None:
            end = f"{how(process.exit_code(status))} [HVD403]"
            if not self._given_up:
                self._failure = self._failure or (f"the agent (pid {each.pid}) of the ranks ended too early: {end}", 1)
            process.sweep(self._strangers | {session.pid for session in self._far.sessions})
        elif self._ending.asked is None and self._ending.culprit() in (None, *lost):
            text = f"host {each.name} is lost: {why}; {ranks_named(sorted(lost))} ran there [HVD403]"
            self._failure = self._failure or (text, LOST)
        if each.output.fileno() >= 0 and each.pid is None:
            if each.taking:
                self._take(each)  # what came before the end
            if each.taking:
                self._selector.unregister(each.output)
            each.taking = False
            each.output.close()
        each.control.close()
        for rank in sorted(lost):
            self._store.rank_ended(rank, f"{self._ending.who(rank)} is lost with its host [HVD403]")
            self._ending.ended(time.monotonic(), rank, LOST)
        self._release()

    def _code(self) -> int:
        code = self._failure[1] if self._failure is not None else self._ending.exit_code()
        return code or (LOST if any(each.cut for each in self._branches) else 0)

    @property
    def failed(self) -> bool:
        """Whether it has failed by itself: nobody has asked for its end."""
        return self._code() != 0 and self._ending.asked is None and not self._console.broken

    def _finish(self) -> int:
        self._store.close()
        headline, culprit = self._ending.headline(), self._ending.culprit()
        for cut in filter(None, [each.cut for each in self._branches]):
            self._console.say(cut)
        if self._failure is not None:
            self._console.say(self._failure[0])
        elif headline is not None and culprit is not None:
            self._console.report(culprit, headline)
        self._console.close(self._interrupted)
        for session in self._far.sessions:
            session.end()
        for each in self._branches:
            each.control.close()
        self._selector.close()
        return self._code()

    def _interrupted(self) -> bool:
        """While the last output is written: has somebody lost patience?"""
        try:
            if any(number in ENDING for number in self._signals.read()):
                return True
        except BlockingIOError:
            pass
        return self._impatient()

    def _impatient(self) -> bool:
        """A signal has ended the job, and its output has had its time."""
        return self._give_up is not None and time.monotonic() >= self._give_up

    def _leave_now(self) -> None:
        """Ctrl-C for the third time. The agents' ends take the ranks with them."""
        if self._own is not None and self._own.pid is not None:
            process.send(self._own.pid, signal.SIGKILL)
        os._exit(128 + signal.SIGINT)
