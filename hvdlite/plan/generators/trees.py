"""Trees that share no link, each of which carries its share of the buffer: for links that are no ring.

G. Wang et al., "Blink: fast and generic collectives for distributed ML", MLSys 2020. The trees are packed
(tree_packing.py) from the graph of links: one that is k times as fast as the slowest counts k times. A buffer goes down
all trees at the same time, in pieces one behind the other; an allreduce goes up by the same links first.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from ..draft import Draft
from ..registry import algorithm
from ..table import MOVES_MAX, PlanError
from ..tree_packing import Tree, least_cut, pack

UNITS_MAX = 64  # of one link: bounds the time that packing takes


@algorithm("trees", kinds=("broadcast", "allreduce"))
def trees(draft: Draft, packed: Sequence[Sequence[Sequence[int]]] | None = None, pieces: int = 16) -> None:
    """trees from the root over a graph of links (Blink), or those of packed=, each share in pieces="""
    found = _from_links(draft) if packed is None else packed
    draft.chunks = max(1, len(found) * pieces)
    if draft.chunks * draft.size > 2 * MOVES_MAX:  # before they are listed
        raise PlanError(f"plan {draft.name!r}: {pieces} pieces of {len(found)} trees make too many moves [HVD003]")
    moves = []
    for number, tree in enumerate(found):
        depth = _depths(draft, tree)
        deepest = max(depth.values())
        for (a, b), piece in itertools.product(tree, range(pieces)):
            chunk, down = number * pieces + piece, piece + depth[a]
            if draft.kind == "allreduce":  # children of one rank in turn: two could not both be added in one step
                moves.append((piece + deepest - depth[b], b, (b, a, chunk, 1, "reduce")))
                down += deepest
            moves.append((down, -1, (a, b, chunk, 1, "copy")))
    for _, together in itertools.groupby(sorted(moves), lambda move: move[:2]):
        for _, _, move in together:
            draft.move(*move)
        draft.next()


def _from_links(draft: Draft) -> list[Tree]:
    arcs = draft.links.arcs if draft.links else None
    if draft.size == 1:
        return []
    if not arcs:
        raise PlanError(f"plan {draft.name!r} needs links that form a graph [HVD004]")
    capacity: dict[int, dict[int, int]] = {}
    slowest = max(float(beta) for beta in arcs.values())
    for (a, b), beta in arcs.items():
        capacity.setdefault(a, {})[b] = min(UNITS_MAX, int(slowest / float(beta) + 1e-6))
    most, worst = least_cut(draft.size, capacity, draft.root)
    if not most:
        raise PlanError(f"plan {draft.name!r}: no links lead from rank {draft.root} to rank {worst} [HVD004]")
    return pack(draft.size, capacity, draft.root)


def _depths(draft: Draft, tree: Sequence[Sequence[int]]) -> dict[int, int]:
    """How far from the root each rank of a tree is; its arcs in any order."""
    depth, left = {draft.root: 0}, [tuple(arc) for arc in tree]
    while left:
        hangs = [arc for arc in left if arc[0] in depth]
        if not hangs:
            raise PlanError(f"plan {draft.name!r}: no arc of a tree leads to rank {left[0][0]} [HVD003]")
        depth.update({b: depth[a] + 1 for a, b in hangs})
        left = [arc for arc in left if arc not in hangs]
    return depth
