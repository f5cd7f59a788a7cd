"""Run a table in a real job over public calls: `plan.run(table, array)` on all ranks.

Each step is one alltoall with splits: what a rank sends to whom in this step, put together. So a step costs one
collective, however many moves it has, and is slow against the core's own algorithms: what it shows is that the table
does what the proof says, over real connections. Before the first step the ranks compare what they are about to run;
they do so in each run, as one that remembered would wait forever for one that has taken another table.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from .. import numpy as hvd
from .table import COPY, FOLD, REDUCE, Moves, PlanError, Table

Array = NDArray[Any]


def run(table: Table, array: Array) -> Array:
    """Run a plan on an array in a real job, in place, and return the array. All ranks must call it.

    The ranks first compare what they are about to run. Each step is one alltoall, so it is slow. It shows that a table
    does what its proof says.

    Args:
        table (Table): the plan, for ``hvd.size()`` ranks.
        array (numpy.ndarray): the same length and dtype on all ranks. For reducescatter and allgather the whole buffer;
            for alltoall its cells (from, to).

    Returns:
        numpy.ndarray: ``array``.

    Raises:
        HvdPeerLostError: a rank has left or died.
        PlanError: on all ranks, if one of them cannot take part.

    Example:
        >>> from hvdlite import plan
        >>> plan.run(plan.make("ring", size=2), np.array([1.0, 2.0]) * (hvd.rank() + 1)).tolist()
        [3.0, 6.0]
    """
    _agree(table, array)
    flat = array.reshape(-1)
    cut, me, label = table.cut(len(flat)), hvd.rank(), f"plan.{table.name}.{table.digest()[:8]}"
    kept: dict[int, dict[int, Array]] = {}  # by chunk: what is staged, by rank
    for rows in np.split(table.moves, np.flatnonzero(np.diff(table.moves["step"])) + 1):
        came = _exchange(rows, flat, cut, me, label)
        for (_, src, _, at, n, how), values in came:
            part = flat[cut[at] : cut[at + n]]
            if how == COPY:
                part[...] = values
            elif how == REDUCE:
                part += values
            else:
                for chunk in range(at, at + n):
                    kept.setdefault(chunk, {})[src] = values[cut[chunk] - cut[at] : cut[chunk + 1] - cut[at]]
        for _, _, _, at, n, _ in rows[(rows["how"] == FOLD) & (rows["src"] == me)].tolist():
            for chunk in range(at, at + n):
                mine = flat[cut[chunk] : cut[chunk + 1]]
                first, *rest = (part for _, part in sorted({**kept.pop(chunk, {}), me: mine.copy()}.items()))
                mine[...] = first
                for part in rest:
                    mine += part
    return array


def _exchange(rows: Moves, flat: Array, cut: Array, me: int, label: str) -> list[tuple[Any, Array]]:
    """Sends this rank's part of a step; what came, by the moves that brought it."""
    rows = rows[rows["how"] != FOLD]
    out = sorted(rows[rows["src"] == me].tolist(), key=lambda row: row[2])  # sorts are stable: both ends have one order
    into = sorted(rows[rows["dst"] == me].tolist(), key=lambda row: row[1])
    splits = [0] * hvd.size()
    for _, _, dst, at, n, _ in out:
        splits[dst] += int(cut[at + n] - cut[at])
    blocks = [flat[cut[at] : cut[at + n]] for _, _, _, at, n, _ in out]
    got, _ = hvd.alltoall(np.concatenate(blocks) if blocks else flat[:0], splits=splits, name=label)
    ends = np.cumsum([0] + [int(cut[at + n] - cut[at]) for _, _, _, at, n, _ in into])
    return [(row, got[begin:end]) for row, begin, end in zip(into, ends, ends[1:])]


def _agree(table: Table, array: Array) -> None:
    """Raises PlanError on all ranks, or on none."""
    problem = ""
    if table.size != hvd.size():
        problem = f"it is for {table.size} ranks, this job has {hvd.size()}"
    elif not isinstance(array, np.ndarray):
        problem = f"it runs on a NumPy array, not on {type(array).__name__}"
    elif not (array.flags.c_contiguous and array.flags.writeable):
        problem = "the array must be contiguous and writable, as it is changed in place"
    same = (table.digest(), "" if problem else f"{array.size} elements of {array.dtype}")
    every = hvd.allgather_object((table.name, problem, same), name="plan.agree")
    for rank, (name, complaint, _) in enumerate(every):
        if complaint:
            raise PlanError(f"plan {name!r} cannot run on rank {rank}: {complaint} [HVD009]")
    name, _, (digest, shape) = every[0]
    for rank, (other, _, (theirs, its)) in enumerate(every):
        if theirs != digest:
            here, there = f"plan {name!r} ({digest[:8]})", f"plan {other!r} ({theirs[:8]})"
        elif its != shape:
            here, there = shape, its
        else:
            continue
        raise PlanError(f"ranks cannot run this together: rank 0 has {here}, rank {rank} has {there} [HVD009]")
