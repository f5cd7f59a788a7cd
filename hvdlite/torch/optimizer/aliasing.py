"""Gradients that share memory. Autograd makes a gradient of whatever tensor nobody else holds, but a tensor is not its
memory: where a parameter is used through a view (`bias.view(...)`, `unsqueeze`), p.grad may share its memory with a
gradient that backward still needs for another branch, or with the gradient of another parameter. What lies there must
not change before backward is over, and views that the user holds must stay views.

Torch counts the users of a memory. One is the tensor; the object that Python makes to ask is another, or has gone by
then (before PyTorch 2.5), so it is tried with a memory that has one user, and then two. If torch does not report the
count, others are assumed: that costs copies, and is right.

And two optimizers may have one parameter: the newer one reduces its gradient.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from .reducer import Exchange

_users: Callable[[Any], int] = getattr(torch._C, "_storage_Use_Count", lambda storage: 0)


def _users_of_one() -> int | None:
    """What the count is for one tensor alone; None: this torch does not report it."""
    tensor = torch.empty(1, device="cpu")
    alone = _users(tensor.untyped_storage()._cdata)
    both = (tensor, tensor.view(1))
    return alone if _users(both[0].untyped_storage()._cdata) == alone + 1 else None


_alone = _users_of_one()
_owner_of: dict[int, weakref.ref[Exchange]] = {}  # by id of a parameter, which its exchange keeps alive


def is_shared(tensor: torch.Tensor) -> bool:
    """Whether another tensor, or something outside of torch that holds one, has this dense tensor's memory."""
    return _alone is None or _users(tensor.untyped_storage()._cdata) > _alone


def is_held(tensor: torch.Tensor) -> bool:
    """Whether something beside its parameter and Python has the tensor itself, as a DLPack capsule does."""
    count = getattr(tensor, "_use_count", None)
    return count is None or count() > 2


def owner_of(parameter: torch.Tensor) -> Exchange | None:
    """The exchange that reduces its gradient, if there is one."""
    return _owner_of.get(id(parameter), lambda: None)()


def take_over(exchange: Exchange, parameter: torch.Tensor, name: str) -> None:
    """Two optimizers that reduce one gradient, each in place, would spoil it: the newer one has it."""
    earlier = owner_of(parameter)
    if earlier is not None and earlier is not exchange:
        earlier.lost = name
        earlier.hooks.remove()
    _owner_of[id(parameter)] = weakref.ref(exchange)
