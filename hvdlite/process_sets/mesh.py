"""Ranks on a grid with named axes: `Mesh(dp=2, tp=2)` gives every rank its process set along each axis.

Ranks fill the grid in row-major order: the last axis is the fastest, so its neighbours are neighbouring ranks, which
usually share a host. Rank 3 of Mesh(dp=2, tp=2) has the coordinates dp=1, tp=1; its tp group is ranks 2 and 3, its dp
group ranks 1 and 3. All sets of all axes are registered, in the same order on every rank; where one exists already
(another mesh's, or all ranks), that one is used.

A mesh may have some of the ranks only, `Mesh(ranks=range(6), dp=3, pp=2)`. The others make it as well, since all ranks
register sets together, and then have no place in it.

`pairs` are sets of two neighbours, for sends. Their members alone open them: a rank then counts two for each axis among
its 256 sets, however long the axis is and however many lines there are.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable
from typing import Any

from .. import _core
from .._core import byte_exchange
from .process_set import ProcessSet, existing_or_added, global_process_set, number_of, open_among, process_sets


class Mesh:
    """The ranks of the job on a grid with named axes.

    It registers one process set for each line along each axis, or uses the registered set of the same ranks. All ranks
    must make the same mesh. Ranks fill the grid in row-major order: neighbors on the last axis are neighboring ranks.
    In ``Mesh(dp=2, tp=2)`` rank 3 has the coordinates dp=1 and tp=1. Its tp group is ranks 2 and 3, its dp group ranks
    1 and 3.

    Args:
        ranks (iterable of int, optional): the ranks of the mesh, in ascending order. The other ranks must make the mesh
            too, and have no place in it. None (default): all ranks.
        axes (int): length of each axis by its name. One length may be -1, which takes the ranks that are left.

    Attributes:
        shape (dict): length of each axis by its name.
        process_set (ProcessSet): the ranks of the mesh.

    Raises:
        HvdMismatchError: if the ranks make different meshes.
        HvdNotInitializedError: before ``init``.
        ValueError: if the product of the lengths is not the number of ranks, or ``ranks`` has ranks twice, in another
            order, or outside the job.

    Example:
        >>> mesh = hvd.Mesh(dp=-1, tp=1)
        >>> mesh, mesh.coordinate("dp"), mesh.group("dp").ranks
        (Mesh(dp=2, tp=1), 0, [0, 1])  # rank 0
        (Mesh(dp=2, tp=1), 1, [0, 1])  # rank 1
        >>> [hvd.remove_process_set(each) for each in mesh.sets("tp")]
        [True, True]
    """

    def __init__(self, ranks: Iterable[int] | None = None, **axes: int) -> None:
        _core.require_job()
        self._ranks = list(range(_core.size()) if ranks is None else ranks)
        if self._ranks != sorted({*self._ranks} & {*range(_core.size())}) or not self._ranks:
            raise ValueError(
                f"Mesh(ranks={self._ranks}): must be ranks of the job, 0 to {_core.size() - 1}, in ascending order, "
                "each once [HVD221]"
            )
        size = len(self._ranks)
        for axis, length in axes.items():
            if isinstance(length, bool) or not isinstance(length, int) or (length < 1 and length != -1):
                raise ValueError(
                    f"axis {axis}={length!r}: must be a whole number of at least 1, or -1 for the rest [HVD221]"
                )
        product = math.prod(length for length in axes.values() if length != -1)
        free = [axis for axis, length in axes.items() if length == -1]
        if not axes or len(free) > 1 or (product != size if not free else size % product):
            shape = ", ".join(f"{axis}={length}" for axis, length in axes.items())
            raise ValueError(
                f"Mesh({shape}) does not match {size} ranks: the product of the axes must be the number of ranks "
                "[HVD221]"
            )
        self.shape = {axis: size // product if length == -1 else length for axis, length in axes.items()}
        self._coordinates = list(itertools.product(*(range(length) for length in self.shape.values())))
        place = self._coordinates[self._ranks.index(_core.rank())] if self.included() else ()
        self._mine = dict(zip(self.shape, place))
        whole = size == _core.size()
        self.process_set = global_process_set if whole else existing_or_added(self._ranks)
        self._sets = {axis: self._along(i) for i, axis in enumerate(self.shape)}
        self._pairs: dict[str, list[ProcessSet]] = {}
        self._some: dict[tuple[Any, ...], ProcessSet | None] = {}

    def _along(self, axis: int) -> list[ProcessSet]:
        lines: dict[tuple[int, ...], list[int]] = {}
        for rank, coordinates in zip(self._ranks, self._coordinates):
            lines.setdefault(coordinates[:axis] + coordinates[axis + 1 :], []).append(rank)
        return [existing_or_added(ranks) for ranks in lines.values()]

    def included(self) -> bool:
        """Return whether this rank has a place in the mesh.

        Returns:
            bool: False on ranks that ``ranks`` leaves out.
        """
        return _core.rank() in self._ranks

    def _known(self, axis: str) -> str:
        if axis not in self.shape:
            raise ValueError(f"the mesh has no axis {axis!r}; it has {', '.join(self.shape)} [HVD221]")
        return axis

    def _require_place(self) -> None:
        if not self.included():
            raise ValueError(
                f"rank {_core.rank()} has no place in {self} of the ranks {self._ranks}: ask included() first [HVD221]"
            )

    def group(self, axis: str) -> ProcessSet:
        """Return the process set of this rank along an axis.

        Args:
            axis (str): name of the axis.

        Returns:
            ProcessSet: the ranks that differ from this one in this axis only, this rank among them.

        Raises:
            ValueError: if the mesh has no such axis, or this rank no place in it.
        """
        sets = self._sets[self._known(axis)]
        self._require_place()
        return next(each for each in sets if _core.rank() in each.ranks)

    def coordinate(self, axis: str) -> int:
        """Return the place of this rank on an axis, which is its rank within ``group(axis)``.

        Args:
            axis (str): name of the axis.

        Returns:
            int: from 0 to the length of the axis - 1.

        Raises:
            ValueError: if the mesh has no such axis, or this rank no place in it.
        """
        self._known(axis)
        self._require_place()
        return self._mine[axis]

    def sets(self, axis: str) -> list[ProcessSet]:
        """Return the process sets of all lines along an axis.

        Args:
            axis (str): name of the axis.

        Returns:
            list of ProcessSet: in the order of their lowest ranks.

        Raises:
            ValueError: if the mesh has no such axis.
        """
        return list(self._sets[self._known(axis)])

    def pairs(self, axis: str) -> list[ProcessSet]:
        """Return sets of two neighbors along an axis, for ``send`` and ``recv``.

        Entry s joins the places s and s + 1 of this rank's line. In a larger set a send waits for what other members
        move. The first call for an axis opens the sets, so all ranks must make it; later calls return the same sets. An
        axis of length 2 has its own set as the pair; one of length 1 has none. A set takes some milliseconds once, and
        2 KB. Only its two members count it among their 256 sets.

        Args:
            axis (str): name of the axis.

        Returns:
            list of ProcessSet: of pairs that this rank does not belong to, only ``ranks`` can be used.

        Raises:
            ValueError: if the mesh has no such axis.
        """
        if self._known(axis) not in self._pairs:
            self._pairs[axis] = self._opened(axis)
        return list(self._pairs[axis])

    def _opened(self, axis: str) -> list[ProcessSet]:
        line, mine = self.group(axis), self.coordinate(axis)
        if line.size() == 2:
            return [line]
        pairs = [ProcessSet(ranks) for ranks in zip(line.ranks, line.ranks[1:])]
        for first in (0, 1) if pairs else ():  # each rank is in one pair of those that begin at even places, or at odd
            left = mine - (mine - first) % 2
            at = [left, left + 1] if 0 <= left < len(pairs) else []  # an end of the line: the others exchange two words
            opened = self._opened_of(axis, at)
            if opened is not None:
                pairs[left] = opened
        return pairs

    def _opened_of(self, axis: str, places: list[int]) -> ProcessSet | None:
        """A set of some places of this rank's line, its own among them; of none where there are none. All ranks of the
        line make this call at once, each for its own places."""
        line = self.group(axis)
        number = number_of(line)

        def exchange(word: bytes) -> list[bytes]:
            everyone = byte_exchange.allgather_bytes(word, f"mesh.pairs.{axis}", number)
            return [everyone[place] for place in places]

        if places:
            return open_among([line.ranks[place] for place in places], exchange)
        exchange(b"")
        exchange(b"")
        return None

    def some(self, axis: str, places: Iterable[int]) -> ProcessSet | None:
        """The set of some places of this rank's line, for what they have in common. All ranks of the line call it.

        Args:
            axis (str): name of the axis.
            places (iterable of int): places on the axis.

        Returns:
            ProcessSet or None: None on a rank at another place.
        """
        line, wanted = self.group(axis), sorted(places)
        ranks = [line.ranks[place] for place in wanted]
        known = next((each for each in process_sets() if each.ranks == ranks), None)
        mine, key = self.coordinate(axis) in wanted, (axis, *wanted)
        if known is None and key not in self._some:
            self._some[key] = self._opened_of(axis, wanted if mine else [])
        return (known or self._some[key]) if mine else None

    def rank_at(self, **coordinates: int) -> int:
        """Return the global rank at a place of the grid.

        Args:
            coordinates (int): place on each axis by its name. Axes that are left out take this rank's own place.

        Returns:
            int: the global rank.

        Raises:
            ValueError: if the mesh has no such axis, and for a place outside the grid.
        """
        if not coordinates.keys() >= self.shape.keys():
            self._require_place()
        point = {**self._mine, **{self._known(axis): at for axis, at in coordinates.items()}}
        position = tuple(point[axis] for axis in self.shape)
        if position not in self._coordinates:
            raise ValueError(f"{point} is outside the mesh {self.shape} [HVD221]")
        return self._ranks[self._coordinates.index(position)]

    def __repr__(self) -> str:
        return f"Mesh({', '.join(f'{axis}={length}' for axis, length in self.shape.items())})"
