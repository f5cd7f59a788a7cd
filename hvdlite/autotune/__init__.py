"""Finds the size of buckets that makes training steps shortest, while the training runs: `hvdlite-run --autotune ...`.

    hvd.autotune.step()      a step is over; hvd.DistributedOptimizer reports it itself
    hvd.autotune.reopen()    search anew, from now on

It is over within 50 steps and keeps the default unless another setting is better beyond the noise that it has measured
(search.py). HVDLITE_AUTOTUNE_LOG names a file that gets a row for every trial (trials.py). A fusion threshold that the
user has given stays as it is. The setting changes on all ranks in the same round; rank 0 alone measures and proposes,
and on the others these calls do nothing. Results do not depend on it: sums are the same, bit by bit.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from .. import _core
from ..errors import HvdError

if TYPE_CHECKING:
    from ..config import Settings
    from .tuner import Tuner

__all__ = ["reopen", "step"]

watching = False  # whether steps matter here and now: what an optimizer looks at before it calls `step`
_settings: Settings | None = None  # of the job that this process is a rank of
_rank, _size = 0, 1
_tuner: Tuner | None = None


def step(source: Any = None) -> None:
    """Count a training step, for the search, in a loop without ``hvd.DistributedOptimizer``.

    The optimizer counts its own steps. After the first call, only these calls count. Call it once per step. Only the
    clock of rank 0 counts; on other ranks it does nothing.

    Args:
        source (object, optional): what made the step; for optimizers. Default: None, the script.

    Example:
        >>> hvd.autotune.step()  # does nothing: no search is running
    """
    global watching
    if not watching or _tuner is None:
        return
    try:
        _tuner.step(source)
    except HvdError:
        watching = False  # the job has failed, and its next collective says why
        return
    watching = _tuner.searching


def reopen() -> None:
    """Search anew from the next step on, after the model, the batch or the machine has changed.

    Call it on all ranks or on rank 0. It needs no ``HVDLITE_AUTOTUNE``. If there is nothing to tune, it prints a line
    and changes nothing. Sums stay the same, bit by bit.

    Raises:
        HvdNotInitializedError: before ``init`` and after ``shutdown``. It is also a ``ValueError``.
        HvdOptionError: if the file of ``HVDLITE_AUTOTUNE_LOG`` cannot be written.

    Example:
        >>> hvd.autotune.reopen()  # doctest: +SKIP
        >>> # skipped here, since rank 0 prints a line about the search
    """
    if _settings is None:
        _core.require_job()
    _search()


def check(settings: Settings, rank: int) -> None:
    """Before the rendezvous: raises HvdOptionError if rank 0 cannot write the file of trials."""
    filename = settings.values["autotune_log"]
    if rank == 0 and filename and settings.values["autotune"]:
        from . import trials

        trials.check(filename)


def begin(settings: Settings, rank: int, size: int) -> None:
    """This process has become a rank."""
    global _settings, _rank, _size
    _settings, _rank, _size = settings, rank, size
    if settings.values["autotune"]:
        _search()
    elif rank == 0 and settings.values["autotune_log"]:
        from .tuner import note

        note(f"{settings.origin['autotune_log']} waits for HVDLITE_AUTOTUNE=1 or hvd.autotune.reopen()")


def end() -> None:
    """This process is no rank any more."""
    global _settings, _tuner, watching
    tuner, unfinished = _tuner, watching
    _settings, _tuner, watching = None, None, False
    if tuner is None:
        return
    if unfinished:
        from .tuner import note

        counted = "hvd.DistributedOptimizer counts its own, hvd.autotune.step() those of other loops"
        note(f"no verdict after {tuner.steps} steps" if tuner.steps else f"it has seen no steps: {counted}")
    tuner.trials.close()


def _search() -> None:
    """A search on rank 0, the first of this job or a new one."""
    global _tuner, watching
    if _rank != 0 or _settings is None:
        return
    from .trials import Trials
    from .tuner import Tuner, note

    values, origin = _settings.values, _settings.origin
    if _tuner is not None:
        _tuner.restart()
        watching = True
        return
    trials = Trials(values["autotune_log"] or None)
    given = origin["fusion_threshold"]
    if given is not None or _size == 1:
        note(f"nothing to tune: {f'{given} is given and stays' if given else 'there is only one rank'}")
        trials.close()
        return
    limits = [values["autotune_" + name] for name in ("warmup_samples", "steps_per_sample", "max_samples")]
    _tuner = Tuner(values["fusion_threshold"], (limits[0], limits[1], limits[2]), _core.tune, trials)
    watching = True
