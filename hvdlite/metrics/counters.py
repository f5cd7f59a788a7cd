"""Counters of the core since init, those of its links included.

The core keeps the list (csrc/engine/engine.h); a count that is added there is described here. Counts only grow, and
begin anew with each incarnation of a job. They cost nothing to read: the difference of two readings is what a part of a
script has cost on this rank.
"""

from __future__ import annotations

from .. import _core
from .._core import ffi, lib

_NAMES: list[str] = []
while (_name := lib.hvd_counter_name(len(_NAMES))) != ffi.NULL:
    _NAMES.append(_core.text_of(_name))


def counters() -> dict[str, int]:
    """Return how often the core has done what on this rank since ``init``.

    Counts only grow. The difference of two calls is the cost of what ran in between.

    ===========================================  ===========  ==========================================================
    Key                                          Unit         Meaning
    ===========================================  ===========  ==========================================================
    ``submits``                                  tensors      tensors that were submitted
    ``rounds``                                   rounds       agreements between the ranks
    ``buckets``                                  buckets      transfers; tensors that travel together are one bucket
    ``elements``                                 elements     elements in buckets
    ``sleeps``                                   times        the core's thread slept
    ``turns_taken_by_waiters``                   times        a waiting caller worked in place of that thread
    ``learned``                                  rounds       rounds whose content the core predicted
    ``deviations``                               rounds       rounds that were not as predicted
    ``link_bytes_out``, ``link_bytes_in``        bytes        over links to other hosts, votes included
    ``link_messages_out``, ``link_messages_in``  messages     over links to other hosts, votes included
    ``rides``                                    buckets      buckets that traveled within the votes
    ``exposed_ns``, ``negotiation_ns``           nanoseconds  as in ``hvd.stats``
    ``data_ns``, ``optimizer_ns``                nanoseconds  as in ``hvd.stats``
    ===========================================  ===========  ==========================================================

    Returns:
        dict of str to int: counts by name.

    Raises:
        HvdNotInitializedError: before ``init`` and after ``shutdown``. It is also a ``ValueError``.

    Example:
        >>> before = hvd.counters()["submits"]
        >>> _ = hvd.allreduce(np.array([1.0]))
        >>> hvd.counters()["submits"] - before
        1
    """
    _core.require_job()
    return {name: int(lib.hvd_counter(index)) for index, name in enumerate(_NAMES)}
