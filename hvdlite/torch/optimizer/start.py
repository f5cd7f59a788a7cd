"""Do an optimizer's ranks start from the same parameters, in the same order?

A broadcast that was forgotten, and a list of parameters that is in another order on each rank, show in nothing but the
result. So in an optimizer's first round each rank sends a digest of its parameters beside the gradients. As a rule they
are equal, and no later round has a check. Else:

* Without named_parameters a gradient's name is its place in the optimizer. If two ranks have equal parameters, or
  shapes, in other places, their averages would be of different parameters: that is an error before the first step.
* Ranks that still differ in the second round were not given the same values in between either: that is a warning, or
  an error (HVDLITE_CHECK_START). What is equal at first is not compared again: other hardware may round differently.

The digest is a part of the round: every rank sends it, also one that skips the round, so no rank waits in vain. A rank
that has joined knows nothing of the others' rounds, so the check is over for all when all have joined.
Digests travel as a sum, to which ranks that have joined add zeros. Only where ranks differ does a list with a digest of
each parameter travel.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import NamedTuple

import torch

from ... import _core, config
from ..._coded import coded
from ..._digests import are_equal, digest, summands
from ..._life import lives
from ...errors import HvdMismatchError, is_outcome
from ...ops import Handle, Sum
from ...process_set import ProcessSet
from .. import owned
from ..ops import plain
from .twice import warn_of_ddp

_UNNAMED = "noname."
_ORDER = (
    "the ranks' parameters come in different orders: {name!r} (group.index) of rank {other} is not that of rank "
    "{first}, so that gradients of different parameters would be averaged. Give hvd.DistributedOptimizer "
    "named_parameters=model.named_parameters(), or the parameters in the same order on all ranks"
)
_VALUES = (
    "parameter {name!r} on rank{s} {others} is not what rank {first} has: the ranks train different models. Call "
    "hvd.broadcast_parameters(model.state_dict(), root_rank=0) or hvd.broadcast_state before the first step; if ranks "
    "differ on purpose, set HVDLITE_CHECK_START=off"
)


class StartCheck:
    """The comparison among the ranks of one optimizer; it begins anew in each life of the job."""

    def __init__(self, suffix: str, process_set: ProcessSet) -> None:
        self._suffix, self._process_set = suffix, process_set
        self._life, self._mode = 0, "off"
        self._born, self._joins = lives(), _core.joins()
        self._differed = False  # in the round before
        self._sent: Handle | None = None
        self._lengths: Handle | None = None
        self._listed: Handle | None = None
        self._unnamed = False
        self._names: list[str] = []
        self._mine: list[list[int]] = []

    def send(self, parameters: Sequence[torch.Tensor], names: Sequence[str]) -> None:
        """Part of sending a round; the first call in it sends the digest, if there is something to compare."""
        if self._life != lives():
            self._life, self._mode = lives(), config.load().values["check_start"]
            self._differed, self._sent, self._lengths, self._listed = False, None, None, None
            self._joins = self._joins if self._born == self._life else 0
            if self._mode != "off" and self._process_set.rank() == 0:
                warn_of_ddp(parameters)
        if self._joins != _core.joins():
            self._mode = "off"
        if self._mode == "off" or self._sent is not None:
            return
        self._unnamed = any(name.startswith(_UNNAMED) for name in names)
        pairs = sorted((pair for pair in zip(names, parameters) if pair[1].requires_grad), key=lambda pair: pair[0])
        self._names, self._mine = [name for name, _ in pairs], _digests_of([each for _, each in pairs])
        self._sent = self._summed(torch.tensor(summands(_number(self._mine))), "start")

    def close(self) -> None:
        """The round is over. Raises HvdMismatchError, on all ranks."""
        if self._sent is None:
            return
        try:
            equal = are_equal(self._sent.wait().tolist())
            lists = [] if equal else self._lists()
        except Exception as error:
            if is_outcome(error):  # else a signal handler's: the round is not over
                self._sent = self._lengths = self._listed = None
            raise
        before, self._differed = self._differed, not equal
        self._sent = self._lengths = self._listed = None
        if lists:
            _require_order(self._names, lists)  # and in the next round, too
        if equal or before:
            mode, self._mode = self._mode, "off"
            said = _difference(self._names, lists)
            if said is not None and mode == "raise":
                raise HvdMismatchError(coded("HVD302", said))
            if said is not None and lists[0].rank == self._process_set.ranks[self._process_set.rank()]:
                warnings.warn(coded("HVD302", f"hvdlite: {said}"), RuntimeWarning, stacklevel=2)

    def _summed(self, mine: torch.Tensor, name: str) -> Handle:
        name = f"optimizer.{name}{self._suffix}"
        return plain.allreduce_async_(mine, name=name, op=Sum, process_set=self._process_set)

    def _lists(self) -> list[_List]:
        """What the ranks have that have not joined, where it matters in this round and is of one length; waits."""
        if not self._differed and not self._unnamed:
            return []
        size = self._process_set.size()
        if self._lengths is None:
            lengths = torch.zeros(size, dtype=torch.int64)
            lengths[self._process_set.rank()] = 1 + len(self._names)
            self._lengths = self._summed(lengths, "start.lengths")
        if len({length for length in self._lengths.wait().tolist() if length}) > 1 or not self._names:
            return []
        if self._listed is None:
            table = torch.zeros((size, len(self._names), 2), dtype=torch.int64)
            table[self._process_set.rank()] = torch.tensor(self._mine)
            self._listed = self._summed(table, "start.list")
        everyone = zip(self._process_set.ranks, self._listed.wait().tolist())
        return [_List(rank, theirs) for rank, theirs in everyone if theirs[0][0] != 0]


class _List(NamedTuple):
    """A rank, and of each of its parameters a digest of its form, and one of its form and bits: 0 if it has none."""

    rank: int
    digests: list[list[int]]


def _number(what: object) -> int:
    """The same for what shows alike; not 0."""
    return int.from_bytes(digest([repr(what).encode()])[:8], "little") >> 1 | 1


def _digests_of(parameters: Sequence[torch.Tensor]) -> list[list[int]]:
    """As a _List has them."""
    with torch.no_grad():
        sums = [sum_of_bits(each) for each in parameters]
    forms = [(tuple(each.shape), str(each.dtype)) for each in parameters]
    return [[_number(form), 0 if bits is None else _number((form, int(bits)))] for form, bits in zip(forms, sums)]


def sum_of_bits(tensor: torch.Tensor) -> torch.Tensor | None:
    """The sum of its memory as 64-bit numbers, where it lies: as fast as memory is. None: it has no memory."""
    tensor = owned.bare(tensor).detach()
    if tensor.layout is not torch.strided or tensor.is_meta or not owned.fits(tensor, tensor.data_ptr()):
        return None
    octets = tensor.resolve_conj().resolve_neg().contiguous().view(-1).view(torch.uint8)
    whole = octets.numel() // 8 * 8
    if octets.storage_offset() % 8 or whole < octets.numel():
        octets = torch.nn.functional.pad(octets, (0, -octets.numel() % 8))
    return octets.view(torch.int64).sum()


def _require_order(names: list[str], lists: list[_List]) -> None:
    """HvdMismatchError if parameters that are known by their place alone are in other places elsewhere."""
    places = [number for number, name in enumerate(names) if name.startswith(_UNNAMED)]
    first, *others = [[each.digests[place] for place in places] for each in lists]
    for other, theirs in zip(lists[1:], others):
        moved = sorted(theirs) == sorted(first) or [form for form, _ in theirs] != [form for form, _ in first]
        if moved and theirs != first:
            at = next(place for place, mine, its in zip(places, first, theirs) if mine != its)
            name = names[at].removeprefix(_UNNAMED).partition("#")[0]
            text = _ORDER.format(name=name, other=other.rank, first=lists[0].rank)
            raise HvdMismatchError(coded("HVD302", text))


def _difference(names: list[str], lists: list[_List]) -> str | None:
    """What to say of the first parameter whose bits differ."""
    for number, name in enumerate(names):
        bits = [(each.rank, each.digests[number][1]) for each in lists]
        known = [(rank, one) for rank, one in bits if one]
        others = [str(rank) for rank, one in known if one != known[0][1]]
        if others:
            many = "s" * (len(others) > 1)
            return _VALUES.format(name=name, s=many, others=", ".join(others), first=known[0][0])
    return None
