"""One job from the command line to the exit code: its store, its agents, its ranks, its end.

The loop below has four sources of events and sleeps nowhere else: each host's agent (its control stream: ranks started,
ended; its output stream), the sessions that brought agents to other hosts, the store (abort records), and signals.
Decisions are taken elsewhere and purely: control/ending.py decides which rank is to blame and which signal is due when,
output/lines.py what the output looks like. How agents come to other hosts is not known here: plan.gather does it, and
returns RemoteHosts.

Order matters three times. The agent of this host is forked before any thread exists and before the store is bound, so
that it holds nothing of ours. The store gets a rank's end after it has read that rank's last words. And the last
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
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from . import output_flags
from .agent import agent, process, rank_environment
from .agent.stdin import INPUT, Feed
from .control.agent_link import AgentLink
from .control.ending import KILL, LOST, Ending, Send
from .control.heartbeat import Heartbeat
from .control.lingering_ranks import Lingering
from .control.plan import Plan, RemoteHosts
from .control.signals import ENDING, PASSED_ON, Signals
from .control.start_orders import Orders, shown
from .control.static_driver import StaticDriver
from .elastic.driver import ElasticDriver
from .hosts import hosts
from .output.console import Console
from .starters import starter
from .starters.starter_sessions import Sessions

OUTPUT_S = 2.0  # after a signal has ended the job, for output that is slow to be read


class Job:
    """Runs one Plan in this process's main thread."""

    def __init__(
        self, plan: Plan, signals: Signals, own: AgentLink | None, far: RemoteHosts, strangers: set[int]
    ) -> None:
        self.plan, self.signals, self.far = plan, signals, far
        self.links = [*([own] if own is not None else []), *far.links]
        self.own, self._strangers = own, strangers  # the latter: children from before exec, none of ours
        self._size = len(far.slots)
        self.began = time.monotonic()
        names = [slot.host for slot in far.slots] if far.links else ()
        self.ending = Ending(self._size, plan.graces, names)
        look = output_flags.placed(plan.look, far.slots)
        server_hosts = hosts.of_servers(far.slots, plan.servers + plan.aggregators)
        servers = {self._size + each: hosts.server_name(each, plan.servers) for each in range(len(server_hosts))}
        rank_hosts = [slot.host for slot in far.slots] + server_hosts
        self.console = Console(self._size, look, signals.ring, rank_hosts, servers)
        self._selector = selectors.DefaultSelector()
        self.heartbeat = Heartbeat(self.links, plan.silence)
        self._lingering = Lingering(self.ending, plan.lingering, self.console.announce)
        self._agent_killed = False  # the agent of this host was killed by us
        self._feed: Feed | None = None  # of rank 0 on another host
        self._interrupts = 0
        self._give_up: float | None = None  # when output that is not read stops being waited for
        self.failure: tuple[str, int] | None = None  # what stopped the launcher itself, and the exit code
        self.sessions = Sessions(self)
        self.policy = StaticDriver(self) if plan.elastic is None else ElasticDriver(self, plan.elastic)
        for each in self.links:
            each.ranks = each.ranks or {slot.rank for slot in far.slots if slot.host == each.name}

    def run(self) -> int:
        """Starts the ranks, returns the job's exit code when nothing of it is left."""
        if self.plan.output_folder is not None:
            self.console.open_files(self.plan.output_folder, again=self.plan.attempt > 0)
        self.number = int.from_bytes(os.urandom(8), "big")
        self.store = self.policy.open_store(self.number)
        self.ending.left = self.store.left
        self.console.start()
        self._order_start(rank_environment.StoreAccess(*self.store.address, self.far.secret, self.number))
        self.watch(self.store, lambda: None)  # served every round: deadlines
        self.watch(self.signals, lambda: self.signalled(self.signals.read()))
        for each in self.links:
            self.watch(each.control, partial(self._listen, each))
        for session in self.far.sessions:
            self.sessions.admit(session)
        while any(each.alive or each.output.fileno() >= 0 for each in self.links):
            self._turn()
        return self._finish()

    def watch(self, source: Any, act: Callable[[], None]) -> None:
        """act: called when there is something to read."""
        self._selector.register(source, selectors.EVENT_READ, act)

    def watch_no_more(self, source: Any) -> None:
        """It is closed next."""
        self._selector.unregister(source)

    def _order_start(self, access: rank_environment.StoreAccess) -> None:
        plan, own = self.plan, self.own
        first = next(each for each in self.links if 0 in each.ranks)
        if rank_environment.sets_threads(plan.environ, self.far.slots) and not plan.attempt:
            self.console.announce(rank_environment.THREADS_NOTE.format(self._size))
        by = f", agent {own.pid}" if own is not None else ""
        self.log_verbose(f"store on {access.address}:{access.port}, job {access.job:016x}{by}")
        self.log_verbose(f"command: {' '.join(plan.command)}")
        starts = self.starts = Orders(plan, self.far, access, first)
        for each in self.links:
            order = starts.of(each.ranks, each.name, each is own)
            for text in shown(order, each.name):
                self.log_verbose(text)
            each.order(**order)
        if plan.stdin and first is not own:
            self._feed = Feed(partial(first.send, INPUT), self._selector)
            self._feed.more()

    def order(self, **order: Any) -> None:
        for each in self.links:
            if each.alive:
                each.order(**order)

    def _turn(self) -> None:
        """One round of the loop: waits for news, deals with it, does what is due."""
        open_for_output = self._impatient() or not self.console.full
        for each in self.links:
            if open_for_output and not each.taking and each.output.fileno() >= 0:
                self.watch(each.output, partial(self._take, each))
                each.taking = True
        paused = any(not each.taking and each.output.fileno() >= 0 for each in self.links)
        give_up = self._give_up if paused else None
        clocks = (self.ending, self.console, self.heartbeat, self._lingering, self.sessions)
        times = (self.store.deadline(), give_up, self.policy.due(), *(each.due() for each in clocks))
        due = [at for at in times if at is not None]
        patience = max(0.0, min(due) - time.monotonic()) if due else None
        for key, _ in self._selector.select(patience):
            if key.fd in self._selector.get_map():  # not gone by what another has done
                key.data()
        self.store.turn()
        now = time.monotonic()
        self.console.tick(now)
        self._lingering.look(now)
        self.sessions.look(now)
        self.policy.act(now)
        self.send(self.ending.act(now))
        for each in self.heartbeat.tick(now):
            self._silent(each)
        if self.console.broken and self.ending.stop_signal is None:
            self.send(self.ending.signalled(now, signal.SIGPIPE)._replace(number=int(signal.SIGTERM)))

    def _listen(self, each: AgentLink) -> None:
        """News from an agent."""
        received = each.news()
        if received is None:
            self.lose(each)
            return
        for news in received:
            if news["what"] == "started":
                self.ending.pids[news["rank"]] = news["pid"]
                each.started = each.ranks.issubset(self.ending.pids)
                self.policy.started(news["rank"])
                self.log_verbose(f"{self.policy.called(news['rank'])} is process {news['pid']}")
            elif news["what"] == "unstarted":
                where = f" on {each.name}" if self.far.links else ""
                self.console.announce(f"cannot start {self.policy.called(news['rank'])}{where}: {news['text']}")
                self.policy.unstarted(each, news["rank"], news["code"])
            elif news["what"] == "ended":
                self.policy.ended(news["rank"], news["code"])
            elif news["what"] == "aborted":  # by a rank that knows no store
                self.policy.aborted(each.number, *news["record"])
            elif news["what"] == "joined":  # likewise
                self.ending.left.discard(each.number)
            elif news["what"] == "left job":
                self.ending.left.add(each.number)
            elif news["what"] == "pong":
                each.pinged = False
            elif news["what"] == "took" and self._feed is not None:
                self._feed.more()
            elif news["what"] == "left":
                where = f"host {each.name}: " if self.far.links else ""
                self.console.announce(where + news["text"])
            elif news["what"] == "done":
                each.done = True
                self._release()
            elif news["what"] == "broken":
                self.fail(news["text"], 1)
            elif news["what"] == "signalled":
                if each.stays:
                    self.signalled(bytes((news["number"],)))
                else:
                    self.ending.warned(news["number"])

    def log_verbose(self, text: str) -> None:
        if self.plan.verbose:
            self.console.announce(text)

    def _release(self) -> None:
        """Lets agents go that wait for the job's exit code, once nothing runs anywhere."""
        if all(each.done or not each.alive for each in self.links):
            again = self.failed and self.plan.attempt < self.plan.max_restarts
            for each in (each for each in self.links if each.stays and each.alive):
                each.order(do="end", code=self._code(), again=again)

    def drain(self, rank: int | None = None) -> None:
        """Takes what the host of a rank has sent of its output; None: what all hosts have."""
        for each in (each for each in self.links if each.taking and (rank is None or rank in each.ranks)):
            self._take(each)

    def fail(self, text: str, code: int) -> None:
        """The job cannot go on, and it is not a rank that has failed; the first such text counts."""
        self.failure = self.failure or (text, code)

    def _take(self, each: AgentLink) -> None:
        """Output of ranks."""
        pieces = each.read_output()
        for kind, rank, text in pieces or ():
            if kind == agent.ENDED:
                self.console.finish(rank)
            elif not (self.console.full and self._impatient()):
                self.console.take(rank, kind, text)
        if pieces is None or (self.console.full and not self._impatient()):
            self._selector.unregister(each.output)
            each.taking = False
        if pieces is None:
            each.output.close()

    def admit(self, each: AgentLink, sessions: Sequence[starter.Running]) -> None:
        """The agent of one more host takes part from now on."""
        for session in sessions:
            self.sessions.admit(session)
        self.links.append(each)
        self.heartbeat.admit(each)
        self.watch(each.control, partial(self._listen, each))
        each.order(**self.starts.of([], each.name, False))

    def _silent(self, each: AgentLink) -> None:
        """An agent does not answer: it is stopped, or its host is."""
        if each.pid is not None:
            if self.ending.stop_signal is None and self.ending.culprit() is None:
                text = f"the agent (pid {each.pid}) of the ranks has not answered for {self.plan.silence:g} s [HVD403]"
                self.fail(text, 1)
            process.send(each.pid, signal.SIGKILL)  # the kernel ends its ranks
            self._agent_killed = True
        else:
            self.lose(each, f"its agent has not answered for {self.plan.silence:g} s (--agent-timeout)")

    def send(self, send: Send | None) -> None:
        if send == KILL:
            self.order(do="kill")
            self.heartbeat.hurry()
        elif send is not None:
            self.order(do="signal", number=int(send.number), group=True, spared=sorted(send.spared))

    def signalled(self, numbers: bytes) -> None:
        """Signals to the launcher; a zero byte is the console's ring."""
        for number in numbers:
            if self.policy.signalled(number):
                continue
            if number in ENDING:
                self._interrupts += number == signal.SIGINT
                if self._interrupts >= 3:
                    self._leave_now()
                now = time.monotonic()
                self.send(self.ending.signalled(now, number))
                left = max(0.0, (self.ending.due() or now) - now)
                if self.plan.verbose or number != signal.SIGINT or self._interrupts == 1:
                    again = "; a second Ctrl-C kills them at once" if number == signal.SIGINT else ""
                    name = process.signal_name(number)
                    self.console.announce(f"{name} is forwarded to the ranks, which have {left:.3g} s to end{again}")
                self._give_up = now if self._interrupts > 1 else now + left + OUTPUT_S
            elif number in PASSED_ON:
                self.order(do="signal", number=number, group=False)
            elif number == signal.SIGTSTP:
                self.order(do="signal", number=int(signal.SIGSTOP), group=True)
                os.kill(os.getpid(), signal.SIGSTOP)
            elif number == signal.SIGCONT:
                self.order(do="signal", number=number, group=True)
            elif number == signal.SIGCHLD and os.getpid() == 1:
                process.reap_adopted({each.pid or 0 for each in self.links} | self.policy.children())

    def lose(self, each: AgentLink, why: str = "its connection ended") -> None:
        """An agent has ended, or does not answer any more."""
        self._selector.unregister(each.control)
        each.alive = False
        status = os.waitpid(each.pid, 0)[1] if each.pid is not None else 0
        if each.done:
            return
        lost = each.ranks & self.ending.living
        if each.pid is not None:
            end = f"{process.exit_text(process.exit_code(status))} [HVD403]"
            if not self._agent_killed:
                self.fail(f"the agent (pid {each.pid}) of the ranks ended too early: {end}", 1)
            process.sweep(self._strangers | self.sessions.pids())
        else:
            self.policy.host_lost(each, each.why or why)
        if each.output.fileno() >= 0 and each.pid is None:
            if each.taking:
                self._take(each)  # what came before the end
            if each.taking:
                self._selector.unregister(each.output)
            each.taking = False
            each.output.close()
        each.control.close()
        for rank in sorted(lost):
            self.policy.lost(rank)
        self._release()

    def _code(self) -> int:
        code = self.failure[1] if self.failure is not None else self.ending.exit_code()
        return code or (LOST if any(each.cut for each in self.links) else 0)

    @property
    def failed(self) -> bool:
        """Whether it has failed by itself: no signal has asked for its end."""
        by_request = self.ending.stop_signal is not None or self.policy.preempted
        return self._code() != 0 and not by_request and not self.console.broken

    def _finish(self) -> int:
        self.policy.close()
        self.store.close()
        headline, culprit = self.ending.headline(), self.ending.culprit()
        for cut in filter(None, [each.cut for each in self.links]):
            self.console.announce(cut)
        if self.failure is not None:
            self.console.announce(self.failure[0])
        elif headline is not None and culprit is not None:
            self.console.report(culprit, self.policy.headline(headline))
        self.console.close(self._interrupted)
        self.sessions.end()
        for each in self.links:
            each.control.close()
        self._selector.close()
        return self._code()

    def _interrupted(self) -> bool:
        """While the last output is written: is the wait over?"""
        try:
            if any(number in ENDING for number in self.signals.read()):
                return True
        except BlockingIOError:
            pass
        return self._impatient()

    def _impatient(self) -> bool:
        """A signal has ended the job, and its output has had its time."""
        return self._give_up is not None and time.monotonic() >= self._give_up

    def _leave_now(self) -> None:
        """Ctrl-C for the third time. The agents' ends take the ranks with them."""
        if self.own is not None and self.own.pid is not None:
            process.send(self.own.pid, signal.SIGKILL)
        os._exit(128 + signal.SIGINT)
