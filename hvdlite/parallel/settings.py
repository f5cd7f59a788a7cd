"""Check that the settings of a pipeline fit together and are the same on all ranks.

What one rank can see alone is a ValueError before anything is sent. What ranks compare, once, when the pipeline is
made, is an HvdMismatchError with the same words on all of them: settings that differ, and copies of a weight that
stages share but do not begin with alike.
"""

from __future__ import annotations

from functools import partial
from operator import index
from typing import Any

import torch

import hvdlite.torch as hvd

from ..errors.user_warning import warn
from . import schedule as schedules
from .weights import POLICIES, Policy

SHAPES = ("each", "once", "step")
_made = [0]  # pipelines without a name of their own, the same number on all ranks


def named(choice: Any) -> str:
    return choice if isinstance(choice, str) else getattr(choice, "__qualname__", repr(type(choice)))


def number_of(micro_batches: Any) -> int:
    """As an int. ValueError for what is no whole number of at least 1."""
    count = 0 if isinstance(micro_batches, bool) or not hasattr(micro_batches, "__index__") else index(micro_batches)
    if count < 1:
        raise ValueError(f"micro_batches must be a whole number of at least 1, not {micro_batches!r} [HVD011]")
    return count


def chosen(
    schedule: Any, update: Any, shapes: str, checkpoint: bool, chunks: int, micro_batches: int, stages: int
) -> tuple[schedules.Plan, Any]:  # fmt: skip
    """The function that makes the lists, and the class of the policy. ValueError for what does not go together."""
    for what, value, known in (
        ("schedule", schedule, schedules.PLANS), ("update", update, POLICIES), ("shapes", shapes, SHAPES)
    ):  # fmt: skip
        if not (callable(value) and what != "shapes") and not (isinstance(value, str) and value in known):
            raise ValueError(f"there is no {what} {value!r}; there are {', '.join(sorted(known))} [HVD011]")
    policy: Any = POLICIES[update] if isinstance(update, str) else update
    if not (isinstance(policy, type) and issubclass(policy, Policy)):
        raise ValueError(f"update must be a name or a subclass of weights.Policy, not {update!r} [HVD011]")
    if policy.flushes == (schedule == "continuous") or (callable(schedule) and not policy.flushes):
        raise ValueError(
            f"update {named(update)!r} does not support schedule {named(schedule)!r}: use stash, vertical, 2bw or "
            "pipemare with schedule='continuous', and flush with the other schedules [HVD011]"
        )
    if checkpoint and update == "pipemare":
        raise ValueError(
            "update 'pipemare' does not support checkpoint=True: the second forward would use the weights of the "
            "backward [HVD011]"
        )
    if (chunks > 1) != (schedule == "interleaved") and isinstance(schedule, str):
        raise ValueError(
            f"schedule {schedule!r} does not support a stage of {chunks} chunk{'s' * (chunks > 1)}: give split a "
            "balance of as many numbers as stages, or of a multiple of it with schedule='interleaved' [HVD011]"
        )
    if schedule == "interleaved" and micro_batches % stages:
        raise ValueError(
            f"schedule 'interleaved' needs a multiple of {stages} micro-batches, as there are {stages} stages, but "
            f"{micro_batches} are set [HVD011]"
        )
    plan: Any = schedules.PLANS[schedule] if isinstance(schedule, str) else schedule
    return (partial(plan, chunks=chunks) if chunks > 1 else plan), policy


def check_parts(
    stage: torch.nn.Module, optimizer: Any, loss: Any, last: bool, lr_scheduler: Any, clip: Any,
    checkpoint: bool
) -> None:  # fmt: skip
    """ValueError for parts with which a stage would not train, or not as they would alone."""
    learning = [p for p in stage.parameters() if p.requires_grad]
    known = {id(p) for group in optimizer.param_groups for p in group["params"]} if optimizer is not None else set()
    why = None
    if hasattr(optimizer, "skip_synchronize"):
        why = "pass the plain optimizer to Pipeline, not a DistributedOptimizer: Pipeline averages gradients itself"
    elif isinstance(optimizer, torch.optim.LBFGS):
        why = "LBFGS computes the loss several times per step, but a pipeline computes it once"
    elif learning and not any(id(p) in known for p in learning):
        why = "the optimizer has none of the stage's parameters: create it from stage.parameters()"
    elif isinstance(lr_scheduler, torch.optim.lr_scheduler.ReduceLROnPlateau):
        why = "ReduceLROnPlateau needs a loss: step it in the loop, and do not pass it to Pipeline"
    elif last and not callable(loss):
        why = f"the last stage calls loss(output, y), but received {loss!r}"
    elif clip is not None and not clip > 0:
        why = f"clip must be more than 0, not {clip!r}"
    if why is not None:
        raise ValueError(f"{why} [HVD011]")
    if checkpoint and any(isinstance(layer, torch.nn.modules.batchnorm._BatchNorm) for layer in stage.modules()):
        warn(
            "this stage has a BatchNorm: with checkpoint=True, it updates its running statistics twice for each "
            "micro-batch [HVD021]"
        )  # fmt: skip


def same_start(stage: torch.nn.Module, copies: hvd.ProcessSet) -> None:
    """All copies of a stage begin with the weights of the first, as in DistributedDataParallel."""
    weights = {name: p.data for name, p in stage.named_parameters()}
    real = {name: torch.view_as_real(t) if t.is_complex() else t for name, t in weights.items()}
    hvd.broadcast_parameters(real, copies.ranks[0], process_set=copies)


def agree(
    settings: tuple[Any, ...], name: str | None, tied: dict[str, str], line: int, ranks: hvd.ProcessSet
) -> str:  # fmt: skip
    """The pipeline's name. HvdMismatchError, the same on all ranks, where settings or copies of tied weights differ.
    line: the lowest rank of this pipeline."""
    everyone = hvd.allgather_object(((*settings, name), tied, line, _made[0]), name="pipeline", process_set=ranks)
    what = "micro_batches, schedule, update, shapes, checkpoint, clip, count, chunks, scaler, name"
    for rank, (other, *_) in zip(ranks.ranks, everyone):
        if other != everyone[0][0]:
            raise hvd.HvdMismatchError(
                f"ranks disagree on ({what}): rank {ranks.ranks[0]} has {everyone[0][0]}, rank {rank} has {other} "
                "[HVD011]"
            )
    first: dict[tuple[int, str], tuple[int, str]] = {}
    for rank, (_, tied, line, _) in zip(ranks.ranks, everyone):
        for name, digest in tied.items():
            known = first.setdefault((line, name), (rank, digest))
            if known[1] != digest:
                raise hvd.HvdMismatchError(
                    f"the copies of the tied weight {name!r} on ranks {known[0]} and {rank} differ at the start: "
                    "initialize both from one tensor [HVD022]"
                )
    if name is not None:
        return name
    _made[0] = 1 + max(made for *_, made in everyone)  # an elastic newcomer has made none
    return "pipe" if _made[0] == 1 else f"pipe{_made[0]}"
