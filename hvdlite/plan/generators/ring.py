"""The ring: each rank hands on to the next one chunk a step. Moves the fewest bytes, in the most steps.

P. Patarasuk, X. Yuan, "Bandwidth optimal all-reduce algorithms for clusters of workstations", JPDC 69(2), 2009. In
size - 1 steps each chunk goes round and is summed, until chunk r is whole on rank r; in as many it goes round again.
Either half alone is the reducescatter and the allgather.
"""

from __future__ import annotations

from ..draft import Draft
from ..registry import algorithm


@algorithm("ring", kinds=("allreduce", "reducescatter", "allgather"))
def ring(draft: Draft, pieces: int = 1) -> None:
    """around the ring and around again, a chunk a step; pieces=: each chunk in so many, one behind the other"""
    n = draft.size
    draft.chunks = n * pieces
    phases = {"allreduce": ("reduce", "copy"), "reducescatter": ("reduce",), "allgather": ("copy",)}[draft.kind]
    for how in phases:
        for i in range(n - 1):
            for piece in range(pieces):
                for r in range(n):
                    chunk = (r - i - (how == "reduce")) % n
                    draft.move(r, (r + 1) % n, chunk * pieces + piece, how=how)
                draft.next()
