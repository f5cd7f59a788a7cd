"""Do the settings of a pipeline go together, and are they the same on all ranks?

What one rank can see alone is a ValueError before anything is sent. What ranks compare, once, when the pipeline is
made, is an HvdMismatchError with the same words on all of them: settings that differ, and copies of a weight that
stages share but do not begin with alike.
"""

from __future__ import annotations

from typing import Any

import hvdlite.torch as hvd

from . import schedule as schedules
from .weights import POLICIES

SHAPES = ("each", "once", "step")


def named(choice: Any) -> str:
    return choice if isinstance(choice, str) else getattr(choice, "__qualname__", repr(type(choice)))


def chosen(schedule: Any, update: Any, count: int, shapes: str, checkpoint: bool) -> tuple[schedules.Plan, Any]:
    """The function that makes the lists, and the class of the policy. ValueError for what does not go together."""
    if isinstance(count, bool) or not isinstance(count, int) or count < 1:
        raise ValueError(f"micro_batches must be a whole number of at least 1, not {count!r} [HVD271]")
    for what, given, known in (
        ("schedule", schedule, schedules.PLANS), ("update", update, POLICIES), ("shapes", shapes, SHAPES)
    ):  # fmt: skip
        if given not in known and (what == "shapes" or not callable(given)):
            raise ValueError(f"there is no {what} {given!r}; there are {', '.join(sorted(known))} [HVD271]")
    policy: Any = POLICIES[update] if isinstance(update, str) else update
    if policy.flushes == (schedule == "continuous") or (callable(schedule) and not policy.flushes):
        raise ValueError(
            f"update {named(update)!r} does not go with schedule {named(schedule)!r}: stash, vertical, 2bw and "
            "pipemare are what lets a pipeline go on over updates (schedule='continuous'), and flush is for the others "
            "[HVD271]"
        )
    if checkpoint and update == "pipemare":
        raise ValueError(
            "update 'pipemare' does not go with checkpoint=True: what is computed again would see the weights of the "
            "backward [HVD271]"
        )
    return (schedules.PLANS[schedule] if isinstance(schedule, str) else schedule), policy


def agree(said: tuple[Any, ...], tied: dict[str, str], line: int) -> None:
    """HvdMismatchError, the same on all ranks, where settings or copies of tied weights differ. line: the lowest rank
    of this pipeline."""
    everyone = hvd.allgather_object((said, tied, line), name="pipeline")
    what = "micro_batches, schedule, update, shapes, checkpoint, clip, scaler"
    for rank, (other, _, _) in enumerate(everyone):
        if other != everyone[0][0]:
            raise hvd.HvdMismatchError(
                f"ranks disagree on ({what}): rank 0 said {everyone[0][0]}, rank {rank} said {other} [HVD271]"
            )
    first: dict[tuple[int, str], tuple[int, str]] = {}
    for rank, (_, tied, line) in enumerate(everyone):
        for name, digest in tied.items():
            known = first.setdefault((line, name), (rank, digest))
            if known[1] != digest:
                raise hvd.HvdMismatchError(
                    f"the copies of the tied weight {name!r} on ranks {known[0]} and {rank} differ at the start: "
                    "initialize both from one tensor [HVD282]"
                )
