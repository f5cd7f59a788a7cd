"""Agreement of all ranks on the set of gradients that a round sends.

A rank sends what is trainable on it, and that may differ: a layer is frozen on one rank for one step, or parameters
were added on one rank only. A gradient that only some ranks send would be averaged with the others' of a later step.

So a digest of what a rank sends travels in each round, as a sum of integers that shows whether all are equal. Where
they are not, the ranks tell each other the names. Zeros are sent for what is frozen here and not everywhere, as in
Horovod; what is frozen everywhere does not travel. A parameter that is not in the optimizer of every rank is an error
on all of them, before the step.

The same sum carries the number of ranks that ask for a comparison of their states (`start`). Ranks that have joined add
zeros to all sums.
"""

from __future__ import annotations

import json
from collections.abc import Sequence

import torch

from ... import _core
from ...ops import Handle, Sum
from ...ops.arguments import full_name
from ...process_sets.process_set import ProcessSet, number_of
from ...training.consistency import differing_lists, mismatch
from ...training.digest import are_equal, summands
from ...training.digest import number_of as digest_of
from ..ops import plain
from .failed_backward import land_all

_LENGTH = len(summands(0)) + 1
_SHAPE = (0,) * 7  # of what ends the wait for a gradient that this rank does not know: no gradient has it


class Agreement:
    """The comparison in each round of one optimizer. A signal handler may raise in any wait, which is then repeated."""

    def __init__(self, suffix: str, process_set: ProcessSet) -> None:
        self._suffix, self._process_set = suffix, process_set
        self._names = Told("optimizer.names" + suffix, process_set)
        self._known: tuple[list[int], int, int] | None = None
        self._request: _core.Request | None = None
        self._mine = torch.zeros((2, _LENGTH), dtype=torch.int64)  # what travels, and where the last number is 1
        self._sums = torch.zeros(_LENGTH, dtype=torch.int64)
        self._addresses = self._mine[0].data_ptr(), self._mine[1].data_ptr(), self._sums.data_ptr()
        self._equal: list[int] = []  # the sum in a round where all was equal and no rank asked
        self._pending: _core.Pending | None = None
        self._unknown: list[Handle] = []
        self.asked = False  # a rank asks for a comparison in this round
        self.partly: list[str] = []  # parameters that some ranks only send in this round
        self.silent: list[int] = []  # parameters that no rank has sent in the round before

    def begun(self) -> bool:
        """Whether a digest is under way."""
        return self._pending is not None and self._pending.native != 0

    def send(self, silent: list[int], names: Sequence[str], asks: bool) -> None:
        """All but `silent` is under way: send the digest."""
        known = silent, len(names), number_of(self._process_set)
        if self._known != known or self._request is None:
            left_out = set(silent)
            sums = summands(digest_of(sorted(name for n, name in enumerate(names) if n not in left_out)))
            self._mine.copy_(torch.tensor([[*sums, 0], [*sums, 1]]))
            self._request = _core.request(
                _core.ALLREDUCE, Sum, _core.DTYPES["int64"], full_name("allreduce.", "optimizer.round" + self._suffix),
                (_LENGTH,), process_set=known[2],
            )  # fmt: skip
            self._known, self._equal = known, []
        self.silent = silent
        self._pending = _core.Pending(self._request)  # known before it starts: a signal handler may raise right after
        self._pending.start(self._addresses[asks], self._addresses[2], _core.QUIET, (self._mine, self._sums))

    def lacking(self, names: Sequence[str]) -> list[int]:
        """Parameters that other ranks send in this round and this one does not. HvdMismatchError, on all ranks, for one
        that a rank does not know; what was sent of it ends."""
        if not self.begun() or self._pending is None:  # it was looked at, and a signal handler raised later
            return []
        error = self._pending.ended()
        if error is not None:
            raise error
        sums = self._sums.tolist()
        if sums == self._equal:
            return []
        self.asked = sums[-1] > 0
        if are_equal(sums[:-1]):
            self._equal = [] if self.asked else sums
            return []
        left_out = set(self.silent)
        sent = [name for number, name in enumerate(names) if number not in left_out]
        everyone = [(rank, json.loads(said)) for rank, said in self._names.wait(json.dumps([sent, list(names)]))]
        of_some = {name for _, (theirs, _) in everyone for name in theirs}
        self.partly = sorted(name for name in of_some if any(name not in theirs for _, (theirs, _) in everyone))
        unknown = sorted(name for name in of_some if any(name not in has for _, (_, has) in everyone))
        if unknown:
            self._refuse(unknown, everyone, set(names))
        lacking = [number for number in self.silent if names[number] in of_some]
        self.silent = [number for number in self.silent if names[number] not in of_some]
        return lacking

    def _refuse(self, unknown: list[str], everyone: list[tuple[int, list[list[str]]]], mine: set[str]) -> None:
        for name in unknown[len(self._unknown) :]:
            if name in mine:  # who has sent it waits for those who have not
                continue
            self._unknown.append(plain.allreduce_async_(torch.empty(_SHAPE), name=name, process_set=self._process_set))
        ranks, lists = [rank for rank, _ in everyone], [has for _, (_, has) in everyone]
        advice = "Wrap the same parameters, and call add_param_group with the same ones,"
        text = differing_lists("DistributedOptimizer", lists, ranks, _shown, advice)
        raise mismatch("HVD301", text, lists, ranks)

    def close(self) -> None:
        """The round is over."""
        failure = land_all(handle.wait for handle in self._unknown) if self._unknown else None
        if self._pending is not None:
            self._pending.release()
        self.asked, self.partly = False, []
        self._unknown.clear()
        self._names.close()
        if failure is not None:
            raise failure


def _shown(names: list[str]) -> str:
    return ", ".join(map(repr, names[:3])) + (f" and {len(names) - 3} more" if len(names) > 3 else "")


class Told:
    """A text of each rank, told to all. Sums, since ranks that have joined take part in those."""

    def __init__(self, name: str, process_set: ProcessSet) -> None:
        self._name, self._process_set = name, process_set
        self._lengths: Handle | None = None
        self._table: Handle | None = None

    def wait(self, text: str) -> list[tuple[int, str]]:
        """(rank, text) of all that have not joined; `text` is this rank's. May be called again until `close`."""
        said, size, place = text.encode(), self._process_set.size(), self._process_set.rank()
        if self._lengths is None:
            lengths = torch.zeros(size, dtype=torch.int64)
            lengths[place] = len(said)
            self._lengths = self._summed(lengths, ".lengths")
        every = self._lengths.wait().tolist()
        if self._table is None:
            table = torch.zeros((size, max(every)), dtype=torch.uint8)
            table[place, : len(said)] = torch.frombuffer(bytearray(said), dtype=torch.uint8)
            self._table = self._summed(table, "")
        rows = zip(self._process_set.ranks, every, self._table.wait())
        return [(rank, bytes(row[:length].tolist()).decode()) for rank, length, row in rows if length]

    def _summed(self, mine: torch.Tensor, more: str) -> Handle:
        return plain.allreduce_async_(mine, name=self._name + more, op=Sum, process_set=self._process_set)

    def close(self) -> None:
        """What was told is used."""
        self._lengths = self._table = None
