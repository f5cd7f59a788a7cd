"""Packing of spanning trees from a root that share no link: as many as the maximum flow allows.

J. Edmonds, "Edge-disjoint branchings" (1973): from a root there are k arc-disjoint spanning trees if and only if k
units can flow to every node. L. Lovász (1976) proves it so that trees can be grown arc by arc, each chosen such that
k - 1 units still can flow in what is left. A new arc (u, v) can only spoil cuts that have v inside, u and the root
outside: one flow from {root, u} to v tells.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

Capacity = Mapping[int, Mapping[int, int]]  # units of each arc, by its begin and its end
Tree = list[tuple[int, int]]  # arcs, each after the one that reaches its begin


def flow(capacity: Capacity, sources: Iterable[int], sink: int, most: int) -> int:
    """Units that can flow, up to `most`: shortest augmenting paths (J. Edmonds, R. Karp, 1972)."""
    left = {a: dict(to) for a, to in capacity.items()}
    sources = list(sources)
    for total in range(most):
        came: dict[int, int | None] = dict.fromkeys(sources)
        queue = list(sources)
        for a in queue:
            for b, units in left.get(a, {}).items():
                if units > 0 and b not in came:
                    came[b] = a
                    queue.append(b)
        if sink not in came:
            return total
        b = sink
        while (before := came[b]) is not None:
            left[before][b] -= 1
            back = left.setdefault(b, {})
            back[before] = back.get(before, 0) + 1
            b = before
    return most


def least_cut(size: int, capacity: Capacity, root: int) -> tuple[int, int]:
    """(units that can flow to the node that is worst off, that node); nodes are 0 to size - 1, two at least."""
    most = sum(capacity.get(root, {}).values())
    return min((flow(capacity, [root], node, most), node) for node in range(size) if node != root)


def pack(size: int, capacity: Capacity, root: int) -> list[Tree]:
    """The trees: as many as the least cut has units."""
    left = {a: dict(to) for a, to in capacity.items()}
    trees = []
    for k in range(least_cut(size, capacity, root)[0] if size > 1 else 0, 0, -1):
        inside, tree = [root], []
        while len(inside) < size:
            u, v = _arc(left, inside, root, k)
            left[u][v] -= 1
            tree.append((u, v))
            inside.append(v)
        trees.append(tree)
    return trees


def _arc(left: dict[int, dict[int, int]], inside: list[int], root: int, k: int) -> tuple[int, int]:
    """The next arc of a tree, from the node that is inside longest: so trees stay shallow."""
    for u in inside:
        for v, units in left.get(u, {}).items():
            if units > 0 and v not in inside:
                left[u][v] -= 1
                spoils = flow(left, {root, u}, v, k - 1) < k - 1
                left[u][v] += 1
                if not spoils:
                    return u, v
    raise AssertionError("there is always such an arc: Lovász")
