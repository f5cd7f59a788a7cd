"""Exact search for the best cut of a chain of layers and the number of ranks of each stage.

A stage is a range of layers on r ranks. A layer is there "dp" (replicated, the batch divided), "zero1" (the same, the
optimizer's state divided: ZeRO, Rajbhandari et al., SC 2020) or "tpN" (weights cut over N ranks: Megatron-LM, Shoeybi
et al., 2019; N divides the heads). For a micro-batch the stage takes F and B; after the last one its gradients are
summed in AR = 2 (n - 1) / n bytes beta, a ring's time; between two stages an activation takes C each way.

    throughput  PipeDream (Narayanan et al., SOSP 2019, section 3.1): max over stages of (F + B + AR, 2 C)
    latency     DAPPLE (Fan et al., PPoPP 2021, section 4) and Alpa (Zheng et al., OSDI 2022, section 5), one step of m
                micro-batches: sum (F + B + 2 C) + (m - 1) max (F + B, C) + what of the sums is left at its end

The search goes from the last stage to the first. A stage is dropped if another one is as good in F, F + B and F + B +
AR, a pipeline's end if another one is as good in the sum, the max, and the sum with what is left: all only grow with
what is put in front, and what is left shrinks by at most what the sum grows, so what is dropped cannot win. Memory is
that of 1F1B: a stage with b behind it keeps min(m, b + 1) micro-batches.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from numbers import Real
from typing import Any, NamedTuple

from ..parallel import schedule
from .pipeline import Played, makespan
from .table import SIZE_MAX, PlanError

KINDS = ("dp", "zero1", "tp")
OBJECTIVES = ("latency", "throughput")
LAYERS_MAX, MICRO_MAX, NUMBER_MAX = 4096, 4096, 1e15
ALMOST = 1 + 1e-12  # the same sum in another order is no other point
Point = tuple[float, ...]
Points = list[tuple[Point, Any]]


@dataclass(frozen=True)
class Layer:
    """The cost of one layer for one micro-batch on one rank.

    Args:
        name (str): the name, for messages.
        forward_ms (float): the time of forward, in ms.
        backward_ms (float): the time of backward, in ms.
        activation (float): bytes of its output.
        weights (float): bytes of its weights.
        stash (float): bytes that it keeps for backward. Default: 0.0.
        heads (int): the number of attention heads. 0 (default): it cannot be cut.
        sync (float): bytes of an allreduce of tensor parallelism, of which each pass has two. Default: 0.0.

    Raises:
        PlanError: a number is not valid.

    Example:
        >>> from hvdlite import plan
        >>> plan.Layer("block", forward_ms=1.0, backward_ms=2.0, activation=1e6, weights=4e6).heads
        0
    """

    name: str
    forward_ms: float
    backward_ms: float
    activation: float
    weights: float
    stash: float = 0.0
    heads: int = 0
    sync: float = 0.0

    def __post_init__(self) -> None:
        for what, value in list(vars(self).items())[1:]:
            expected: Any = int if what == "heads" else Real
            if isinstance(value, bool) or not isinstance(value, expected) or not 0 <= value < NUMBER_MAX:
                kind = "whole number" if what == "heads" else "number"
                raise PlanError(
                    f"layer {str(self.name)[:64]!r}: {what} is {str(value)[:40]}: it must be a {kind} of at least 0 "
                    f"and below {NUMBER_MAX:g} [HVD005]"
                )


class Choice(NamedTuple):
    """A layer on the ranks of a stage: ms of a micro-batch and of the sum of its gradients; bytes on each rank."""

    kind: str
    forward: float
    backward: float
    sums: float
    state: float
    stash: float


class Cut(NamedTuple):
    """A stage: layers [first, end) on so many ranks, the kind of each layer."""

    first: int
    end: int
    ranks: int
    kinds: tuple[str, ...]


class Found(NamedTuple):
    """ms: what the objective says. stages: from the first to the last."""

    ms: float
    stages: tuple[Cut, ...]


class Chain:
    """What is planned: a chain of layers, a network and a memory.

    Args:
        layers (list of Layer): the layers, from first to last.
        beta (float): ms per byte between any two ranks.
        micro (int): the number of micro-batches.
        memory (float): bytes of a rank. Default: no limit.
        state (float): bytes of weights, gradients and optimizer per byte of weights. Default: 4.0, Adam in float32.
        kinds (list of str): how layers may be divided, of ``"dp"``, ``"zero1"`` and ``"tp"``. Default: all.

    Raises:
        PlanError: the number of layers or micro-batches is out of bounds.
        ValueError: another number or a kind is not valid.

    Example:
        >>> from hvdlite import plan
        >>> chain = plan.Chain([plan.Layer("block", 1.0, 2.0, 1e6, 4e6)], beta=1e-6, micro=4)
        >>> len(chain.layers)
        1
    """

    def __init__(
        self, layers: Sequence[Layer], beta: float, micro: int, memory: float = math.inf, state: float = 4.0,
        kinds: Sequence[str] = KINDS,
    ) -> None:  # fmt: skip
        if not 1 <= len(layers) <= LAYERS_MAX:
            raise PlanError(f"{len(layers)} layers: a plan is for 1 to {LAYERS_MAX} [HVD005]")
        if type(micro) is not int or not 1 <= micro <= MICRO_MAX:
            raise PlanError(f"{micro!r} micro-batches: the number must be 1 to {MICRO_MAX} [HVD005]")
        if not 0 <= beta < math.inf or not memory > 0 or not 1 <= state < math.inf:
            raise ValueError(f"beta {beta}, memory {memory} or state {state} is out of range [HVD008]")
        if not set(kinds) <= set(KINDS) or "dp" not in kinds:
            raise ValueError(
                f"kinds {', '.join(map(str, kinds))} must be from {', '.join(KINDS)}, and include dp [HVD008]"
            )
        self.layers, self.beta, self.micro, self.memory, self.state = tuple(layers), beta, micro, memory, state
        self.kinds = tuple(kinds)
        self._options: dict[tuple[int, int, int, int], Points] = {}
        self._begun: dict[tuple[int, int, int, int], dict[int, Points]] = {}
        names = ("forward_ms", "backward_ms", "weights", "stash")
        self._sums = [[0.0, *itertools.accumulate(getattr(each, name) for each in self.layers)] for name in names]

    def summed(self, n: int, size: float) -> float:
        """Return the time of a ring allreduce.

        Args:
            n (int): the number of ranks.
            size (float): bytes.

        Returns:
            float: ms.
        """
        return 2 * (n - 1) / n * size * self.beta

    def choices(self, layer: Layer, r: int) -> list[Choice]:
        """Return the ways in which a layer may be divided over ranks.

        Args:
            layer (Layer): the layer.
            r (int): the number of ranks.

        Returns:
            list[Choice]: times in ms and bytes on each rank.
        """
        w, f, b, stash = layer.weights, layer.forward_ms / r, layer.backward_ms / r, layer.stash / r
        found = [Choice("dp", f, b, self.summed(r, w), self.state * w, stash)]
        if "zero1" in self.kinds and r > 1:
            found.append(Choice("zero1", f, b, self.summed(r, w), self.state * w * (0.5 + 0.5 / r), stash))
        for t in range(2, min(r, layer.heads) + 1) if "tp" in self.kinds else ():
            if r % t == 0 and layer.heads % t == 0:
                each = 2 * self.summed(t, layer.sync * t / r)
                sums = self.summed(r // t, w / t)
                found.append(Choice(f"tp{t}", f + each, b + each, sums, self.state * w / t, stash))
        return found

    def turn(self, a: int, b: int, at: int, r: int) -> tuple[float, float]:
        """Return the time of the exchange between two layers of a stage that are divided differently.

        Args:
            a (int): the number of ranks over which the layer before is cut.
            b (int): the number of ranks over which this layer is cut.
            at (int): the number of this layer.
            r (int): the number of ranks of the stage.

        Returns:
            tuple[float, float]: ms in forward and in backward.
        """
        each = self.layers[at - 1].activation * self.beta / r
        return max(0, b // a - 1) * a * each, max(0, a // b - 1) * b * each

    def front(self, at: int, r: int) -> float:
        """Return the time to bring activations to a stage.

        Args:
            at (int): the first layer of the stage.
            r (int): the number of ranks of the stage.

        Returns:
            float: ms.
        """
        return self.layers[at - 1].activation * self.beta / r if at else 0.0

    def of_stage(self, cut: Cut, behind: int) -> tuple[float, float, float, float, float]:
        """Return the times and the memory of a stage.

        Args:
            cut (Cut): the stage.
            behind (int): the number of stages behind it.

        Returns:
            tuple: ms of forward, of backward, of the sum of gradients and of the exchange in front of it; bytes on each
            rank.
        """
        f = b = sums = memory = 0.0
        for at, kind in zip(range(cut.first, cut.end), cut.kinds):
            own = next(each for each in self.choices(self.layers[at], cut.ranks) if each.kind == kind)
            before = cut.kinds[at - cut.first - 1] if at > cut.first else kind
            up, down = self.turn(_parts(before), _parts(kind), at, cut.ranks)
            f, b, sums = f + own.forward + up, b + own.backward + down, sums + own.sums
            memory += own.state + min(self.micro, behind + 1) * own.stash
        return f, b, sums, self.front(cut.first, cut.ranks), memory

    def options(self, i: int, j: int, r: int, held: int) -> Points:
        """Return the best ways to divide the layers [i, j) as one stage. Each is better than the others in some cost.

        Args:
            i (int): the first layer.
            j (int): the layer after the last one.
            r (int): the number of ranks.
            held (int): the number of micro-batches that it keeps.

        Returns:
            list: ((ms of forward, of backward, of the sum of gradients), kinds).
        """
        key = (i, j, r, held)
        if key not in self._options and self.kinds == ("dp",):  # one choice only
            f, b, w, stash = (sums[j] - sums[i] for sums in self._sums)
            fits = self.state * w + held * stash / r <= self.memory
            self._options[key] = [((f / r, b / r, self.summed(r, w)), ("dp",) * (j - i))] if fits else []
        elif key not in self._options:
            found = [each for points in self._mixed(i, j, r, held).values() for each in points]
            found = _kept([(p[:3], kinds) for p, kinds in found])  # it fits, so memory does not matter any more
            self._options[key] = [((f, fb - f, whole - fb), kinds) for (f, fb, whole), kinds in found]
        return self._options[key]

    def _mixed(self, i: int, j: int, r: int, held: int) -> dict[int, Points]:
        """By over how many ranks layer i is cut: ((F, F + B, F + B + AR, bytes), kinds). From those of [i + 1, j)."""
        known = next((at for at in range(i, j) if (at, j, r, held) in self._begun), j)
        behind = self._begun.get((known, j, r, held), {0: [((0.0, 0.0, 0.0, 0.0), ())]})
        counted = self.memory < math.inf
        for at in range(known - 1, i - 1, -1):
            now: dict[int, Points] = {}
            for kind, f, b, sums, state, stash in self.choices(self.layers[at], r):
                more = state + held * stash if counted else 0.0
                made = now.setdefault(_parts(kind), [])
                for then, old in behind.items():
                    up, down = self.turn(_parts(kind), then, at + 1, r) if then else (0.0, 0.0)
                    fs, fb = f + up, f + up + b + down
                    for (a, ab, whole, bytes_), kinds in old:
                        if bytes_ + more <= self.memory:
                            made.append(((a + fs, ab + fb, whole + fb + sums, bytes_ + more), (kind, *kinds)))
            self._begun[at, j, r, held] = behind = {parts: _kept(made) for parts, made in now.items()}
        return behind


def _parts(kind: str) -> int:
    return int(kind[2:]) if kind.startswith("tp") else 1


def _kept(points: Points) -> Points:
    """Those that no other one is as good as in all."""
    found: Points = []
    for point, what in sorted(points, key=lambda each: each[0]):
        rest = [value * ALMOST for value in point[1:]]  # all that are kept already are as good in the first
        if not any(all(a <= b for a, b in zip(other[1:], rest)) for other, _ in found):
            found.append((point, what))
    return found


@dataclass
class _Search:
    """table: (first layer, ranks used, stages): the points of all ends of a pipeline that begin there."""

    chain: Chain
    ranks: int
    objective: str
    table: dict[tuple[int, int, int], Points]
    found: Found | None = None

    def extend(self, point: Point, parts: Point, comm: float) -> Point:
        """One stage more in front: (sum, busiest, sum and what is left of AR when a backward reaches the front)."""
        (total, most, whole), (f, b, sums) = point, parts
        if self.objective == "throughput":
            return 0.0, max(most, f + b + sums, 2 * comm), 0.0
        now = total + f + b + 2 * comm
        return now, max(most, f + b, comm), now + max(sums, whole - total - b) - comm

    def hopeless(self, point: Point) -> bool:
        """No pipeline with this at its end is better than what is found."""
        least = point[0] + (self.chain.micro - 1) * point[1] if self.objective == "latency" else point[1]
        return self.found is not None and least >= self.found.ms

    def put(self, point: Point, cuts: tuple[Cut, ...], j: int, r: int, used: int, behind: int, counted: bool) -> None:
        """All stages of r ranks in front, which end before layer j."""
        last = used + r == self.ranks
        for i in (0,) if last else range(j - 1, 0, -1):
            comm, enough = self.chain.front(i, r), True
            for parts, kinds in self.chain.options(i, j, r, min(self.chain.micro, behind + 1)):
                if self.hopeless(self.extend(point, parts, 0.0)):
                    continue
                enough, new = False, self.extend(point, parts, comm)
                made = (Cut(i, j, r, kinds), *cuts)
                if self.hopeless(new):
                    continue
                if not last:
                    points = self.table.setdefault((i, used + r, behind + 1 if counted else 0), [])
                    if not points or any(a < b for a, b in zip(new, points[-1][0])):  # most are seen to be worse here
                        points.append((new, made))
                    continue
                ms = new[1] if self.objective == "throughput" else new[2] + (self.chain.micro - 1) * new[1]
                if self.found is None or ms < self.found.ms:
                    self.found = Found(ms, made)
            if enough:  # with more layers a stage is slower and needs no less memory; only its message may be shorter
                break


def best(chain: Chain, ranks: int, objective: str = "latency", each: int | None = None) -> Found:
    """Return the best plan for a chain in which all ranks are used, found by exact search.

    For throughput, costs are those of PipeDream (Narayanan et al., 2019). For latency, they are those of DAPPLE (Fan et
    al., 2021) and Alpa (Zheng et al., 2022).

    Args:
        chain (Chain): layers, network and memory.
        ranks (int): the number of ranks.
        objective (str): ``"latency"`` of a step (default), or ``"throughput"``.
        each (int, optional): the number of ranks of every stage. None: any numbers.

    Returns:
        Found: ``ms``, and ``stages`` from first to last.

    Raises:
        PlanError: no plan fits the memory. The text has the least memory that would do.
        ValueError: ``ranks`` or ``objective`` is not valid.

    Example:
        >>> from hvdlite import plan
        >>> layers = [plan.Layer(f"layer {i}", 1.0, 2.0, activation=1e6, weights=1e6) for i in range(4)]
        >>> found = plan.best(plan.Chain(layers, beta=1e-6, micro=4), ranks=2)
        >>> sum(stage.end - stage.first for stage in found.stages)
        4
    """
    if type(ranks) is not int or not 1 <= ranks <= SIZE_MAX:
        raise ValueError(f"{ranks!r} ranks: a plan is for 1 to {SIZE_MAX} [HVD008]")
    if objective not in OBJECTIVES:
        raise ValueError(f"the objective must be {' or '.join(OBJECTIVES)}, not {str(objective)[:40]!r} [HVD008]")
    n, counted = len(chain.layers), chain.memory < math.inf  # else it does not matter how many stages are behind
    search = _Search(chain, ranks, objective, {(n, 0, 0): [((0.0, 0.0, -math.inf), ())]})
    if each is None and chain.kinds != ("dp",):  # found soon, and most others are seen to be worse than it
        try:
            plain = Chain(chain.layers, chain.beta, chain.micro, chain.memory, chain.state, ("dp",))
            search.found = best(plain, ranks, objective)
        except PlanError:
            pass
    for j in range(n, 0, -1):
        for used in range(ranks):
            for behind in range(min(ranks, n)) if counted else (0,):
                for point, cuts in _kept(search.table.pop((j, used, behind), [])):
                    for r in range(1, ranks - used + 1) if each is None else (each,):
                        if used + r <= ranks:
                            search.put(point, cuts, j, r, used, behind, counted)
    if search.found is None:
        need = least_memory(chain, ranks, each)
        if need < math.inf:
            raise PlanError(
                f"no plan of {n} layers on {ranks} ranks fits into {chain.memory:.0f} bytes of memory: the minimum "
                f"is {math.ceil(need)} bytes [HVD005]"
            )
        raise PlanError(f"{n} layers cannot be split into stages of {each} ranks each on {ranks} ranks [HVD005]")
    return _plain(chain, search.found)


def _plain(chain: Chain, found: Found) -> Found:
    """Each zero1 back to dp where the memory allows it: both take the same time, and a plan reads well."""
    stages = []
    for at, cut in enumerate(found.stages):
        for stage in range(len(cut.kinds)):
            if cut.kinds[stage] == "zero1":
                other = cut._replace(kinds=(*cut.kinds[:stage], "dp", *cut.kinds[stage + 1 :]))
                if chain.of_stage(other, len(found.stages) - 1 - at)[4] <= chain.memory:
                    cut = other
        stages.append(cut)
    return Found(found.ms, tuple(stages))


def least_memory(chain: Chain, ranks: int, each: int | None = None) -> float:
    """Bytes on each rank that some plan fits; infinite where there is no plan."""
    n, sizes = len(chain.layers), range(1, ranks + 1) if each is None else (each,)
    ends: dict[tuple[int, int], float] = {(n, 0): 0.0}  # (first layer, ranks used): of the pipelines that begin there
    least = math.inf
    for behind in range(min(ranks, n)):
        held = min(chain.micro, behind + 1)
        needs = {
            r: [min((c.state + held * c.stash for c in chain.choices(a, r)), default=math.inf) for a in chain.layers]
            for r in sizes
        }
        then: dict[tuple[int, int], float] = {}
        for (j, used), most in ends.items():
            for r in sizes:
                total = 0.0
                for i in range(j - 1, -1, -1) if used + r <= ranks else ():
                    total += needs[r][i]
                    if max(most, total) >= least:
                        break
                    if i == 0 and used + r == ranks:
                        least = max(most, total)
                    elif i and used + r < ranks:
                        then[i, used + r] = min(then.get((i, used + r), math.inf), max(most, total))
        ends = then
    return least


def played(chain: Chain, found: Found) -> Played:
    """One step of a plan, played as 1F1B: the formula of latency falls short of it where stages are uneven."""
    count = len(found.stages)
    parts = [chain.of_stage(cut, count - 1 - s) for s, cut in enumerate(found.stages)]
    orders = [schedule.one_f_one_b(s, count, chain.micro) for s in range(count)]
    forward, backward, sums, front, _ = ([part[at] for part in parts] for at in range(5))
    return makespan(orders, forward, backward, front[1:], sums)
