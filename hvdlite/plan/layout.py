"""Layout of a pipeline for a number of ranks: stages, copies, micro-batches and the cut, from profiles of its layers.

A job whose number of ranks changes asks this anew each time. The batch stays, whatever the layout: each copy has the
same number of rows, in whole micro-batches. Costs are those measured at a number of rows, so small micro-batches are
as slow here as they really are: this choice is that of Varuna (Athlur et al., EuroSys 2022, section 4).

For each number of stages, of copies and of rows the exact search finds the cut, and its 1F1B schedule is played with
transfers and sums of gradients. The shortest step wins; of equal ones that of the fewest ranks, so the others are
spare. A layout is not tried where even a pipeline without any gap would take longer than what is found already.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

from .auto import Grid
from .search import MICRO_MAX, Chain, Layer, best, least_memory, played
from .table import SIZE_MAX, PlanError

BATCH_MAX = 1 << 40  # rows
SAME = 1e-6  # ms: steps that differ by less are equally long


class Layout(NamedTuple):
    """A pipeline of ``pp`` stages and ``dp`` copies of each.

    ``rows``: of a micro-batch. ``micro_batches``: of a copy in a step. ``balance``: the number of layers of each stage.
    ``ms``: the time of a step, as played.

    Example:
        >>> from hvdlite import plan
        >>> layout = plan.Layout(pp=2, dp=4, rows=2, micro_batches=3, balance=(4, 4), ms=10.0)
        >>> layout.ranks, layout.describe()
        (8, '2 stages x 4 copies, 3 micro-batches of 2 rows, layers 4+4')
    """

    pp: int
    dp: int
    rows: int
    micro_batches: int
    balance: tuple[int, ...]
    ms: float

    @property
    def ranks(self) -> int:
        """The number of ranks that it uses."""
        return self.pp * self.dp

    def describe(self) -> str:
        """Return the layout in words.

        Returns:
            str: for messages and logs.
        """
        stages, copies = f"{self.pp} stage{'s' * (self.pp > 1)}", f"{self.dp} {'copies' if self.dp > 1 else 'copy'}"
        micro, rows = f"micro-batch{'es' * (self.micro_batches > 1)}", f"{self.rows} row{'s' * (self.rows > 1)}"
        layers = "+".join(map(str, self.balance))
        return f"{stages} x {copies}, {self.micro_batches} {micro} of {rows}, layers {layers}"


def layout_for(
    profiles: Mapping[int, Sequence[Layer]], ranks: int, batch: int, beta: float = 0.0, memory: float = math.inf,
    state: float = 4.0, shape: tuple[int, int] | None = None,
) -> Layout:  # fmt: skip
    """Return the layout of a pipeline with the shortest step on at most so many ranks.

    Args:
        profiles (dict): the layers, by rows of the micro-batch at which they were measured.
        ranks (int): the number of ranks. The layout may leave some of them spare.
        batch (int): rows of a step, of all copies together.
        beta (float): ms per byte between any two ranks. Default: 0.0, transfers take no time.
        memory (float): bytes of a rank. Default: no limit.
        state (float): bytes of weights, gradients and optimizer per byte of weights. Default: 4.0, Adam in float32.
        shape (tuple, optional): the numbers of stages and copies, where they are given. None: the best ones.

    Returns:
        Layout: of equally short steps that with the fewest ranks.

    Raises:
        PlanError: no layout keeps the batch or fits the memory, or the profiles do not fit together. Of memory the text
            has the least that would do.
        ValueError: ``ranks``, ``batch``, ``beta``, ``memory`` or ``state`` is not valid.

    Example:
        >>> from hvdlite import plan
        >>> layers = [plan.Layer(f"layer {i}", 1.0, 2.0, activation=1e6, weights=1e6) for i in range(4)]
        >>> plan.layout_for({4: layers}, ranks=3, batch=32, beta=1e-6).describe()
        '1 stage x 2 copies, 4 micro-batches of 4 rows, layers 4'
    """
    count = _checked(profiles, ranks, batch)
    tried = [
        (_least_ms(profiles[rows], pp, batch // dp // rows), pp, dp, rows)
        for dp in range(1, ranks + 1) if batch % dp == 0
        for pp in range(1, min(ranks // dp, count) + 1) if shape is None or (pp, dp) == tuple(shape)
        for rows in profiles if batch // dp % rows == 0 and batch // dp // rows <= MICRO_MAX
    ]  # fmt: skip
    where = f"at most {ranks} rank{'s' * (ranks > 1)}"
    if shape is not None:
        where = f"pp={shape[0]} x dp={shape[1]} on {where}"
    none = f"no layout of {where} for {count} layers and a batch of {batch} rows"
    if shape is not None and not (1 <= shape[0] <= count and shape[1] >= 1 and shape[0] * shape[1] <= ranks):
        raise PlanError(f"{none}: it needs other numbers of layers or ranks [HVD005]")
    if not tried:
        known = ", ".join(map(str, sorted(profiles)))
        raise PlanError(
            f"{none} keeps the batch: a copy may have up to {MICRO_MAX} micro-batches, and profiles are of {known} "
            "rows [HVD005]"
        )
    grids: dict[tuple[int, int], Grid] = {}  # what one of them has found for a stage serves all numbers of stages
    found: list[tuple[tuple[float, int, int, int], Layout]] = []
    refused: list[tuple[Grid, int, int]] = []
    shortest = math.inf
    for least_ms, pp, dp, rows in sorted(tried):
        if least_ms > shortest + 2 * SAME:
            break
        micro = batch // dp // rows
        if (dp, rows) not in grids:
            chain = Chain([_of_all(each, dp) for each in profiles[rows]], beta, micro, memory, state, ("dp",))
            grids[dp, rows] = Grid(chain, dp, 1)
        grid = grids[dp, rows]
        try:
            cut = best(grid, pp * dp, each=dp)
        except PlanError:
            refused.append((grid, pp * dp, dp))
            continue
        ms = played(grid, cut).end
        shortest = min(shortest, ms)
        layout = Layout(pp, dp, rows, micro, tuple(each.end - each.first for each in cut.stages), ms)
        found.append(((round(ms / SAME), pp * dp, pp, -rows), layout))
    if not found:
        least = math.ceil(min(least_memory(*each) for each in refused))
        raise PlanError(f"{none} fits into {memory:.0f} bytes of memory: the minimum is {least} bytes a rank [HVD005]")
    return min(found)[1]


def _checked(profiles: Mapping[int, Sequence[Layer]], ranks: int, batch: int) -> int:
    """The number of layers."""
    for what, value, most in (("ranks", ranks, SIZE_MAX), ("rows of a batch", batch, BATCH_MAX)):
        if type(value) is not int or not 1 <= value <= most:
            raise ValueError(f"{str(value)[:40]} {what}: a layout is for 1 to {most} [HVD008]")
    if not profiles or any(type(rows) is not int or rows < 1 for rows in profiles):
        known = ", ".join(str(rows)[:40] for rows in profiles) or "none"
        raise PlanError(f"profiles must be by whole numbers of rows, at least 1; they are by: {known[:200]} [HVD005]")
    counts = {rows: len(layers) for rows, layers in profiles.items()}
    if len(set(counts.values())) > 1:
        listed = ", ".join(f"{count} at {rows} rows" for rows, count in sorted(counts.items()))
        raise PlanError(f"profiles must be of the same layers, but have different numbers: {listed[:200]} [HVD005]")
    if not any(each.forward_ms + each.backward_ms > 0 for layers in profiles.values() for each in layers):
        raise PlanError("the layers take no time, so no layout is faster than another [HVD005]")
    return min(counts.values())


def _of_all(layer: Layer, dp: int) -> Layer:
    """A layer's cost for the micro-batches of all copies together: a Grid divides it by dp again."""
    more = {name: getattr(layer, name) * dp for name in ("forward_ms", "backward_ms", "activation", "stash")}
    return replace(layer, **more)


def _least_ms(layers: Sequence[Layer], pp: int, micro: int) -> float:
    """A step is not shorter: the busiest stage has a part of the layers, and the longest layer is in one stage."""
    times = [each.forward_ms + each.backward_ms for each in layers]
    return max(sum(times), micro * sum(times) / pp, micro * max(times, default=0.0))
