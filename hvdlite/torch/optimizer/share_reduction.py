"""Share reduction: a bucket's sum over all ranks, of which each rank gets its share.

One reducescatter, or one reduce to the owner, does it. Where only the ranks of a group shard (`shard=` a process set),
this sums inside the group, and an allreduce among the ranks with the same place in the groups adds the groups' sums.
The layout is that of hpZ (G. Wang et al., ZeRO++, 2023) and MiCS (Z. Zhang et al., VLDB 2022).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch

from ... import _core
from ...errors import HvdMismatchError
from ...errors.codes import coded
from ...ops import Handle
from ...ops.objects import allgather_object
from ...process_sets.process_set import ProcessSet, existing_or_added


class Part(NamedTuple):
    """A collective in flight, and its request."""

    handle: Handle
    request: _core.Pending


class ShareReduction:
    """What a flight waits for: a collective, and then maybe the one across groups."""

    def __init__(self, first: Part, across: Callable[[torch.Tensor | None], Part] | None) -> None:
        self._part, self._across = first, across
        self._failure: Exception | None = None

    def go_on(self) -> None:
        """Wait for the first collective, and start the second."""
        if self._across is None:
            return
        share = None  # which the other groups learn, too
        try:
            share = self._part.handle.wait()
        except HvdMismatchError as error:
            self._failure = error
        self._part, self._across = self._across(share), None

    def done(self) -> bool:
        """Whether `wait` would return or raise at once. Starts the second collective if the first has ended."""
        if self._across is not None and self._part.handle.done():
            self.go_on()
        return self._across is None and self._part.handle.done()

    def within(self, seconds: float) -> bool:
        """As `done`, after waiting for the collective in flight so long at most."""
        if not self.done():
            _core.within(self._part.request.native, seconds)
        return self.done()

    def wait(self) -> torch.Tensor:
        """The share. Raises why a collective failed; may be called again."""
        self.go_on()
        try:
            share: torch.Tensor = self._part.handle.wait()
        except Exception as error:
            raise self._failure or error from None
        if self._failure is not None:
            raise self._failure
        return share


def across(inside: ProcessSet, every: ProcessSet) -> ProcessSet | None:
    """The ranks that have the same place as this one in all groups; None: `inside` has all ranks.

    ValueError if the ranks' groups are not disjoint, of one size and of all ranks of `every`. Collective.
    """
    if inside is every:
        return None
    mine = list(inside.ranks) if _core.rank() in inside.ranks else []
    groups = [list(ranks) for ranks in sorted({tuple(ranks) for ranks in allgather_object(mine, None, every)})]
    if len({len(group) for group in groups}) != 1 or sorted(sum(groups, [])) != list(every.ranks):
        raise ValueError(
            coded(
                "HVD200",
                f"shard=: ranks {list(every.ranks)} must be cut into groups of one size, each rank in one. They have "
                f"{', '.join(map(str, groups))}: use mesh.group(axis) of one hvd.Mesh",
            )
        )
    if len(groups) == 1:
        return None
    sets = [existing_or_added([group[place] for group in groups]) for place in range(len(groups[0]))]
    return sets[inside.ranks.index(_core.rank())]
