"""Balance of stages: the cut of the layers that makes the slowest stage fastest, found exactly.

A pipeline goes at the pace of its slowest stage. `partition` looks at every cut that could be best (dynamic programming
over stages and layers), so no stage is left empty where a rule of thumb would do so, and a limit of memory is respected
if any cut respects it. Of cuts that are equally fast it takes the one whose first stages are shortest: with 1F1B they
keep the most activations. Pure: costs come from `profile`, or from anywhere.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import accumulate
from numbers import Real


def partition(
    costs: Sequence[float], stages: int, weights: Sequence[float] | None = None, limit: float | None = None
) -> list[int]:
    """Return how many layers each stage gets, so that the slowest stage is as fast as possible.

    It finds the exact optimum by dynamic programming. Of equally fast cuts it takes the one with the shortest first
    stages.

    Args:
        costs (list of float): the cost of each layer, in any unit.
        stages (int): the number of stages.
        weights (list of float, optional): the memory of each layer, in any unit. Needs ``limit``.
        limit (float, optional): the most memory of a stage, in the unit of ``weights``.

    Returns:
        list[int]: the number of layers of each stage, at least 1.

    Raises:
        ValueError: the numbers are not valid, or no cut respects the limit.

    Example:
        >>> from hvdlite import parallel
        >>> parallel.partition([1, 1, 1, 3], stages=2)
        [3, 1]
    """
    layers = len(costs)
    if isinstance(stages, bool) or not hasattr(stages, "__index__") or not 1 <= stages <= layers:
        raise ValueError(f"{layers} layers cannot be split into {stages} stages of at least one layer [HVD013]")
    if (weights is None) != (limit is None) or (weights is not None and len(weights) != layers):
        raise ValueError(f"weights and limit need each other, with one weight for each of {layers} layers [HVD013]")
    time = _sums("cost", costs)
    memory = _sums("weight", weights or [0] * layers)
    most = math.inf if limit is None else limit
    best = [0.0] + [math.inf] * layers  # of the first j layers on the stages so far: the slowest stage's time
    cuts = []  # by stage: where it begins if it ends before layer j
    for stage in range(stages):
        before, best, begins = best, [math.inf] * (layers + 1), [0] * (layers + 1)
        for end in range(stage + 1, layers - (stages - stage) + 2):
            for begin in range(end - 1, stage - 1, -1):
                if not memory[end] - memory[begin] <= most:
                    break
                own = time[end] - time[begin]
                if max(before[begin], own) <= best[end]:
                    best[end], begins[end] = max(before[begin], own), begin
                if own > before[begin]:  # a longer stage is only slower, and what comes before is not slowest already
                    break
        cuts.append(begins)
    if best[layers] == math.inf:
        raise ValueError(f"no split of these layers into {stages} stages keeps every stage within {limit} [HVD013]")
    balance, end = [], layers
    for begins in reversed(cuts):
        balance.append(end - begins[end])
        end = begins[end]
    return balance[::-1]


def _sums(what: str, numbers: Sequence[float]) -> list[float]:
    for layer, number in enumerate(numbers):
        if not isinstance(number, Real) or not 0 <= number < math.inf:
            raise ValueError(f"the {what} of layer {layer} is {number!r}: it must be a number of at least 0 [HVD013]")
    return [0.0, *accumulate(map(float, numbers))]
