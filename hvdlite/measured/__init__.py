"""What does training cost, while it runs? Counted by the core all the time, step by step; read when somebody asks.

    hvd.stats()                      numbers of this rank, as a dict
    hvd.report()                     the same for a human: printed, and returned as a text
    hvd.stats(everyone=True)         and who is late: all ranks call it
    hvd.stats_step()                 a step is over, in loops that have none of hvdlite's optimizers
    hvd.write_stats(writer, step)    to TensorBoard
    hvd.StepLogger(log).step()       to TensorBoard or another tracker, every few steps, with who was late (logged.py)

A step ends where an optimizer of hvdlite's has stepped or has averaged its gradients; in a graph of TensorFlow nobody
sees that, and a step ends where the next list of gradients is about to be averaged (csrc/tensorflow/list.c), unless the
script says so. stepping.py says whose steps count. Nothing here
communicates unless it says so, and nothing runs beside the training unless an option asks for it: steps.jsonl
(journal.py), the port for Prometheus (gathering.py, port.py).
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

from .. import _core, _records
from .._core import lib
from ..stepping import Whose
from . import rows

if TYPE_CHECKING:
    from ..config import Settings
    from .gathering import Gathering
    from .journal import Journal

_TRACKERS = ("add_scalar", "log_metrics", "log")  # what they have to be told by

__all__ = ["StepLogger", "begin", "data_waited", "end", "report", "stats", "stats_step", "step", "write_stats"]


class _Life:
    """What belongs to one life of a job."""

    def __init__(self) -> None:
        self.whose = Whose()
        self.history = rows.History()
        self.since_ns = 0
        self.journal: Journal | None = None
        self.served: Gathering | None = None


_life = _Life()


def step(source: Any = None, optimizer_ns: int = 0) -> None:
    """A step is over. source: what made it, so that one counts where there are several; None: the script says so.
    optimizer_ns: of it, in the optimizer itself. Costs a microsecond; does nothing before init()."""
    if _life.whose.counts(source):
        lib.hvd_step(0, optimizer_ns)


def steps() -> int:
    """How many there were since init(). Raises HvdNotInitializedError."""
    now = rows.row(0)
    assert now is not None
    return now[0]


def data_waited(ns: int) -> None:
    """The training loop has waited so long for its data."""
    lib.hvd_data_waited(ns)


def _host() -> str:
    return os.uname().nodename


def stats_step() -> None:
    """Says that a training step is over, for `hvd.stats()`: for loops without an optimizer of hvdlite's, which say
    so by themselves.

    Once a script has called it, only its own calls count. Call it once per step, on all ranks.
    Raises HvdNotInitializedError before init().
    """
    _core.size()
    step()


def stats(everyone: bool = False) -> dict[str, Any]:
    """What training costs on this rank: means of the last 511 steps at most, the first left out, and totals since init.

    rank, size, host; seconds: since init; steps: so far; window: of how many steps the means are.
    step_ms: mean, p50, p90, p99 of how long a step took, or None without steps, as all means are.
    compute_ms, exposed_ms, data_wait_ms: what a step is made of: threads of the script waited for collectives
    (exposed), or for data (None: where nobody measured it; see hvd.data), or neither (compute). exposed_share: of the
    step, 0 to 1. In a graph of TensorFlow no thread waits, and exposed is the time in which collectives were under way.
    negotiation_ms: tensors were submitted here and not yet everywhere (a part of the others).
    optimizer_ms: of the optimizer's own step (a part of compute), or None.
    bytes, messages: of tensors, by plane and step; a message is one bucket. votes: what travels with them.
    bandwidth: by plane, bytes/s while a bucket was under way; None where that is not known (NCCL works on by itself).
    buckets: per_step, mean_bytes, mean_tensors; sizes: how many since init, by the greatest size in bytes of each kind.
    memory: bytes by device: of the process on the "cpu", of PyTorch's tensors on "cuda:k". core_memory: of hvdlite's
    own, as hvd.memory_stats().
    totals: since init: tensors, buckets, rounds, exposed_ms, negotiation_ms, data_wait_ms, bytes and messages by plane,
    links (bytes and messages to other hosts, votes included).

    everyone: a collective, all ranks call it. Adds ranks: this dict of every rank; and lateness: by rank how late it
    was in steps that all ranks tell of (p50_ms, p90_ms, p99_ms after the first rank) and in which share it was the last
    (last_share, of `steps`); None where there is no such step, or no clock that all hosts have in common.
    Raises HvdNotInitializedError before init(), TypeError.
    """
    if not isinstance(everyone, bool):
        raise TypeError(f"everyone must be True or False, not {everyone!r} [HVD242]")
    from . import summary

    _core.size()
    steps, now = _life.history.steps(), rows.row(0)
    assert now is not None
    mine = summary.local(steps, now, _host(), _life.since_ns)
    if everyone:
        from . import job

        mine.update(job.gathered(mine, steps))
    return mine


def report(everyone: bool = False, show: bool = True) -> str:
    """`hvd.stats` as a text that is printed (unless `show` is False) and returned.

    everyone: a collective, all ranks call it; then rank 0 alone prints. Raises as `stats`.
    """
    if not isinstance(show, bool):
        raise TypeError(f"show must be True or False, not {show!r} [HVD242]")
    from . import words

    found = stats(everyone)
    text = words.report(found)
    if show and (not everyone or found["rank"] == 0):
        print(text, flush=True)
    return text


def write_stats(writer: Any, step: int, prefix: str = "hvdlite/") -> None:
    """Gives `writer.add_scalar(tag, value, step)` the numbers of `hvd.stats()`: for torch.utils.tensorboard's
    SummaryWriter, or whatever has that function. Tags: hvdlite/step_ms/mean, hvdlite/bytes/shm, ...
    Raises TypeError for what is no writer or no number of a step, HvdNotInitializedError before init()."""
    add = getattr(writer, "add_scalar", None)
    if not callable(add):
        raise TypeError(
            f"a writer has a function add_scalar(tag, value, step), as SummaryWriter has: {writer!r} has none [HVD242]"
        )
    if isinstance(step, bool) or not isinstance(step, int):
        raise TypeError(f"step must be a whole number, not {step!r} [HVD242]")
    from .scalars import scalars

    for tag, value in scalars(stats()).items():
        add(prefix + tag, value, step)


class StepLogger:
    """Sends what the last steps have cost, and who was late in them, to a tracker, when `step` is called.

    All ranks make one and call `step` equally often, for they exchange when they came; in elastic training make it in
    the function that trains.
    log: has add_scalar(tag, value, step), as TensorBoard's SummaryWriter; or log_metrics(dict, step=), as Lightning's
    loggers and mlflow; or log(dict), as a run of wandb; or is a function of a dict. None: this rank exchanges only.
    every: after so many calls of `step` there is a point, of the means since the last one.

    hvdlite/step_ms; compute_ms, exposed_ms, data_wait_ms (where somebody measures it): of it, as in hvd.stats. The
    first step since init is in none of them, and what comes between steps, as a validation, belongs to the next one.
    hvdlite/late_ms, ahead_ms: how long after the first rank, and before the last one, this rank had submitted what a
    step needs. hvdlite/last_rank, last_late_ms: which rank came the latest, in the mean, and its late_ms. These are not
    told on one rank, nor between hosts without a clock in common.
    Raises TypeError, ValueError, HvdNotInitializedError before init().
    """

    def __init__(self, log: Any = None, every: int = 10) -> None:
        if log is not None and not callable(log) and not any(callable(getattr(log, name, None)) for name in _TRACKERS):
            raise TypeError(f"log must have {', '.join(_TRACKERS)}, or be a function: {log!r} is none [HVD242]")
        if isinstance(every, bool) or not isinstance(every, int) or every < 1:
            raise ValueError(f"every must be a number of steps, not {every!r} [HVD242]")
        self._log, self._every, self._calls = log, every, 0
        self._counted = self._told = steps()

    def step(self, number: int | None = None) -> None:
        """A training step is over. Where an optimizer of hvdlite's has told so, this counts none of its own.

        number: of the step, for the tracker; None: how often this was called. Raises what a collective raises.
        """
        if steps() == self._counted:
            stats_step()
        self._counted = steps()
        self._calls += 1
        if self._calls % self._every == 0:
            from . import logged

            found = logged.point([each for each in _life.history.steps(self._told) if each.number > 1], self._every)
            self._told = self._counted
            if self._log is not None and found:
                logged.send(self._log, found, self._calls if number is None else number)


def begin(settings: Settings, rank: int) -> None:
    """This process has become a rank: what options ask for begins, too."""
    global _life
    _life = _Life()
    now = rows.row(0)
    assert now is not None
    _life.since_ns = _life.history.since_ns = now[1]
    values = settings.values
    if values["trace_steps"] and values["trace_dir"] not in (None, *_records.OFF):
        from .journal import Journal as Writes

        about = {"fusion_threshold": values["fusion_threshold"]}
        _life.journal = Writes(values["trace_dir"], rank, values["trace_every"], _host(), _life.history, about)
    if values["metrics_port"] is not None:
        from .gathering import Gathering as Gathers

        _life.served = Gathers(values, rank, _host(), _life.history)


def end() -> None:
    """This process is about to leave the job."""
    global _life
    life, _life = _life, _Life()
    for each in (life.journal, life.served):
        if each is not None:
            each.close()
