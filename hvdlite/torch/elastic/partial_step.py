"""Unfinished step at a commit: what belongs to it, and what is dropped when ranks return to it.

A lost rank ends a step anywhere: gradients are half made, passes are counted, some are in flight, a GradScaler has
unscaled. When ranks return to a commit all of it goes: each gradient is None, as in a process that begins at the
commit.

But a commit may lie between the passes of one step. What has been added up by then is needed to complete that step, so
the commit keeps it: gradients and counters of a distributed optimizer whose step is not taken yet. Where it has taken
its step its gradients are used up, and nothing is copied. Of all other parameters (of a plain optimizer, of Adasum's,
frozen ones) nobody knows whether their gradients are used up, so a commit keeps those that there are.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch

from ...errors import HvdStateError
from ..optimizer.failed_backward import forget
from ..optimizer.gradient_memory import owner_of
from ..optimizer.methods import Delta
from ..optimizer.reducer import Exchange
from ..optimizer.sent_gradient import SentGradient

_Kept = dict[str, dict[int, Any]]


def _of(parts: Sequence[Any]) -> tuple[list[torch.Tensor], list[Exchange]]:
    """Parameters of models, then of optimizers, each once; what reduces their gradients. In one order everywhere."""
    found: dict[int, torch.Tensor] = {}
    for each in sorted(parts, key=lambda part: not isinstance(part, torch.nn.Module)):
        its: Iterable[torch.Tensor] = ()
        if isinstance(each, torch.nn.Module):
            its = each.parameters()
        elif isinstance(each, torch.optim.Optimizer):
            its = (parameter for group in each.param_groups for parameter in group["params"])
        found.update((id(parameter), parameter) for parameter in its)
    owners = {id(owner): owner for owner in map(owner_of, found.values()) if owner is not None}
    return list(found.values()), list(owners.values())


def kept(parts: Sequence[Any]) -> _Kept | None:
    """Of these models and optimizers what the commit needs to complete a step. None: nothing. Gradients in flight
    are waited for."""
    parameters, owners = _of(parts)
    positions, gradients = {}, {}
    for number, owner in enumerate(owners):
        if owner.tracker.in_flight() and owner.failed is None:
            owner.finish()
        position = owner.tracker.position()
        if position is not None:
            positions[number] = position
    opened = [owners[number] for number in positions]
    for number, parameter in enumerate(parameters):
        gradient, owner_ = parameter.grad, owner_of(parameter)
        if isinstance(gradient, SentGradient):
            if owner_ in opened:
                raise HvdStateError(
                    "a commit between backward and step() does not hold the shares of the averaged gradients: commit "
                    "after step() of a sharded optimizer [HVD425]"
                )
            continue
        if gradient is not None and (owner_ is None or owner_ in opened or not parameter.requires_grad):
            gradients[number] = gradient.detach().clone()
    return {"places": positions, "gradients": gradients} if positions or gradients else None


def has_sums(what: _Kept | None) -> bool:
    """Whether a window of several passes is open: until it ends, sums are each rank's own."""
    return any(ended or closing for _, ended, closing, *_ in what["places"].values()) if what else False


def go_back(parts: Sequence[Any], what: _Kept | None) -> None:
    """To what `kept` has returned, on this rank or on another one with the same parameters."""
    parameters, owners = _of(parts)
    for owner in owners:
        forget(owner)
    for each in parts:
        if isinstance(each, Delta):
            each._hvd_delta.forget()
        if hasattr(each, "_per_optimizer_states"):  # of a GradScaler: what it has unscaled
            each._per_optimizer_states.clear()
    gradients = what["gradients"] if what else {}
    for number, parameter in enumerate(parameters):
        gradient = gradients.get(number)
        parameter.grad = None if gradient is None else gradient.to(parameter.device, copy=True)
    for number, position in what["places"].items() if what else ():
        owners[number].tracker.go_on(position)
