"""Group of tables: their rows lie one behind the other in one table of the servers, at the cost of one.

A recommendation model has a table for each of its features: 26 in DLRM (Naumov et al., 2019, arXiv:1906.00091). Tables
of their own need a message each, in each step. In a group one message to a server carries rows of all of them, and the
optimizer runs once. Row r of a table of the group has the bits that it would have in a table of its own.

It is what FBGEMM calls table batched embeddings: tables of one group have the same dim, optimizer and staleness.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np

from .._api import Handle
from . import optimizers
from .arrays import like, numbers
from .pending_requests import Awaited
from .table import Table
from .table_spec import described_group


class Joined(NamedTuple):
    """Ids of several tables, as ids of the one table that they are."""

    flat: Any  # int64 [n]
    names: list[str]
    ends: Any  # of each table in flat
    shapes: list[tuple[int, ...]]

    def split(self, flat: Any) -> dict[str, Any]:
        """What belongs to each table of something that has one row for each id, in the shape of the ids."""
        parts = np.split(flat, self.ends[:-1])
        return {
            name: each.reshape(*shape, *flat.shape[1:]) for name, each, shape in zip(self.names, parts, self.shapes)
        }


class TableGroup(Table):
    """Several tables of float32 rows that one message reads or changes. All ranks must make the same groups.

    Calls take and return dictionaries by the names of tables. All else is as for ``Table``::

        group = hvd.ps.TableGroup("features", {"user": 50_000, "item": 9_000}, dim=16, optimizer=hvd.ps.Adagrad(0.05))
        rows = group.pull({"user": users, "item": items})      # {"user": (*users.shape, 16), ...}
        group.push({"user": users, "item": items}, gradients)
        group.step()

    Args:
        name (str): the name, unique in the job.
        tables (dict[str, int]): the number of rows of each table, by its name.
        dim (int): the number of float32 values in a row.
        optimizer: as for ``Table``, with the other arguments.
        staleness (int, optional): as for ``Table``.
        replicas (int): as for ``Table``.
        order (str): as for ``Table``.
        reduce (str): as for ``Table``.
        init (optional): ``hvd.ps.uniform(scale, seed)`` for all tables, or a dictionary of them by name. None: zeros.

    Raises:
        HvdInitError: the job has no servers.
        HvdMismatchError: the ranks give different arguments.
        ValueError: an argument is not valid. The text names it.
    """

    def __init__(
        self, name: str, tables: Mapping[str, int], dim: int, optimizer: Any, staleness: int | None = 0,
        replicas: int = 1, order: str = "hash", reduce: str = "mean",
        init: optimizers.Uniform | Mapping[str, optimizers.Uniform] | None = None
    ) -> None:  # fmt: skip
        spec = described_group(
            name, tables, dim, optimizer=optimizer, staleness=staleness, replicas=replicas, order=order, reduce=reduce,
            init=init,
        )  # fmt: skip
        self.tables: dict[str, int] = dict(spec["tables"])
        sizes = list(self.tables.values())
        self._starts = dict(zip(self.tables, np.cumsum([0, *sizes[:-1]]).tolist()))
        self._open(spec)

    def joined(self, ids: Any) -> Joined:
        """Return ids of several tables as ids of one table. Layers of frameworks call it.

        Args:
            ids (dict): arrays of integers, of any shape, by the names of tables.

        Returns:
            Joined: the ids, and how they are split.

        Raises:
            ValueError: there is no such table, or an id is not the number of a row.
        """
        if not isinstance(ids, Mapping) or not ids or not set(ids) <= set(self.tables):
            keys = sorted(map(str, ids)) if isinstance(ids, Mapping) else type(ids).__name__
            raise ValueError(
                f"table group {self.name!r}: give a dictionary of ids by the names of its tables, not {keys}; they are "
                f"{list(self.tables)} [HVD027]"
            )
        arrays = [np.asarray(numbers(each)) for each in ids.values()]
        for name, each in zip(ids, arrays):
            if each.dtype.kind not in "iu" and each.size:
                raise ValueError(
                    f"table {name!r} of group {self.name!r}: ids must be integers, not {each.dtype} [HVD027]"
                )
        counts = [each.size for each in arrays]
        flat = np.concatenate([each.ravel() for each in arrays], dtype=np.int64, casting="unsafe")
        bad = np.flatnonzero((flat < 0) | (flat >= np.repeat([self.tables[name] for name in ids], counts)))
        if len(bad):
            name = list(ids)[int(np.searchsorted(np.cumsum(counts), bad[0], side="right"))]
            raise ValueError(
                f"table {name!r} of group {self.name!r} has rows 0 to {self.tables[name] - 1}: there is no row "
                f"{flat[bad[0]]} [HVD027]"
            )
        flat += np.repeat([self._starts[name] for name in ids], counts)
        return Joined(flat, list(ids), np.cumsum(counts), [each.shape for each in arrays])

    def rows_of_tables(self, ids: Any) -> dict[str, int]:
        """Return how many of some ids are of each table. Layers of frameworks call it.

        Args:
            ids (array): int64, sorted, as ``joined`` makes them.

        Returns:
            dict[str, int]: by the names of all tables, in their order.
        """
        at = np.searchsorted(ids, [*self._starts.values(), self.rows])
        return dict(zip(self.tables, np.diff(at).tolist()))

    def pull_async(self, ids: Any) -> Handle:
        """Start ``pull`` and return a handle.

        Args:
            ids (dict): arrays or tensors of integers, of any shape, by the names of tables.

        Returns:
            Handle: ``hvd.synchronize`` returns a dictionary of rows.

        Raises:
            ValueError: there is no such table, or an id is not the number of a row.
        """
        joined = self.joined(ids)
        some, back = np.unique(joined.flat, return_inverse=True)
        question = self._question(some)

        def made() -> dict[str, Any]:
            rows = joined.split(question.rows.take(back.reshape(-1), axis=0))
            return {name: like(each, ids[name]) for name, each in rows.items()}

        return Awaited(question, made)

    def push_async(self, ids: Any, grads: Any) -> Handle:
        """Start ``push`` and return a handle.

        Args:
            ids (dict): as in ``pull_async``.
            grads (dict): floating-point numbers of shape ``(*ids[name].shape, dim)``, by the same names.

        Returns:
            Handle: ``hvd.synchronize`` waits until the servers have the gradients.

        Raises:
            ValueError: as ``Table.push``, or a table has ids and no gradients.
        """
        joined = self.joined(ids)
        values = {name: np.asarray(numbers(each)) for name, each in dict(grads).items()}
        expected = {name: (*shape, self.dim) for name, shape in zip(joined.names, joined.shapes)}
        found = {name: each.shape for name, each in values.items()}
        if found != expected:
            raise ValueError(f"table group {self.name!r}: push needs gradients of {expected}, not {found} [HVD028]")
        stacked = [values[name].reshape(-1, self.dim) for name in joined.names]
        return super().push_async(joined.flat, np.concatenate(stacked))

    def prefetch(self, ids: Any) -> None:
        """Ask now for rows that the next step will pull, as ``Table.prefetch`` does.

        Args:
            ids (dict): the ids that the next step pulls, by the names of tables.

        Raises:
            ValueError: an id is not the number of a row.
        """
        super().prefetch(self.joined(ids).flat)
