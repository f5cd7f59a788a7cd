"""How does a round end on all ranks when the backward pass of one has ended with an exception?

The user catches the exception to go on with the next batch. Some gradients are under way by then and the other ranks
wait for the rest, so a rank that only went on would be one round behind for good, and one that sent what it has would
bring half a gradient into the average, which the others apply and it does not.

So the pass is over for all: for each gradient that has not travelled the rank sends a *skip*, a tensor of a shape that
no gradient has, under the gradient's name. The ranks disagree on it, nothing is moved, and the engine goes on.
Elsewhere the mismatch is told as what it is, with the rank's number, where the averages are waited for: every rank has
an error in the same step, and equal weights. At least one gradient is always skipped, since the last ones are sent by
the end of backward only.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING

import torch

from ... import _core
from ...errors import OUTCOMES, HvdError, HvdMismatchError
from ...ops import Handle
from ..ops import plain

if TYPE_CHECKING:
    from .wire import Wire

_SHAPE = (0,) * 8  # as many dimensions as there can be
_SHOWN = 3
_SAID = re.compile(r"(ranks? \d[\d, and-]*?)(?: said|:) (?:(?!ranks? \d)[^\n])*?" + re.escape(str(list(_SHAPE))))
_NAMED = re.compile(r"tensor '(?:(?:grouped_)?allreduce\.)?([^']*)'")


def send_skip(wire: Wire, number: int) -> list[Handle]:
    """In the place of one gradient."""
    name, dtype = wire.names[number], wire.parameters[number].dtype
    handles = [plain.allreduce_async_(torch.empty(_SHAPE, dtype=dtype), name=name, **wire.settings)]
    if wire.is_sparse(number) and not wire.sparse_as_dense and not wire.uneven:
        handles.append(plain.allgather_async(torch.empty(_SHAPE, dtype=dtype), f"{name}.values", wire.process_set))
    return handles


def send_skipped_group(wire: Wire, numbers: Sequence[int], name: str) -> list[Handle]:
    """In the place of a group."""
    tensors = [torch.empty(_SHAPE, dtype=wire.parameters[number].dtype) for number in numbers]
    return [plain.grouped_allreduce_async_(tensors, name=name, **wire.settings)]


def told(error: Exception) -> HvdMismatchError | None:
    """The error that says which rank has skipped the pass, if that is why the exchange failed."""
    found = _SAID.search(str(error)) if isinstance(error, HvdMismatchError) else None
    if found is None:
        return None
    named = _NAMED.search(str(error))
    which = f" {named[1]!r}" if named else ""
    return HvdMismatchError(
        f"{found[1]} skipped this backward pass: it ended there with an exception, before the gradient of{which} was "
        "complete, so this step has no averages on any rank. To go on, catch this error as the exception is caught "
        "there: call optimizer.zero_grad() and take the next batch, without step() [HVD308]"
    )


def nothing_to_step_with(wire: Wire, numbers: Iterable[int]) -> HvdError:
    """The error of the rank itself, where it goes on without zero_grad()."""
    names = [wire.names[number] for number in numbers]
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return HvdError(
        f"the last backward pass of rank {_core.rank()} ended with an exception before the gradients of "
        f"{', '.join(map(repr, names[:_SHOWN]))}{more} were sent, so there is nothing to synchronize or step with. The "
        "other ranks have been told that this rank skips the step: call optimizer.zero_grad() and take the next batch, "
        "without step() [HVD308]"
    )


def land_all(waits: Iterable[Callable[[], object]]) -> Exception | None:
    """Wait for everything. The first failure that is no mismatch, which is what skips are for."""
    failure: Exception | None = None
    for wait in waits:
        try:
            wait()
        except HvdMismatchError:
            pass
        except OUTCOMES as error:
            failure = failure or error
    return failure
