"""Norm of gradients whose bits depend neither on how tensors are cut nor on the number of ranks.

Squares of float32 are exact in float64. They are split against grids that are the same everywhere, since they depend on
the greatest square and on the number of elements only; so each part is summed without rounding, in any order. These are
the pre-rounded sums of J. Demmel and H. D. Nguyen, Parallel Reproducible Summation, IEEE Trans. Computers 64(7), 2015.
Three grids keep more than 53 bits of the greatest square.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator

import torch

_BLOCK, _GRIDS = 1 << 16, 3


def known_norm(norm_type: float) -> float:
    """ValueError for a norm that is not computed here."""
    if float(norm_type) not in (2.0, math.inf):
        raise ValueError(f"norm_type={norm_type!r}: use 2 or infinity [HVD222]")
    return float(norm_type)


def _blocks(tensors: Iterable[torch.Tensor]) -> Iterator[torch.Tensor]:
    for tensor in tensors:
        yield from tensor.detach().reshape(-1).split(_BLOCK)


def greatest(tensors: Iterable[torch.Tensor]) -> float:
    """The greatest magnitude; infinity where one is not finite."""
    tops = [block.abs().max() for block in _blocks(tensors) if block.numel()]
    return max((float(each) if math.isfinite(each) else math.inf for each in tops), default=0.0)


def euclidean(
    tensors: list[torch.Tensor], count: int, agreed_max: Callable[[float], float],
    agreed_sum: Callable[[torch.Tensor], torch.Tensor]
) -> float:  # fmt: skip
    """The 2-norm of all ranks' tensors, which have `count` elements together; infinity if one is not finite.

    agreed_max, agreed_sum: what makes a number, or a tensor, of all ranks' ones.
    """
    top = agreed_max(greatest(tensors))
    if top == 0.0 or not math.isfinite(top):
        return top
    bits = math.ceil(math.log2(count + 1))
    high = 2 * math.frexp(top)[1]  # squares are below 2 ** high
    sums, grids = torch.zeros(_GRIDS, dtype=torch.float64), []
    for _ in range(_GRIDS):
        unit = high + bits - 52
        grids.append(math.ldexp(1.5, 52 + unit))
        high = unit - 1
    for block in _blocks(tensors):
        rest = block.double().square_()
        for at, grid in enumerate(grids):
            part = (rest + grid) - grid
            sums[at] += part.sum().cpu()
            rest -= part
    first, second, third = agreed_sum(sums).tolist()
    return math.sqrt(first + (second + third))


def clip(gradients: Iterable[torch.Tensor], norm: float, max_norm: float, error_if_nonfinite: bool) -> torch.Tensor:
    """Scales gradients of this norm in place, as ``torch.nn.utils.clip_grad_norm_`` does, and returns the norm."""
    total = torch.tensor(norm, dtype=torch.float32)
    if error_if_nonfinite and not torch.isfinite(total):
        raise RuntimeError("the total norm of the gradients is not finite, so they cannot be clipped [HVD232]")
    factor = torch.clamp(max_norm / (total + 1e-6), max=1.0)
    for gradient in gradients:
        gradient.mul_(factor.to(gradient.device, gradient.dtype))
    return total
