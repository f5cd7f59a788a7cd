"""Halving, then doubling: pairs of ranks exchange half of what they still have, until each holds one chunk.

R. Rabenseifner, "Optimization of collective reduction operations", ICCS 2004; R. Thakur, R. Rabenseifner, W. Gropp,
"Optimization of collective communication operations in MPICH", IJHPCA 19(1), 2005. It moves as many bytes as the ring
in 2 log2(size) steps, between ranks that are far apart.
"""

from __future__ import annotations

from ..draft import Draft
from ..registry import algorithm
from ..table import PlanError


@algorithm("halving")
def halving(draft: Draft) -> None:
    """halves to and fro between pairs; powers of two"""
    n = draft.size
    if n & (n - 1):
        raise PlanError(f"plan {draft.name!r}: {n} ranks are not a power of two [HVD003]")
    first, length = [0] * n, n  # of what each rank still sums
    bits = [1 << b for b in reversed(range(n.bit_length() - 1))]
    for bit in bits:
        length //= 2
        for r in range(n):
            keeps = first[r] + (length if r & bit else 0)
            draft.move(r, r ^ bit, 2 * first[r] + length - keeps, length)
            first[r] = keeps
        draft.next()
    for bit in reversed(bits):
        for r in range(n):
            draft.move(r, r ^ bit, first[r], length, "copy")
        first = [min(first[r], first[r ^ bit]) for r in range(n)]
        length *= 2
        draft.next()
