"""Gradient noise scale of a job that trains: what the ranks' gradients say about the batch size.

The formula is in hvdlite.training.noise. Of each round it needs the mean of the ranks' squared norms, which is one
allreduce of a scalar. It goes when a round is complete and is waited for in the next one, so it delays no step. Where a
rank's gradient has a NaN or an infinity, that mean has it, too, and all ranks leave the round out.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from ... import _core
from ...lifecycle.init import incarnations
from ...ops import Average, Sum
from ...training.noise import Noise, efficiency, gain
from ..ops import plain
from .gradient_watch import Watch, exchange_of, watch_gradients

if TYPE_CHECKING:
    from .reducer import Exchange


class NoiseScale:
    """What ``noise_scale`` returns: a running estimate, the same on all ranks.

    It takes in each complete round, but for those with a NaN or an infinity and those of ``uneven_inputs``.
    """

    def __init__(self, exchange: Exchange | None, batch: int, smooth: float, scaler: Any) -> None:
        self._noise, self._batch, self._scaler = Noise(smooth), batch, scaler
        self._process_set = None if exchange is None else exchange.wire.process_set
        self._in_flight: tuple[int, int, float, Any] | None = None  # incarnation, ranks, square of the mean, handle
        if exchange is not None and exchange.watch is not None:
            wire = exchange.wire
            self._name, self._sum = f"optimizer.noise{wire.suffix}", wire.op == Sum
            exchange.watch.listeners.append(self._arrived)
            self._uneven = lambda: wire.uneven

    def _arrived(self, watch: Watch) -> None:
        self._take()
        assert self._process_set is not None
        size = self._process_set.size()
        if size < 2 or self._uneven():
            return
        given, result = watch.squares()
        unit = 1.0 if self._scaler is None else float(self._scaler.get_scale()) ** 2
        mine = torch.tensor([given / unit], dtype=torch.float64)
        handle = plain.allreduce_async_(mine, name=self._name, op=Average, process_set=self._process_set)
        self._in_flight = incarnations(), size, result / unit / (size**2 if self._sum else 1), handle

    def _take(self) -> None:
        """The round before is added."""
        if self._in_flight is None:
            return
        incarnation, size, square, handle = self._in_flight
        if incarnation == incarnations():
            mean = float(handle.wait())
            if torch.isfinite(torch.tensor([mean, square])).all():
                self._noise.add([mean] * size, square, self._batch)
        self._in_flight = None

    def _phi(self) -> float:
        self._take()
        if self._noise.square > 0:
            return self._noise.phi
        raise ValueError(
            f"noise_scale: the squared norm of the mean gradient is estimated as {self._noise.square:g}: run more "
            "steps first, with two ranks or more [HVD229]"
        )

    @property
    def scale(self) -> float:
        """The batch at which noise and gradient are equal: ``tr S / |G|^2``.

        Raises:
            ValueError: there was no round yet, or noise hides the gradient until more are averaged.
        """
        return self._phi()

    @property
    def error(self) -> float:
        """Relative standard error of ``scale``, as if rounds were independent. Infinite while nothing is known."""
        self._take()
        return self._noise.error

    def efficiency(self, batch: int) -> float:
        """Return what a sample is worth in a batch of this many samples of all ranks.

        Args:
            batch (int): samples of the whole job in a step.

        Returns:
            float: beside 1 for the present batch of all ranks.

        Raises:
            ValueError: as ``scale``.
        """
        return efficiency(self._phi(), batch, self._batch * self._ranks())

    def gain(self) -> float:
        """Return AdaScale's gain: the factor of a learning rate that was set up for the batch of one rank.

        Returns:
            float: from 1, where noise is small, to the number of ranks, where it is large.

        Raises:
            ValueError: as ``scale``.
        """
        return gain(self._phi(), self._batch * self._ranks(), self._batch)

    def _ranks(self) -> int:
        return 1 if self._process_set is None else self._process_set.size()


def noise_scale(optimizer: Any, batch: int, smooth: float = 0.999, scaler: Any = None) -> NoiseScale:
    """Estimate the gradient noise scale while a job trains, by the ranks' gradients (McCandlish et al., 2018).

    Call it once, on all ranks. It calls ``watch_gradients``, and adds an allreduce of one number to each round. Each
    step must be one round: gradients that were averaged and added to before the step do not count as one rank's.

    Args:
        optimizer (DistributedOptimizer): the optimizer, with ``op=hvd.Average`` or ``hvd.Sum``.
        batch (int): samples of each rank in a step, of all its passes.
        smooth (float): the share of its averages that a step keeps, from 0 to below 1. Default: 0.999.
        scaler (GradScaler, optional): what multiplies the loss, to divide by its scale.

    Returns:
        NoiseScale: the estimate. ``scale`` is the batch at which noise and gradient are equal, ``error`` its relative
        standard error. ``efficiency(batch)`` is what a sample is worth in a batch of all ranks, beside the present one.
        ``gain()`` is AdaScale's factor of a learning rate that was set up for one rank.

    Raises:
        TypeError: if ``optimizer`` is not a ``DistributedOptimizer``.
        ValueError: an argument is invalid. Or the result is not the ranks' average, as with another op, with
            ``WeightedAverage``, a comm hook, or a compression such as PowerSGD.

    Example:
        >>> weight = torch.nn.Parameter(torch.tensor([0.0, 0.0]))
        >>> optimizer = hvd.DistributedOptimizer(torch.optim.SGD([weight], lr=1.0), [("weight", weight)])
        >>> noise = hvd.noise_scale(optimizer, batch=1)
        >>> (weight * torch.tensor([2.0, float(hvd.rank())])).sum().backward()
        >>> round(noise.scale, 4), round(noise.gain(), 4)
        (0.125, 1.0588)
    """
    if isinstance(batch, bool) or not isinstance(batch, int) or batch < 1:
        raise ValueError(f"noise_scale: batch={batch!r} must be a whole number of at least 1 [HVD229]")
    exchange = exchange_of(optimizer, "noise_scale")
    if exchange is not None:
        wire, carrier = exchange.wire, exchange.carrier
        if wire.weights is not None or wire.op not in (Average, Sum):
            op = "a WeightedAverage" if wire.weights is not None else f"op={_core.op_name(wire.op)}"
            raise ValueError(f"noise_scale needs op=hvd.Average or hvd.Sum, not {op} [HVD229]")
        if hasattr(carrier, "hook"):
            raise ValueError("noise_scale does not support a comm hook: leave out one of them [HVD229]")
        compressor = getattr(carrier, "compressor", None)
        if not getattr(compressor, "exact_mean", True):
            raise ValueError(
                f"noise_scale does not support compression={compressor!r}, whose result is not near the average of "
                "each step: leave it out, or use hvd.Compression.int8 [HVD208]"
            )
    estimate = Noise(smooth)  # refuses a wrong value before anything is switched on
    watch_gradients(optimizer)
    return NoiseScale(exchange, batch, estimate.smooth, scaler)
