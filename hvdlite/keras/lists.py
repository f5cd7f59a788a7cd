"""Have all ranks lists of variables of one length? Asked before variables are sent by their places in a list.

Where an optimizer is built on one rank only, its list is longer there, and the collectives of the others would wait for
ever for names that nobody else has. So the lengths go first, under one name. Only if they differ do the names of the
variables follow, and all ranks raise the same error. Shapes and dtypes are the core's to compare.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from .. import _core
from ..errors import HvdMismatchError
from ..objects import allgather_object
from ..process_set import ProcessSet, global_process_set
from .naming import everywhere

_SHOWN = 4


def compare(variables: Sequence[Any], what: str, process_set: ProcessSet = global_process_set) -> None:
    """HvdMismatchError on all ranks of the set if the number of variables is not the same on all. `what` sends them."""
    if not process_set.included() or process_set.size() == 1:
        return
    counts = allgather_object(len(variables), f"{what}.count", process_set)
    if len(set(counts)) == 1:
        return
    names = allgather_object([everywhere(variable) for variable in variables], f"{what}.names", process_set)
    few, many = counts.index(min(counts)), counts.index(max(counts))
    ranks = process_set.ranks
    more = [name for i, name in enumerate(names[many]) if i >= len(names[few]) or name != names[few][i]]
    shown = ", ".join(more[:_SHOWN]) + (", ..." if len(more) > _SHOWN else "")
    raise HvdMismatchError(
        f"rank {_core.rank()}: {what} got {counts[many]} variables on rank {ranks[many]} and {counts[few]} on rank "
        f"{ranks[few]}; rank {ranks[many]} has more: {shown}. Make the same variables on all ranks before they are "
        "sent: build the model and the optimizer (optimizer.build(model.trainable_variables)) on all of them."
    )
