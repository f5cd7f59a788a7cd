"""End of a job: the culprit, the signals to the others, the exit code. Pure: events and times in, actions out.

The culprit is the rank that the first abort record names (the engines' own account of the first failure), else the rank
whose process was the first to end with a non-zero code. From the first such news on the others have a moment to fail by
themselves, so that each prints its own error; then SIGTERM, another moment, SIGKILL (`Graces`). A signal to the
launcher is passed on and gives more time before SIGKILL, SIGTERM most: schedulers announce the end by it, and a rank
that saves then must not be cut off. SIGINT after any signal kills at once. What ranks do once the launcher has sent
them a signal decides nothing any more.

A rank that exits with 0 is never a failure, also where it has not left by shutdown() (os._exit(0) as the last line):
the others go on. If one of them fails because it needs a rank that has left or has exited with 0, the one that fails is
the culprit, and the headline names the other.

A culprit that has reported why it fails is on its way out, in atexit handlers or the teardown of a framework, and so is
a rank whose script has ended. Each gets `LEAVING_S` for it, while the others have their usual time.

The exit code is the culprit's, 128+n for a signal, also 128+n when signal n ended the launcher's job. A culprit that
exited with 0 hands the code over to the next that failed. One that has reported its error and had not ended when the
grace was over counts as failed, with code 1; so does one that not even SIGKILL has ended.
"""

from __future__ import annotations

import signal
from collections.abc import Callable, Sequence
from typing import NamedTuple

from hvdlite.errors.codes import code_of, coded

from ..agent.process import exit_text

INTERRUPT_S, TERM_S = 5.0, 30.0  # as long as Slurm and Kubernetes wait after SIGTERM
LEAVING_S = 10.0  # from the first failure; as long as containers have to end
LOST = 255  # of ranks whose host is gone, as ssh has it
KILLED = " (by the kernel when memory runs out, a scheduler at a limit, or kill -9: see dmesg and the scheduler's log)"
UNKNOWN = 1  # the exit code where that of no rank applies


class Send(NamedTuple):
    """An action: this signal to the process group of every living rank but `spared`."""

    number: int
    spared: frozenset[int] = frozenset()


KILL = Send(int(signal.SIGKILL))


class Abort(NamedTuple):
    """An abort record."""

    reporter: int
    culprit: int
    text: str
    hangs: bool = False  # it kept the others waiting, and may know of nothing

    @property
    def own(self) -> bool:
        """Whether the culprit itself has reported it."""
        return self.reporter == self.culprit and not self.hangs


class Graces(NamedTuple):
    """Seconds that ranks are given."""

    fail: float = 1.0  # from the first failure to SIGTERM
    term: float = 0.5  # from there to SIGKILL
    signal: float | None = None  # from a signal to the launcher to SIGKILL; None: by the signal

    def after(self, number: int) -> float:
        """From this signal to SIGKILL."""
        if self.signal is not None:
            return self.signal
        return TERM_S if number == signal.SIGTERM else INTERRUPT_S


class Ending:
    """The end of a job of `size` ranks; times are seconds on any one clock. hosts: where they run, if not all here."""

    def __init__(self, size: int, graces: Graces, hosts: Sequence[str] = ()) -> None:
        self._size, self._graces = size, graces
        self._hosts = hosts
        self.named: Callable[[int], str] | None = None  # how texts name a rank; None: by number, host and process
        self.pids: dict[int, int] = {}
        self.codes: dict[int, int] = {}  # of ended ranks; negative for a signal
        self.living = set(range(size))
        self.left: set[int] = set()  # ranks whose script has ended, or that have left, and may run exit handlers
        self.abort: Abort | None = None
        self._missed: Abort | None = None  # of the ranks that were missing at the time limit, by one that waited
        self.stop_signal: int | None = None  # the signal that ended the job from outside
        self._failed: list[int] = []  # ranks with a non-zero code, in order, before any signal of ours
        self._stopped = False  # the culprit, which had reported its error, ended by our signal
        self._sent: set[int] = set()  # signals of ours that have gone out
        self._next: tuple[float, Send] | None = None
        self._leave_by = 0.0  # until then those that are about to end may do so by themselves

    def admit(self, rank: int) -> None:
        """One more."""
        self._size = max(self._size, rank + 1)
        self.living.add(rank)

    def aborted(self, now: float, abort: Abort) -> None:
        """An engine's abort record came in. Only the first counts, and its culprit's own report replaces
        those of ranks that got its report and were faster."""
        if not 0 <= abort.culprit < self._size:
            abort = abort._replace(culprit=abort.reporter)
        if self.abort is None and not self._sent:
            self.abort = abort
            self._failing(now)
        elif self.abort is not None and abort.reporter == abort.culprit == self.abort.culprit and not self.abort.hangs:
            self.abort = self.abort if self.abort.reporter == abort.reporter else abort
        self._let_live()

    def missed(self, waiting: int, missing: int, text: str) -> None:
        """A rank was missing at the time limit, or had ended without a word: if that makes one fail, it is the culprit,
        and not those that waited."""
        self._missed = self._missed or Abort(waiting, missing, text)

    def ended(self, now: float, rank: int, code: int, words: str = "") -> None:
        """A rank's process has ended. words: its last, which tell whether it has failed of one that left before. None
        and code 1: its traceback, which says nothing new, was left out."""
        self.living.discard(rank)
        if code != 0 and self._left_well() and (words or code != 1) and "HvdPeerLostError" not in words:
            self.abort = None
        self.codes[rank] = code
        if -code in self._sent and self.abort is not None and self.abort.culprit == rank == self.culprit():
            self.codes[rank] = UNKNOWN  # it was on its way out, or did not know that it had failed
            self._stopped = True
        if code != 0 and not self._sent:
            self.abort = self.abort or (None if self._failed else self._missed)
            self._failed.append(rank)
            self._failing(now)
        self._let_live()

    def signalled(self, now: float, number: int) -> Send:
        """The launcher got SIGINT, SIGTERM or SIGHUP: what to send on at once."""
        again = self.stop_signal is not None and number == signal.SIGINT
        patience = self._graces.after(number)
        if self.stop_signal is None and self.culprit() is None:
            self.stop_signal = number
        elif self.stop_signal is None:
            self.stop_signal = 0  # the job was ending already; its culprit stays
            patience = min(patience, self._graces.fail + self._graces.term)
        self._sent.add(KILL.number if again else number)
        if again:
            self._next = None
            return KILL
        if self._next is None or self._next[1] != KILL:
            self._next = (now + patience, KILL)
        return Send(number)

    def warned(self, number: int) -> None:
        """A scheduler has sent this signal to ranks past the launcher: the first end of a rank hurries none that saves,
        also where it was reported before this."""
        more = max(0.0, self._graces.after(number) - self._graces.fail)
        self._graces = self._graces._replace(fail=self._graces.fail + more)
        if self._next is not None and self.stop_signal is None:
            self._next = (self._next[0] + more, self._next[1])
            self._leave_by += more

    @property
    def far(self) -> bool:
        """Whether ranks run on other hosts."""
        return bool(self._hosts)

    @property
    def kills(self) -> bool:
        """Whether SIGKILL has gone out."""
        return KILL.number in self._sent

    def who(self, rank: int) -> str:
        """ "rank 2 (nodeB, pid 4711)", without the host where that goes without saying."""
        if self.named is not None:
            return self.named(rank)
        host = f"{self._hosts[rank]}, " if self._hosts else ""
        return f"rank {rank} ({host}pid {self.pids.get(rank, '?')})"

    def due(self) -> float | None:
        """When `act` has something to do; None: never."""
        return self._next[0] if self._next is not None and self.living else None

    def act(self, now: float) -> Send | None:
        """The signal that is due, if one is."""
        if self._next is None or now < self._next[0] or not self.living:
            return None
        send = self._next[1]
        self._next = None if send == KILL else (now + self._graces.term, KILL)
        leaving = self._leaving()
        if self.stop_signal is None and now < self._leave_by and leaving:
            self._next = self._next or (self._leave_by, Send(int(signal.SIGTERM)))
            send = send._replace(spared=leaving)
        self._sent.add(send.number)
        return send

    def culprit(self) -> int | None:
        """The rank that the job's end is put down to, if it has failed; its code is known once it has ended."""
        if self.abort is not None:
            if self._failed and self._departed():
                return self._failed[0]
            return None if self._left_well() else self.abort.culprit
        return self._failed[0] if self._failed else None

    def exit_code(self) -> int:
        """Of the launcher, once no rank runs or those that do are left behind."""
        if self.stop_signal:
            return 128 + self.stop_signal
        culprit = self.culprit()
        if culprit is None or self._survived():
            return 0
        first = [self.codes.get(culprit, 0)] + [self.codes[rank] for rank in self._failed]
        code = next((code for code in first if code), UNKNOWN)
        return code if code > 0 else 128 - code

    def headline(self) -> str | None:
        """How the culprit ended, in one line; None if no rank failed."""
        culprit = self.culprit()
        if self.stop_signal or culprit not in self.pids or self._survived():
            return None  # one that was never started has been reported already
        end = exit_text(self.codes.get(culprit))
        if self.codes.get(culprit) == -signal.SIGKILL:
            end += KILLED
        if self._stopped and self.abort is not None:
            own = self.abort.reporter == culprit
            end = "failed, and was stopped before it ended" if own else "did not end by itself and was stopped"
        code = self.codes.get(culprit, 0)
        return blamed(self._with_cause(f"{self.who(culprit)} {end}", culprit, code), code)

    def _with_cause(self, line: str, culprit: int, code: int) -> str:
        """What is known of its end, or what others say of it."""
        if self.abort is not None and self.abort.culprit != culprit:
            if self._left() and code_of(self.abort.text) != "HVD451":  # it did not say that it leaves
                return f"{line}: {self.who(self.abort.culprit)} exited with code 0 without hvd.shutdown()"
            return f"{line}: {self.abort.text}"
        if self.abort is not None and self.abort == self._missed:
            return f"{line}; rank {self.abort.reporter} says: {self.abort.text}"
        if self.abort is None:
            return line
        if self.abort.reporter == culprit:
            return f"{line}: {self.abort.text}" if self.abort.text else line
        if code and not self._stopped and not self.abort.hangs:
            return line
        return f"{line}; rank {self.abort.reporter} says: {self.abort.text}"

    def _left(self) -> bool:
        """Whether others miss that rank, and did not only wait for it in vain."""
        abort = self.abort
        if abort is None or abort.reporter == abort.culprit or abort.hangs or abort == self._missed:
            return False
        return self._departed()

    def _departed(self) -> bool:
        """Whether the rank that others name has exited with 0, or left by shutdown(). The failed one is to blame."""
        abort = self.abort
        if abort is None or abort.reporter == abort.culprit:
            return False
        code = self.codes.get(abort.culprit)
        return code == 0 or (code_of(abort.text) == "HVD451" and (code is None or -code in self._sent))

    def _leaving(self) -> frozenset[int]:
        """Living ranks that are about to end: those that have left, and a culprit that has reported its error."""
        own = {self.abort.culprit} if self.abort is not None and self.abort.own else set()
        return frozenset(self.living & (self.left | own))

    def _left_well(self) -> bool:
        """And no other has failed of it, or by itself."""
        return self._left() and not self._failed

    def _let_live(self) -> None:
        """No rank is hurried because of one that has left well."""
        if self._left_well() and not self._sent:
            self._next = None

    def _survived(self) -> bool:
        """All have ended, and well."""
        return not self.living and not any(self.codes.values())

    def _failing(self, now: float) -> None:
        if self._next is None and not self._sent:
            self._next = (now + self._graces.fail, Send(int(signal.SIGTERM)))
            self._leave_by = now + max(LEAVING_S, self._graces.fail + self._graces.term)


def blamed(text: str, code: int) -> str:
    """A text about the end of a process, with the code of the catalogue that fits its exit code."""
    return coded("HVD402" if code < 0 else "HVD401", text)
