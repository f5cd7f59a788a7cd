"""Check that ranks have the same parameters, in the same order, and the same optimizer state.

A broadcast that was forgotten, a checkpoint that one rank loads, and a list of parameters that is in another order on
each rank show in nothing but the result. So in some rounds the ranks compare a digest of their parameters, of the
optimizer's state and of its groups' options: in the rounds 1, 2, 4, 8 and so on, and after a rank has called
add_param_group or load_state_dict. Where they differ:

* Without named_parameters a gradient's name is its index in the optimizer. If two ranks have equal parameters, or
  shapes, at other indices, their averages would be of different parameters: that is an error before the step.
* Ranks that still differ in the next round were not given the same values in between either: that is a warning, or an
  error (HVDLITE_CHECK_START), and the last comparison.

The gradients of the first rounds are compared, too, before the average: equal ones mean equal data (`_same_data`).

The comparison is a part of the round: every rank makes it, also one that skips the round, so no rank waits in vain. A
rank that has joined knows nothing of the others' rounds, so no rank asks for another one when all have joined. Digests
travel as a sum, to which ranks that have joined add zeros. Only where ranks differ does a list travel.
"""

from __future__ import annotations

import json
import weakref
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from ... import _core, config
from ...errors import HvdMismatchError, is_outcome
from ...errors.codes import coded
from ...errors.user_warning import warn
from ...lifecycle.init import incarnations
from ...ops import Handle, Sum
from ...process_sets.process_set import ProcessSet
from ...training.digest import are_equal, number_of, summands, unaddressed
from ...training.same_data import SameData
from .. import storage_check
from ..ops import plain
from .agreement import Told
from .ddp_check import warn_of_ddp

_UNNAMED = "noname."
_OF_SPEED = ("params", "param_names", "foreach", "fused", "capturable", "differentiable")  # they change no result
_ORDER = (
    "the ranks' parameters come in different orders: {name!r} (group.index) of rank {other} is not that of rank "
    "{first}, so that gradients of different parameters would be averaged. Give hvd.DistributedOptimizer "
    "named_parameters=model.named_parameters(), or the parameters in the same order on all ranks"
)
_VALUES = (
    "parameter {name!r} on rank{s} {others} is not what rank {first} has: the ranks train different models. Call "
    "hvd.broadcast_parameters(model.state_dict(), root_rank=0) or hvd.broadcast_state before the first step, and after "
    "a rank has loaded a checkpoint; if ranks differ on purpose, set HVDLITE_CHECK_START=off"
)
_STATE = (
    "the optimizer's state of parameter {name!r} on rank{s} {others} is not what rank {first} has, so the ranks' "
    "weights drift apart. Call hvd.broadcast_optimizer_state(optimizer, root_rank=0) or hvd.broadcast_state before the "
    "first step, and after a rank has loaded a checkpoint; if ranks differ on purpose, set HVDLITE_CHECK_START=off"
)
_OPTIONS = (
    "the optimizer's options, such as lr, of {name} on rank{s} {others} are not what rank {first} has, so the ranks' "
    "weights drift apart. Set them on all ranks alike, also by a scheduler, or call "
    "hvd.broadcast_optimizer_state(optimizer, root_rank=0) after a rank has set them; if ranks differ on purpose, set "
    "HVDLITE_CHECK_START=off"
)


class StartCheck:
    """The comparison among the ranks of one optimizer; it begins anew in each incarnation of the job."""

    def __init__(self, suffix: str, process_set: ProcessSet) -> None:
        self._suffix, self._process_set = suffix, process_set
        self._incarnation, self._mode = 0, "off"
        self._born, self._joins = incarnations(), _core.joins()
        self.optimizer: weakref.ref[Any] | None = None  # its state is compared; None: each rank has its own
        self.data = SameData()
        self._rounds, self._asks = 0, False
        self._before: str | None = None  # how the ranks differed in the comparison before, if they did
        self._mine: dict[str, list[int]] = {}
        self._sums: Handle | None = None
        self._told = Told("optimizer.start.list" + suffix, process_set)

    def ask(self) -> None:
        """Something has changed on this rank: compare in the next round."""
        self._asks = True

    def begin(self, parameters: Sequence[torch.Tensor]) -> bool:
        """Once in each round: whether this rank asks for a comparison."""
        self._renew()
        if self._rounds == 0 and self._mode != "off" and self._process_set.rank() == 0:
            warn_of_ddp(parameters)
        if self._joins != _core.joins():
            self._mode = "off"
        self._rounds += 1
        asks, self._asks = self._asks, False
        due = asks or self._before is not None or self._rounds & (self._rounds - 1) == 0
        return due and self._mode != "off"

    def _renew(self) -> None:
        """What the job before has left is forgotten."""
        if self._incarnation != incarnations():
            self._incarnation, self._mode = incarnations(), config.load().values["check_start"]
            self._rounds, self._before, self.data = 0, None, SameData()
            self._joins = self._joins if self._born == self._incarnation else 0

    def looks_at_data(self) -> bool:
        """Whether `data` needs this round's gradients."""
        if not self.data.looks():
            return False
        self._renew()
        return self._mode != "off"

    def compare(self, parameters: Sequence[torch.Tensor], names: Sequence[str]) -> None:
        """At the end of a round in which a rank has asked. HvdMismatchError on all ranks. May be called again if a
        signal handler has raised."""
        try:
            if self._sums is None:
                self._mine = self._digests(parameters, names)
                numbers = [number_of(sorted(self._mine.items())), self.data.number()]
                sums = torch.tensor([each for number in numbers for each in summands(number)])
                self._sums = plain.allreduce_async_(
                    sums, name="optimizer.start" + self._suffix, op=Sum, process_set=self._process_set
                )
            sums = self._sums.wait().tolist()
            half = len(sums) // 2
            told = [] if are_equal(sums[:half]) else self._told.wait(json.dumps(self._mine))
        except Exception as error:
            if is_outcome(error):  # else a signal handler's: the round is not over
                self._end()
            raise
        lists = [_List(rank, json.loads(digests)) for rank, digests in told]
        first = self._process_set.rank() == 0
        self.data.step(self.data.number(), are_equal(sums[half:]), sums[half], first and self._mode != "off")
        self._end()
        if lists:
            _require_order(lists)
        self._judge(_difference(lists), lists)

    def _end(self) -> None:
        self._sums = None
        self._told.close()

    def _judge(self, differs: str | None, lists: list[_List]) -> None:
        """Twice in a row is no accident."""
        before, self._before = self._before, differs
        if before is None or differs is None:
            return
        mode, self._mode, self._before = self._mode, "off", None
        if mode == "raise":
            raise HvdMismatchError(coded("HVD302", before))
        if mode == "warn" and lists[0].rank == self._process_set.ranks[self._process_set.rank()]:
            warn(coded("HVD302", f"hvdlite: {before}"), RuntimeWarning)

    def _digests(self, parameters: Sequence[torch.Tensor], names: Sequence[str]) -> dict[str, list[int]]:
        """As a _List has them. What is frozen may differ: there is no broadcast of it in many scripts."""
        optimizer = None if self.optimizer is None else self.optimizer()
        states = {} if optimizer is None else optimizer.state
        with torch.no_grad():
            mine = {
                name: [
                    number_of((tuple(each.shape), str(each.dtype))),
                    (_bits(each) if each.requires_grad else None) or 0,
                    _state(states[each]) if each in states else 0,
                ]
                for name, each in sorted(zip(names, parameters), key=lambda pair: pair[0])
            }
            for number, group in enumerate([] if optimizer is None else optimizer.param_groups):
                options = {key: _value(value) for key, value in group.items() if key not in _OF_SPEED}
                mine[f"group {number}"] = [0, 0, number_of(sorted(options.items()))]
        return mine


class _List(NamedTuple):
    """A rank, and of each of its parameters digests of its form, of its form and bits, and of its state; of each group
    of its options. 0: there is none."""

    rank: int
    digests: dict[str, list[int]]


def _bits(parameter: torch.Tensor) -> int | None:
    bits = sum_of_bits(parameter)
    return None if bits is None else number_of((tuple(parameter.shape), str(parameter.dtype), int(bits)))


def _state(state: Any) -> int:
    """Of what an optimizer has of one parameter; 0 for nothing."""
    return number_of(_value(state)) if state else 0


def _value(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        bits = sum_of_bits(value)
        return tuple(value.shape), str(value.dtype), None if bits is None else int(bits)
    if isinstance(value, dict):
        return sorted((str(key), _value(each)) for key, each in value.items())
    if isinstance(value, (list, tuple)):
        return [_value(each) for each in value]
    return unaddressed(repr(value))


def sum_of_bits(tensor: torch.Tensor) -> torch.Tensor | None:
    """The sum of its memory as 64-bit numbers, where it lies: as fast as memory is. None: it has no memory."""
    tensor = storage_check.bare(tensor).detach()
    if tensor.layout is not torch.strided or tensor.is_meta or not storage_check.fits(tensor, tensor.data_ptr()):
        return None
    octets = tensor.resolve_conj().resolve_neg().contiguous().view(-1).view(torch.uint8)
    whole = octets.numel() // 8 * 8
    if octets.storage_offset() % 8 or whole < octets.numel():
        octets = torch.nn.functional.pad(octets, (0, -octets.numel() % 8))
    return octets.view(torch.int64).sum()


def _require_order(lists: list[_List]) -> None:
    """HvdMismatchError if parameters without names have other indices on other ranks."""
    names = [name for name in lists[0].digests if name.startswith(_UNNAMED)]
    names = [name for name in names if all(name in each.digests for each in lists)]
    first, *others = [[each.digests[name][:2] for name in names] for each in lists]
    for other, theirs in zip(lists[1:], others):
        moved = sorted(theirs) == sorted(first) or [form for form, _ in theirs] != [form for form, _ in first]
        if moved and theirs != first:
            at = next(place for place, (mine, its) in enumerate(zip(first, theirs)) if mine != its)
            name = names[at].removeprefix(_UNNAMED).partition("#")[0]
            text = _ORDER.format(name=name, other=other.rank, first=lists[0].rank)
            raise HvdMismatchError(coded("HVD302", text))


def _difference(lists: list[_List]) -> str | None:
    """The text about the first parameter whose bits differ, else the first whose state does, else a group."""
    for column in (1, 2):
        for name in lists[0].digests if lists else ():
            found = [(each.rank, each.digests[name][column]) for each in lists if name in each.digests]
            known = [(rank, one) for rank, one in found if one or column == 2]
            others = [str(rank) for rank, one in known if one != known[0][1]]
            if others:
                text = _VALUES if column == 1 else _OPTIONS if name.startswith("group ") else _STATE
                count = "s" * (len(others) > 1)
                return text.format(name=name, s=count, others=", ".join(others), first=known[0][0])
    return None
