"""What happens between the command line and the exit code? One job: its store, its agent, its ranks, its end.

The loop below has four sources of news and no other place to sleep: the agent's control stream (ranks started, ended),
its output stream, the store (abort records), and signals. Decisions are taken elsewhere and purely: ending.py says who
is to blame and what to send when, lines.py what the output looks like.

Order matters in three places. The agent is forked before any thread exists and before the store is bound, so that it
holds nothing of ours. The store hears of a rank's end after it has read that rank's last words. And the last report is
made when the agent is gone, because then all output has come.

If the launcher is killed, the agent ends the job; if the agent is killed, the kernel ends the ranks, and what they left
behind becomes our child and ends here. As process 1 of a container we reap whatever is handed to us.
"""

from __future__ import annotations

import json
import os
import selectors
import signal
import socket
import sys
import time
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from hvdlite import _wire

from . import agent, environment, process
from .ending import KILL, TERM_S, Abort, Ending, Send, how
from .hosts import Slot
from .logs import Console
from .store import StoreServer

PASSED_ON = (signal.SIGUSR1, signal.SIGUSR2)  # to the ranks' own processes only
ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
OUTPUT_S = 2.0  # after a signal has ended the job, for output that is slow to be read
_READ_BYTES = 1 << 18


class Plan(NamedTuple):
    """A job as the command line asks for it."""

    command: Sequence[str]
    slots: Sequence[Slot]
    environ: Mapping[str, str]  # the launcher's own
    options: Mapping[str, str]  # variables that flags stand for
    grace: float
    output_folder: str | None = None
    timestamps: bool = False
    verbose: bool = False
    as_horovod: bool = False


class Job:
    """Runs one Plan in this process's main thread."""

    def __init__(self, plan: Plan) -> None:
        self._plan = plan
        self._size = len(plan.slots)
        self._began = time.monotonic()
        self._ending = Ending(self._size, plan.grace)
        self._woken, self._wake = socket.socketpair()
        self._woken.setblocking(False)
        self._wake.setblocking(False)
        self._console = Console(self._size, self._size > 1, plan.timestamps, self._ring)
        self._selector = selectors.DefaultSelector()
        self._control_reader, self._output_reader = _wire.FrameReader(), _wire.FrameReader()
        self._taking = False  # the output stream is watched
        self._alive = True  # the agent has not been reaped
        self._done = False  # the agent says that nothing is left
        self._interrupts = 0
        self._give_up: float | None = None  # when output that nobody reads stops being waited for
        self._failure: str | None = None  # what stopped the launcher itself

    def run(self) -> int:
        """Starts the ranks, returns the job's exit code when nothing of it is left."""
        if self._plan.output_folder is not None:
            self._console.open_files(self._plan.output_folder)
        self._watch_signals()
        process.become_subreaper()
        self._strangers = set() if process.childless() else set(process.descendants())  # children from before exec
        self._fork_agent()
        secret, job = os.urandom(32), int.from_bytes(os.urandom(8), "big")
        self._store = StoreServer(self._size, secret, job, on_abort=self._aborted)
        self._console.start()
        meeting = environment.Meeting(*self._store.address, secret, job)
        self._order_start(meeting)
        for source in (self._control, self._store, self._woken):
            self._selector.register(source, selectors.EVENT_READ)
        while self._alive or self._output.fileno() >= 0:
            self._turn()
        return self._finish()

    def _fork_agent(self) -> None:
        self._control, control = socket.socketpair()
        self._output, output = socket.socketpair()
        ours = (self._control, self._output, self._woken, self._wake)
        self._agent = agent.fork(control, output, _stdin(), close=ours)
        control.close()
        output.close()
        self._output.setblocking(False)

    def _order_start(self, meeting: environment.Meeting) -> None:
        plan = self._plan
        shared = environment.shared(plan.environ, plan.options, meeting, plan.slots)
        if plan.as_horovod:
            environment.put_horovod_in_front(shared)
        if environment.sets_threads(plan.environ, plan.slots):
            self._console.say(
                f"OMP_NUM_THREADS=1 is set for each of {self._size} ranks, so that they do not fight for the CPUs; "
                "set it yourself to tune it"
            )
        places = [environment.of_rank(slot, self._size) for slot in plan.slots]
        ranks = [{"rank": slot.rank, "environ": place} for slot, place in zip(plan.slots, places)]
        if plan.verbose:
            self._console.say(f"store on {meeting.address}:{meeting.port}, job {meeting.job:016x}, agent {self._agent}")
            self._console.say(f"command: {' '.join(plan.command)}")
            for slot, place in zip(plan.slots, places):
                pairs = " ".join(f"{name}={value}" for name, value in sorted(place.items()))
                self._console.say(f"rank {slot.rank} on {slot.host}: {pairs}")
        self._order(do="start", command=list(plan.command), cwd=os.getcwd(), environ=shared, ranks=ranks)

    def _order(self, **order: Any) -> None:
        try:
            self._control.sendall(_wire.pack(agent.CONTROL, json.dumps(order).encode()))
        except OSError:
            pass  # the agent is gone; its end is noticed below

    def _turn(self) -> None:
        """One round of the loop: waits for news, deals with it, does what is due."""
        if not self._taking and self._output.fileno() >= 0 and (self._impatient() or not self._console.full):
            self._selector.register(self._output, selectors.EVENT_READ)
            self._taking = True
        times = (
            self._ending.due(),
            self._console.due(),
            self._store.deadline(),
            None if self._taking else self._give_up,
        )
        due = [each for each in times if each is not None]
        patience = max(0.0, min(due) - time.monotonic()) if due else None
        for key, _ in self._selector.select(patience):
            if key.fileobj is self._store:
                continue  # below, always: deadlines
            if key.fileobj is self._control:
                self._listen()
            elif key.fileobj is self._output:
                self._take()
            elif key.fileobj is self._woken:
                self._signalled(self._woken.recv(4096))
        self._store.turn()
        now = time.monotonic()
        self._console.tick(now)
        self._send(self._ending.act(now))
        if self._console.broken and self._ending.asked is None:
            self._send(self._ending.signalled(now, signal.SIGPIPE)._replace(number=int(signal.SIGTERM)))

    def _listen(self) -> None:
        """News from the agent."""
        try:
            chunk = self._control.recv(_READ_BYTES)
        except OSError:
            chunk = b""
        if not chunk:
            self._selector.unregister(self._control)
            self._agent_ended(os.waitpid(self._agent, 0)[1])
            return
        for _, body in self._control_reader.feed(chunk):
            news = json.loads(body)
            if news["what"] == "started":
                self._ending.pids[news["rank"]] = news["pid"]
                if self._plan.verbose:
                    self._console.say(f"rank {news['rank']} is process {news['pid']}")
            elif news["what"] == "unstarted":
                self._console.say(f"cannot start rank {news['rank']}: {news['text']}")
                self._rank_ended(news["rank"], news["code"])
                self._ending.living &= set(self._ending.pids)  # those after it were not started either
            elif news["what"] == "ended":
                self._rank_ended(news["rank"], news["code"])
            elif news["what"] == "done":
                self._done = True
            elif news["what"] == "broken":
                self._failure = news["text"]

    def _rank_ended(self, rank: int, code: int) -> None:
        text = f"rank {rank} (pid {self._ending.pids.get(rank, '?')}) {how(code)}"
        self._store.rank_ended(rank, text)
        if self._plan.verbose:
            self._console.say(f"{text} after {time.monotonic() - self._began:.2f} s")
        self._ending.ended(time.monotonic(), rank, code)

    def _aborted(self, reporter: int, culprit: int, code: int, text: str) -> None:
        if self._plan.verbose:
            self._console.say(f"abort record of rank {reporter}: rank {culprit}, code {code}: {text}")
        self._ending.aborted(time.monotonic(), Abort(reporter, culprit, text))

    def _take(self) -> None:
        """Output of ranks."""
        try:
            chunk = self._output.recv(_READ_BYTES)
        except BlockingIOError:
            return
        except OSError:
            chunk = b""
        for kind, body in self._output_reader.feed(chunk):
            rank = agent.RANK.unpack_from(body)[0]
            if kind == agent.ENDED:
                self._console.finish(rank)
            elif not (self._console.full and self._impatient()):
                self._console.take(rank, kind, body[agent.RANK.size :])
        if not chunk or (self._console.full and not self._impatient()):
            self._selector.unregister(self._output)
            self._taking = False
        if not chunk:
            self._output.close()

    def _send(self, send: Send | None) -> None:
        if send == KILL:
            self._order(do="kill")
        elif send is not None:
            self._order(do="signal", number=int(send.number), group=True)

    def _signalled(self, numbers: bytes) -> None:
        """Signals to the launcher; a zero byte is the console's ring."""
        for number in numbers:
            if number in ENDING:
                self._interrupts += number == signal.SIGINT
                if self._interrupts >= 3:
                    self._leave_now()
                if self._plan.verbose or number != signal.SIGINT or self._interrupts == 1:
                    name = process.signal_name(number)
                    again = "; Ctrl-C again kills them" if number == signal.SIGINT else ""
                    self._console.say(f"{name}: passed on to the ranks, which have 5 s to end{again}")
                now = time.monotonic()
                self._send(self._ending.signalled(now, number))
                self._give_up = now if self._interrupts > 1 else now + TERM_S + OUTPUT_S
            elif number in PASSED_ON:
                self._order(do="signal", number=number, group=False)
            elif number == signal.SIGTSTP:
                self._order(do="signal", number=int(signal.SIGSTOP), group=True)
                os.kill(os.getpid(), signal.SIGSTOP)
            elif number == signal.SIGCONT:
                self._order(do="signal", number=number, group=True)
            elif number == signal.SIGCHLD and os.getpid() == 1:
                self._reap_adopted()

    def _reap_adopted(self) -> None:
        """As process 1: children that are not ours by birth. The agent's end is left to be read from its stream."""
        while True:
            try:
                found = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
            except ChildProcessError:
                return
            if found is None or found.si_pid == self._agent:
                return
            os.waitpid(found.si_pid, os.WNOHANG)

    def _agent_ended(self, status: int) -> None:
        self._alive = False
        if self._done:
            return
        ending = how(process.exit_code(status))
        self._failure = self._failure or f"the agent (pid {self._agent}) of the ranks ended too early: {ending}"
        give_up = time.monotonic() + 5.0
        while time.monotonic() < give_up:
            left = set(process.descendants()) - self._strangers
            if not left:
                return
            for pid in left:
                process.send(pid, signal.SIGKILL)
            process.reap()
            time.sleep(0.01)

    def _finish(self) -> int:
        self._store.close()
        headline = self._ending.headline()
        culprit = self._ending.culprit()
        if self._failure is not None:
            self._console.say(self._failure)
        elif headline is not None and culprit is not None:
            self._console.report(culprit, headline)
        self._console.close(self._interrupted)
        signal.set_wakeup_fd(-1)
        for end in (self._control, self._woken, self._wake):
            end.close()
        self._selector.close()
        return 1 if self._failure is not None else self._ending.exit_code()

    def _interrupted(self) -> bool:
        """While the last output is written: has somebody lost patience?"""
        try:
            if any(number in ENDING for number in self._woken.recv(4096)):
                return True
        except BlockingIOError:
            pass
        return self._impatient()

    def _impatient(self) -> bool:
        """A signal has ended the job, and its output has had its time."""
        return self._give_up is not None and time.monotonic() >= self._give_up

    def _leave_now(self) -> None:
        """Ctrl-C for the third time. The agent's death takes the ranks with it."""
        process.send(self._agent, signal.SIGKILL)
        os._exit(128 + signal.SIGINT)

    def _ring(self) -> None:
        try:
            self._wake.send(b"\0")
        except OSError:
            pass  # full: it will wake up anyway

    def _watch_signals(self) -> None:
        signal.set_wakeup_fd(self._wake.fileno(), warn_on_full_buffer=False)
        for number in (*ENDING, *PASSED_ON, signal.SIGTSTP, signal.SIGCONT, signal.SIGCHLD):
            if signal.getsignal(number) != signal.SIG_IGN or number == signal.SIGCHLD:  # nohup stays nohup
                signal.signal(number, lambda *_: None)


def _stdin() -> int:
    """The descriptor that rank 0 reads: ours, unless reading it would take the terminal from somebody else."""
    try:
        if os.isatty(0) and os.tcgetpgrp(0) != os.getpgrp():
            return -1
    except OSError:
        pass  # not our controlling terminal: nobody's to take
    return 0


def run(plan: Plan) -> int:
    """Runs the job; the exit code of the launcher. Raises OSError when the output folder cannot be written."""
    for standard in (0, 1, 2):
        try:
            os.fstat(standard)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # takes the lowest free number: this one
    for stream in (sys.stdout, sys.stderr):
        if stream is not None:
            stream.flush()
    return Job(plan).run()
