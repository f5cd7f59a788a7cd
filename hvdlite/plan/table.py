"""Table of moves: a collective as data. In this step, this rank sends these chunks to that rank.

    (step, src, dst, at, n, how)    src sends chunks [at, at + n) of the buffer to dst, which
        copy    overwrites its own          stage   keeps them apart
        reduce  adds them to its own        fold    (src is dst) adds its own and all that it kept, by rank

A move has both ends, so no send lacks its receive, and ranges cannot differ. There are no loops and no conditions. All
moves of a step read what was there before the step; but none writes what another one sends, as that could be in flight
still: ranks that add into each other stage what comes, and fold it in the next step. A buffer of any size is cut into
`chunks` pieces, the first of which are one element longer, as the core cuts (csrc/algo). Of an alltoall the chunks are
the cells (from, to).

A table says nothing of whether it sums: `proof.py` does.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

COPY, REDUCE, STAGE, FOLD = range(4)
HOW = ("copy", "reduce", "stage", "fold")
KINDS = ("allreduce", "reducescatter", "allgather", "broadcast", "reduce", "alltoall")
SUMS = ("allreduce", "reducescatter", "reduce")
FIELDS = ("step", "src", "dst", "at", "n", "how")
MOVE = np.dtype([(name, "i4") for name in FIELDS])
SIZE_MAX, MOVES_MAX, CHUNKS_MAX, CELLS_MAX, STEPS_MAX = 1024, 1 << 20, 1 << 22, 1 << 24, 1 << 16
FORMAT = "hvdlite-plan-1"
NAME_MAX = 64

Moves = NDArray[Any]


class PlanError(ValueError):
    """A plan that is wrong. The text names its file or name, and step, rank and chunk where they are known."""


def plain(text: object, most: int = 300) -> str:
    """A text for one line of a terminal: what the terminal would obey is a "?", and of a long one the middle is cut."""
    words = " ".join(str(text)[: 100 * most].split())
    if len(words) > most:
        words = f"{words[: most * 2 // 3]} ... {words[-(most // 3) :]}"
    return "".join(each if each.isprintable() else "?" for each in words)


def named(name: object, most: int) -> bool:
    """Whether it may be a name: of at most so many letters, and none that a terminal or a picture would obey."""
    return isinstance(name, str) and len(name) <= most and name.isprintable()


class Row(NamedTuple):
    """One step of one rank, as the core's interpreter has it (csrc/algo/algo.h); peers are -1 where there is none."""

    to: int
    frm: int
    send_at: int
    send_n: int
    recv_at: int
    recv_n: int
    how: int  # what is done with what is received
    fold: bool


@dataclass(frozen=True)
class Table:
    """A collective as a table of moves. ``make`` and ``Draft.table`` make it.

    Args:
        name (str): the name of the plan.
        kind (str): ``allreduce``, ``reducescatter``, ``allgather``, ``broadcast``, ``reduce`` or ``alltoall``.
        size (int): the number of ranks.
        chunks (int): the number of pieces into which a buffer is cut.
        moves (array): rows (step, src, dst, at, n, how), in the order of steps.
        root (int): the root, for kinds that have one. Default: 0.

    Example:
        >>> from hvdlite import plan
        >>> table = plan.make("ring", size=4)
        >>> table.steps, table.chunks
        (6, 4)
    """

    name: str
    kind: str
    size: int
    chunks: int
    moves: Moves
    root: int = 0

    @property
    def steps(self) -> int:
        return int(self.moves["step"].max(initial=-1)) + 1

    def cut(self, count: int) -> NDArray[np.int64]:
        """Return where the chunks of a buffer begin, and its end.

        Args:
            count (int): the number of elements in the buffer.

        Returns:
            array: int64, chunks + 1 numbers.
        """
        each, longer = divmod(count, self.chunks)
        at = np.arange(self.chunks + 1, dtype=np.int64)
        return each * at + np.minimum(at, longer)

    def digest(self) -> str:
        """Return the SHA-256 of everything but the name. Ranks with the same digest do the same.

        Returns:
            str: hexadecimal digits.
        """
        about = f"{self.kind} {self.size} {self.chunks} {self.root} ".encode()
        return hashlib.sha256(about + np.ascontiguousarray(self.moves).astype(MOVE).tobytes()).hexdigest()

    def to_json(self) -> str:
        """Return the table as JSON, of the format ``hvdlite-plan-1``.

        Returns:
            str: one line.
        """
        content = {"format": FORMAT, "name": self.name, "kind": self.kind, "size": self.size, "chunks": self.chunks}
        return json.dumps({**content, "root": self.root, "moves": self.moves.tolist()}, separators=(",", ":"))

    def rows(self, rank: int) -> list[Row]:
        """Return the steps of one rank with at most one send and one receive each, aligned over all ranks.

        Args:
            rank (int): the rank.

        Returns:
            list[Row]: as the core's interpreter runs them.
        """
        found: dict[int, dict[str, Any]] = {}
        base = 0
        edges = np.searchsorted(self.moves["step"], np.arange(self.steps + 1))
        for step in range(self.steps):
            out: dict[int, int] = {}
            into: dict[int, int] = {}
            most = -1
            folds = []
            for _, src, dst, at, n, how in self.moves[edges[step] : edges[step + 1]].tolist():
                if how == FOLD:
                    folds.append(src)
                    continue
                slot = max(out.get(src, -1), into.get(dst, -1)) + 1
                out[src] = into[dst] = slot
                most = max(most, slot)
                if src == rank:
                    found.setdefault(base + slot, {}).update(to=dst, send_at=at, send_n=n)
                if dst == rank:
                    found.setdefault(base + slot, {}).update(frm=src, recv_at=at, recv_n=n, how=how)
            most = max(most, 0) if folds else most
            if rank in folds:
                found.setdefault(base + most, {})["fold"] = True
            base += most + 1
        empty = Row(-1, -1, 0, 0, 0, 0, COPY, False)
        return [empty._replace(**found.get(index, {})) for index in range(base)]


def bounds(table: Table) -> None:
    """Raises PlanError for what is outside, before memory is taken for it."""
    m, name = table.moves, table.name
    if not named(name, NAME_MAX):
        raise PlanError(f"plan {name!r:.80}: a name has at most {NAME_MAX} printable characters [HVD002]")
    if table.kind not in KINDS:
        raise PlanError(f"plan {name!r}: kind {str(table.kind)[:40]!r} is not one of {', '.join(KINDS)} [HVD002]")
    if not 1 <= table.size <= SIZE_MAX:
        raise PlanError(f"plan {name!r}: {table.size} ranks; a plan is for 1 to {SIZE_MAX} [HVD002]")
    if not 1 <= table.chunks <= CHUNKS_MAX or table.size * table.chunks > CELLS_MAX:
        raise PlanError(f"plan {name!r}: {table.chunks} chunks on {table.size} ranks are out of range [HVD002]")
    if not 0 <= table.root < table.size:
        raise PlanError(f"plan {name!r}: root {table.root} is not one of {table.size} ranks [HVD002]")
    if len(m) > MOVES_MAX:
        raise PlanError(f"plan {name!r}: more than {MOVES_MAX} moves [HVD002]")
    grid = {"reducescatter": table.size, "allgather": table.size, "alltoall": table.size**2}.get(table.kind, 1)
    if table.chunks % grid:
        raise PlanError(
            f"plan {name!r}: the number of chunks of this {table.kind} must be a multiple of {grid} [HVD002]"
        )
    bad = (m["src"] < 0) | (m["src"] >= table.size) | (m["dst"] < 0) | (m["dst"] >= table.size) | (m["at"] < 0)
    bad |= (m["n"] < 1) | (m["at"].astype(np.int64) + m["n"] > table.chunks) | (m["how"] < 0) | (m["how"] > FOLD)
    bad |= (m["step"] < 0) | ((m["src"] == m["dst"]) != (m["how"] == FOLD))
    if bad.any():
        first = int(np.argmax(bad))
        shown = ", ".join(f"{field} {value}" for field, value in zip(FIELDS, m[first].tolist()))
        raise PlanError(
            f"plan {name!r}: move {first} ({shown}) has a rank, a chunk or a kind outside {table.size} ranks and "
            f"{table.chunks} chunks [HVD002]"
        )
    back = np.diff(m["step"]) < 0
    if back.any():
        raise PlanError(f"plan {name!r}: move {int(np.argmax(back)) + 1} goes back to an earlier step [HVD002]")
    if len(m) and int(m["step"][-1]) >= STEPS_MAX:
        raise PlanError(f"plan {name!r}: step {int(m['step'][-1])} exceeds the maximum of {STEPS_MAX} [HVD002]")


def from_json(text: str, origin: str = "plan") -> Table:
    """The table of a file; origin: its name, for errors. Not proved. Raises PlanError."""
    try:
        content = json.loads(text)
        if not isinstance(content, dict) or content.get("format") != FORMAT:
            found = content.get("format") if isinstance(content, dict) else type(content).__name__
            raise ValueError(f"its format is {str(found)[:40]!r}, this version reads {FORMAT!r}")
        rows = content["moves"]
        if not isinstance(rows, list) or len(rows) > MOVES_MAX:
            raise ValueError(f"moves must be a list of at most {MOVES_MAX}")
        numbers = [content["size"], content["chunks"], content["root"]]
        if not all(type(number) is int for number in numbers):
            raise ValueError("size, chunks and root must be whole numbers")
        kind, name = content["kind"], content["name"]
        if not isinstance(kind, str) or not isinstance(name, str):
            raise ValueError("name and kind must be texts")
        table = Table(name[:NAME_MAX], kind, numbers[0], numbers[1], moves_of(rows), numbers[2])
    except (ValueError, KeyError, TypeError, OverflowError, RecursionError) as error:
        problem = f"{error} is missing" if isinstance(error, KeyError) else str(error)
        raise PlanError(f"{origin}: not a plan: {problem[:200]} [HVD002]") from None
    bounds(table)
    return table


def moves_of(rows: Iterable[Any]) -> Moves:
    """An array of MOVE. Raises ValueError for a row that is not six whole numbers."""
    made = []
    for number, row in enumerate(rows):
        if not isinstance(row, (list, tuple)) or len(row) != len(FIELDS) or any(type(each) is not int for each in row):
            raise ValueError(f"move {number} is not six whole numbers")
        made.append(tuple(row))
    return np.array(made, MOVE)
