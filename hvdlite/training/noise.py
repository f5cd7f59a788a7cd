"""Gradient noise scale: the batch at which noise and gradient are equal, and what follows from it.

S. McCandlish et al., arXiv 1812.06162, appendix A. Of n ranks with b samples each, with m the mean of |g_k|^2 and
s = |mean of g_k|^2, (n s - m) / (n - 1) estimates |G|^2, and (m - s) b n / (n - 1) the variance of one sample's
gradient, summed over its elements. One rank takes two gradients that follow each other for those of two ranks. Averages
of both come first, then the ratio phi.

Efficiency: A. Qiao et al., Pollux, OSDI 2021, section 3. Gain: T. Johnson et al., AdaScale, ICML 2020.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray


class Noise:
    """Running estimate of the gradient noise scale (McCandlish et al., 2018, appendix A).

    ``square`` is the estimate of ``|G|^2``, and ``variance`` that of one sample's gradient. ``phi`` is their ratio
    ``variance / |G|^2``: the batch at which noise and gradient are equal.

    Args:
        smooth (float): the share of its averages that a step keeps, from 0 to below 1. Default: 0.999.

    Raises:
        ValueError: ``smooth`` is out of range.

    Example:
        >>> from hvdlite import predict
        >>> noise = predict.Noise()
        >>> noise.add([3.0, 5.0], mean_square=3.5, batch=32)
        >>> round(noise.square, 6), round(noise.variance, 6)
        (3.0, 32.0)
    """

    def __init__(self, smooth: float = 0.999) -> None:
        if not 0 <= smooth < 1:
            raise ValueError(f"smooth is {smooth}: it must be at least 0 and below 1 [HVD008]")
        self.smooth = smooth
        self._square = self._variance = self._weight = 0.0
        self._products, self._weights = (0.0, 0.0, 0.0), 0.0  # of both estimates of each step; of weights
        self._last: NDArray[np.float64] | None = None

    def add(self, squares: Sequence[float], mean_square: float, batch: int) -> None:
        """Add one step of several ranks.

        Args:
            squares (list of float): the squared norm of each rank's gradient.
            mean_square (float): the squared norm of the mean gradient.
            batch (int): the number of samples of each rank.

        Raises:
            ValueError: there are fewer than two ranks, or a number is not finite.
        """
        n = len(squares)
        if n < 2 or batch < 1:
            raise ValueError(f"noise needs the gradients of two ranks and a sample each, not {n} and {batch} [HVD008]")
        m, k = float(np.mean(squares)), self.smooth
        if not math.isfinite(m) or not math.isfinite(mean_square):
            raise ValueError(f"squares of norms must be finite, not {m} on average and {mean_square} [HVD008]")
        square, variance = (n * mean_square - m) / (n - 1), (m - mean_square) * batch * n / (n - 1)
        self._square = k * self._square + (1 - k) * square
        self._variance = k * self._variance + (1 - k) * variance
        self._weight = k * self._weight + 1 - k
        products = square * square, square * variance, variance * variance
        before = self._products
        self._products = tuple(k * old + (1 - k) * new for old, new in zip(before, products))  # type: ignore[assignment]
        self._weights = k * k * self._weights + (1 - k) ** 2

    def add_alone(self, gradient: NDArray[np.float64], batch: int) -> None:
        """Add one step of a single rank, which is compared with the step before.

        Args:
            gradient (array): the gradient.
            batch (int): the number of samples.

        Raises:
            ValueError: the gradient is not finite.
        """
        now, last = np.array(gradient, np.float64).ravel(), self._last
        if last is not None:
            mean = (now + last) / 2
            self.add([float(now @ now), float(last @ last)], float(mean @ mean), batch)
        self._last = now

    @property
    def square(self) -> float:
        """``|G|^2``; 0 before the first step."""
        return self._square / self._weight if self._weight else 0.0

    @property
    def variance(self) -> float:
        """Of one sample's gradient, summed over its elements; 0 before the first step."""
        return self._variance / self._weight if self._weight else 0.0

    @property
    def phi(self) -> float:
        """``variance / |G|^2``: the batch at which noise and gradient are equal.

        Raises:
            ValueError: while the estimate of ``|G|^2`` is not above zero. There was no step yet, or noise hides the
                gradient until more steps are averaged.
        """
        if not self.square > 0:
            raise ValueError(f"|G|^2 is estimated as {self.square}: more steps are needed [HVD008]")
        return max(self.variance, 0.0) / self.square

    @property
    def error(self) -> float:
        """Relative standard error of ``phi``, as if steps were independent; infinite where nothing can be said yet."""
        x, y = self.square, self.variance
        share = self._weights / self._weight**2 if self._weight else 1.0  # 1 / n, of n steps of equal weight
        if share >= 1 or x <= 0 or y <= 0:
            return math.inf
        xx, xy, yy = (each / self._weight for each in self._products)
        spread = xx / x**2 - 2 * xy / (x * y) + yy / y**2  # of the ratio, relative; the means cancel
        return math.sqrt(max(spread, 0.0) * share / (1 - share))


def efficiency(phi: float, batch: float, first: float) -> float:
    """What a sample of a batch is worth, beside one of the batch size that training was set up with (first)."""
    return (phi + first) / (phi + batch)


def gain(phi: float, batch: float, first: float) -> float:
    """The factor of the learning rate that was set up for `first`."""
    return (phi / first + 1) / (phi / batch + 1)
