"""Names of collectives that the caller does not name: the same numbers on all ranks.

Unnamed collectives are matched by their order: each has the number of those of its kind that were submitted before it
in its process set. A group needs a number that its members have in common: of its name, else likewise.

Ranks count alike as long as they submit alike. Where they could not have (a join, a set that is made anew, a new job),
all begin at 1 again.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

_joins = [0]
_unnamed: dict[int, dict[Any, Iterator[int]]] = {}  # process set -> what -> the numbers of those without a name


def unnamed(what: Any, process_set: int) -> int:
    """How many of these there have been in the set, this one included: the number that stands in for a name."""
    return next(_unnamed.setdefault(process_set, {}).setdefault(what, itertools.count(1)))


def forget_unnamed(process_set: int | None) -> None:
    """A new set has an old one's number: ranks that were in that one begin at 1 again, as the others do. None: so it is
    with all sets, in a new job."""
    if process_set is None:
        _unnamed.clear()
        _joins[0] = 0
    else:
        _unnamed.pop(process_set, None)


def begin_again() -> None:
    """At the end of a join: what stands for names counts from 1, for joined ranks have not counted with the others.
    What goes between two ranks only does not travel while one of them has joined, so its numbers are the same still."""
    _joins[0] += 1
    for counts in _unnamed.values():
        for what in [what for what in counts if isinstance(what, str)]:
            del counts[what]


def joins() -> int:
    """How often all ranks have joined in this job: what they did before one by one, they may not have done alike."""
    return _joins[0]


def group_number(name: str | None, process_set: int = 0) -> int:
    """The number that the members of a group have in common: of its name, else of how many unnamed came before."""
    if name is not None:
        import hashlib  # loads OpenSSL, which few need

        return int.from_bytes(hashlib.blake2b(name.encode(), digest_size=8).digest(), "little") | 1 << 63
    return unnamed("group", process_set)
