"""Averages other than one over equal ranks: of batches that differ in size or number, and Adasum's.

`WeightedAverage` and `uneven_inputs` need one number per rank and round (`Shares`). It travels as a tensor of its own
beside the gradients, without anyone waiting for it before the round ends.

* `WeightedAverage`: batches of different sizes. Each rank multiplies its gradients by its weight, gradients and weights
  are summed, and the one is divided by the other. With the loss a mean over the rank's batch and the weight that
  batch's size, this is the gradient of one process on all batches together. 16-bit gradients travel as float32, since
  a weighted sum may leave their range.
* `uneven_inputs`: a rank that leaves its loop joins: the engine answers the others' reductions with zeros for it, and
  the average over all ranks is scaled to be one over those that still have data. When all have left, everything is
  taken over from the rank that left last, which has made every step: parameters, optimizer state, and the model's
  buffers if the model is given.
* Adasum (`Combination`): the ranks combine not their gradients but the changes that their own steps would make.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import torch

from ...errors import OUTCOMES, is_outcome
from ...ops import Adasum, Average, Handle, Max, Sum, join
from ...process_sets.process_set import ProcessSet
from ..ops import plain
from ..state_broadcast import broadcast_optimizer_state, broadcast_parameters
from .checks import StartCheck
from .gradient_memory import sum_of_bits


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


@contextmanager
def uneven_inputs(optimizer: Any, *others: Any, model: Any = None) -> Iterator[None]:
    """Let ranks run different numbers of steps inside a ``with`` block.

    A rank that has no more batches leaves the block and waits at its end. It contributes nothing, and gradients are
    averaged over the ranks that still have batches. The average of any other allreduce of the loop divides by all
    ranks. Afterwards all ranks have the parameters and the optimizer state of the rank that came last. Gradients that
    were not stepped with are dropped. An exception in the block is raised without waiting.

    Args:
        optimizer (DistributedOptimizer): the optimizer of the loop, of all ranks of the job.
        others (DistributedOptimizer): more optimizers of the loop.
        model (torch.nn.Module, optional): its buffers are taken over as well.

    Yields:
        None: the block runs with no value.

    Raises:
        HvdPeerLostError: at the end of the block, if a rank dies or leaves the job.
        ValueError: for the ops ``Min``, ``Max`` and ``Product``, for a comm hook, and for a process set of some ranks
            only.
        TypeError: if an optimizer is not a ``DistributedOptimizer``.

    Example:
        >>> weight = torch.nn.Parameter(torch.tensor([0.0]))
        >>> optimizer = hvd.DistributedOptimizer(torch.optim.SGD([weight], lr=1.0), [("weight", weight)])
        >>> with hvd.uneven_inputs(optimizer):
        ...     for batch in range(hvd.rank() + 1):
        ...         optimizer.zero_grad()
        ...         weight.sum().backward()
        ...         optimizer.step()
        >>> weight.tolist()
        [-2.0]
    """
    optimizers = (optimizer, *others)
    for each in optimizers:
        _check(each)
    exchanges = [each._hvd for each in optimizers if each._hvd is not None]
    for exchange in exchanges:
        exchange.restart()
        exchange.wire.count_active(True)
    try:
        yield
        for exchange in exchanges:
            exchange.behind = None  # all ranks get the weights of one
            exchange.restart()
    finally:
        for exchange in exchanges:
            exchange.wire.count_active(False)
    last = join()
    for each in optimizers:
        parameters = [parameter for group in each.param_groups for parameter in group["params"]]
        broadcast_parameters(parameters, last)
        broadcast_optimizer_state(each, last)
    if model is not None:
        broadcast_parameters(model.state_dict(), last)


def _check(optimizer: Any) -> None:
    if not (isinstance(optimizer, torch.optim.Optimizer) and hasattr(optimizer, "_hvd_names")):
        raise TypeError(f"uneven_inputs expects DistributedOptimizers, not {type(optimizer).__name__} [HVD229]")
    exchange: Any = getattr(optimizer, "_hvd", None)
    delta = getattr(optimizer, "_hvd_delta", None)
    if exchange is None and delta is None:
        return
    wire = exchange.wire if delta is None else delta
    if wire.process_set.process_set_id != 0:
        raise ValueError(
            "uneven_inputs needs an optimizer of all ranks: leave process_set at hvd.global_process_set [HVD229]"
        )
    if exchange is None:
        return
    if wire.weights is None and wire.op not in (Average, Sum):
        raise ValueError("uneven_inputs adds zeros, and needs op=hvd.Average, hvd.Sum or hvd.WeightedAverage [HVD229]")
    if hasattr(exchange.carrier, "hook"):
        raise ValueError("uneven_inputs does not support a comm hook: leave out one of them [HVD229]")
    if hasattr(optimizer, "_hvd_shards"):
        raise ValueError(
            "uneven_inputs does not support shard=True, since a rank without data still has its share: pad the data, "
            "or drop the rest [HVD229]"
        )


class Combination:
    """What the optimizer of Adasum (`Delta`) holds besides the original.

    Each rank steps with its local gradient, sends the difference that this made to its parameters through Adasum, and
    all start over from the same point plus the combined difference. So the original's rule (momentum, Adam's division)
    comes before the combination, and nothing travels in backward. Optimizer state (momenta) is each rank's own.
    """

    def __init__(self, pairs: list[tuple[torch.Tensor, str]], suffix: str, compression: Any, process_set: ProcessSet):
        self.pairs, self.suffix, self.compression, self.process_set = pairs, suffix, compression, process_set
        self._start = StartCheck(suffix, process_set)
        self._begun = self._compares = self._combines = False  # a step is made, ends with a comparison, is taken
        self._left: deque[Any] = deque()
        self._in_flight: deque[Any] = deque()

    def check(self) -> None:
        """Before a step: whether the ranks compare what they have, when it is over. Once for each step that is made."""
        if not self._begun:
            self._begun = True
            self._compares = self._start.begin([parameter for parameter, _ in self.pairs])
            if self._start.looks_at_data():
                for parameter, name in self.pairs:
                    if parameter.grad is not None and parameter.grad.layout is torch.strided:
                        finite = bool(torch.isfinite(parameter.grad).all())
                        self._start.data.add(name, int(sum_of_bits(parameter.grad) or 0), finite)

    def combine(self, starts: list[torch.Tensor]) -> None:
        """Parameters become their start plus the Adasum of all ranks' changes. Raises the first failure."""
        self._combines = True
        self._left.extend(zip(self.pairs, starts))
        self.complete()

    def complete(self) -> None:
        """What an exception has left of a combination: the other ranks have made it, or wait for it."""
        while self._left:
            (parameter, name), start = self._left[0]
            packed, ctx = self.compression.compress(parameter.detach() - start)
            handle = plain.allreduce_async_(packed, name=name, op=Adasum, process_set=self.process_set)
            self._in_flight.append((parameter, start, handle, ctx))
            self._left.popleft()
        failure: Exception | None = None
        while self._in_flight:
            parameter, start, handle, ctx = self._in_flight[0]
            try:
                parameter.copy_(start + self.compression.decompress(handle.wait(), ctx))
            except Exception as error:
                if not is_outcome(error):
                    raise
                parameter.copy_(start)  # as on the other ranks
                failure = failure or error
            self._in_flight.popleft()
        if self._compares and self._combines:
            self._start.compare([parameter for parameter, _ in self.pairs], [name for _, name in self.pairs])
        self._begun = self._begun and not self._combines
        self._combines = False
        if failure is not None:
            raise failure

    def drop(self) -> None:
        """Parameters get other values: what is left is nobody's concern."""
        for _, _, handle, _ in self._in_flight:
            with suppress(*OUTCOMES):
                handle.wait()
        self._left.clear()
        self._in_flight.clear()

    def forget(self) -> None:
        """All ranks go back to a commit: the next step is a new one."""
        self.drop()
        self._begun = self._compares = self._combines = False

    def agree_on_infinities(self) -> None:
        """If a rank's gradients are not finite, let no rank's be."""
        gradients = [parameter.grad for parameter, _ in self.pairs if parameter.grad is not None]
        values = [g if g.layout is torch.strided else g.coalesce().values() for g in gradients]
        bad = any(not torch.isfinite(value).all() for value in values)
        flag = torch.tensor([float(bad)])
        plain.allreduce_(flag, name="optimizer.infinite" + self.suffix, op=Max, process_set=self.process_set)
        if flag.item() and not bad:
            parameter = self.pairs[0][0]
            parameter.grad = torch.full_like(parameter, float("inf"))
