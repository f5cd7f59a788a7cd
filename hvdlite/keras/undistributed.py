"""Warnings for a model without a DistributedOptimizer, or without sharded data, from the callbacks.

Ranks whose gradients nothing averages have different weights soon after they had the same. Those that average only
every few batches have, too. So ranks compare twice, and it counts what they send in between: a loop that averages does
so inside a batch.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any

from .. import _core, metrics
from ..errors.user_warning import warn
from ..process_sets.process_set import ProcessSet
from .backend import start_check
from .initial_check import ALONE

_BETWEEN = 16  # batches between the two comparisons
# Models in fit whose weights a callback averages, over these ranks, which have begun with the same weights.
averaged: weakref.WeakKeyDictionary[Any, ProcessSet] = weakref.WeakKeyDictionary()


class Alone:
    """Compares the weights of all ranks after the second batch, and again if they differ. name: of the collectives."""

    def __init__(self, name: str) -> None:
        self._name, self._check = name, start_check(ALONE)
        self._left, self._differed, self._sent = 1, False, False  # left: batches until the next comparison; 0: over
        self._over = self._check.off()
        self.mark()

    def mark(self) -> None:
        """What was sent until now was not sent by a batch."""
        self._tensors = self._sent_tensors()

    def batch(self, variables: Sequence[Any]) -> None:
        """A batch is over."""
        if self._over:
            return
        self._sent = self._sent or self._sent_tensors() > self._tensors
        self._left -= 1
        if self._left == 0:
            self._compare(variables)
        self.mark()

    def end(self, variables: Sequence[Any]) -> None:
        """Training is over: ranks compare what they have not yet compared, however many batches each had."""
        while not self._over:
            self._compare(variables)

    def _compare(self, variables: Sequence[Any]) -> None:
        difference = self._check.difference(self._name, variables)
        self._over, self._differed, self._left = self._differed or difference is None, True, _BETWEEN
        if self._over and difference is not None and not self._sent:
            self._check.report(difference)

    def _sent_tensors(self) -> int:
        return int(metrics.stats()["totals"]["tensors"])


def warn_without_batch(batches: int | None) -> None:
    """A rank that had no batch in an epoch makes no step, and the others wait for it."""
    if batches == 0 and _core.size() > 1:
        warn(
            f"rank {_core.rank()}: fit had no batch in this epoch, so this rank takes no training step, and ranks that "
            "do wait for it: check the path and the filter of its data, shard it evenly (hvd.data.shard), or use fewer "
            "ranks [HVD240]",
        )  # fmt: skip
