"""Which ranks take part in a collective? So far there is one answer: all of them.

Every collective takes `process_set`, as in Horovod, and the only set that exists is `global_process_set`. Sets of some
ranks get their constructor when the engine can run them; until then there is no name here that would promise it.

A set is asked anew each time, never cached: after shutdown and init the job may have another size.
"""

from __future__ import annotations

from . import _core


class ProcessSet:
    """An ordered set of ranks. Not to be constructed by users yet: use `global_process_set`."""

    process_set_id = 0

    @property
    def ranks(self) -> list[int]:
        """The ranks of the set, in order. Raises HvdNotInitializedError before init()."""
        return list(range(_core.size()))

    def size(self) -> int:
        """Number of ranks in the set."""
        return _core.size()

    def rank(self) -> int:
        """This process's rank within the set."""
        return _core.rank()

    def included(self) -> bool:
        """Whether this process belongs to the set."""
        return True

    def __repr__(self) -> str:
        return "global_process_set"


global_process_set = ProcessSet()


def number_of(process_set: ProcessSet) -> int:
    """The number by which the core knows a set. TypeError for anything that is not one."""
    if not isinstance(process_set, ProcessSet):
        raise TypeError(f"process_set must be hvd.global_process_set, not {process_set!r}")
    return process_set.process_set_id
