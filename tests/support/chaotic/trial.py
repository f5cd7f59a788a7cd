"""One trial: start the job, strike the victim when its moment has come, and judge what every rank and the launcher say.

    python trial.py SEED LATE     prints one line of JSON: what went wrong (nothing, one hopes) and how long things took
                                  LATE: seconds by which the parent strikes late, as on a crowded machine; inf: when
                                  the victim has done all its work

The right end of a trial: the job is over within the bound that its options give, with the victim's exit code; each
other rank that said how it ended named the victim (or ended well, where the victim had done its part); the launcher's
last line names it; and nothing is left. On MPI, whose launcher may kill the others first, the code is any but 0, and
only those who still spoke must have named it.

The parent's strike may come late: on a crowded machine the victim is long past the moment that it reported. Past its
last collective nobody needs it any more, so the trial is then one whose moment is at the end (`Run.late`). The clock,
which is the same for all processes, tells what came first: the victim says when it came to its last collective, and the
parent knows when the strike had surely landed.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import re
import select
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import uuid
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))

import launching  # noqa: E402  (after the path is set)
import mpis  # noqa: E402
import ranks  # noqa: E402
import warm  # noqa: E402

from chaotic import left, plan  # noqa: E402

ARRIVE_S = 240.0  # until the moment has come: imports of many ranks on a crowded machine
SLACK_S = 20.0  # what a crowded machine may add to a bound
LAND_S = 5.0  # from a signal until it shows


class Run:
    """The job of a trial, and what its ranks have said."""

    def __init__(self, trial, folder, more_s):
        self.trial, self.delay_s = trial, more_s + trial.delay_us * 1e-6
        self.mark = uuid.uuid4().hex
        self.hello, self.ready, self.ended, self.links = {}, set(), {}, {}
        # When; last: the victim came to its last collective.
        self.struck = self.completed = self.last = self.woken = 0.0
        self.reached = self.begun = self.done = False
        self.due = None  # (when, what) that the parent is about to do
        temporary = os.path.join(folder, "tmp")
        os.mkdir(temporary)
        self.watch = left.Watch(self.mark, temporary)
        place = os.path.join(folder, "socket")
        self.listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.listener.bind(place)
        self.listener.listen(64)
        self.watch.sockets |= {place}
        self.output = open(os.path.join(folder, "output"), "w+b")
        launcher = mpis.command(trial.mpi, trial.size) if trial.plane == "mpi" else [*launching.RUN, "-np", trial.size]
        environ = ranks.environment(OMP_NUM_THREADS="1", TMPDIR=temporary, CHAOS_MARK=self.mark, **trial.environ)
        words = [*launcher, sys.executable, "-u", HERE / "program.py", place, trial.seed]
        self.launcher = warm.start(words, environ, stdout=self.output, stderr=subprocess.STDOUT, cold=True)

    def text(self):
        """What launcher and ranks have printed."""
        return os.pread(self.output.fileno(), 1 << 20, 0).decode(errors="replace")

    @property
    def late(self):
        """Whether the strike found the victim in its last collective, or past it."""
        return self.reached and 0.0 < self.last < self.completed and self.trial.way != "nap"

    def turn(self):
        """Waits for news, deals with it, and does what is due."""
        patience = 0.05
        if self.due is not None:
            patience = max(0.0, min(patience, self.due[0] - time.monotonic()))
        for each in select.select([self.listener, *self.links], [], [], patience)[0]:
            if each is self.listener:
                self.links[each.accept()[0]] = None
                continue
            try:
                said = each.recv(65536)
            except ConnectionError:
                said = b""
            if said:
                self.heard(each, json.loads(said))
            else:
                del self.links[each]
                each.close()
        if self.due is not None and time.monotonic() >= self.due[0]:
            (_, act), self.due = self.due, None
            act()

    def heard(self, link, said):
        """A rank has said something."""
        rank, what = said["rank"], said["what"]
        self.links[link] = rank
        if what == "hello":
            self.hello[rank] = said["pid"]
        elif what == "ready":
            self.ready.add(rank)
            if self.begun:
                self.go(rank)
        elif what == "here":
            self.reached = True
            if self.trial.by == "victim":
                self.struck = said["at"]
            elif self.trial.moment != "import":
                self.due = (time.monotonic() + self.delay_s, self.strike)
        elif what == "last":
            self.last = said["at"]
        elif what == "done":
            self.done = True
            if self.reached and math.isinf(self.delay_s):
                self.due = None
                self.strike()
            if not self.reached or self.woken:
                self.go(rank)
        else:
            self.ended[rank] = said
            if rank == self.trial.victim:
                self.completed = self.completed or said["at"]  # what the parent raised in it
            elif self.trial.way == "wake" and self.struck and not self.woken:
                self.wake()
            self.let_go()
        if not self.begun:
            self.begin()

    def begin(self):
        """All come to init together, or to what one of them meets just before."""
        early = self.trial.moment == "import"
        others = set(range(self.trial.size)) - ({self.trial.victim} if early else set())
        if not others <= self.ready or early and not self.reached:
            return
        self.begun = True
        for rank in range(self.trial.size):
            self.go(rank)
        if early and self.trial.by == "parent":
            self.due = (time.monotonic() + self.delay_s, self.strike)
        elif early:
            self.struck = time.monotonic()

    def go(self, rank):
        """A rank that waits goes on."""
        for link, of in self.links.items():
            with contextlib.suppress(OSError):
                if of == rank:
                    link.send(b"go")

    def strike(self):
        """The victim's end."""
        way = self.trial.way
        name = "SIGSTOP" if way in plan.STOPPED else "SIGUSR2" if way == "raise" else way
        self.struck = time.monotonic()
        self.signal(getattr(signal, name))
        if way != "raise":
            self.completed = self.seen_landing()
        if way == "nap":
            self.due = (time.monotonic() + plan.NAP_S, self.wake)
        elif way in plan.STOPPED and self.trial.moment in plan.AT_END:  # nobody may miss it
            self.due = (time.monotonic() + plan.COLLECTIVE_S, self.wake)
        self.let_go()

    def seen_landing(self):
        """When the victim had stopped, or was no more."""
        until = time.monotonic() + LAND_S
        while (now := time.monotonic()) < until:
            try:
                stat = Path(f"/proc/{self.hello[self.trial.victim]}/stat").read_text()
            except (OSError, KeyError):
                break
            if stat.rpartition(")")[2].split()[0] in "TZX":
                break
        return now

    def let_go(self):
        """A stopped victim goes on once all the others have ended well: nobody is left who could miss it."""
        if self.trial.way in ("stop", "wake") and self.struck and not self.woken:
            well = {rank for rank, said in self.ended.items() if said["what"] == "well"}
            if well == set(range(self.trial.size)) - {self.trial.victim}:
                self.wake()

    def signal(self, number, rank=None):
        """To the victim, or another rank."""
        with contextlib.suppress(ProcessLookupError, KeyError):  # gone, or never come
            os.kill(self.hello[self.trial.victim if rank is None else rank], number)

    def wake(self):
        """The victim goes on."""
        self.signal(signal.SIGCONT)
        self.woken = time.monotonic()
        self.due = None
        if self.done:
            self.go(self.trial.victim)

    def drive(self):
        """To the end of the job; what is wrong with how it came, or an empty text."""
        began = time.monotonic()
        while self.launcher.poll() is None:
            self.turn()
            now = time.monotonic()
            bounded = self.struck and self.trial.way != "nap"  # after which all goes on as if nothing had been
            since, limit = (self.struck, self.trial.bound_s + SLACK_S) if bounded else (began, ARRIVE_S)
            if now - since > limit:
                for rank in self.hello:  # says where it hangs
                    self.signal(signal.SIGUSR1, rank)
                time.sleep(0.5)
                return f"no end {now - since:.1f} s after {'the end of the victim' if self.struck else 'the start'}"
        while self.links and select.select(list(self.links), [], [], 0)[0]:
            self.turn()
        return ""

    def end(self):
        """Whoever is left ends here; what was left."""
        if self.launcher.poll() is None:
            self.launcher.kill()
            self.launcher.wait()
        self.signal(signal.SIGCONT)  # one that is still stopped ends by itself, or is left
        found = self.watch.left(mpis_own=self.trial.plane in ("mpi", "gpu"))
        for pid in self.watch.processes():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        for each in (self.output, self.listener, *self.links):
            each.close()
        return found


def judged(run):
    """What was wrong, in texts, once the job is over."""
    trial, code, wrong = run.trial, run.launcher.returncode, []
    fails = run.reached and trial.way != "nap"
    late = trial.moment in plan.AT_END or run.late
    if trial.way in plan.STOPPED and late:
        fails = any(said["what"] == "error" for said in run.ended.values())  # it was continued, and may have ended well
    wanted = 0 if not fails else plan.WAYS[trial.way] if trial.plane != "mpi" else None
    if (code == 0) if wanted is None else code != wanted:
        wrong.append(f"exit code {code} instead of {'any but 0' if wanted is None else wanted}")
    for rank, said in sorted(run.ended.items()):
        if said["what"] == "well":
            wrong += [f"rank {rank} ended well"] if fails and not late else []
        elif not fails:
            wrong.append(f"rank {rank} raised {said['kind']}: {said['text']}")
        elif rank != trial.victim:
            wrong += [f"rank {rank}: {each}" for each in misnamed(trial, said)]
    silent = set(range(trial.size)) - set(run.ended) - {trial.victim}
    if silent and trial.plane != "mpi":
        wrong.append(f"ranks {sorted(silent)} did not say how they ended")
    lines = [line for line in run.text().splitlines() if line.startswith("hvdlite-run: rank ")]
    if fails and trial.plane != "mpi" and not re.search(rf"\brank {trial.victim} \(", "".join(lines[-1:])):
        wrong.append(f"the launcher's last line does not name rank {trial.victim}: {lines[-1:]}")
    return wrong


def misnamed(trial, said):
    """What a survivor said amiss."""
    if trial.plane == "mpi" and trial.way in plan.STOPPED and trial.moment in plan.BEFORE:
        return  # who is stopped inside MPI's own calls of init cannot be told
    if not re.search(rf"\brank {trial.victim}\b", said["text"]):
        yield f"{said['kind']} does not name rank {trial.victim}: {said['text']}"
    if said["named"] not in (trial.victim, None) or said["named"] is None and trial.moment not in plan.BEFORE:
        yield f"{said['kind']}.rank is {said['named']}: {said['text']}"
    if trial.way == "raise" and trial.moment not in ("import", "init") and f"boom {trial.seed}" not in said["text"]:
        yield f"the exception is not quoted: {said['text']}"


def verdict(run, wrong):
    """In words that chaos.py counts."""
    passed = run.late and run.trial.moment not in plan.AT_END
    met = " (moment passed)" if passed else "" if run.reached else " (moment not reached)"
    return "WRONG" if wrong else f"ok{met}"


def conduct(seed, more_s):
    """The outcome of a trial, as a dict."""
    trial = plan.planned(seed)
    began = time.monotonic()
    folder = tempfile.mkdtemp(prefix="chaos")
    try:
        run = Run(trial, folder, more_s)
        hung = run.drive()
        over = time.monotonic()
        wrong = [hung] if hung else judged(run)
        said = run.text()
        wrong += [f"left: {each}" for each in run.end()]
        if trial.plane == "mpi" and run.struck and time.monotonic() - run.struck > trial.bound_s + SLACK_S:
            wrong.append("too late")
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    return {
        "seed": seed,
        "wrong": wrong,
        "verdict": verdict(run, wrong),
        "seconds": round(time.monotonic() - began, 2),
        "ending": round(over - run.struck, 2) if run.struck else None,
        "said": said[-8000:],
    }


if __name__ == "__main__":
    print(json.dumps(conduct(int(sys.argv[1]), float(sys.argv[2]))), flush=True)
