"""All to one rank and back, as a parameter server does: to show why not.

The root's port carries 2 (size - 1) S bytes of a buffer of S bytes, where the ring's ports carry less than 2 S (M. Li
et al., "Scaling distributed machine learning with the parameter server", OSDI 2014, cut the buffer over many servers
for that reason). Time it beside another plan: `hvdlite-plan time central ring --ranks 8`.
"""

from __future__ import annotations

from ..draft import Draft
from ..registry import algorithm


@algorithm("central")
def central(draft: Draft) -> None:
    """all to the root, which sums, and back: to show why not"""
    draft.chunks = 1
    others = [r for r in range(draft.size) if r != draft.root]
    for r in others:
        draft.move(r, draft.root, 0)
        draft.next()
    for r in others:
        draft.move(draft.root, r, 0, how="copy")
        draft.next()
