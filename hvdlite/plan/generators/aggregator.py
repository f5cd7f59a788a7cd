"""All to one that adds, block after block, and each sum back to all: what a switch that adds would do.

A. Sapio et al., "Scaling distributed machine learning with in-network aggregation", NSDI 2021 (SwitchML); C. Lao et
al., "ATP: in-network aggregation for multi-tenant learning", NSDI 2021. The root plays the switch. It gives a part as
each rank does: zeros in practice. Sums of early blocks go out while later blocks still come in. So the port of each
other rank carries S bytes out and S in at the same time, where the ring's carries 2 (size - 1) / size S each way.

Two networks answer two questions. `Links.switch`: the root has a port for each rank, as a switch has. Uniform links:
the root is a process on an ordinary host. Its one port then carries (size - 1) S each way: from three ranks on, large
tensors are slower than on the ring.
"""

from __future__ import annotations

from ..draft import Draft
from ..registry import algorithm
from ..table import PlanError


@algorithm("aggregator")
def aggregator(draft: Draft, pieces: int = 16) -> None:
    """each block to the root, which adds, and back beside the next blocks; pieces=: the number of blocks"""
    if pieces < 1:
        raise PlanError(f"plan {draft.name!r}: {pieces} pieces: the number must be at least 1 [HVD003]")
    draft.chunks = pieces
    others = [r for r in range(draft.size) if r != draft.root]
    for step in range(pieces + 2 if others else 0):
        coming, whole, back = step, step - 1, step - 2  # the blocks that are sent, added and returned in this step
        for r in others:
            if coming < pieces:  # stage, not reduce: parts come at the same time, no rank waits for another
                draft.move(r, draft.root, coming, how="stage")
            if back >= 0:
                draft.move(draft.root, r, back, how="copy")
        if 0 <= whole < pieces:
            draft.fold(draft.root, whole)
        draft.next()
