"""Automatic plan of parallel training for a model: the best that `hvdlite.parallel` runs, with the reasons.

`hvdlite.parallel` runs a Mesh: the same dp x tp ranks in every stage, layers that are not cut the same on all ranks of
tp. So every mesh of the ranks is tried, with the exact search for its cuts; each stage has dp * tp ranks there. What
search.py finds without this bound is reported beside it. A formula decides for each mesh; what it found is played, and
the shortest of these is taken. The schedule is 1F1B, which is as fast as GPipe and keeps less.

The file, `hvdlite-parallel-1`, is what `hvdlite.parallel.planned` reads:

    {"format", "micro_batches", "schedule", "shape": {"dp", "pp", "tp"}, "ms", "why",
     "stages": [{"layers": [first, end], "kinds": ["dp" or "tpN", ...]}, ...]}
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from .search import Chain, Choice, Found, Layer, best, least_memory, played
from .table import PlanError

FORMAT = "hvdlite-parallel-1"
FREE_MAX = 3000  # layers squared times ranks: the search without meshes takes seconds there, minutes soon after


class Grid(Chain):
    """A chain whose stages have dp x tp ranks each. Layers whose heads tp divides are cut, the others replicated."""

    def __init__(self, chain: Chain, dp: int, tp: int) -> None:
        kinds = ("dp", "tp") if tp > 1 else ("dp",)
        super().__init__(chain.layers, chain.beta, chain.micro, chain.memory, chain.state, kinds)
        self.dp, self.tp = dp, tp

    def choices(self, layer: Layer, r: int) -> list[Choice]:
        cuts = self.tp if layer.heads and layer.heads % self.tp == 0 else 1
        n, w = self.dp * cuts, layer.weights / cuts
        each = 2 * self.summed(cuts, layer.sync / self.dp)
        f, b = layer.forward_ms / n + each, layer.backward_ms / n + each
        kind = f"tp{cuts}" if cuts > 1 else "dp"
        return [Choice(kind, f, b, self.summed(self.dp, w), self.state * w, layer.stash / n)]

    def turn(self, a: int, b: int, at: int, r: int) -> tuple[float, float]:
        """Nothing: what layers hand on is whole on all ranks of tp."""
        return 0.0, 0.0

    def front(self, at: int, r: int) -> float:
        return super().front(at, self.dp)


class Plan(NamedTuple):
    """ms: of a step, played. why: sentences."""

    shape: dict[str, int]
    found: Found
    micro: int
    ms: float
    why: list[str]

    def write(self, path: str | Path) -> None:
        stages = [{"layers": [cut.first, cut.end], "kinds": list(cut.kinds)} for cut in self.found.stages]
        header = {"format": FORMAT, "micro_batches": self.micro, "schedule": "1f1b", "shape": self.shape}
        text = json.dumps({**header, "ms": round(self.ms, 6), "why": " ".join(self.why), "stages": stages}, indent=1)
        Path(path).write_text(text + "\n", encoding="utf-8")


def meshes(chain: Chain, ranks: int) -> Iterator[tuple[int, int, int]]:
    """(dp, pp, tp) of so many ranks; tp that divides the heads of no layer is none, nor pp of more than the layers."""
    for tp in range(1, ranks + 1):
        cut = "tp" in chain.kinds and any(layer.heads and layer.heads % tp == 0 for layer in chain.layers)
        if ranks % tp == 0 and (tp == 1 or cut):
            for pp in range(1, min(ranks // tp, len(chain.layers)) + 1):
                if ranks // tp % pp == 0:
                    yield ranks // tp // pp, pp, tp


def choose(chain: Chain, ranks: int) -> Plan:
    """Return the mesh, the cuts and the kinds of layers with the shortest step that ``hvdlite.parallel`` can run.

    Args:
        chain (Chain): layers, network and memory.
        ranks (int): the number of ranks.

    Returns:
        Plan: ``shape``, ``found``, ``ms`` and ``why``. ``write(path)`` saves it for ``parallel.planned``.

    Raises:
        PlanError: no mesh fits the memory, or the layers take no time.

    Example:
        >>> from hvdlite import plan
        >>> layers = [plan.Layer(f"layer {i}", 1.0, 2.0, activation=1e6, weights=1e6) for i in range(4)]
        >>> plan.choose(plan.Chain(layers, beta=1e-6, micro=4), ranks=2).shape
        {'dp': 2, 'pp': 1, 'tp': 1}
    """
    tried: list[tuple[float, dict[str, int], Grid, Found, float]] = []
    refused, least = 0, math.inf
    for dp, pp, tp in meshes(chain, ranks):
        grid = Grid(chain, dp, tp)
        try:
            found = best(grid, ranks, each=dp * tp)
        except PlanError:
            refused, least = refused + 1, min(least, least_memory(grid, ranks, dp * tp))
            continue
        step = played(grid, found)
        tried.append((step.end, {"dp": dp, "pp": pp, "tp": tp}, grid, found, max(step.busy)))
    if not tried:
        raise PlanError(
            f"no mesh of {ranks} ranks fits into {chain.memory:.0f} bytes of memory: the minimum is "
            f"{math.ceil(least)} bytes [HVD005]"
        )
    tried.sort(key=lambda each: each[0])
    ms, shape, grid, found, busiest = tried[0]
    if not ms > 0:
        raise PlanError("the layers take no time, so no plan is faster than another [HVD005]")
    others = [(each[0], each[1]) for each in tried]
    why = [*_why(grid, found, ms, busiest), *_beside(chain, ranks, others, refused)]
    return Plan(shape, found, chain.micro, ms, why)


def _why(grid: Grid, found: Found, ms: float, busiest: float) -> list[str]:
    count = len(found.stages)
    parts = [grid.of_stage(cut, count - 1 - at) for at, cut in enumerate(found.stages)]
    slow = max(range(count), key=lambda at: parts[at][0] + parts[at][1])
    cut = sum(kind != "dp" for stage in found.stages for kind in stage.kinds)
    layers = ", ".join(str(stage.end - stage.first) for stage in found.stages)
    lines = [
        f"{_named(grid.dp, count, grid.tp)}: {ms:.4g} ms a step of {grid.micro} micro-batches.",
        f"The stages have {layers} layers; stage {slow} is the slowest, {parts[slow][0] + parts[slow][1]:.4g} ms a "
        f"micro-batch, and the busiest computes {100 * busiest / ms:.0f} % of the step.",
    ]
    if cut:
        lines.append(f"{cut} of {len(grid.layers)} layers are cut over tp.")
    sums = max(part[2] for part in parts)
    if sums:
        lines.append(f"Sums of gradients take up to {sums:.4g} ms after the last backward of a stage.")
    need = [part[4] for part in parts]
    bound = f" of {grid.memory:.4g}" if grid.memory < math.inf else ""
    lines.append(f"Stage {need.index(max(need))} needs the most memory, {max(need):.4g}{bound} bytes a rank.")
    return lines


def _beside(chain: Chain, ranks: int, tried: list[tuple[float, dict[str, int]]], refused: int) -> list[str]:
    """What else there is: other meshes, and what hvdlite.parallel does not run."""
    lines = (
        [f"The next best mesh, {_named(**tried[1][1])}, takes {tried[1][0] / tried[0][0]:.3g} times as long."]
        if tried[1:]
        else []
    )
    if refused:
        lines.append(f"Of {refused + len(tried)} meshes {refused} cannot fit the memory.")
    if len(chain.layers) ** 2 * ranks > FREE_MAX:
        return [
            *lines,
            "Stages of unequal ranks were not tried: there are too many of them for so many layers and ranks.",
        ]
    free = best(chain, ranks)
    ms = played(chain, free).end
    if ms < tried[0][0] * 0.999:
        stages = "; ".join(
            f"{_count(cut.end - cut.first, 'layer')} on {_count(cut.ranks, 'rank')} ({kinds})"
            for cut in free.stages
            for kinds in [", ".join(sorted(set(cut.kinds)))]
        )
        lines.append(
            f"Stages of unequal ranks or kinds would take {ms:.4g} ms ({stages}); hvdlite.parallel does not run them."
        )
    return lines


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'s' * (number != 1)}"


def _named(dp: int, pp: int, tp: int) -> str:
    return f"dp={dp} pp={pp} tp={tp}"
