"""Links between ranks: latency of each pair, and the resources that a message holds, and for how long.

    of(a, b) -> (alpha in ns, ((resource, ns a byte), ...))

A resource that several pairs name is shared: messages pass it one after the other. A pair without a link (of a graph of
NVLinks, say) cannot exchange: an error names it. Times and rates are as units.py reads them: "20us", "25gbit", "1GB/s".
"""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any

from .table import SIZE_MAX, PlanError, plain
from .units import ns_a_byte, time_ns

FORMAT = "hvdlite-topology-1"
Use = tuple[float, tuple[tuple[Hashable, float], ...]]
LINKS_MAX = 1 << 20
DIMS_MAX = 6  # of a grid: they have 720 orders


class Links:
    """What joins the ranks of a plan: latencies, rates, and which pairs share a resource.

    Use one of the static methods. Times and rates are texts such as ``"20us"``, ``"25gbit"`` and ``"1GB/s"``, or
    numbers in ns and ns per byte.

    Args:
        size (int): the number of ranks.
        of (callable): a function of two ranks that returns (latency in ns, ((resource, ns per byte), ...)).
        name (str): the name, for messages.
        busy (float): the part of the latency, in ns, that also occupies the resources. Default: 0.0.
        arcs (dict, optional): of a graph, {(from, to): ns per byte}.
        hosts (list of lists of int, optional): the ranks of each host.

    Raises:
        PlanError: the size is out of bounds.

    Example:
        >>> from hvdlite import plan
        >>> plan.Links.uniform(4, "20us", "1GB/s").size
        4
    """

    def __init__(
        self,
        size: int,
        of: Callable[[int, int], Use],
        name: str,
        busy: float = 0.0,
        arcs: Mapping[tuple[int, int], float] | None = None,
        hosts: list[list[int]] | None = None,
    ) -> None:
        if not 1 <= size <= SIZE_MAX:
            raise PlanError(f"links of {size} ranks: the number must be 1 to {SIZE_MAX} [HVD004]")
        self.size, self.of, self.name, self.busy, self.arcs, self.hosts = size, of, name, busy, arcs, hosts

    @staticmethod
    def uniform(size: int, alpha: str | float, beta: str | float, busy: float = 0.0) -> Links:
        """Return links of ranks that each have one port out and one port in.

        Args:
            size (int): the number of ranks.
            alpha (str or float): the latency.
            beta (str or float): the rate of a port.
            busy (float): the part of the latency, in ns, that also occupies the ports. Default: 0.0.

        Returns:
            Links: for ``time`` and ``make``.

        Raises:
            PlanError: the size, a time or a rate is not valid.
        """
        late, each = time_ns(alpha), ns_a_byte(beta)
        return Links(size, lambda a, b: (late, ((("out", a), each), (("in", b), each))), "uniform", busy)

    @staticmethod
    def bus(size: int, alpha: str | float, beta: str | float) -> Links:
        """Return links of ranks that share one medium.

        Args:
            size (int): the number of ranks.
            alpha (str or float): the latency.
            beta (str or float): the rate of the medium.

        Returns:
            Links: for ``time`` and ``make``.

        Raises:
            PlanError: the size, a time or a rate is not valid.
        """
        late, each = time_ns(alpha), ns_a_byte(beta)
        return Links(size, lambda a, b: (late, (("bus", each),)), "bus")

    @staticmethod
    def switch(size: int, alpha: str | float, beta: str | float) -> Links:
        """Return links of ranks around a switch that adds, which is the last rank.

        Each other rank has one port out and one in. The switch has a port of the same rate for each of them, and adds
        at line rate. Ranks reach each other through it, as on uniform links.

        Args:
            size (int): the number of ranks, with the switch.
            alpha (str or float): the latency between two ranks. Half of it is that between a rank and the switch.
            beta (str or float): the rate of a port.

        Returns:
            Links: for ``time`` and ``make``.

        Raises:
            PlanError: the size, a time or a rate is not valid.

        Example:
            >>> from hvdlite import plan
            >>> table = plan.make("aggregator", size=9, root=8, pieces=500)
            >>> plan.time(table, 4_000_000, plan.Links.switch(9, "20us", "1GB/s"))
            4028000.0
        """
        late, each = time_ns(alpha), ns_a_byte(beta)

        def of(a: int, b: int) -> Use:
            out, into = (("out", a), each), (("in", b), each)
            if size - 1 in (a, b):  # no resource of the switch: each rank has its own port of it
                return late / 2, (out if b == size - 1 else into,)
            return late, (out, into)

        return Links(size, of, "switch")

    @staticmethod
    def across(
        hosts: Sequence[Sequence[int]],
        inside: tuple[str | float, str | float],
        between: tuple[str | float, str | float],
    ) -> Links:
        """Return links of hosts whose ranks share the host's wire, out and in.

        Args:
            hosts (list of lists of int): the ranks of each host.
            inside (tuple): latency and rate within a host.
            between (tuple): latency and rate between hosts.

        Returns:
            Links: for ``time`` and ``make``.

        Raises:
            PlanError: a rank is missing or listed twice, or a time or rate is not valid.
        """
        host_of = {rank: number for number, ranks in enumerate(hosts) for rank in ranks}
        size = sum(map(len, hosts))
        if sorted(host_of) != list(range(size)):
            raise PlanError(
                f"hosts {plain([list(each) for each in hosts], 80)}: list each rank from 0 on once [HVD004]"
            )
        near, far = (
            (time_ns(inside[0]), ns_a_byte(inside[1])),
            (time_ns(between[0]), ns_a_byte(between[1])),
        )

        def of(a: int, b: int) -> Use:
            here, there = host_of[a], host_of[b]
            if here == there:
                return near[0], ((("out", a), near[1]), (("in", b), near[1]))
            return far[0], ((("wire out", here), far[1]), (("wire in", there), far[1]))

        return Links(size, of, "hosts", hosts=[list(each) for each in hosts])

    @staticmethod
    def grid(dims: Sequence[int], rates: Sequence[str | float], alpha: str | float) -> Links:
        """Return links of a grid with a switch for each line of each dimension. Ranks are in row-major order.

        Args:
            dims (list of int): the lengths of the dimensions.
            rates (list): the rate of each dimension.
            alpha (str or float): the latency.

        Returns:
            Links: for ``time`` and ``make``.

        Raises:
            PlanError: the dimensions do not fit, or a time or rate is not valid.
        """
        late, each = time_ns(alpha), [ns_a_byte(rate) for rate in rates]
        if not 1 <= len(dims) <= DIMS_MAX or min(dims) < 1 or math.prod(dims) > SIZE_MAX:
            text = plain("x".join(map(str, dims)), 80)
            raise PlanError(f"{text} is not a grid of 1 to {DIMS_MAX} dimensions and at most {SIZE_MAX} ranks [HVD004]")
        if len(dims) != len(each):
            raise PlanError(f"a grid of {'x'.join(map(str, dims))} needs {len(dims)} rates, not {len(each)} [HVD004]")
        point = list(itertools.product(*map(range, dims)))

        def of(a: int, b: int) -> Use:
            differ = [d for d in range(len(dims)) if point[a][d] != point[b][d]]
            if len(differ) != 1:
                raise PlanError(
                    f"ranks {a} and {b} are not on one line of the grid {'x'.join(map(str, dims))} [HVD004]"
                )
            d = differ[0]
            return late, ((("out", a, d), each[d]), (("in", b, d), each[d]))

        return Links(len(point), of, f"grid {'x'.join(map(str, dims))}")

    @staticmethod
    def graph(size: int, arcs: Mapping[tuple[int, int], str | float], alpha: str | float) -> Links:
        """Return links of a graph in which each arc is a link of its own, one way.

        Args:
            size (int): the number of ranks.
            arcs (dict): {(from, to): rate}.
            alpha (str or float): the latency.

        Returns:
            Links: for ``time`` and ``make``.

        Raises:
            PlanError: the size, a time or a rate is not valid.
        """
        late, each = time_ns(alpha), {arc: ns_a_byte(rate) for arc, rate in arcs.items()}

        def of(a: int, b: int) -> Use:
            if (a, b) not in each:
                raise PlanError(f"no link joins rank {a} to rank {b} in this topology [HVD004]")
            return late, ((("arc", a, b), each[a, b]),)

        return Links(size, of, "graph", arcs=each)


def from_json(text: str, origin: str = "topology") -> Links:
    """The links of a file, a graph or hosts; origin: its name, for errors. Links of a graph are both ways, and several
    of one pair add up. Raises PlanError."""
    try:
        data = json.loads(text)
        if not isinstance(data, dict) or data.get("format") != FORMAT:
            found = data.get("format") if isinstance(data, dict) else type(data).__name__
            raise ValueError(f"its format is {str(found)[:40]!r}, this version reads {FORMAT!r}")
        if "hosts" in data:
            hosts = [[_rank(rank, SIZE_MAX) for rank in each] for each in data["hosts"]]
            inside, across = ((1e3 * _number(us), 1 / _number(rate)) for us, rate in (data["inside"], data["across"]))
            return Links.across(hosts, inside, across)
        size, links = _rank(data["ranks"], SIZE_MAX + 1), data["links"]
        if len(links) > LINKS_MAX:
            raise ValueError(f"more than {LINKS_MAX} links")
        rates: dict[tuple[int, int], float] = {}
        for a, b, rate in links:
            if _rank(a, size) == _rank(b, size):
                raise ValueError(f"the link {a}, {b} joins a rank to itself")
            for arc in ((a, b), (b, a)):
                rates[arc] = rates.get(arc, 0.0) + _number(rate)
        return Links.graph(size, {arc: 1 / rate for arc, rate in rates.items()}, 1e3 * _number(data["alpha_us"]))
    except PlanError as error:
        raise PlanError(f"{origin}: {error}") from None
    except (ValueError, KeyError, TypeError, OverflowError, RecursionError, ZeroDivisionError) as error:
        problem = f"{error} is missing" if isinstance(error, KeyError) else str(error)
        raise PlanError(f"{origin}: not a topology: {problem[:200]} [HVD004]") from None


def _rank(value: Any, size: int) -> int:
    if type(value) is not int or not 0 <= value < size:
        raise ValueError(f"{value!r} is none of {size} ranks")
    return value


def _number(value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value < 1e12:
        raise ValueError(f"{value!r} must be a number above zero")
    return float(value)
