"""Costs of training, counted by the core step by step: `hvd.stats()`, `hvd.report()` and their relatives.

    hvd.stats()                      numbers of this rank, as a dict
    hvd.report()                     the same for a human: printed, and returned as a text
    hvd.stats(everyone=True)         and who is late: all ranks call it
    hvd.stats_step()                 a step is over, in loops that have none of hvdlite's optimizers
    hvd.write_stats(writer, step)    to TensorBoard
    hvd.StepLogger(log).step()       to TensorBoard or another tracker, every few steps, with who was late
    (step_logger.py)

A step ends where an optimizer of hvdlite's has stepped or has averaged its gradients; in a graph of TensorFlow nobody
sees that, and a step ends where the next list of gradients is about to be averaged (csrc/tensorflow/list_mismatch.c),
unless the script says so. training/step_source.py says whose steps count. Nothing here communicates unless it says so,
and nothing runs beside the training unless an option asks for it: steps.jsonl (step_log.py), the port for Prometheus
(aggregator.py).
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

from .. import _core
from .._core import lib
from ..trace import directory
from ..training.step_source import Whose
from . import step_rows

if TYPE_CHECKING:
    from ..config import Settings
    from .aggregator import Gathering
    from .step_log import Journal

_TRACKERS = ("add_scalar", "log_metrics", "log")  # methods, one of which a tracker must have

__all__ = ["StepLogger", "begin", "data_waited", "end", "report", "stats", "stats_step", "step", "write_stats"]


class _State:
    """What belongs to one life of a job."""

    def __init__(self) -> None:
        self.step_source = Whose()
        self.history = step_rows.History()
        self.since_ns = 0
        self.journal: Journal | None = None
        self.served: Gathering | None = None


_state = _State()


def step(source: Any = None, optimizer_ns: int = 0) -> None:
    """A step is over. source: what made it, so that one counts where there are several; None: the script says so.
    optimizer_ns: of it, in the optimizer itself. Costs a microsecond; does nothing before init()."""
    if _state.step_source.counts(source):
        lib.hvd_step(0, optimizer_ns)


def steps() -> int:
    """How many there were since init(). Raises HvdNotInitializedError."""
    now = step_rows.row(0)
    assert now is not None
    return now[0]


def data_waited(ns: int) -> None:
    """The training loop has waited so long for its data."""
    lib.hvd_data_waited(ns)


def _host() -> str:
    return os.uname().nodename


def stats_step() -> None:
    """Count a training step, for ``hvd.stats``, in a loop without an optimizer of hvdlite.

    The optimizers and pipelines of hvdlite count their own steps. After the first call in a script, only these calls
    count. Call it once per step on all ranks.

    Raises:
        HvdNotInitializedError: before ``init`` and after ``shutdown``. It is also a ``ValueError``.

    Example:
        >>> before = hvd.stats()["steps"]
        >>> hvd.stats_step()
        >>> hvd.stats()["steps"] - before
        1
    """
    _core.require_job()
    step()


def stats(everyone: bool = False) -> dict[str, Any]:
    """Return what training costs on this rank, as a dict.

    Means are over the last 511 steps at most, without the first step. A value that is not known is None. Totals are
    since ``init``. Planes are the ways that tensors take, such as ``shm``.

    ==================  ========  ======================================================================================
    Key                 Unit      Meaning
    ==================  ========  ======================================================================================
    ``rank``, ``size``            number of this rank; number of ranks
    ``host``                      name of this host
    ``seconds``         s         time since ``init``
    ``steps``           steps     steps so far
    ``window``          steps     number of steps that the means are over
    ``step_ms``         ms        dict of ``mean``, ``p50``, ``p90`` and ``p99`` of a step's duration
    ``compute_ms``      ms        part of a step that is neither exposed nor waiting for data
    ``exposed_ms``      ms        part of a step in which the script waited for collectives. In a TensorFlow graph: the
                                  time in which collectives were in flight.
    ``exposed_share``   0 to 1    ``exposed_ms`` as a share of the step
    ``negotiation_ms``  ms        time in which tensors were submitted here and not yet on all ranks; it overlaps the
                                  parts above
    ``data_wait_ms``    ms        part of a step in which the script waited for data; None if nothing measures it
    ``optimizer_ms``    ms        time in the optimizer's own step; part of ``compute_ms``
    ``bytes``           bytes     per step, by plane
    ``messages``        messages  per step, by plane; a message is one bucket
    ``bandwidth``       bytes/s   by plane, while a bucket was in flight; None for NCCL, which is not measured
    ``buckets``                   dict of ``per_step``, ``mean_bytes``, ``mean_tensors``, and ``sizes``: number of
                                  buckets since ``init`` by size class
    ``memory``          bytes     by device: the process on ``cpu``, PyTorch's tensors on ``cuda:k``
    ``core_memory``     bytes     as ``hvd.memory_stats``
    ``totals``                    since ``init``: ``tensors``, ``buckets``, ``rounds``, ``exposed_ms``,
                                  ``negotiation_ms``, ``data_wait_ms``, ``bytes`` and ``messages`` by plane, and
                                  ``links`` (bytes and messages to other hosts, votes included)
    ``ranks``                     with ``everyone``: list of the dicts of all ranks
    ``lateness``                  with ``everyone``: by rank, ``p50_ms``, ``p90_ms`` and ``p99_ms`` after the first rank
                                  of a step, ``last_share`` (0 to 1) of ``steps`` in which it was the last; None without
                                  a common step or a common clock
    ==================  ========  ======================================================================================

    Args:
        everyone (bool): True also returns the numbers of all ranks; then all ranks must call it. Default: False.

    Returns:
        dict: the keys of the table. The dict can be written as JSON.

    Raises:
        HvdNotInitializedError: before ``init`` and after ``shutdown``. It is also a ``ValueError``.
        HvdPeerLostError: with ``everyone``, if a rank dies or leaves the job.
        TypeError: if ``everyone`` is not a bool.

    Example:
        >>> hvd.stats()["rank"]
        0  # rank 0
        1  # rank 1
        >>> [each["rank"] for each in hvd.stats(everyone=True)["ranks"]]
        [0, 1]
    """
    if not isinstance(everyone, bool):
        raise TypeError(f"everyone must be True or False, not {everyone!r} [HVD242]")
    from . import summary

    _core.require_job()
    steps, now = _state.history.steps(), step_rows.row(0)
    assert now is not None
    mine = summary.local(steps, now, _host(), _state.since_ns)
    if everyone:
        from . import job

        mine.update(job.gathered(mine, steps))
    return mine


def report(everyone: bool = False, show: bool = True) -> str:
    """Return ``hvd.stats`` as a text, and print it.

    Args:
        everyone (bool): True reports all ranks; then all ranks must call it, and rank 0 alone prints. Default: False.
        show (bool): False does not print. Default: True.

    Returns:
        str: the text, of several lines.

    Raises:
        HvdNotInitializedError: before ``init`` and after ``shutdown``. It is also a ``ValueError``.
        HvdPeerLostError: with ``everyone``, if a rank dies or leaves the job.
        TypeError: if an argument is not a bool.

    Example:
        >>> hvd.report(show=False).startswith(f"hvdlite: rank {hvd.rank()} of 2")
        True
    """
    if not isinstance(show, bool):
        raise TypeError(f"show must be True or False, not {show!r} [HVD242]")
    from . import report_text

    found = stats(everyone)
    text = report_text.report(found)
    if show and (not everyone or found["rank"] == 0):
        print(text, flush=True)
    return text


def write_stats(writer: Any, step: int, prefix: str = "hvdlite/") -> None:
    """Write the numbers of ``hvd.stats`` to TensorBoard.

    It calls ``writer.add_scalar(tag, value, step)`` for each number, with tags such as ``hvdlite/step_ms/mean`` and
    ``hvdlite/bytes/shm``. Numbers that are not known, and totals, are left out.

    Args:
        writer (SummaryWriter): any object with a method ``add_scalar(tag, value, step)``.
        step (int): number of the step.
        prefix (str): begins each tag. Default: ``"hvdlite/"``.

    Raises:
        HvdNotInitializedError: before ``init`` and after ``shutdown``. It is also a ``ValueError``.
        TypeError: if ``writer`` has no such method, or ``step`` is not an integer.

    Example:
        >>> from types import SimpleNamespace
        >>> tags = []
        >>> hvd.write_stats(SimpleNamespace(add_scalar=lambda tag, value, step: tags.append(tag)), step=1)
        >>> "hvdlite/core_memory/total" in tags
        True
    """
    add = getattr(writer, "add_scalar", None)
    if not callable(add):
        raise TypeError(
            f"a writer needs a function add_scalar(tag, value, step), like SummaryWriter: {writer!r} has none [HVD242]"
        )
    if isinstance(step, bool) or not isinstance(step, int):
        raise TypeError(f"step must be a whole number, not {step!r} [HVD242]")
    from .tensorboard import scalars

    for tag, value in scalars(stats()).items():
        add(prefix + tag, value, step)


class StepLogger:
    """Sends the cost of the last steps, and the rank that was late in them, to a tracker.

    All ranks must make one and call ``step`` equally often, because they exchange their times. In elastic training,
    make it in the function that trains. It sends these numbers, each with the prefix ``hvdlite/``:

    * ``step_ms``, ``compute_ms``, ``exposed_ms``, ``data_wait_ms``: means in milliseconds since the last point, as in
      ``hvd.stats``. The first step since ``init`` is left out.
    * ``late_ms``, ``ahead_ms``: mean time in milliseconds by which this rank had submitted a step's tensors after the
      first rank and before the last one.
    * ``last_rank``, ``last_late_ms``: the rank that was last in the mean, and its ``late_ms``. These four are missing
      on one rank and between hosts without a common clock.

    Args:
        log (object, optional): has ``add_scalar(tag, value, step)`` as TensorBoard's SummaryWriter, or
            ``log_metrics(dict, step=)`` as Lightning's loggers and mlflow, or ``log(dict)`` as wandb; or is a function
            of a dict. Default: None, which only exchanges times.
        every (int): calls of ``step`` per point, at least 1. Default: 10.

    Raises:
        HvdNotInitializedError: before ``init`` and after ``shutdown``. It is also a ``ValueError``.
        TypeError: if ``log`` is none of these.
        ValueError: if ``every`` is not a positive integer.

    Example:
        >>> points = []
        >>> logger = hvd.StepLogger(points.append, every=2)
        >>> for number in range(2):
        ...     _ = hvd.allreduce(np.array([1.0]))
        ...     logger.step()
        >>> len(points), points[0]["hvdlite/step"]
        (1, 2)
    """

    def __init__(self, log: Any = None, every: int = 10) -> None:
        if log is not None and not callable(log) and not any(callable(getattr(log, name, None)) for name in _TRACKERS):
            raise TypeError(f"log must be a function or have {', '.join(_TRACKERS)}: {log!r} is neither [HVD242]")
        if isinstance(every, bool) or not isinstance(every, int) or every < 1:
            raise ValueError(f"every must be a number of steps, not {every!r} [HVD242]")
        self._log, self._every, self._calls = log, every, 0
        self._counted = self._reported = steps()

    def step(self, number: int | None = None) -> None:
        """Count a training step, and send a point after every ``every`` calls.

        If an optimizer of hvdlite has counted the step, this call counts none.

        Args:
            number (int, optional): number of the step, for the tracker. Default: the number of calls.

        Raises:
            HvdNotInitializedError: before ``init`` and after ``shutdown``. It is also a ``ValueError``.
            HvdPeerLostError: if a rank dies or leaves the job.
        """
        if steps() == self._counted:
            stats_step()
        self._counted = steps()
        self._calls += 1
        if self._calls % self._every == 0:
            from . import step_logger

            found = step_logger.point(
                [each for each in _state.history.steps(self._reported) if each.number > 1], self._every
            )
            self._reported = self._counted
            if self._log is not None and found:
                step_logger.send(self._log, found, self._calls if number is None else number)


def begin(settings: Settings, rank: int) -> None:
    """This process has become a rank: what options ask for begins, too."""
    global _state
    _state = _State()
    now = step_rows.row(0)
    assert now is not None
    _state.since_ns = _state.history.since_ns = now[1]
    values = settings.values
    if values["trace_steps"] and values["trace_dir"] not in (None, *directory.OFF):
        from .step_log import Journal as Writes

        about = {"fusion_threshold": values["fusion_threshold"]}
        _state.journal = Writes(values["trace_dir"], rank, values["trace_every"], _host(), _state.history, about)
    if values["metrics_port"] is not None:
        from .aggregator import Gathering as Gathers

        _state.served = Gathers(values, rank, _host(), _state.history)


def end() -> None:
    """This process is about to leave the job."""
    global _state
    incarnation, _state = _state, _State()
    for each in (incarnation.journal, incarnation.served):
        if each is not None:
            each.close()
