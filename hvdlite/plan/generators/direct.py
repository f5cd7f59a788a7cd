"""All give all their part at once: each rank sums one chunk, and adds the parts in the order of ranks.

R. Thakur, R. Rabenseifner, W. Gropp, IJHPCA 19(1), 2005, call the first half pairwise exchange. Parts are kept apart
until all are there, so every chunk is added as ((0 + 1) + 2) + ...: the same bits wherever a tensor lies. It moves as
many bytes as the ring. No move waits for another within a half, so latency counts twice in all.
"""

from __future__ import annotations

from ..draft import Draft
from ..registry import algorithm


@algorithm("direct", kinds=("allreduce", "reducescatter"))
def direct(draft: Draft) -> None:
    """each part straight to the rank that sums it, in rank order, and back to all"""
    n = draft.size
    for i in range(1, n):
        for r in range(n):
            draft.move(r, (r + i) % n, (r + i) % n, how="stage")
        draft.next()
    for r in range(n):
        draft.fold(r, r)
    draft.next()
    for i in range(1, n if draft.kind == "allreduce" else 1):
        for r in range(n):
            draft.move(r, (r + i) % n, r, how="copy")
        draft.next()
