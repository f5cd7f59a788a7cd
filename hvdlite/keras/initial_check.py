"""Check that the ranks of a Keras optimizer train the same model, each with data of its own. A broadcast that was
forgotten, weights that one rank loads later and a forgotten shard show in nothing but the result.

So in some rounds of averages the ranks compare a digest of the variables and of the optimizer's variables: in the
rounds 1, 2, 4, 8 and so on. If they differ, they compare again in the next round: BroadcastGlobalVariablesCallback does
its work after the first batch. If they still differ, that is a warning, or an error (HVDLITE_CHECK_START), and the last
comparison. After the second round what rounding makes is no difference: other hardware may round differently.

In the first two rounds they also compare the gradients, before the average: equal ones mean equal data (same_data.py).

All ranks make the same rounds in an incarnation of the job, and count them anew in each: a rank that comes later finds
the others. A rank that has joined knows nothing of the others' rounds, so the checks are over for all when all have
joined. Digests travel as a sum, to which ranks that have joined add zeros. Only where ranks differ does a list travel.
"""

from __future__ import annotations

import abc
import json
from collections.abc import Callable, Sequence
from itertools import zip_longest
from math import isfinite
from typing import Any

import numpy as np

from .. import _core, config
from ..errors import HvdMismatchError
from ..errors.codes import coded
from ..errors.user_warning import warn
from ..lifecycle.init import incarnations
from ..numpy import allreduce
from ..ops import Sum
from ..process_sets.process_set import ProcessSet, on_new_incarnation
from ..training.digest import are_equal, number_of, summands
from ..training.same_data import SameData

NEVER = 1 << 40  # rounds
VALUES = (
    "variable {name!r} on rank{s} {others} is not what rank {first} has: the ranks train different models. Give "
    "model.fit hvd.callbacks.BroadcastGlobalVariablesCallback(0), or broadcast model.variables before the second step "
    "(hvdlite.tensorflow.broadcast_variables); if ranks differ on purpose, set HVDLITE_CHECK_START=off"
)
_STATE = (
    "the optimizer's variable {name!r} on rank{s} {others} is not what rank {first} has, so the ranks' weights drift "
    "apart. Give model.fit hvd.callbacks.BroadcastGlobalVariablesCallback(0), or broadcast optimizer.variables before "
    "the second step, and after a rank has loaded a checkpoint; set the learning rate on all ranks alike; if ranks "
    "differ on purpose, set HVDLITE_CHECK_START=off"
)
_EXACT = 2  # rounds in which bits are compared
_ROUNDING = 1e-3  # of the sum of all elements' amounts

ALONE = (
    "variable {name!r} on rank{s} {others} is not what rank {first} has, a step after all ranks had the same: nothing "
    "averages gradients over the ranks, and each trains alone. Compile the model with "
    "hvd.DistributedOptimizer(optimizer), or average in train_step (hvd.DistributedGradientTape, hvd.allreduce); if "
    "ranks differ on purpose, set HVDLITE_CHECK_START=off"
)
NOT_AVERAGED = (
    "the gradient of variable {name!r} on rank{s} {others} is not what rank {first} has, and apply_gradients was told "
    "not to average it: leave out experimental_aggregate_gradients=False or skip_gradients_aggregation=True, or "
    "average the gradients before (DistributedGradientTape, hvd.allreduce); if ranks differ on purpose, set "
    "HVDLITE_CHECK_START=off"
)


class Check(abc.ABC):
    """What the ranks of a set compare in some of their rounds. sum_of_bits: of what is in the memory of a variable or
    tensor, 64 bits."""

    def __init__(self, process_set: ProcessSet, sum_of_bits: Callable[[Any], int]) -> None:
        self._process_set, self._sum_of_bits = process_set, sum_of_bits
        self.state: Callable[[], list[Any]] = list  # variables that are compared besides those of a round
        self._incarnation, self._mode, self.left = -1, "off", 1  # left: rounds until the next comparison
        self._born, self._joins = incarnations(), _core.joins()
        self.off()

    def off(self) -> bool:
        """Whether nothing is compared in this incarnation of the job. The first call in one begins anew."""
        if self._incarnation != incarnations():
            self._incarnation, self._mode, self.left = incarnations(), config.load().values["check_start"], 1
            self._joins = self._joins if self._born == self._incarnation else 0
            self._begin()
        return self._mode == "off"

    def round(self, prefix: str, variables: Sequence[Any], values: Sequence[Any] | None = None) -> None:
        """One round of averages of the variables' gradients. HvdMismatchError on all ranks. Blocks.

        values: what is compared. None: the values of the variables.
        """
        if self.off():
            return
        self.left -= 1
        if self.left <= 0:
            self.left = self.look(prefix, variables, values)

    def look(self, prefix: str, variables: Sequence[Any], values: Sequence[Any] | None = None) -> int:
        """A round with a comparison. How many rounds later the next one is."""
        return NEVER if self.off() or self._joins != _core.joins() else self._compared(prefix, variables, values)

    @abc.abstractmethod
    def _begin(self) -> None:
        """Forgets what the incarnation before has left."""

    @abc.abstractmethod
    def _compared(self, prefix: str, variables: Sequence[Any], values: Sequence[Any] | None) -> int:
        """Compares. How many rounds later the next comparison is."""

    def _summed(self, name: str, mine: np.ndarray) -> np.ndarray:
        summed: np.ndarray = allreduce(mine, name=name, op=Sum, process_set=self._process_set)
        return summed

    def _sums(self, name: str, number: int) -> list[int]:
        found: list[int] = self._summed(name, np.array(summands(number))).tolist()
        return found


def _forget() -> None:
    SameData.differed = 0


on_new_incarnation(_forget)


class DataCheck(Check):
    """Are the gradients of all ranks equal? Compared in the first rounds. sums_of: as StartCheck has it."""

    def __init__(
        self, process_set: ProcessSet, sum_of_bits: Callable[[Any], int],
        sums_of: Callable[[Any], tuple[float, float] | None]
    ) -> None:  # fmt: skip
        super().__init__(process_set, sum_of_bits)
        self._sums_of = sums_of

    def _begin(self) -> None:
        self._data = SameData(None if self._born == self._incarnation else 0)

    def _compared(self, prefix: str, variables: Sequence[Any], values: Sequence[Any] | None) -> int:
        for index, value in enumerate(values or ()):
            sums = self._sums_of(value)
            self._data.add(str(index), self._sum_of_bits(value), sums is None or isfinite(sums[1]))
        number = self._data.number()
        summed = self._sums(f"{prefix}.gradients", number)
        self._data.step(number, are_equal(summed), summed[0], self._process_set.rank() == 0)
        return 1 if self._data.looks() else NEVER


class StartCheck(Check):
    """Have all ranks the same values? sums_of: the sum of a variable's elements and that of their amounts; text: what
    is reported of a variable that differs; state: the optimizer's variables, which are compared, too."""

    def __init__(
        self, process_set: ProcessSet, sum_of_bits: Callable[[Any], int],
        sums_of: Callable[[Any], tuple[float, float] | None], text: str = VALUES,
        state: Callable[[], list[Any]] = list,
    ) -> None:  # fmt: skip
        super().__init__(process_set, sum_of_bits)
        self._sums_of, self._text, self.state = sums_of, text, state

    def _begin(self) -> None:
        self._round, self._gap = 0, 1
        self._before: str | None = None  # how ranks differed in the comparison before, if they did

    def _compared(self, prefix: str, variables: Sequence[Any], values: Sequence[Any] | None) -> int:
        self._round += self._gap
        difference = self.difference(prefix, variables, values, self._round <= _EXACT)
        before, self._before = self._before, difference
        if before is not None and difference is not None:  # twice in a row is no accident
            self.report(before)
            return NEVER
        self._gap = 1 if difference is not None else (1 << self._round.bit_length()) - self._round
        return self._gap

    def report(self, difference: str) -> None:
        """A warning on the first of the ranks that were compared, or an error on all."""
        if self._mode == "raise":
            raise HvdMismatchError(coded("HVD302", difference))
        if self._process_set.ranks[self._process_set.rank()] == self._first:
            warn(coded("HVD302", f"hvdlite: {difference}"), RuntimeWarning)

    def difference(
        self, prefix: str, variables: Sequence[Any], values: Sequence[Any] | None = None, exact: bool = True
    ) -> str | None:
        """What differs between ranks that have not joined, of the first that does; None: nothing. exact: in any bit."""
        state = self.state() if values is None else []
        found = [list(variables if values is None else values), state]
        bits = [[self._sum_of_bits(each) for each in column] for column in found]
        if are_equal(self._sums(f"{prefix}.start", number_of(bits))):
            return None
        rows = [
            [[_name(named), bit, self._sums_of(each)] for named, bit, each in zip(names, column, each_of)]
            for names, column, each_of in zip((variables, state), bits, found)
        ]
        lists_of_ranks = self._gathered(f"{prefix}.start.list", json.dumps(rows))
        self._first = lists_of_ranks[0][0]
        for column, text in enumerate((self._text, _STATE)):
            for its in zip_longest(*(lists[column] for _, lists in lists_of_ranks)):
                others = [str(rank) for (rank, _), one in zip(lists_of_ranks, its) if _differ(its[0], one, exact)]
                if others:
                    name, many = next(one for one in its if one)[0], "s" * (len(others) > 1)
                    return text.format(name=name, s=many, others=", ".join(others), first=self._first)
        return None

    def _gathered(self, name: str, text: str) -> list[tuple[int, Any]]:
        """(rank, what it sent) of those that have not joined."""
        size, rank, mine = self._process_set.size(), self._process_set.rank(), text.encode()
        lengths = np.zeros(size, np.int64)
        lengths[rank] = len(mine)
        lengths = self._summed(f"{name}.lengths", lengths)
        letters = np.zeros((size, int(lengths.max())), np.uint8)
        letters[rank, : len(mine)] = np.frombuffer(mine, np.uint8)
        letters = self._summed(name, letters)
        return [
            (source, json.loads(row[:length].tobytes()))
            for source, row, length in zip(self._process_set.ranks, letters, lengths.tolist())
            if length
        ]


def _name(variable: Any) -> str:
    return str(getattr(variable, "path", None) or variable.name).removesuffix(":0")


def _differ(one: Any, other: Any, exact: bool) -> bool:
    """Of the name of a variable, its bits and its sums; None: a rank has no such variable."""
    if one is None or other is None or one[1] == other[1]:
        return (one is None) != (other is None)
    if exact or one[2] is None or other[2] is None:
        return True
    bound = _ROUNDING * max(one[2][1], other[2][1])
    return not all(abs(mine - its) <= bound for mine, its in zip(one[2], other[2]))
