"""Check that all ranks have the same list of tensors, before tensors are sent by their index in it.

Where an optimizer is built on one rank only, its list of variables is longer there; where a layer is frozen on one rank
only, its list of gradients is shorter. The collectives of the others would wait for ever for names that no other rank
has. So before a list goes an allreduce of no elements, under one name, whose shape says how long the list is and what
is in it: the core compares shapes anyway. Only if they differ do all ranks exchange their lists, and all raise the same
error; where they cannot, since another rank has joined, each shows its own. Nodes of a graph do the same
(csrc/tensorflow/list_mismatch.c), and a rank that runs eagerly is matched with one that does not.
"""

from __future__ import annotations

import os
import zlib
from collections.abc import Sequence
from typing import NamedTuple

from .. import _core
from .._core.byte_exchange import allgather_bytes
from ..errors import HvdArgumentError, HvdMismatchError
from ..errors.codes import coded
from ..ops import Sum
from ..process_sets.process_set import ProcessSet, global_process_set, number_of
from ..training.consistency import mismatch

_SHOWN, _SHOWN_LETTERS = 4, 200  # as in list_mismatch.c
SAME_VARIABLES = (
    "Make the same variables on all ranks before they are sent: build the model and the optimizer "
    "(optimizer.build(model.trainable_variables)) on all of them."
)
SAME_GRADIENTS = (
    "Average the same gradients on all ranks: make and freeze (trainable=False) the same variables, in the same order, "
    "and let no rank alone have a gradient that is None."
)


class Listed(NamedTuple):
    """A list: whose it is, how many of it travel, what must be the same on all ranks, what errors show, a remedy."""

    what: str
    travel: int
    noun: str
    compared: Sequence[str]
    entries: Sequence[str]
    remedy: str

    @property
    def name(self) -> str:
        """Of the allreduce."""
        return f"allreduce.{self.what}.list"

    @property
    def shape(self) -> tuple[int, int, int]:
        """Of the allreduce: no elements, and different where lists differ."""
        return 0, self.travel, zlib.crc32("\n".join(self.compared).encode()) & 0x7FFFFFFF

    def text(self) -> str:
        """What is exchanged: a line that says whose list it is, a line for each entry."""
        begin = f"rank {_core.rank()}: {self.travel} {self.noun}"
        return "\n".join([begin, *(entry.replace("\n", " ") for entry in self.entries)])


def compare(listed: Listed, process_set: ProcessSet = global_process_set) -> None:
    """HvdMismatchError on all ranks of the set if their lists are not the same. Blocks."""
    if not process_set.included() or process_set.size() == 1:
        return
    number = number_of(process_set)
    pending = _core.submit(
        _core.ALLREDUCE, Sum, _core.DTYPES["float32"], listed.name, listed.shape, 0, 0, None, process_set=number
    )
    try:
        pending.wait()
    except HvdMismatchError:
        name = listed.name.replace("allreduce.", "allgather.", 1) + ".names"
        try:
            texts = [each.decode(errors="replace") for each in allgather_bytes(listed.text().encode(), name, number)]
        except (HvdArgumentError, HvdMismatchError) as error:  # a rank has joined: there is no allgather
            raise HvdMismatchError(coded("HVD305", _differ(listed, [listed.text()], str(error)))) from None
        lists = [text.partition(": ")[2] for text in texts]
        raise mismatch("HVD305", _differ(listed, texts), lists, process_set.ranks) from None
    pending.release()


def _differ(listed: Listed, texts: Sequence[str], silent: str = "") -> str:
    """What ranks have, by their texts; `silent`: why the others have none."""
    lists: dict[str, str] = {}
    for text in texts:
        rank, _, rest = text.partition(": ")
        lists.setdefault(rest, rank)
    shown = {rank: rest.split("\n") for rest, rank in list(lists.items())[:_SHOWN]}
    same = len(os.path.commonprefix([entries[1:] for entries in shown.values()])) if len(shown) > 1 else 0
    lines = []
    for rank, (begin, *entries) in shown.items():
        names = ", ".join(["..."][: same and 1] + entries[same:])
        lines.append(f"\n  {rank}: {begin} ({names[:_SHOWN_LETTERS]}{', ...' if len(names) > _SHOWN_LETTERS else ''})")
    others = len(texts) - len(shown)
    more = f"\n  and {others} other rank{'s'[: others > 1]}" if others else ""
    more += f"\n  the lists of the other ranks are not available: {silent}" if silent else ""
    name = listed.name.removeprefix("allreduce.")
    return f"rank {_core.rank()}: tensor '{name}': ranks have different lists:{''.join(lines)}{more}\n{listed.remedy}"


__all__ = ["SAME_GRADIENTS", "SAME_VARIABLES", "Listed", "compare"]
