"""Sent gradient: what `p.grad` of a sharded optimizer is after the gradient has been sent, so that no code reads it.

A sharded optimizer drops a gradient when it is sent, and gets back a share of the average only. If `p.grad` were None
then, torch.nn.utils.clip_grad_norm_ would clip nothing, in silence. So `p.grad` is a tensor without memory, which
raises an error that names the parameter and the remedy. It lets pass what a training loop does to gradients anyway:
setting them to zero, detaching, and converting the model.
"""

from __future__ import annotations

from typing import Any

import torch

from ...errors import HvdError


class SentGradient(torch.Tensor):
    """What ``p.grad`` is between the moment when the gradient is sent and ``zero_grad``: an error for its readers."""

    _name: str
    zeroed: bool

    @staticmethod
    def __new__(cls, like: torch.Tensor, name: str, dtype: Any = None, device: Any = None) -> SentGradient:
        made: SentGradient = torch.Tensor._make_wrapper_subclass(  # type: ignore[attr-defined]
            cls, like.shape, dtype=dtype or like.dtype, device=device or like.device
        )
        made._name, made.zeroed = name.partition("#")[0], False
        return made

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"<gradient of {self._name!r}: each rank has its share>"

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        called = func._schema.name
        found = [each for arg in args for each in (arg if isinstance(arg, (list, tuple)) else [arg])]
        mine = [each for each in found if isinstance(each, SentGradient)]
        if called in ("aten::zero_", "aten::_foreach_zero_"):
            for each in mine:
                each.zeroed = True
            return args[0] if called == "aten::zero_" else None
        if called == "aten::detach":
            return args[0]
        if called == "aten::_to_copy":  # as model.double() does
            return SentGradient(mine[0], mine[0]._name, kwargs.get("dtype"), kwargs.get("device"))
        raise HvdError(
            f"the gradient of {mine[0]._name!r} is not on this rank: with shard=True each rank has a share of the "
            "averaged gradients. Clip with optimizer.clip_grad_norm_(max_norm). To read this rank's own gradient, use "
            "parameter.register_post_accumulate_grad_hook [HVD200]"
        )
