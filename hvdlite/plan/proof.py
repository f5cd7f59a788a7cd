"""Proof of a table: three values for every chunk of every rank, followed through all moves of a step at once.

* A number modulo the prime 2^61 - 1, random for each contribution (and for what a rank had where it gives nothing).
  Moves are linear, so a chunk is right when its number is the sum of all: Schwartz and Zippel's argument, as in PET
  (H. Wang et al., OSDI 2021). A wrong chunk passes with a probability of about 2^-61.
* How many contributions it holds: modulo that prime, 61 doublings change nothing.
* A hash of the expression that made it, the same for a + b and b + a, which are the same bits, but not associative. It
  tells whether all ranks hold the same bits (without that, replicas drift: refused) and whether all chunks are added
  in the same order (then a result does not depend on where a tensor lies: `ordered`).

What fails is gone through again for the one chunk that is wrong, with counts: step, rank, whose part lacks. There is no
deadlock: what a move waits for stands in an earlier step.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .table import CELLS_MAX, COPY, FOLD, REDUCE, STAGE, SUMS, Moves, PlanError, Table, bounds

P = (1 << 61) - 1
MOVED_MAX = CELLS_MAX  # chunks that all moves carry together: bounds time and memory
U = np.uint64
Array = NDArray[Any]


@dataclass(frozen=True)
class Proof:
    """What ``prove`` has found.

    Args:
        ordered (bool): all chunks are added in the same order.
        in_rank_order (bool): that order is ((0 + 1) + 2) + ..., as in the core's ordered algorithms.
        steps (int): the number of steps.
        moves (int): the number of moves.

    Example:
        >>> from hvdlite import plan
        >>> plan.prove(plan.make("ring", size=4)).ordered
        False
    """

    ordered: bool  # all chunks are added in the same order
    in_rank_order: bool  # and that is ((0 + 1) + 2) + ..., as the core's ordered algorithms have it
    steps: int
    moves: int


def _mix(x: Array) -> Array:
    x = (x ^ (x >> U(31))) * U(0x9E3779B97F4A7C15)
    x = (x ^ (x >> U(29))) * U(0xBF58476D1CE4E5B9)
    return x ^ (x >> U(32))


def _both(a: Array, b: Array) -> Array:
    """The hash of the sum of two expressions."""
    return _mix(a + b) + _mix(a * b + U(0x632BE59BD9B4E019)) * U(3)


def places(table: Table) -> tuple[Array, Array]:
    """Of each (rank, chunk): does the rank give it, is it promised to the rank?"""
    n, c, kind = table.size, table.chunks, table.kind
    rank, chunk, ever = np.arange(n)[:, None], np.arange(c)[None, :], np.ones((n, c), bool)
    own, at_root = rank == chunk * n // c, np.broadcast_to(rank == table.root, (n, c))
    if kind in SUMS:
        return ever, {"allreduce": ever, "reducescatter": own, "reduce": at_root}[kind]
    if kind == "alltoall":  # cell (from, to)
        return own, rank == chunk * n * n // c % n
    return (own if kind == "allgather" else at_root), ever


class _State:
    """Number, expression and count of each (rank, chunk), in one line; and what is kept until a fold."""

    def __init__(self, table: Table, gives: Array, seed: int) -> None:
        random, shape = np.random.default_rng(seed), gives.shape
        if table.kind in SUMS:  # a chunk's place is never left: all chunks of a rank may begin alike
            shape = (table.size, 1)
        number, made = (np.broadcast_to(random.integers(1, P, shape, dtype=U), gives.shape) for _ in range(2))
        self.want: Array = number[np.argmax(gives, axis=0), np.arange(table.chunks)]
        if table.kind in SUMS:
            self.want[:] = sum(map(int, number[:, 0])) % P
        self.values: list[Array] = [number.flatten(), made.flatten(), np.ones(gives.size, np.float32)]
        staged = int(table.moves["n"][table.moves["how"] == STAGE].sum(dtype=np.int64))
        self.kept: list[Array] = [np.empty(staged, np.int64), *(np.empty(staged, each.dtype) for each in self.values)]
        self.before = np.empty(staged, np.int64)  # of a kept part that of the same place before it; -1: there is none
        self.last = np.full(gives.size if staged else 0, -1)  # the last part that is kept of a place
        self.filled = 0

    def add(self, at: Array, more: list[Array]) -> None:
        number, made, count = self.values
        number[at], made[at], count[at] = _add([each[at] for each in self.values], more)

    def keep(self, at: Array, ranks: Array, values: list[Array]) -> None:
        """Keeps values until a fold: what is kept of a place is a chain, so a fold reads no other place."""
        order, new = np.argsort(at, kind="stable"), np.arange(self.filled, self.filled + len(at))
        at, self.filled = at[order], self.filled + len(at)
        for mine, more in zip(self.kept, (ranks, *values)):
            mine[new] = more[order]
        self.before[new] = np.where(np.append(True, at[1:] != at[:-1]), self.last[at], new - 1)
        end = np.append(at[1:] != at[:-1], True)
        self.last[at[end]] = new[end]

    def fold(self, at: Array, ranks: int) -> tuple[int, int] | None:
        """Combines in rank order. (place, rank) of what is kept twice."""
        chunks = self.values[0].size // ranks
        own = [at // chunks, *(each[at] for each in self.values)]
        all_at, found = [at], [np.full(0, -1)]
        where, links = at, self.last[at] if self.filled else found[0]
        while len(links) and len(all_at) <= ranks + 1:  # of so many parts two are of one rank
            where, links = where[links >= 0], links[links >= 0]
            all_at.append(where)
            found.append(links)
            links = self.before[links]
        if self.filled:
            self.last[at] = -1
        index, ids = np.concatenate(all_at), np.concatenate(found)
        order = np.lexsort((np.concatenate([own[0], self.kept[0][ids]]), index))
        sources, *values = (np.concatenate([mine, kept[ids]])[order] for mine, kept in zip(own, self.kept))
        index = index[order]
        twice = np.flatnonzero((index[1:] == index[:-1]) & (sources[1:] == sources[:-1]))
        if len(twice):
            return int(index[twice[0]]), int(sources[twice[0]])
        spots, first, parts = np.unique(index, return_index=True, return_counts=True)
        for mine, value in zip(self.values, values):
            mine[spots] = value[first]
        for k in range(1, int(parts.max())):
            more = parts > k
            self.add(spots[more], [value[first[more] + k] for value in values])
        return None


def _add(a: list[Array], b: list[Array]) -> tuple[Array, Array, Array]:
    return (a[0] + b[0]) % U(P), _both(a[1], b[1]), a[2] + b[2]


def prove(table: Table, seed: int = 0) -> Proof:
    """Prove that a table does on every rank what its kind promises.

    It follows random numbers modulo 2^61 - 1 through all moves, as PET does (Wang et al., 2021). A wrong table passes
    with a probability of about 2^-61. It also proves that all ranks get the same bits.

    Args:
        table (Table): the plan.
        seed (int): the seed of the random numbers. Default: 0.

    Returns:
        Proof: what is known about the order of additions.

    Raises:
        PlanError: the table is wrong. The text names the step, the rank and the contribution that is missing.

    Example:
        >>> from hvdlite import plan
        >>> plan.prove(plan.make("ring", size=4)).steps
        6
    """
    bounds(table)
    moves, c, sums = table.moves, table.chunks, table.kind in SUMS
    if moves["n"].sum(dtype=np.int64) > MOVED_MAX:
        raise PlanError(f"plan {table.name!r}: its moves carry more than {MOVED_MAX} chunks in total [HVD002]")
    gives, promised = places(table)
    state = _State(table, gives, seed)
    begun = state.values[1][::c].copy()
    steps, edges = np.unique(moves["step"], return_index=True)
    with np.errstate(over="ignore"):
        for step, rows in zip(steps.tolist(), np.split(moves, edges[1:])):
            _step(table, state, step, rows)
        chain = begun[:1]
        for other in range(1, len(begun)):
            chain = _both(chain, begun[other : other + 1])
    number, made, count = (each.reshape(gives.shape) for each in state.values)
    wrong = promised & ((number != state.want) | (count != (table.size if sums else 1)))
    if wrong.any():
        rank, chunk = divmod(int(np.argmax(wrong)), c)
        raise PlanError(f"plan {table.name!r}: {_why(table, gives[:, chunk], rank, chunk)} [HVD001]")
    first = np.argmax(promised, axis=0)
    like = made[first, np.arange(c)]
    drift = promised & (made != like)
    if drift.any():
        rank, chunk = divmod(int(np.argmax(drift)), c)
        problem = f"rank {rank} adds chunk {chunk} in another order than rank {first[chunk]}: their bits would differ"
        raise PlanError(f"plan {table.name!r}: {problem} [HVD001]")
    ordered = sums and bool((like == like[0]).all())
    return Proof(ordered, ordered and bool(like[0] == chain[0]), len(steps), len(moves))


def _step(table: Table, state: _State, step: int, rows: Moves) -> None:
    """The moves of one step, in moves of one chunk each."""
    where, c = np.repeat(np.arange(len(rows)), rows["n"]), table.chunks
    at = rows["at"][where] + np.arange(len(where)) - (np.cumsum(rows["n"], dtype=np.int64) - rows["n"])[where]
    how, src = rows["how"][where], rows["src"][where].astype(np.int64)
    here, there = src * c + at, rows["dst"][where].astype(np.int64) * c + at
    fold, keep = how == FOLD, how == STAGE
    writes = np.sort(there[~keep])

    def refuse(spot: int, what: str) -> None:
        rank, chunk = divmod(int(spot), c)
        raise PlanError(f"plan {table.name!r}: step {step}: {what.format(rank=rank, chunk=chunk)} [HVD001]")

    twice = writes[1:] == writes[:-1]
    if twice.any():
        refuse(writes[1:][twice][0], "two moves write chunk {chunk} of rank {rank}, in no defined order")
    if not fold.all() and (race := ~fold & np.isin(here, writes)).any():
        refuse(
            here[race][0],
            "rank {rank} sends chunk {chunk} and writes it, too, maybe before it is sent: stage it, then fold",
        )
    if fold.any() and keep.any() and (race := keep & np.isin(there, there[fold])).any():
        refuse(there[race][0], "rank {rank} folds chunk {chunk} while a part of it still comes")
    values = [each[here] for each in state.values]
    for mine, value in zip(state.values, values):
        mine[there[how == COPY]] = value[how == COPY]
    add = how == REDUCE
    state.add(there[add], [value[add] for value in values])
    if keep.any():
        state.keep(there[keep], src[keep], [value[keep] for value in values])
    again = state.fold(there[fold], table.size) if fold.any() else None
    if again:
        refuse(again[0], f"rank {{rank}} folds chunk {{chunk}} and has kept that of rank {again[1]} twice")


def _why(table: Table, gives: Array, rank: int, chunk: int) -> str:
    """The chunk again, with contributions counted up to 2; the last column is what stood where nothing is given."""
    n, moves, first = table.size, table.moves, ""
    has = np.zeros((n, n + 1), np.uint8)
    has[np.arange(n), np.where(gives, np.arange(n), n)] = 1
    kept = np.zeros_like(has)
    moves = moves[(moves["at"] <= chunk) & (chunk < moves["at"] + moves["n"])]
    edges = np.unique(moves["step"], return_index=True)[1]
    for rows in np.split(moves, edges[1:]) if len(moves) else ():
        read = has[rows["src"]]
        for (step, src, dst, _, _, how), value in zip(rows.tolist(), read):
            if how == COPY:
                has[dst] = value
            elif how == STAGE:
                kept[dst] = np.minimum(kept[dst] + value, 2)
            else:
                value = kept[dst].copy() if how == FOLD else value
                both = np.flatnonzero(has[dst] & (value > 0))
                if len(both) and both[0] < n and how == REDUCE and not first:
                    first = f"; in step {step} rank {dst} adds from rank {src} what it has: that of rank {both[0]}"
                has[dst] = np.minimum(has[dst] + value, 2)
                kept[dst] *= how != FOLD
    found, problems = has[rank], []
    for template, ranks in (
        ("lacks what rank {} gave", np.flatnonzero(gives & (found[:n] == 0))),
        ("counts that of rank {} more than once", np.flatnonzero(found[:n] > 1)),
    ):
        if len(ranks):
            problems.append(template.format(", ".join(map(str, ranks[:8]))))
    if found[n]:
        problems.append("holds what no rank gave")
    return f"in the end chunk {chunk} of rank {rank} {' and '.join(problems)}{first}"
