"""Draft of a table: a generator adds moves to it, and it becomes the table.

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
    """The moves of a plan while a generator adds them. ``make`` creates it and passes it to the generator.

    Args:
        name (str): the name of the plan.
        kind (str): the kind of collective, as in ``Table``.
        size (int): the number of ranks.
        root (int): the root. Default: 0.
        hosts (list of lists of int, optional): the ranks of each host.
        links (Links, optional): what joins the ranks.
        chunks (int): the number of pieces of a buffer. 0 (default): one per rank; for alltoall one per pair of ranks.
        step (int): the step of the moves to come. Default: 0.
        moves (list): the moves so far.

    Example:
        >>> from hvdlite import plan
        >>> draft = plan.Draft("pair", "allreduce", size=2, chunks=1)
        >>> draft.move(0, 1, at=0, how="reduce")
        >>> draft.next()
        >>> draft.move(1, 0, at=0, how="copy")
        >>> plan.prove(draft.table()).moves
        2
    """

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
        """Add a move: ``src`` sends chunks [at, at + n) to ``dst``.

        Args:
            src (int): the sending rank.
            dst (int): the receiving rank.
            at (int): the first chunk.
            n (int): the number of chunks. Default: 1.
            how (str): what ``dst`` does: ``"reduce"`` (default) adds, ``"copy"`` overwrites, ``"stage"`` keeps for
                ``fold``.
            step (int, optional): another step than the draft's.

        Raises:
            PlanError: the move is not valid, or there are too many.
        """
        if how not in HOW[:FOLD]:
            raise PlanError(f"plan {self.name!r}: a move cannot {how!r}: it can copy, reduce or stage [HVD002]")
        self._add(step, src, dst, at, n, HOW.index(how))

    def fold(self, rank: int, at: int, n: int = 1, step: int | None = None) -> None:
        """Add a move in which a rank adds its own chunks and all staged ones, in the order of ranks.

        Args:
            rank (int): the rank.
            at (int): the first chunk.
            n (int): the number of chunks. Default: 1.
            step (int, optional): another step than the draft's.

        Raises:
            PlanError: the move is not valid, or there are too many.
        """
        self._add(step, rank, rank, at, n, FOLD)

    def next(self) -> None:
        """Begin the next step.

        Raises:
            PlanError: there are too many steps.
        """
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
            shown = plain(row, 80)
            raise PlanError(f"plan {self.name!r}: the move {shown} must consist of whole numbers [HVD003]") from None

    def table(self) -> Table:
        """Return the moves as a table, in the order of steps. The table is not proved.

        Returns:
            Table: the plan.

        Raises:
            PlanError: a move is out of bounds.
        """
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
