"""Weight of each rank's gradient in the average.

As a rule the same: Average divides by the number of ranks. Two cases differ, and both need one number per rank and
round, which travels as a tensor of its own beside the gradients, without anyone waiting for it before the round ends:

* `WeightedAverage`: batches of different sizes. Each rank multiplies its gradients by its weight, gradients and weights
  are summed, and the one is divided by the other. With the loss a mean over the rank's batch and the weight that
  batch's size, this is the gradient of one process on all batches together. 16-bit gradients travel as float32, since
  a weighted sum may leave their range.
* `uneven_inputs`: a rank that has run out of data contributes zeros, to the gradients and to the number of ranks that
  still have some. The average over all ranks is then scaled to be one over those.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch

from ...errors import is_outcome
from ...ops import Handle, Sum
from ...process_sets.process_set import ProcessSet
from ..ops import plain


class WeightedAverage:
    """The ``op`` of a ``DistributedOptimizer`` whose ranks have batches of different sizes.

    The gradients are summed with weights and divided by the sum of the weights. Make the loss a mean over the rank's
    batch, and the weight the batch's size. Then the result is the gradient of one process on all batches together. Set
    ``op.weight`` anew before each backward pass, or give a function.

    Args:
        weight (float or callable): a finite number of at least 0, or a function without arguments that returns one; it
            is called once per round. Default: 1.0.

    Raises:
        ValueError: for a weight that is negative or not finite. At the end of backward: if the weights of all ranks are
            0.

    Example:
        >>> weight = torch.nn.Parameter(torch.tensor([0.0]))
        >>> optimizer, op = torch.optim.SGD([weight], lr=1.0), hvd.WeightedAverage(2 * hvd.rank() + 1)
        >>> optimizer = hvd.DistributedOptimizer(optimizer, [("weight", weight)], op=op)
        >>> (weight * 4 * hvd.rank()).sum().backward()
        >>> weight.grad.tolist()  # (1 * 0 + 3 * 4) / (1 + 3)
        [3.0]
    """

    def __init__(self, weight: float | Callable[[], float] = 1.0) -> None:
        self.weight = weight

    @property
    def weight(self) -> float | Callable[[], float]:
        """What this rank's gradients count, relative to the others'."""
        return self._weight

    @weight.setter
    def weight(self, weight: float | Callable[[], float]) -> None:
        self._weight = weight if callable(weight) else _checked(weight)

    def current(self) -> float:
        """Return the weight of the round that begins.

        Returns:
            float: the number, or what the function returns.

        Raises:
            ValueError: if the function returns anything but a finite number of at least 0.
        """
        return _checked(self._weight()) if callable(self._weight) else self._weight

    def __repr__(self) -> str:
        return f"WeightedAverage({self._weight!r})"


def _checked(weight: Any) -> float:
    if isinstance(weight, torch.Tensor) and weight.numel() == 1:
        weight = weight.item()
    if isinstance(weight, bool) or not isinstance(weight, (int, float)) or not math.isfinite(weight) or weight < 0:
        raise ValueError(
            f"WeightedAverage: weight={weight!r} must be a finite number of at least 0, or return one [HVD230]"
        )
    return float(weight)


class Shares:
    """This rank's number in a round, and the sum of all ranks'."""

    def __init__(self, name: str, process_set: ProcessSet, mine: Callable[[], float]) -> None:
        self.name, self.process_set, self._ask = name, process_set, mine
        self._mine: float | None = None
        self._handle: Handle | None = None
        self._total: float | None = None

    def mine(self) -> float:
        """This rank's number; the first call in a round sends it."""
        if self._mine is None:
            mine = self._ask()
            tensor = torch.tensor([mine], dtype=torch.float64)
            self._handle = plain.allreduce_async_(tensor, name=self.name, op=Sum, process_set=self.process_set)
            self._mine = mine
        return self._mine

    def total(self) -> float:
        """The sum over the ranks; waits for them. ValueError if it is 0."""
        if self._total is None:
            assert self._handle is not None, "asked before anything was sent"
            self._total = float(self._handle.wait().item())
        if self._total == 0:
            raise ValueError(
                f"{self.name}: the weights of all ranks are 0 in this round, so there is no average: give at least one "
                "rank a weight above 0 [HVD230]"
            )
        return self._total

    def close(self) -> None:
        """The round is over."""
        try:
            if self._handle is not None and self._total is None:
                self._handle.wait()
        except Exception as error:
            if not is_outcome(error):  # a signal handler's: the round is not over
                raise
            self._mine = self._handle = self._total = None
            raise
        self._mine = self._handle = self._total = None
