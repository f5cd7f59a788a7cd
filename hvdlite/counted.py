"""What has the core done so far? `counters`: its own counts since init, the bytes and messages of its links among them.

The core keeps the list (csrc/engine/engine.h); a count that is added there is told here. Counts only grow, and begin
anew with each life of a job. They cost nothing to read: what is asked twice and subtracted is what a part of a script
has cost on this rank.
"""

from __future__ import annotations

from . import _core
from ._core import ffi, lib

_NAMES: list[str] = []
while (_name := lib.hvd_counter_name(len(_NAMES))) != ffi.NULL:
    _NAMES.append(_core.text_of(_name))


def counters() -> dict[str, int]:
    """How often the core has done what since init, on this rank.

    submits: tensors that were given to it; rounds: agreements; buckets, elements: what was moved, tensors that travel
    together being one; sleeps, turns_taken_by_waiters: of its thread, and in its stead; learned, deviations: rounds
    that were known by heart, and those that were not as expected; link_bytes_out, link_bytes_in, link_messages_out,
    link_messages_in: over links to other hosts, votes included, added when a bucket is done or a round decided; rides:
    buckets that travelled within the votes; exposed_ns, negotiation_ns, data_ns, optimizer_ns: times that hvd.stats()
    shows by step.
    Raises HvdNotInitializedError before init().
    """
    _core.size()
    return {name: int(lib.hvd_counter(index)) for index, name in enumerate(_NAMES)}
