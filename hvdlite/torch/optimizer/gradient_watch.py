"""Statistics of gradients: how large what this rank gave in a round was, and what came of it.

A `Watch` measures gradients when they are about to travel, and again when all of a round have arrived. What travels
quantized is measured by its compressor, which reads it anyway. An optimizer without a watch makes one comparison a run
of gradients, and no more.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from ...errors import OUTCOMES
from ...process_sets.levels import levels_of

if TYPE_CHECKING:
    from .reducer import Exchange

_ROW = 1024  # elements whose squares are added in float32
_ZERO = torch.zeros(3, dtype=torch.float64)


class GradientStats(NamedTuple):
    """Of one gradient. The greatest magnitude and the sum of squares are NaN or infinite where an element is.

    Args:
        greatest (float): the greatest magnitude.
        square (float): the sum of squares.
        not_finite (int): the number of elements that are NaN or infinite.
    """

    greatest: float
    square: float
    not_finite: int


class Watch:
    """Of one optimizer. `listeners` are called when a round has been measured."""

    def __init__(self, exchange: Exchange) -> None:
        self._exchange = weakref.proxy(exchange)
        self._given: dict[int, torch.Tensor | None] = {}  # of this round; None: the compressor tells
        self._last: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        self.listeners: list[Callable[[Watch], None]] = []

    def sent(self, numbers: Sequence[int]) -> None:
        """These are about to travel."""
        wire = self._exchange.wire
        wire.writers.join(numbers)
        there = self._measured_there(numbers)
        for number in numbers:
            gradient = wire.parameters[number].grad
            self._given[number] = None if number in there else _ZERO if gradient is None else measured(gradient)

    def _measured_there(self, numbers: Sequence[int]) -> set[int]:
        """Those that the compressor measures as they are: not where it sees a sum of this host's ranks only."""
        carrier, wire = self._exchange.carrier, self._exchange.wire
        if not carrier.compresses or wire.shares is not None or not hasattr(carrier.compressor, "stats"):
            return set()
        carrier.at_once(())  # from here on it is known what travels in which bucket
        bucket_of = carrier.bucket_of
        there = {n for n in numbers if n in bucket_of and bucket_of[n] not in carrier.sent}
        return there if there and levels_of(wire.process_set).inside is None else set()

    def arrived(self, numbers: Sequence[int]) -> Exception | None:
        """These have arrived, and the round is complete; why a listener has failed. Called again after a signal
        handler's exception."""
        wire, carrier, last = self._exchange.wire, self._exchange.carrier, {}
        before = wire.settings["prescale_factor"]
        for number in numbers:
            gradient = wire.parameters[number].grad
            if gradient is None:  # frozen on all ranks
                continue
            given = self._given.get(number, _ZERO)
            if given is None:
                mine, result = carrier.compressor.stats[number]
                given = _tensor(mine[0] / before, mine[1] / before**2, mine[2])
                last[number] = given, _tensor(*result)
            else:
                last[number] = given, measured(gradient)
        self._last = last
        try:
            for each in self.listeners:
                each(self)
        except OUTCOMES as error:
            return error
        finally:
            self._given = {}
        return None

    def squares(self) -> tuple[float, float]:
        """Of the last round, the squared norms of this rank's gradient and of the result."""
        sums = [torch.stack(each)[:, 1].sum() for each in zip(*self._on_cpu().values())]
        return (float(sums[0]), float(sums[1])) if sums else (0.0, 0.0)

    def _on_cpu(self) -> dict[int, tuple[torch.Tensor, torch.Tensor]]:
        """With one copy from each GPU."""
        flat = [each for pair in self._last.values() for each in pair]
        on = [at for at, each in enumerate(flat) if not each.is_cpu]
        for device in {flat[at].device for at in on}:
            here = [at for at in on if flat[at].device == device]
            for at, row in zip(here, torch.stack([flat[at] for at in here]).cpu()):
                flat[at] = row
        self._last = dict(zip(self._last, zip(flat[::2], flat[1::2])))
        return self._last

    def named(self, names: dict[torch.Tensor, str]) -> dict[str, tuple[GradientStats, GradientStats]]:
        """Of the last round. names: without what makes them unlike those of other optimizers."""
        wire = self._exchange.wire
        return {
            names.get(wire.parameters[number], wire.names[number]): (_stats(given), _stats(result))
            for number, (given, result) in sorted(self._on_cpu().items())
        }


def _tensor(*three: float) -> torch.Tensor:
    return torch.tensor(three, dtype=torch.float64)


def _stats(three: torch.Tensor) -> GradientStats:
    greatest, square, not_finite = three.tolist()
    return GradientStats(greatest, square, int(not_finite))


def measured(gradient: torch.Tensor) -> torch.Tensor:
    """Greatest magnitude, sum of squares, elements that are not finite; on a GPU without waiting for it."""
    values = gradient.detach()
    values = values if values.layout is torch.strided else values.coalesce().values()
    if not values.numel():
        return _ZERO
    if values.is_complex():
        values = values.abs()
    low, high = values.aminmax()
    square = _square(values)
    known = values.is_cpu and bool(torch.isfinite(square))
    bad = torch.zeros_like(square) if known else torch.isfinite(values).logical_not_().sum().double()
    return torch.stack((torch.maximum(-low, high).double(), square, bad))


def _square(values: torch.Tensor) -> torch.Tensor:
    """In float64, or in float32 by rows where that is faster."""
    if values.is_cpu and values.dtype != torch.float64 and values.numel() >= 16 * _ROW:
        flat = values.reshape(-1).float()
        rows = flat.numel() // _ROW
        head, tail = flat[: rows * _ROW].view(rows, _ROW), flat[rows * _ROW :]
        norms = torch.cat((torch.linalg.vector_norm(head, dim=1), torch.linalg.vector_norm(tail).view(1)))
        square = norms.double().square().sum()
        if torch.isfinite(square):  # else a square may have been too large for float32
            return square
    return torch.linalg.vector_norm(values, dtype=torch.float64).square()


def exchange_of(optimizer: Any, call: str) -> Exchange | None:
    """That of a DistributedOptimizer; None with one rank. Raises TypeError, and ValueError where no gradients are
    averaged whole."""
    if not (isinstance(optimizer, torch.optim.Optimizer) and hasattr(optimizer, "_hvd_names")):
        raise TypeError(f"{call} expects a DistributedOptimizer, not {type(optimizer).__name__} [HVD229]")
    why = None
    if hasattr(optimizer, "_hvd_shards"):
        why = "shard=True: no rank has whole averages there"
    elif getattr(optimizer, "_hvd_delta", None) is not None:
        why = "op=hvd.Adasum: there parameters travel, not gradients"
    if why is not None:
        raise ValueError(f"{call} does not support {why}. Leave out one of them [HVD229]")
    exchange: Exchange | None = getattr(optimizer, "_hvd", None)
    return exchange


def watch_gradients(optimizer: Any, on: bool = True) -> None:
    """Measure gradients from the next round on, for ``gradient_stats``; or no longer.

    That reads each gradient before it travels and after. What travels as int8 or int4 between hosts is measured there,
    at no further cost. Ranks may differ in this.

    Args:
        optimizer (DistributedOptimizer): the optimizer of the gradients.
        on (bool): False to stop. An estimate of ``noise_scale`` stops as well. Default: True.

    Raises:
        TypeError: if ``optimizer`` is not a ``DistributedOptimizer``.
        ValueError: with ``shard=True`` and with ``op=hvd.Adasum``.

    Example:
        >>> weight = torch.nn.Parameter(torch.tensor([0.0]))
        >>> optimizer = hvd.DistributedOptimizer(torch.optim.SGD([weight], lr=1.0), [("weight", weight)])
        >>> hvd.watch_gradients(optimizer)
        >>> (2 * weight).sum().backward()
        >>> hvd.gradient_stats(optimizer)["weight"][1].square
        4.0
    """
    exchange = exchange_of(optimizer, "watch_gradients")
    if exchange is None:
        optimizer._hvd_watched = on
    elif not on:
        exchange.watch = None
    elif exchange.watch is None:
        exchange.watch = Watch(exchange)


def gradient_stats(optimizer: Any) -> dict[str, tuple[GradientStats, GradientStats]]:
    """Return what ``watch_gradients`` has measured in the last complete round.

    The first of each pair is of the gradient that this rank has sent, with all passes of the step. The second is of the
    result of all ranks. A frozen parameter is absent. In a job of one rank both are of the present gradient.

    Args:
        optimizer (DistributedOptimizer): the optimizer of the gradients.

    Returns:
        dict: by the name of the parameter, a pair of ``GradientStats``: ``greatest`` magnitude, sum of squares
        (``square``), and the number of elements that are NaN or infinite (``not_finite``). Empty before the first
        round.

    Raises:
        TypeError: if ``optimizer`` is not a ``DistributedOptimizer``.
        ValueError: ``watch_gradients`` was not called.

    Example:
        >>> weight = torch.nn.Parameter(torch.tensor([0.0, 0.0]))
        >>> optimizer = hvd.DistributedOptimizer(torch.optim.SGD([weight], lr=1.0), [("weight", weight)])
        >>> hvd.watch_gradients(optimizer)
        >>> (weight * torch.tensor([3.0, float("nan")])).sum().backward()
        >>> hvd.gradient_stats(optimizer)["weight"][0].not_finite
        1
    """
    exchange = exchange_of(optimizer, "gradient_stats")
    watch = getattr(optimizer, "_hvd_watched", False) if exchange is None else exchange.watch
    if not watch:
        raise ValueError("gradient_stats has nothing to return: call hvd.watch_gradients(optimizer) before [HVD229]")
    if isinstance(watch, Watch):
        return watch.named(optimizer._hvd_names)
    names: dict[torch.Tensor, str] = optimizer._hvd_names
    alone = {name: measured(each.grad) for each, name in names.items() if each.grad is not None}
    return {name: (_stats(each), _stats(each)) for name, each in alone.items()}
