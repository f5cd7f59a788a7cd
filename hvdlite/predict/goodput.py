"""Goodput of batch sizes: samples of the first batch size that a job is worth in a unit of time.

How noisy gradients are, and what a batch is worth for that, is in hvdlite.training.noise. The time of a step comes from
a prediction or a measurement.

Goodput: A. Qiao et al., Pollux, OSDI 2021, section 3.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import NamedTuple

from ..training.noise import Noise, efficiency, gain

__all__ = ["Advice", "Noise", "advise", "efficiency", "gain"]


class Advice(NamedTuple):
    """batch: samples of the whole job. goodput: samples of the first batch size in a unit of time. gain: the factor of
    the learning rate."""

    batch: int
    goodput: float
    gain: float


def advise(phi: float, first: int, time_of: Callable[[int], float], batches: Iterable[int]) -> Advice:
    """Return the batch size with the greatest goodput (Pollux, Qiao et al., 2021, section 3).

    Args:
        phi (float): the noise scale, from ``Noise.phi``.
        first (int): the batch size for which training was set up.
        time_of (callable): a function of the batch size that returns the time of a step, in any unit.
        batches (iterable of int): the batch sizes of the whole job to compare.

    Returns:
        Advice: ``batch``, ``goodput`` (samples of the first batch size per unit of time), and ``gain``, the factor of
        the learning rate (AdaScale, Johnson et al., 2020).

    Raises:
        ValueError: there are no batch sizes, or a number is out of range.

    Example:
        >>> from hvdlite import predict
        >>> predict.advise(100.0, 32, lambda batch: 1.0 + 0.01 * batch, [32, 64, 128]).batch
        128
    """
    found = []
    for batch in batches:
        took = time_of(batch)
        if not batch >= 1 or not first >= 1 or not 0 <= phi < math.inf or not 0 < took < math.inf:
            raise ValueError(
                f"a batch of {batch} beside {first}, noise {phi} and a step of {took} give no goodput [HVD008]"
            )
        found.append(Advice(batch, batch / took * efficiency(phi, batch, first), gain(phi, batch, first)))
    if not found:
        raise ValueError("advise received no batch size [HVD008]")
    return max(found, key=lambda each: each.goodput)
