"""Detection of ranks that train on the same data: their gradients are equal before the average.

Nothing fails in such a job; it is only no faster than one process. So in the first two steps the ranks compare a digest
of their own gradients, before the average. Equal data gives equal gradients, as all ranks have the same weights.
Gradients that are all zero, or not all finite, are not evidence.
"""

from __future__ import annotations

from ..errors.codes import coded
from ..errors.user_warning import warn
from .digest import number_of

STEPS = 2
_NOT_FINITE = 2  # no digest is even
_WARNING = (
    "hvdlite: all {ranks} ranks computed the same gradients in the first {steps} steps, so every rank reads the same "
    "data, or the script averages gradients itself as well. Shard the data: hvd.data.shard(dataset), "
    "torch.utils.data.DistributedSampler or tf.data.Dataset.shard with hvd.size() and hvd.rank(), or use another seed "
    "on each rank for generated data; if that is on purpose, set HVDLITE_CHECK_START=off"
)


class SameData:
    """This rank's gradients of the first steps. An adapter compares `number` with the other ranks' in each of them."""

    differed = 0  # how many comparisons of this process found different gradients, in this incarnation of the job

    def __init__(self, since: int | None = None) -> None:
        self._finite = True
        self._left, self._bits, self._since = STEPS, dict[str, int](), SameData.differed if since is None else since

    def looks(self) -> bool:
        """Whether gradients are still to be added."""
        return self._left > 0

    def add(self, name: str, bits: int, finite: bool = True) -> None:
        """A gradient, complete and not averaged yet: its parameter, and the sum of its memory as integers. finite: none
        of its values is infinite or NaN."""
        self._bits[name] = bits
        self._finite = self._finite and finite

    def number(self) -> int:
        """Of this step; 0 if all gradients are zero, _NOT_FINITE if some are not finite."""
        if not self._finite:
            return _NOT_FINITE
        return number_of(sorted(self._bits.items())) if any(self._bits.values()) else 0

    def step(self, number: int, equal: bool, ranks: int, warns: bool) -> None:
        """A step's comparison is over. ranks: that were compared; warns: this rank prints the warning.

        No warning if another comparison has found different gradients since: a tape has averaged these before.
        """
        self._bits.clear()
        self._finite = True
        if equal and number == _NOT_FINITE:  # a loss scale that is too large for any data: look at the next step
            return
        same = equal and number != 0 and ranks > 1
        SameData.differed += not equal
        self._left = self._left - 1 if same else 0
        if same and warns and self._left == 0 and self._since == SameData.differed:
            warn(coded("HVD241", _WARNING.format(ranks=ranks, steps=STEPS)), RuntimeWarning)
