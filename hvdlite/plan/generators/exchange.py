"""The straight alltoall: each rank gives each other rank what is for it, another partner in each step.

J. Bruck et al., "Efficient algorithms for all-to-all communications in multiport message-passing systems", IEEE TPDS
8(11), 1997: this is the end of their range that moves the fewest bytes, in size - 1 steps. In each step a rank sends to
one rank and receives from one.
"""

from __future__ import annotations

from ..draft import Draft
from ..registry import algorithm


@algorithm("exchange", kinds=("alltoall",))
def exchange(draft: Draft) -> None:
    """cell (from, to) goes straight to its rank, in size - 1 steps"""
    n = draft.size
    for i in range(1, n):
        for r in range(n):
            to = (r + i) % n
            draft.move(r, to, r * n + to, how="copy")
        draft.next()
