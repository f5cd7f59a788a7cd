"""What does a generator write into? A draft: moves one after the other, then a table.

A generator is a function of a draft (registry.py). It reads `kind`, `size`, `root`, `hosts` and `links`, sets `chunks`
if the buffer is not cut in as many pieces as there are ranks, and calls `move`, `fold` and `next`. The draft ends a
generator that never would: there is a most of moves and of steps.
"""

from __future__ import annotations

import operator
from dataclasses import dataclass, field

import numpy as np

from .links import Links
from .table import FOLD, HOW, MOVES_MAX, STEPS_MAX, PlanError, Table, bounds, moves_of, plain


@dataclass
class Draft:
    """hosts: the ranks of each host, or None. links: what joins the ranks, or None."""

    name: str
    kind: str
    size: int
    root: int = 0
    hosts: list[list[int]] | None = None
    links: Links | None = None
    chunks: int = 0
    step: int = 0  # of the moves to come
    moves: list[tuple[int, int, int, int, int, int]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.chunks = self.chunks or (self.size**2 if self.kind == "alltoall" else self.size)

    def move(self, src: int, dst: int, at: int, n: int = 1, how: str = "reduce", step: int | None = None) -> None:
        """src sends chunks [at, at + n) to dst, which does `how` with them: "copy", "reduce" or "stage". step: another
        than the draft's. Raises PlanError."""
        if how not in HOW[:FOLD]:
            raise PlanError(f"plan {self.name!r}: a move cannot {how!r}: it can copy, reduce or stage [HVD002]")
        self._add(step, src, dst, at, n, HOW.index(how))

    def fold(self, rank: int, at: int, n: int = 1, step: int | None = None) -> None:
        """rank adds its own chunks [at, at + n) and all that it has kept of them, in the order of ranks."""
        self._add(step, rank, rank, at, n, FOLD)

    def next(self) -> None:
        """Moves from here on belong to the next step. Raises PlanError."""
        if self.step >= MOVES_MAX:  # not STEPS_MAX: steps without moves do not count in the end
            raise PlanError(f"plan {self.name!r}: its generator makes more than {MOVES_MAX} steps [HVD003]")
        self.step += 1

    def _add(self, step: int | None, *rest: int) -> None:
        if len(self.moves) >= MOVES_MAX:
            raise PlanError(f"plan {self.name!r}: its generator makes more than {MOVES_MAX} moves [HVD003]")
        row = (self.step if step is None else step, *rest)
        try:
            self.moves.append(tuple(map(operator.index, row)))  # type: ignore[arg-type]  # six of them
        except TypeError:
            told = plain(row, 80)
            raise PlanError(f"plan {self.name!r}: the move {told} must consist of whole numbers [HVD003]") from None

    def table(self) -> Table:
        """The moves as a table, in the order of steps, not proved. Raises PlanError."""
        try:
            moves, chunks = moves_of(self.moves), operator.index(self.chunks)
        except (ValueError, OverflowError, TypeError) as error:
            raise PlanError(f"plan {self.name!r}: {error} [HVD002]") from None
        moves = moves[np.argsort(moves["step"], kind="stable")]
        if len(moves) and moves["step"][-1] >= STEPS_MAX and moves["step"][0] >= 0:  # most of them empty, perhaps
            moves["step"] = np.unique(moves["step"], return_inverse=True)[1].reshape(-1)
        made = Table(self.name, self.kind, self.size, chunks, moves, self.root)
        bounds(made)
        return made
