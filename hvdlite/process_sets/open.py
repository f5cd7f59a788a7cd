"""Open a process set in the core on all ranks: they agree on its number and incarnation, and on failures.

The core takes a number that is free on all ranks that open the set, and an incarnation greater than all that they have
used. So each rank announces what it has in use (`in_use`), and all take the lowest free number and the next incarnation
(`opened`): all ranks of the job, or the members of the set alone. Sets without a common rank may have the same; those
with one differ in both.

`Tell` exchanges these messages: one of each rank, in the order of `among`, over any transport between them. The second
exchange reports which ranks have failed. After it every member has its part of the shared memory, and collectives may
begin.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from .. import _core, mpi
from ..errors.codes import coded

if TYPE_CHECKING:
    from ..transport.mesh import JobLinks, Rows

Exchange = Callable[[str, Any], list[Any]]  # what it is about, and this rank's word

_links: JobLinks | None = None
_incarnations = 0  # the greatest that a set has had here in this job, also one that did not come about
_used: set[int] = set()  # numbers of sets that are open here


def use_links(links: JobLinks | None) -> None:
    """For `init`: where the streams of sets come from; None where no set needs any. No set is open yet."""
    global _links, _incarnations
    _links, _incarnations = links, 0
    _used.clear()


def address() -> str:
    """Where other ranks reach this one: without links to them at 127.0.0.1, if all are on this host."""
    if _links is not None:
        return _links.ip
    from ..transport.address import everywhere

    return "127.0.0.1" if _core.cross_size() == 1 else everywhere()[0]


def in_use() -> list[Any]:
    """What other ranks need before a set is opened: the numbers in use here, and the greatest incarnation."""
    return [sorted(_used), _incarnations]


def opened(call: str, ranks: list[int], among: Sequence[int], all_in_use: Sequence[Any], exchange: Exchange) -> int:
    """The number of the set, which is open on all of `among`; or raises on all of them, naming the first that failed.

    all_in_use: the `in_use` of each of `among`.
    """
    global _incarnations
    taken = {each for used, _ in all_in_use for each in used}
    number = next(free for free in itertools.count(1) if free not in taken)
    _incarnations = 1 + max(incarnations for _, incarnations in all_in_use)
    comm, failure = 0, None
    try:
        if mpi.enabled():
            comm = mpi.current().prepare_set(ranks)
        _core.set_open(number, _incarnations, ranks, *_streams(number, ranks))
        _used.add(number)  # also if the others never answer
        _core.forget_unnamed(number)
    except Exception as error:
        failure = error
    outcomes = dict(zip(among, exchange("opened", [None if failure is None else str(failure), comm != 0])))
    failed = {rank: text for rank, (text, _) in outcomes.items() if text is not None}
    if failed:
        if failure is None:
            _close(number)
        if all(outcomes[rank][1] for rank in ranks) and comm:  # to free one takes all of its ranks
            mpi.current().drop_comm(comm)
        first = min(failed)
        raise failure or RuntimeError(
            coded("HVD306", f"{call} of ranks {ranks} failed on rank {first}: {failed[first]}")
        )
    if comm:
        mpi.current().keep_set(number, comm)
    return number


def closed(number: int) -> None:
    """The set of this number is closed here; all that have opened it call this."""
    _close(number)
    if mpi.enabled():
        mpi.current().drop_set(number)


def _close(number: int) -> None:
    _used.discard(number)
    _core.set_close(number)


def _streams(number: int, ranks: list[int]) -> Rows | tuple[()]:
    """A set's streams, for the core. No two ranks are in two sets of one number and incarnation: that names the
    streams."""
    if _links is None or _core.rank() not in ranks:
        return ()
    return _links.rows(f"set {number} of {_incarnations}", ranks, _core.raise_failure)
