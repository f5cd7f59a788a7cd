"""Checks that all ranks send the same gradients, and have the same parameters and the same optimizer state.

A comparison is a part of the round: every rank makes it, also one that skips the round, so no rank waits in vain. A
rank that has joined knows nothing of the others' rounds, so no rank requests another one when all have joined. Digests
travel as sums, to which ranks that have joined add zeros. Only where ranks differ does a list travel. `Agreement` looks
at what each round sends, `StartCheck` at what the ranks have.
"""

from __future__ import annotations

import gc
import json
import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import torch

from ... import _core, config
from ...errors import HvdMismatchError, is_outcome
from ...errors.codes import coded
from ...errors.user_warning import warn
from ...lifecycle.init import incarnations
from ...ops import Handle, Sum
from ...ops.arguments import full_name
from ...process_sets.process_set import ProcessSet
from ...process_sets.process_set import number_of as number_of_set
from ...training.consistency import differing_lists, mismatch
from ...training.digest import are_equal, number_of, summands, unaddressed
from ...training.same_data import SameData
from ..ops import plain
from .failed_backward import wait_for_all
from .gradient_memory import sum_of_bits


def warn_of_ddp(parameters: Iterable[torch.Tensor]) -> None:
    """A warning if a DistributedDataParallel of several ranks has one of these, and so averages the same gradients.

    Which of the two writes them last is chance. It leaves no mark on a module or on a parameter, and its hooks are the
    Reducer's, in C++. So a living one is looked for among all objects that the garbage collector knows: only in a
    process that has initialized torch.distributed, where that takes some 30 ms once per optimizer.
    """
    if not (torch.distributed.is_available() and torch.distributed.is_initialized()):
        return
    mine, ddp = set(map(id, parameters)), torch.nn.parallel.DistributedDataParallel
    found = (each for each in gc.get_objects() if issubclass(type(each), ddp) and each.process_group.size() > 1)
    if any(not mine.isdisjoint(map(id, each.parameters())) for each in found):
        warn(
            "hvdlite: torch's DistributedDataParallel and hvd.DistributedOptimizer both average these gradients, in no "
            "order: use one of them. Pass the model without DistributedDataParallel, or leave out "
            "hvd.DistributedOptimizer [HVD242]",
            RuntimeWarning,
        )


SETTING = "compression="
_LENGTH = len(summands(0)) + 1
_SHAPE = (0,) * 7  # of what ends the wait for a gradient that this rank does not know: no gradient has it


class Agreement:
    """The comparison in each round of what each rank sends. A signal handler may raise in any wait, which is repeated.

    A rank sends what is trainable on it, and that may differ: a layer is frozen on one rank for one step, or parameters
    were added on one rank only. A gradient that only some ranks send would be averaged with the others' of a later
    step. So a digest of what a rank sends travels in each round, as a sum of integers that shows whether all are equal;
    the same sum carries the number of ranks that ask for a `StartCheck`. Zeros are sent for what is frozen here and not
    everywhere, as in Horovod; what is frozen everywhere does not travel. A parameter that is not in the optimizer of
    every rank is an error on all of them, before the step.
    """

    def __init__(self, suffix: str, process_set: ProcessSet) -> None:
        self._suffix, self._process_set = suffix, process_set
        self._names = TextExchange("optimizer.names" + suffix, process_set)
        self._known: tuple[list[int], int, int, list[str]] | None = None
        self._request: _core.Request | None = None
        self._mine = torch.zeros((2, _LENGTH), dtype=torch.int64)  # what travels, and where the last number is 1
        self._sums = torch.zeros(_LENGTH, dtype=torch.int64)
        self._addresses = self._mine[0].data_ptr(), self._mine[1].data_ptr(), self._sums.data_ptr()
        self._equal: list[int] = []  # the sum in a round where all was equal and without a request
        self._pending: _core.Pending | None = None
        self._unknown: list[Handle] = []
        self.requested = False  # a rank requests a comparison in this round
        self.partly: list[str] = []  # parameters that some ranks only send in this round
        self.silent: list[int] = []  # parameters that no rank has sent in the round before
        self.counted = self.present = 0  # parameters that there were in it; ranks that have not joined
        self.incarnation = 0  # of the job that it was a round of
        self.setting: Callable[[], str] | None = None  # what else must be the same on all ranks

    def begun(self) -> bool:
        """Whether a digest is in flight."""
        return self.pending() != 0

    def pending(self) -> int:
        """The core's number of the digest in flight; 0: there is none."""
        return self._pending.native if self._pending is not None else 0

    def send(self, silent: list[int], names: Sequence[str], request: bool) -> None:
        """All but `silent` is in flight: send the digest."""
        settings = self._settings()
        known = silent, len(names), number_of_set(self._process_set), settings
        if self._known != known or self._request is None:
            left_out = set(silent)
            sent = sorted([name for n, name in enumerate(names) if n not in left_out] + settings)
            sums = summands(number_of(sent))
            self._mine.copy_(torch.tensor([[*sums, 0], [*sums, 1]]))
            self._request = _core.request(
                _core.ALLREDUCE, Sum, _core.DTYPES["int64"], full_name("allreduce.", "optimizer.round" + self._suffix),
                (_LENGTH,), process_set=known[2],
            )  # fmt: skip
            self._known, self._equal = known, []
        self.silent, self.counted, self.incarnation = silent, len(names), incarnations()
        self._pending = _core.Pending(self._request)  # known before it starts: a signal handler may raise right after
        self._pending.start(self._addresses[request], self._addresses[2], _core.QUIET, (self._mine, self._sums))

    def lacking(self, names: Sequence[str]) -> list[int]:
        """Parameters that other ranks send in this round and this one does not. HvdMismatchError, on all ranks, for one
        that a rank does not know; what was sent of it ends."""
        if not self.begun() or self._pending is None:  # it was looked at, and a signal handler raised later
            return []
        error = self._pending.ended()
        if error is not None:
            raise error
        sums = self._sums.tolist()
        self.present = sums[0]
        if sums == self._equal:
            return []
        self.requested = sums[-1] > 0
        if are_equal(sums[:-1]):
            self._equal = [] if self.requested else sums
            return []
        left_out = set(self.silent)
        sent = [name for number, name in enumerate(names) if number not in left_out] + self._settings()
        has = [*names, *self._settings()]
        everyone = [(rank, json.loads(text)) for rank, text in self._names.wait(json.dumps([sent, has]))]
        of_some = {name for _, (theirs, _) in everyone for name in theirs}
        self.partly = sorted(name for name in of_some if any(name not in theirs for _, (theirs, _) in everyone))
        unknown = sorted(name for name in of_some if any(name not in has for _, (_, has) in everyone))
        if unknown:
            self.counted = 0
            self._refuse(unknown, everyone, set(has))
        lacking = [number for number in self.silent if names[number] in of_some]
        self.silent = [number for number in self.silent if names[number] not in of_some]
        return lacking

    def _settings(self) -> list[str]:
        return [] if self.setting is None else [f"{SETTING}{self.setting()}"]

    def _refuse(self, unknown: list[str], everyone: list[tuple[int, list[list[str]]]], mine: set[str]) -> None:
        for name in unknown[len(self._unknown) :]:
            if name in mine or name.startswith(SETTING):  # ranks that have sent it wait for those that have not
                continue
            self._unknown.append(plain.allreduce_async_(torch.empty(_SHAPE), name=name, process_set=self._process_set))
        ranks, lists = [rank for rank, _ in everyone], [has for _, (_, has) in everyone]
        advice = "Wrap the same parameters, and call add_param_group with the same ones,"
        if any(name.startswith(SETTING) for name in unknown):
            advice = "Give the same compression and the same order of parameters, and load the same states,"
        text = differing_lists("DistributedOptimizer", lists, ranks, _shown, advice)
        raise mismatch("HVD301", text, lists, ranks)

    def close(self) -> None:
        """The round is over."""
        failure = wait_for_all(handle.wait for handle in self._unknown) if self._unknown else None
        if self._pending is not None:
            self._pending.release()
        self.requested, self.partly = False, []
        self._unknown.clear()
        self._names.close()
        if failure is not None:
            raise failure


def _shown(names: list[str]) -> str:
    return ", ".join(map(repr, names[:3])) + (f" and {len(names) - 3} more" if len(names) > 3 else "")


class TextExchange:
    """A text of each rank, sent to all. By sums, since ranks that have joined take part in those."""

    def __init__(self, name: str, process_set: ProcessSet) -> None:
        self._name, self._process_set = name, process_set
        self._lengths: Handle | None = None
        self._table: Handle | None = None

    def wait(self, text: str) -> list[tuple[int, str]]:
        """(rank, text) of all that have not joined; `text` is this rank's. May be called again until `close`."""
        data, size, position = text.encode(), self._process_set.size(), self._process_set.rank()
        if self._lengths is None:
            lengths = torch.zeros(size, dtype=torch.int64)
            lengths[position] = len(data)
            self._lengths = self._summed(lengths, ".lengths")
        every = self._lengths.wait().tolist()
        if self._table is None:
            table = torch.zeros((size, max(every)), dtype=torch.uint8)
            table[position, : len(data)] = torch.frombuffer(bytearray(data), dtype=torch.uint8)
            self._table = self._summed(table, "")
        rows = zip(self._process_set.ranks, every, self._table.wait())
        return [(rank, bytes(row[:length].tolist()).decode()) for rank, length, row in rows if length]

    def _summed(self, mine: torch.Tensor, more: str) -> Handle:
        return plain.allreduce_async_(mine, name=self._name + more, op=Sum, process_set=self._process_set)

    def close(self) -> None:
        """The texts are used."""
        self._lengths = self._table = None


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
    """The comparison of what the ranks of one optimizer have; it begins anew in each incarnation of the job.

    A broadcast that was forgotten, a checkpoint that one rank loads, and a list of parameters that is in another order
    on each rank show in nothing but the result. So the ranks compare a digest of their parameters, of the optimizer's
    state and of its groups' options in the rounds 1, 2, 4, 8 and so on, and after a rank has called add_param_group or
    load_state_dict. Where they differ:

    * Without named_parameters a gradient's name is its index in the optimizer. If two ranks have equal parameters, or
      shapes, at other indices, their averages would be of different parameters: that is an error before the step.
    * Ranks that still differ in the next round were not given the same values in between either: that is a warning, or
      an error (HVDLITE_CHECK_START), and the last comparison.

    The gradients of the first rounds are compared, too, before the average: equal ones mean equal data (`SameData`).
    """

    def __init__(self, suffix: str, process_set: ProcessSet) -> None:
        self._suffix, self._process_set = suffix, process_set
        self._incarnation, self._mode = 0, "off"
        self._born, self._joins = incarnations(), _core.joins()
        self.optimizer: weakref.ref[Any] | None = None  # its state is compared; None: each rank has its own
        self.data = SameData()
        self._rounds, self._requested = 0, False
        self._before: str | None = None  # how the ranks differed in the comparison before, if they did
        self._mine: dict[str, list[int]] = {}
        self._sums: Handle | None = None
        self._texts = TextExchange("optimizer.start.list" + suffix, process_set)

    def ask(self) -> None:
        """Something has changed on this rank: compare in the next round."""
        self._requested = True

    def begin(self, parameters: Sequence[torch.Tensor]) -> bool:
        """Once in each round: whether this rank requests a comparison."""
        self._renew()
        if self._rounds == 0 and self._mode != "off" and self._process_set.rank() == 0:
            warn_of_ddp(parameters)
        if self._joins != _core.joins():
            self._mode = "off"
        self._rounds += 1
        request, self._requested = self._requested, False
        due = request or self._before is not None or self._rounds & (self._rounds - 1) == 0
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
        """At the end of a round in which a rank has requested it. HvdMismatchError on all ranks. May be called again if
        a signal handler has raised."""
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
            texts = [] if are_equal(sums[:half]) else self._texts.wait(json.dumps(self._mine))
        except Exception as error:
            if is_outcome(error):  # else a signal handler's: the round is not over
                self._end()
            raise
        lists = [_List(rank, json.loads(digests)) for rank, digests in texts]
        first = self._process_set.rank() == 0
        self.data.step(self.data.number(), are_equal(sums[half:]), sums[half], first and self._mode != "off")
        self._end()
        if lists:
            _require_order(lists)
        self._judge(_difference(lists), lists)

    def _end(self) -> None:
        self._sums = None
        self._texts.close()

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
                    _bits(each) if each.requires_grad else 0,
                    number_of(_value(states[each])) if states.get(each) else 0,
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


def _bits(parameter: torch.Tensor) -> int:
    form = _value(parameter)
    return 0 if form[-1] is None else number_of(form)


def _value(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        bits = sum_of_bits(value)
        return tuple(value.shape), str(value.dtype), None if bits is None else int(bits)
    if isinstance(value, dict):
        return sorted((str(key), _value(each)) for key, each in value.items())
    if isinstance(value, (list, tuple)):
        return [_value(each) for each in value]
    return unaddressed(repr(value))


def _require_order(lists: list[_List]) -> None:
    """HvdMismatchError if parameters without names have other indices on other ranks."""
    names = [name for name in lists[0].digests if name.startswith(_UNNAMED)]
    names = [name for name in names if all(name in each.digests for each in lists)]
    first, *others = [[each.digests[name][:2] for name in names] for each in lists]
    for other, theirs in zip(lists[1:], others):
        moved = sorted(theirs) == sorted(first) or [form for form, _ in theirs] != [form for form, _ in first]
        if moved and theirs != first:
            at = next(position for position, (mine, its) in enumerate(zip(first, theirs)) if mine != its)
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
