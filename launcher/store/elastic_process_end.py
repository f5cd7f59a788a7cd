"""End of one process in an elastic job: a pure function of all that is known of the process.

The exit code alone does not say it. A shell turns SIGKILL into code 137, a pipe into 0. A script that gets SIGTERM may
end with 0 in the middle of training. So three more facts count: whether the training function has returned on that rank
(it tells the launcher), whether the process reported something before its end, and whether a wrapper was started
instead. docs/guides/elastic.md has the table of `judged`.
"""

from __future__ import annotations

import enum
import re
import signal
from collections.abc import Collection
from typing import NamedTuple

from ..agent.process import exit_text, signal_name
from .elastic_members import Member

PREEMPTED, UNKEPT = 75, 74  # EX_TEMPFAIL of sysexits.h: try again later; EX_IOERR: no file has the last commit
EXCEPTION = "exception"  # a word of --tolerate
# What the process says of its end; a wrapper may have another code.
_CALLED = re.compile(r"rank \d+(?: \([^)]*\))? called (?:sys\.exit|exit|quit)\((\d+)\)")
_RAISED = re.compile(r"rank \d+(?: \([^)]*\))? raised ")


class Meaning(enum.Enum):
    """What an end means."""

    REMOVED = "the process was told to go"
    UNUSED = "it was no rank yet, so nobody misses it"
    WELL = "it has done its part"
    LOSS = "the others go on without it"
    LATE = "its training is over, so nobody does what it has left undone: the job fails when all have ended"
    FAILURE = "the script has failed, and would again: the job ends"


class End(NamedTuple):
    """What is known of a process that has ended. code is negative for a signal."""

    code: int
    with_host: bool = False  # with its host
    removed: bool = False  # it had the order to end
    new: bool = False  # it was in no epoch yet while there was one, or could not take the state
    training: bool = False  # it was within its training function
    returned: bool = False  # that has returned
    left: bool = False  # it has sent BYE, as a script does that ends by itself
    vanished: bool = False  # it ended without leaving the job, and its process is not the one that was started
    reason: str = ""  # why it ends, in its own words: "rank 1 raised ValueError: ..."
    others: int = 0  # living ranks that can go on without it
    over: bool = False  # training has ended on one rank or more


def end_of(member: Member | None, known: Collection[Member], opened: bool, begun: bool, finished: bool) -> End:
    """What the membership knows of this one. known: of the last epoch. begun: training has; finished: a rank has
    ended with it."""
    training = begun and member is not None and member.rank >= 0 and member.returned is False
    there = [m for m in known if not (m.ended or m.dismissed or m is member)]
    others = sum(m.returned is False for m in there) if begun else 0 if finished else len(there)
    end = End(0, others=others, over=finished or any(m.returned for m in known))
    if member is None:
        return end
    return end._replace(
        removed=member.dismissed,
        new=opened and (member.rank < 0 or member.unfit),
        training=training,
        returned=bool(member.returned),
        left=not member.silent,
        vanished=(member.silent or training) and member.pid != member.started,
    )


def judged(end: End, tolerated: Collection[str] = (), preempted: bool = False) -> Meaning:
    """The meaning of an end, in a job that goes on. tolerated: exit codes, and "exception", that count as a loss."""
    if end.removed:
        return Meaning.REMOVED
    if end.new:
        return Meaning.UNUSED
    if preempted and end.code in (0, PREEMPTED, UNKEPT):
        return Meaning.WELL
    quiet = not end.reason  # a pipe may have code 0 for one that has failed
    called = _CALLED.match(end.reason)
    code = int(called[1]) if called else end.code
    if end.code == 0 and quiet and not end.with_host and not end.training:
        return Meaning.WELL
    unsaid = quiet and (end.code == 0 or end.vanished)
    lost = end.with_host or unsaid or signal_of(code) or _tolerates(tolerated, end, code)
    if not lost:
        return Meaning.FAILURE
    return Meaning.LATE if end.returned or (end.over and not end.others) else Meaning.LOSS


def signal_of(code: int) -> int:
    """The signal that an exit code stands for, also where a shell has passed it on as 128 + n; 0: none."""
    number = -code if code < 0 else code - 128
    return number if 0 < number < signal.NSIG and (code < 0 or number in signal.valid_signals()) else 0


def text(code: int, training: bool) -> str:
    """How a process ended, for texts."""
    number = signal_of(code)
    if number and code > 0:
        return f"{exit_text(code)} (128 + {number}, {signal_name(number)})"
    return exit_text(code) + " within its training function" * (training and not code)


def _tolerates(tolerated: Collection[str], end: End, code: int) -> bool:
    raised = _RAISED.match(end.reason) is not None if end.reason else code == 1
    return str(code) in tolerated or str(end.code) in tolerated or (EXCEPTION in tolerated and raised)
