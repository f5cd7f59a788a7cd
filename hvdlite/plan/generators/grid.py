"""Ranks on a grid: rings along one dimension after the other. Two plans: `grid`, and `hierarchical` for hosts.

A part of the buffer is reduce-scattered along the dimensions of its order, each time what the one before has left, and
gathered back (H. Mikami et al., "Massively distributed SGD", arXiv 1811.05233, in two dimensions). `hierarchical` is
the grid of (hosts, ranks of a host), inside first: few bytes leave a host, as each of its ranks sends its share. With
many parts all dimensions work at the same time; which part takes which order is chosen as in "Themis: a network
bandwidth-aware collective scheduling policy for distributed training of DL models", S. Rashidi et al., ISCA 2022.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

from ..draft import Draft
from ..links import DIMS_MAX
from ..registry import algorithm
from ..table import MOVES_MAX, STEPS_MAX, PlanError, plain
from ..units import ns_a_byte

Order = tuple[int, ...]
ORDERS_MAX = 1 << 20  # that are tried


@algorithm("grid")
def grid(
    draft: Draft,
    dims: Sequence[int] = (),
    parts: int = 1,
    orders: Sequence[Sequence[int]] | None = None,
    rates: Sequence[str | float] | None = None,
) -> None:
    """rings along the dimensions dims= of a grid, in parts=; rates= of the dimensions choose the orders (Themis)"""
    lengths = tuple(dims) or (draft.size,)
    if min(lengths) < 1 or math.prod(lengths) != draft.size or len(lengths) > DIMS_MAX:  # before it is built
        shown = plain("x".join(map(str, lengths)), 80)
        raise PlanError(f"plan {draft.name!r}: {shown} is not a grid of {draft.size} ranks [HVD003]")
    parts = parts if orders is None else len(orders)
    moves = 2 * draft.size * sum(length - 1 for length in lengths)  # of a part
    if not 1 <= parts <= STEPS_MAX or parts * moves > MOVES_MAX:
        raise PlanError(f"plan {draft.name!r}: {parts} parts of {moves} moves each are out of range [HVD003]")
    if orders is None:
        straight = [tuple(reversed(range(len(lengths))))] * parts
        orders = themis_orders(lengths, rates, parts)[0] if rates else straight
    _along(draft, list(range(draft.size)), lengths, orders)


@algorithm("hierarchical")
def hierarchical(draft: Draft) -> None:
    """a ring inside each host, then one between hosts for each of its ranks; hosts of as many ranks"""
    hosts = draft.hosts or [list(range(draft.size))]
    if len({len(each) for each in hosts}) > 1:
        counts = ", ".join(str(len(each)) for each in hosts)
        raise PlanError(f"plan {draft.name!r}: hosts have {counts} ranks, but must have equal numbers [HVD003]")
    _along(draft, [r for each in hosts for r in each], (len(hosts), len(hosts[0])), [(1, 0)])


def _along(draft: Draft, ranks: list[int], dims: tuple[int, ...], orders: Sequence[Sequence[int]]) -> None:
    """ranks: by place, row-major. Part c begins in step c, with the dimension orders[c][0]."""
    points = list(itertools.product(*map(range, dims)))
    if any(sorted(order) != list(range(len(dims))) for order in orders):
        raise PlanError(f"plan {draft.name!r}: an order must have each of {len(dims)} dimensions once [HVD003]")
    rank_of, size = dict(zip(points, ranks)), draft.size
    draft.chunks = len(orders) * size
    for part, order in enumerate(orders):
        step = part
        levels = range(len(order))
        for how, level in [("reduce", k) for k in levels] + [("copy", k) for k in reversed(levels)]:
            d = order[level]
            for i in range(dims[d] - 1):
                for point, rank in rank_of.items():
                    at, n = part * size, size
                    for before in order[:level]:  # what the levels before have left to this place
                        n //= dims[before]
                        at += point[before] * n
                    n //= dims[d]
                    chunk = (point[d] - i - (how == "reduce")) % dims[d]
                    to = rank_of[point[:d] + ((point[d] + 1) % dims[d],) + point[d + 1 :]]
                    draft.move(rank, to, at + chunk * n, n, how, step=step)
                step += 1


def themis_orders(dims: Sequence[int], rates: Sequence[str | float], parts: int) -> tuple[list[Order], list[float]]:
    """The order of dimensions of each part, and what each dimension has to do in the end, in ns a byte of a part.

    Greedy, as the paper's algorithm 1: each part takes the order after which the busiest dimension has least to do.
    """
    betas = [ns_a_byte(rate) for rate in rates]
    if len(betas) != len(dims):
        raise PlanError(f"a grid of {len(dims)} dimensions needs one rate for each, not {len(betas)} [HVD003]")
    if parts * math.factorial(min(len(dims), 99)) > ORDERS_MAX:
        raise PlanError(f"{parts} parts of a grid of {len(dims)} dimensions have too many orders [HVD003]")
    load, orders = [0.0] * len(dims), []
    for _ in range(parts):
        options = []
        for order in itertools.permutations(range(len(dims))):
            after, left = list(load), 1.0
            for d in order:
                after[d] += 2 * left * (dims[d] - 1) / dims[d] * betas[d]
                left /= dims[d]
            options.append((max(after), order, after))
        _, order, load = min(options)
        orders.append(order)
    return orders, load
