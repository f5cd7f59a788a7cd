"""Do the ranks of a Keras optimizer train the same model? A broadcast that was forgotten shows in nothing but the
result.

So before the first averages the ranks compare a digest of the variables. As a rule it is the same, and nothing is
compared again: other hardware may round differently. Else they compare once more before the second averages, when
BroadcastGlobalVariablesCallback has done its work. If they still differ, that is a warning, or an error
(HVDLITE_CHECK_START).

A rank that has joined knows nothing of the others' steps, so the check is over for all when all have joined. Digests
travel as a sum, to which ranks that have joined add zeros. Only where ranks differ does a table with a digest
of each variable travel.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from .. import _core, config
from .._coded import coded
from .._digests import are_equal, digest, summands
from .._life import lives
from .._warned import warn
from ..errors import HvdMismatchError
from ..numpy import allreduce
from ..ops import Sum
from ..process_set import ProcessSet

VALUES = (
    "variable {name!r} on rank{s} {others} is not what rank {first} has: the ranks train different models. Give "
    "model.fit hvd.callbacks.BroadcastGlobalVariablesCallback(0), or broadcast model.variables before the second step "
    "(hvdlite.tensorflow.broadcast_variables); if ranks differ on purpose, set HVDLITE_CHECK_START=off"
)

_ROUNDING = 1e-3  # of the sum of all elements' amounts; other hardware rounds differently
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


class StartCheck:
    """The comparison among the ranks of one optimizer. sum_of_bits: of what is in the memory of a variable, 64 bits.

    text: what is said of a variable that differs.
    """

    def __init__(self, process_set: ProcessSet, sum_of_bits: Callable[[Any], int], text: str = VALUES) -> None:
        self._process_set, self._sum_of_bits, self._text = process_set, sum_of_bits, text
        self._differed, self.over, self._mode = False, False, "off"
        self._began = lives(), _core.joins()

    def look(self, prefix: str, variables: Sequence[Any], values: Sequence[Any] | None = None) -> None:
        """Before averages of the variables' gradients. HvdMismatchError on all ranks. Blocks.

        values: what is compared. None: the values of the variables.
        """
        mode = self._mode = config.load().values["check_start"]
        self.over = self.over or mode == "off" or self._began != (lives(), _core.joins())
        if self.over or not variables:
            return
        mine = np.array([self._sum_of_bits(each) for each in (variables if values is None else values)], np.int64)
        total = int.from_bytes(digest([mine.tobytes()])[:8], "little") >> 1
        equal = are_equal(self._summed(f"{prefix}.start", np.array(summands(total))).tolist())
        before = self._differed
        self._differed, self.over = not equal, equal or before
        if before and not equal:
            table = np.zeros((self._process_set.size(), 1 + len(mine)), np.int64)
            table[self._process_set.rank()] = [1, *mine]
            self._tell(self._summed(f"{prefix}.start.list", table), variables, mode)

    def require(self, prefix: str, variables: Sequence[Any]) -> None:
        """As `look`, where ranks must not differ even once."""
        self._differed = True
        self.look(prefix, variables)

    def later(self, prefix: str, variables: Sequence[Any], read: Callable[[Any], Any]) -> None:
        """The same in the middle of training, once: weights may have been loaded on some ranks. Variables differ here
        if the sums of their elements do by more than rounding makes. read: a variable as an array."""
        self._differed = self.over = False
        self.look(prefix, variables)
        if not self._differed:
            return
        arrays = [np.asarray(read(each)).astype(np.float64) for each in variables]
        sums = np.array([each.sum() for each in arrays] + [abs(each).sum() for each in arrays])
        table = np.zeros((self._process_set.size(), 1 + len(sums)))
        table[self._process_set.rank()] = [1, *sums]
        table = self._summed(f"{prefix}.later", table)
        rows = table[table[:, 0] > 0, 1:]  # of ranks that have not joined
        bound = _ROUNDING * np.tile(rows[:, len(arrays) :].max(axis=0), 2)
        differ = (abs(table[:, 1:] - rows[0]) > bound).reshape(len(table), 2, -1).any(axis=1)
        self._tell(np.column_stack([table[:, 0], differ]).astype(np.int64), variables, self._mode)

    def _summed(self, name: str, mine: np.ndarray) -> np.ndarray:
        summed: np.ndarray = allreduce(mine, name=name, op=Sum, process_set=self._process_set)
        return summed

    def _tell(self, table: np.ndarray, variables: Sequence[Any], mode: str) -> None:
        """Of the first variable whose bits differ between ranks that have not joined."""
        first, *others = [(rank, row[1:]) for rank, row in zip(self._process_set.ranks, table) if row[0]]
        differ = np.array([row != first[1] for _, row in others])
        if not differ.any():
            return
        place = int(np.flatnonzero(differ.any(axis=0))[0])
        name = str(getattr(variables[place], "path", None) or variables[place].name).removesuffix(":0")
        ranks = [str(rank) for (rank, _), its in zip(others, differ) if its[place]]
        many = "s" * (len(ranks) > 1)
        said = self._text.format(name=name, s=many, others=", ".join(ranks), first=first[0])
        if mode == "raise":
            raise HvdMismatchError(coded("HVD302", said))
        if self._process_set.ranks[self._process_set.rank()] == first[0]:
            warn(coded("HVD302", f"hvdlite: {said}"), RuntimeWarning)
