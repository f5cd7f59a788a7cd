"""How float32 numbers become integers whose sums have the same bits in any order.

Of a block with |x| < 2**e on all n ranks, what travels is round(x * 2**q), q = 31 - ceil(log2 n) - e. So the sum of n
fits int32, and scaling by a power of two is exact. The error of a sum is at most n / 2 * 2**-q, which is at most
n**2 * 2**-30 * max|x|. SwitchML (Sapio et al., NSDI 2021) scales by (2**31 - 1) / (n 2**e), which is no power of two.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from .packet import BLOCK, Integers

Floats = NDArray[np.float32]
LEAST, NOT_FINITE = -126, 1000  # exponents: of a block of zeros; of one with NaN or infinities


def exponents(x: Floats) -> Integers:
    """For each block of a vector the least e with all |x| < 2**e.

    Example:
        >>> from hvdlite.aggregation.fixed_point import exponents
        >>> exponents(np.array([0.5, -3.0], np.float32)).tolist()
        [2]
    """
    if not len(x):
        return np.zeros(0, np.int32)
    most = np.maximum.reduceat(np.abs(x), np.arange(0, len(x), BLOCK))
    finite = np.isfinite(most)
    e = np.maximum(np.frexp(np.where(finite, most, 0))[1], LEAST)
    return np.where(finite, np.where(most == 0, LEAST, e), NOT_FINITE).astype(np.int32)


def encode(x: Floats, e: Any, n: int) -> Integers:
    """What travels; e: of each number, or one for all. The product needs float64: float32 has 24 bits."""
    most = (1 << (31 - (n - 1).bit_length())) - 1
    return np.clip(np.rint(np.ldexp(x.astype(np.float64), _shift(e, n))), -most, most).astype(np.int32)


def decode(numbers: Integers, e: Any, n: int, divisor: int = 1) -> Floats:
    """The sum by `divisor`, rounded once to float32; a sum beyond its range is an infinity, as everywhere."""
    with np.errstate(over="ignore"):
        return (np.ldexp(numbers.astype(np.float64), -_shift(e, n)) / divisor).astype(np.float32)


def _shift(e: Any, n: int) -> Any:
    return 31 - (n - 1).bit_length() - e
