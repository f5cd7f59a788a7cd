"""Who else has a gradient's memory? Autograd makes a gradient of whatever tensor nobody else holds, but a tensor is not
its memory: where a parameter is used through a view (`bias.view(...)`, `unsqueeze`), p.grad may share its memory with a
gradient that backward still needs for another branch, or with the gradient of another parameter. What lies there must
not change before backward is over, and views that the user holds must stay views.

Torch counts the users of a memory. One is the tensor, and one is the object that Python makes to ask. A torch that does
not tell is taken to say that there are others: that costs copies, and is right.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

_users: Callable[[Any], int] | None = getattr(torch._C, "_storage_Use_Count", None)


def is_shared(tensor: torch.Tensor) -> bool:
    """Whether another tensor, or something outside of torch that holds one, has this dense tensor's memory."""
    return _users is None or _users(tensor.untyped_storage()._cdata) > 2


def is_held(tensor: torch.Tensor) -> bool:
    """Whether something beside its parameter and Python has the tensor itself, as a DLPack capsule does."""
    count = getattr(tensor, "_use_count", None)
    return count is None or count() > 2
