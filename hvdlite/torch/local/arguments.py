"""Arguments of `DiLoCo`: which values are refused, and which tensors a model or a list of names stands for.

Whether parameters are trained is not looked at here, since they may be frozen until the first step. Nothing here
communicates: whether ranks have the same arguments is compared at the first step.

Of a Module, buffers that its checkpoint holds belong to what ranks average. Integers, such as a count of batches, and
buffers that are made anew with each Module, such as a mask, stay local.
"""

from __future__ import annotations

from typing import Any

import torch

from ...ops.arguments import Quantized
from ...process_sets.process_set import ProcessSet, global_process_set
from ...rendezvous import elastic_member


def parts_of(model: Any) -> tuple[list[tuple[str, torch.Tensor]], list[str]]:
    """Parameters, each once, and the names of the float buffers that a checkpoint has."""
    if not isinstance(model, torch.nn.Module):
        pairs = list(model)
        first: dict[int, Any] = {}
        for pair in pairs:
            first.setdefault(id(pair[1]) if isinstance(pair, tuple) and len(pair) == 2 else id(pair), pair)
        return list(first.values()), []
    kept = model.state_dict(keep_vars=True)
    buffers = [name for name, each in model.named_buffers() if name in kept and each.is_floating_point()]
    return list(model.named_parameters()), buffers


def check(optimizer: Any, sync_every: Any, fragments: Any, delay: Any, alpha: Any) -> None:
    """TypeError or ValueError for settings that are out of their range."""
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise TypeError(f"expected a torch.optim.Optimizer, not {type(optimizer).__name__} [HVD223]")
    for name, value, least in (("sync_every", sync_every, 1), ("fragments", fragments, 1), ("delay", delay, 0)):
        if isinstance(value, bool) or not isinstance(value, int) or value < least:
            raise ValueError(f"{name}={value!r} must be a whole number of at least {least} [HVD048]")
    if sync_every % fragments:
        raise ValueError(f"sync_every={sync_every} must be a multiple of fragments={fragments} [HVD048]")
    if delay >= sync_every // fragments:
        raise ValueError(
            f"delay={delay} must be less than sync_every / fragments = {sync_every // fragments}, the steps between "
            "two exchanges [HVD048]"
        )
    if isinstance(alpha, bool) or not isinstance(alpha, (int, float)) or not 0 < alpha <= 1:
        raise ValueError(f"alpha={alpha!r} must be a number above 0, and at most 1 [HVD048]")


def check_exchange(compression: Any, process_set: Any) -> None:
    """TypeError or ValueError for a compression and a process set that exchanges cannot have."""
    functions = callable(getattr(compression, "compress", None)) and callable(getattr(compression, "decompress", None))
    if not functions and not isinstance(compression, Quantized):
        raise ValueError(
            f"compression={compression!r} is not known to DiLoCo: use hvd.Compression.none, fp16, bf16, int8 or int4 "
            "[HVD208]"
        )
    if getattr(compression, "feedback", None):
        raise ValueError(f"DiLoCo keeps no residuals of compression={compression!r}: leave out feedback [HVD208]")
    if not isinstance(process_set, ProcessSet):
        raise TypeError(f"process_set must be a hvd.ProcessSet, not {process_set!r} [HVD212]")
    process_set.size()  # ValueError for a set that was not added
    if elastic_member.is_elastic() and process_set is not global_process_set:
        raise ValueError(
            "in an elastic job, whose process sets end with a rank that is lost, all ranks exchange: leave out "
            "process_set= [HVD048]"
        )
