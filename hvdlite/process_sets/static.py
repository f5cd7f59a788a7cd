"""Static process sets, which a job has from its start.

Those that init(process_sets=[...]) names; they come back with each later init() that names none, so that they are there
again after a new rendezvous of an elastic job. The job may be smaller by then, and a set needs its ranks: one that has
lost some is left out of that incarnation, and so is one that has all ranks. Rank 0 reports it. When the job has grown
again the set comes back.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from typing import Any

from .process_set import ProcessSet, global_process_set

_named: list[ProcessSet] = []  # by the last init that named any


def given(process_sets: Any, more: list[Any]) -> list[ProcessSet] | None:
    """The sets that a caller of init names; None for none. ValueError for what is no list of sets."""
    if process_sets is None or process_sets == "dynamic":
        return [ProcessSet(each) for each in more] or None
    if isinstance(process_sets, (str, ProcessSet)) or not isinstance(process_sets, Iterable):
        raise ValueError(f'process_sets must be a list of hvd.ProcessSet or "dynamic", not {process_sets!r} [HVD212]')
    sets = [each if isinstance(each, ProcessSet) else ProcessSet(each) for each in [*more, *process_sets]]
    sets = [each for each in sets if each is not global_process_set]
    for i, each in enumerate(sets):
        if each.mpi_comm is None and any(each.ranks == other.ranks for other in sets[:i]):
            raise ValueError(f"process_sets names the ranks {each.ranks} twice: list each set once [HVD215]")
    return sets


def keep(sets: list[ProcessSet] | None) -> None:
    """These, if any are named, are the job's from now on."""
    if sets is not None:
        _named[:] = sets


def forget() -> None:
    """They could not be made: no later init brings them back."""
    _named.clear()


def of_incarnation(sets: list[ProcessSet] | None, rank: int, size: int) -> list[ProcessSet]:
    """Those of a job of this size: those named now, ValueError if it cannot have them; or those of last time that it
    can have."""
    if sets is not None:
        for each in sets:
            why = _refusal(each, size)
            if why is not None:
                raise ValueError(f"{each!r}: {why} [HVD215]")
        keep(sets)
        return sets
    refused = [(each, _refusal(each, size)) for each in _named]
    lost = [f"{each.ranks} ({why})" for each, why in refused if why is not None]
    if lost and rank == 0:
        print(f"hvdlite: process sets left out: {'; '.join(lost)} [HVD215]", file=sys.stderr, flush=True)
    return [each for each, why in refused if why is None]


def _refusal(process_set: ProcessSet, size: int) -> str | None:
    """Why a job of this size cannot have the set; None if it can."""
    if process_set.mpi_comm is not None:  # its ranks are known after the rendezvous
        return None
    if process_set.ranks[-1] >= size:
        return f"there is no rank {process_set.ranks[-1]} in a job of {size} rank{'s' if size > 1 else ''}"
    if len(process_set.ranks) == size:
        return "it has all ranks of the job: use hvd.global_process_set"
    return None
