"""Process set: the ranks that take part in a collective, in ascending order.

Every collective takes `process_set`; `global_process_set` holds all ranks and is always there. Sets of some ranks are
given to `init(process_sets=[...])` or added later. Either way all ranks of the job, members or not, name the same sets
in the same order; they compare what they name before anything is made, so that a difference is an error on all of them
and no hang. Sets may overlap, and each runs collectives of its own. A framework's group, which only its members
make, is a set by `open_among`.

A ProcessSet object is valid from then until it is removed or the job ends; it keeps its ranks over `shutdown`, so that
it can be given to the next `init`. The sets of the last `init(process_sets=[...])` come back by themselves with a plain
`init()` after `shutdown()`, as elastic training does it.

The core knows a set by a number (`process_set_id`), the same on its members, and counts ranks from 0 in each set. Users
name ranks globally everywhere: roots, destinations, sources. `rank_in` translates.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from .. import _core, mpi
from .._core import byte_exchange
from ..errors import HvdMismatchError
from ..errors.codes import coded
from . import open
from .open import Exchange

host_of: list[int] = []  # by rank, the number of its host; empty: all ranks of the job are on one
_lock = threading.RLock()
_valid: dict[int, list[ProcessSet]] = {}  # by number; several objects may stand for one set
_of_members: dict[int, ProcessSet] = {}  # likewise, those that only their members know
_at_new_incarnation: list[Callable[[], None]] = []  # what else counts from the beginning with each job
_at_end: list[Callable[[list[int]], None]] = []


class ProcessSet:
    """A set of ranks that collectives run on.

    Register it on all ranks, by ``init(process_sets=[...])`` or ``add_process_set``, before a collective uses it. It
    stays valid until ``remove_process_set`` or ``shutdown``. Ranks in arguments and results of collectives are global
    ranks.

    Args:
        ranks_or_comm (list of int or mpi4py.MPI.Comm): global ranks, in any order; or a communicator. Each rank passes
            the communicator that it belongs to, so one call makes a set for each part of a ``Split``.

    Attributes:
        process_set_id (int): number of the set; None while it is not registered.
        ranks (list of int): global ranks in ascending order.
        mpi_comm (mpi4py.MPI.Comm): the communicator it was made of, or None.

    Raises:
        ValueError: if ``ranks_or_comm`` is not a list of distinct ranks from 0, or is empty.

    Example:
        >>> last = hvd.add_process_set(hvd.ProcessSet([1]))
        >>> last.included(), last.ranks
        (False, [1])  # rank 0
        (True, [1])  # rank 1
        >>> hvd.remove_process_set(last)
        True
    """

    process_set_id: int | None = None
    ranks: Any = None  # list[int]
    mpi_comm: Any = None

    def __init__(self, ranks_or_comm: Any) -> None:
        if mpi.is_communicator(ranks_or_comm):
            self.mpi_comm = ranks_or_comm
            return
        message = "ProcessSet should be initialized with a list of process ranks or an mpi4py Comm object"
        if isinstance(ranks_or_comm, (str, bytes)) or not isinstance(ranks_or_comm, Iterable):
            raise ValueError(f"{message}, not {ranks_or_comm!r} [HVD215]")
        ranks = list(ranks_or_comm)
        if any(isinstance(rank, bool) or not hasattr(rank, "__index__") for rank in ranks):
            raise ValueError(f"{message}, not {ranks!r} [HVD215]")
        ranks = sorted(rank.__index__() for rank in ranks)
        if len(set(ranks)) < len(ranks):
            raise ValueError(f"a process set must name each rank once: {ranks} [HVD215]")
        if not ranks or ranks[0] < 0:
            raise ValueError(f"a process set needs at least one rank, and ranks count from 0: {ranks} [HVD215]")
        self.ranks = ranks

    def _ranks(self) -> list[int]:
        if self.process_set_id is None:
            if _core.preparing:
                _core.require_job()
            raise ValueError(
                f"{self!r} is not registered: pass it to hvd.init(process_sets=[...]) or hvd.add_process_set() on "
                "all ranks, and again after hvd.shutdown() [HVD213]"
            )
        return self.ranks

    def size(self) -> int:
        """Return the number of ranks in the set.

        Returns:
            int: at least 1.

        Raises:
            ValueError: if the set is not registered.
        """
        return len(self._ranks())

    def rank(self) -> int:
        """Return the rank of this process within the set.

        Returns:
            int: from 0 to ``size() - 1``.

        Raises:
            ValueError: if this process is not a member, or the set is not registered.
        """
        return rank_in(self, _core.rank())

    def included(self) -> bool:
        """Return whether this process belongs to the set.

        Returns:
            bool: True on members.

        Raises:
            ValueError: if the set is not registered.
        """
        return _core.rank() in self._ranks()

    def __repr__(self) -> str:
        return f"ProcessSet(process_set_id={self.process_set_id}, ranks={self.ranks}, mpi_comm={self.mpi_comm})"


class _Global(ProcessSet):
    """All ranks. Read anew each time: after shutdown and init the job may have another size."""

    process_set_id = 0

    def __init__(self) -> None:
        pass

    @property
    def ranks(self) -> list[int]:  # type: ignore[override]
        """The ranks of the job, in order. Raises HvdNotInitializedError before init()."""
        return list(range(_core.size()))

    def _ranks(self) -> list[int]:
        return self.ranks

    def size(self) -> int:
        """Number of ranks of the job."""
        return _core.size()

    def rank(self) -> int:
        """This process's rank."""
        return _core.rank()

    def included(self) -> bool:
        """True: every rank belongs to it."""
        return True

    def __reduce__(self) -> str:
        return "global_process_set"

    def __repr__(self) -> str:
        return "global_process_set"


global_process_set: ProcessSet = _Global()


def number_of(process_set: ProcessSet) -> int:
    """The number by which the core knows a set. ValueError on ranks outside it, TypeError for what is no set."""
    if process_set is global_process_set:
        return 0
    if not isinstance(process_set, ProcessSet):
        raise TypeError(f"process_set must be a hvd.ProcessSet or hvd.global_process_set, not {process_set!r} [HVD212]")
    ranks, mine = process_set._ranks(), _core.rank()
    if mine not in ranks:
        raise ValueError(
            f"Process is not part of provided process set. Rank {mine} is not a member of the set of ranks {ranks}: "
            "call this on members only, or ask process_set.included() first. [HVD214]"
        )
    return process_set.process_set_id or 0


def rank_in(process_set: ProcessSet, global_rank: int) -> int:
    """The rank inside a set of a global rank. ValueError naming both if it is no member."""
    if isinstance(global_rank, bool) or not hasattr(global_rank, "__index__"):
        raise TypeError(f"a rank must be a whole number, not {global_rank!r} [HVD216]")
    number = global_rank.__index__()
    if process_set is global_process_set:
        if not 0 <= number < _core.size():
            raise ValueError(f"there is no rank {number} in a job of {_core.size()} ranks [HVD216]")
        return 0 if _core.preparing else number  # it is alone in its core
    ranks = process_set._ranks()
    if number not in ranks:
        raise ValueError(
            f"Process is not part of provided process set. Rank {number} is not a member of the set of ranks "
            f"{ranks}; ranks are always global ranks. [HVD214]"
        )
    return ranks.index(number)


def share_of(process_set: ProcessSet, rows: int) -> int:
    """How many of `rows` a reducescatter gives to this rank: equal parts, what is left over to the first ranks."""
    each, more = divmod(rows, process_set.size())
    return each + (process_set.rank() < more)


def add_process_set(process_set: ProcessSet | Sequence[int]) -> ProcessSet:
    """Register a process set after ``init``.

    All ranks of the job must call it with the same ranks, members or not.

    Args:
        process_set (ProcessSet or list of int): the set, or its global ranks.

    Returns:
        ProcessSet: the registered set.

    Raises:
        HvdMismatchError: if the ranks name different sets.
        HvdNotInitializedError: before ``init``.
        ValueError: for ranks that are registered already, for all ranks of the job, and for a rank that is not in the
            job.

    Example:
        >>> first = hvd.add_process_set([0])
        >>> if first.included():
        ...     print(hvd.allreduce(np.array([3.0]), op=hvd.Sum, process_set=first).tolist())
        [3.0]  # rank 0
        >>> hvd.remove_process_set(first)
        True
    """
    if not isinstance(process_set, ProcessSet):
        process_set = ProcessSet(process_set)
    _core.require_job()
    with _lock:
        if process_set.mpi_comm is not None:
            return _add_split(process_set)
        return _add(process_set, process_set.ranks)


def _add_split(process_set: ProcessSet) -> ProcessSet:
    """One set for each of the communicators that the ranks give; this rank's ProcessSet is the one that it is in."""
    from ..mpi import communicator

    if process_set.process_set_id is not None:
        raise ValueError(f"{process_set!r} is registered already [HVD213]")
    _agree("add_process_set", "a communicator", None)
    found = communicator.sets(_exchange("members", communicator.word(process_set.mpi_comm)))
    mine = communicator.own(found, _core.rank())
    for index, ranks in enumerate(found):
        one = process_set if index == mine else ProcessSet(ranks)
        one.ranks = ranks
        _add(one, ranks)
    return process_set


def _add(process_set: ProcessSet, ranks: list[int]) -> ProcessSet:
    wrong = _outside(ranks) or _refusal(process_set, ranks)
    all_in_use = _agree("add_process_set", ranks, wrong)
    number = open.opened("add_process_set", ranks, range(_core.size()), all_in_use, _exchange)
    process_set.process_set_id = number
    _valid[number] = [process_set]
    return process_set


def open_among(ranks: Sequence[int], exchange: Callable[[bytes], list[bytes]]) -> ProcessSet:
    """A set that its members alone open, by this call. It exists until the job ends, is not one of `process_sets`, and
    there may be another of the same ranks.

    exchange: gives this rank's bytes, and returns those of all members in the order of `ranks`; called twice. It may
    take any way that joins them. Sets with a common rank are opened in one order by those that are in both.

    Raises on all members: ValueError for ranks that the job has not, HvdMismatchError where they name different ranks,
    and if one of them fails, naming it; on a rank outside `ranks` ValueError, before anything is exchanged.
    """
    import json

    def exchange_members(_: str, mine: Any) -> list[Any]:
        return [json.loads(part) for part in exchange(json.dumps(mine).encode())]

    process_set, among = ProcessSet(ranks), list(ranks)
    if _core.rank() not in among:
        raise ValueError(f"rank {_core.rank()} is not in the set that it opens: {among} [HVD214]")
    with _lock:
        all_in_use = _agree("open_among", process_set.ranks, _outside(process_set.ranks), exchange_members)
        number = open.opened("open_among", process_set.ranks, among, all_in_use, exchange_members)
        process_set.process_set_id = number
        _of_members[number] = process_set
    return process_set


def _outside(ranks: list[int]) -> str | None:
    size = _core.size()
    return f"there is no rank {ranks[-1]} in a job of {size} ranks: {ranks} [HVD215]" if ranks[-1] >= size else None


def _refusal(process_set: ProcessSet, ranks: list[int]) -> str | None:
    """Why a set cannot be added, as far as this rank can see."""
    if process_set.process_set_id is not None:
        return f"{process_set!r} is registered already"
    if ranks == list(range(_core.size())):
        return f"A process set containing the same ranks already exists: {ranks} are all, use hvd.global_process_set."
    same = next((sets[0] for sets in _valid.values() if sets[0].ranks == ranks), None)
    return None if same is None else f"A process set containing the same ranks already exists: {same!r}."


def _exchange(verb: str, mine: Any) -> list[Any]:
    """The messages of all ranks, by an allgather with a name of its own."""
    import json  # sets are rare, and so is the need for it

    block = json.dumps(mine).encode()
    return [json.loads(part) for part in byte_exchange.allgather_bytes(block, f"process_set.{verb}")]


def _agree(call: str, ranks: Any, wrong: str | None, exchange: Exchange = _exchange) -> list[Any]:
    """What each has in use (`open.in_use`). Raises on all ranks if they make different calls, or if one of them sees
    what is wrong with it."""
    sent = exchange("agree", [call, ranks, wrong, _core.rank(), open.in_use()])
    for word in sent:
        if word[:2] != sent[0][:2]:
            raise HvdMismatchError(
                f"process sets: rank {sent[0][3]} calls {sent[0][0]} of ranks {sent[0][1]}, but rank {word[3]} calls "
                f"{word[0]} of ranks {word[1]}. All ranks, members or not, add and remove the same sets in the same "
                "order; so do members with sets of their own. [HVD303]"
            )
    if wrong is not None:
        raise ValueError(coded("HVD213", wrong))
    first = next((word for word in sent if word[2] is not None), None)
    if first is not None:
        raise ValueError(coded("HVD306", f"rank {first[3]}: {first[2]}"))
    return [word[4] for word in sent]


def remove_process_set(process_set: ProcessSet) -> bool:
    """Unregister a process set.

    All ranks of the job must call it, members or not. Synchronize the set's collectives first; those in flight fail.

    Args:
        process_set (ProcessSet): the set.

    Returns:
        bool: False for ``global_process_set`` and for a set that is not registered, which stay as they are.

    Raises:
        HvdMismatchError: if the ranks name different sets.
        HvdNotInitializedError: before ``init``.
        ValueError: for one of the sets that ``Mesh.pairs`` opens.
        TypeError: if ``process_set`` is not a ``ProcessSet``.

    Example:
        >>> hvd.remove_process_set(hvd.global_process_set)
        False
    """
    if not isinstance(process_set, ProcessSet):
        raise TypeError(f"process_set must be a hvd.ProcessSet, not {process_set!r} [HVD212]")
    _core.require_job()
    if process_set is global_process_set or process_set.process_set_id is None:
        return False
    with _lock:
        number = process_set.process_set_id
        if _of_members.get(number) is process_set:
            raise ValueError(
                f"{process_set!r} was opened by its members only, and stays open until the job ends [HVD213]"
            )
        _agree("remove_process_set", process_set.ranks, None)
        for same in _valid.pop(number, []):
            same.process_set_id = None
        open.closed(number)
        _have_ended([number])
        return True


def process_set_by_id(process_set_id: int) -> ProcessSet:
    """The set of a number here; 0 is the global one. ValueError if there is none."""
    found = process_sets_by_number().get(process_set_id) or _of_members.get(process_set_id)
    if found is None:
        raise ValueError(f"No known process set with id {process_set_id} [HVD213]")
    return found


def process_sets_by_number() -> dict[int, ProcessSet]:
    """All registered sets, the global one under 0."""
    with _lock:
        return {0: global_process_set, **{number: sets[0] for number, sets in sorted(_valid.items())}}


def process_sets() -> list[ProcessSet]:
    """All registered sets in the order of their numbers, the global one first."""
    return list(process_sets_by_number().values())


def existing_or_added(ranks: Sequence[int]) -> ProcessSet:
    """The set of these ranks, registered now if it was not. Collective like `add_process_set`."""
    ordered = sorted(ranks)
    with _lock:
        for known in process_sets():
            if known.ranks == ordered:
                _agree("add_process_set", ordered, None)
                return known
        return _add(ProcessSet(ordered), ordered)


def on_new_incarnation(forget: Callable[[], None]) -> None:
    """Call this when a job ends, too."""
    _at_new_incarnation.append(forget)


def on_end(forget: Callable[[list[int]], None]) -> None:
    """Call this with the numbers of sets that are not valid any more; other sets may get them."""
    _at_end.append(forget)


def _have_ended(numbers: list[int]) -> None:
    for forget in _at_end:
        forget(numbers)


def forget_all() -> None:
    """For `shutdown`: no set but the global one is valid any more."""
    with _lock:
        _have_ended([*_valid, *_of_members])
        for sets in [*_valid.values(), [*_of_members.values()]]:
            for each in sets:
                each.process_set_id = None
        _valid.clear()
        _of_members.clear()
        open.use_links(None)
        for forget in _at_new_incarnation:
            forget()
