"""Edge between two stages: tensors are sent by name, after a message with their shapes.

What a stage gives the next one are tensors in some form (structure.py). What they look like travels ahead in a
message of a fixed size: before the first micro-batch of each step, before every micro-batch (shapes="each"), or once. A
name says the stages, the direction, the tensor and a place in a window of micro-batches; so names come again, as the
core likes it, and are the same on both sides whatever each does in between. A send waits for its own receive and for
nothing else: no order of sends and receives can deadlock.

What is sent must not change before it has left: the runner gives copies, which no layer knows. A gradient that does
not exist travels as such, in a message of flags: zeros would let momentum and weight decay move weights.

A receive that is posted early lets the tensor arrive while this stage still computes.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

import hvdlite.torch as hvd

from .structure import taken_apart

_DTYPES = (
    torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.int64, torch.int32, torch.int16, torch.int8,
    torch.uint8, torch.bool,
)  # fmt: skip
_TENSORS, _DIMS, _FORM = 8, 8, 1024  # at most in one output; bytes of its form as JSON
_ROW = 3 + _DIMS
_ROWS = 2 + _TENSORS * _ROW
_WORDS = _ROWS + _FORM // 8


class Look(NamedTuple):
    """What a tensor looks like; tracked: whether a gradient comes back for it."""

    dtype: torch.dtype
    tracked: bool
    shape: tuple[int, ...]


class Output(NamedTuple):
    """What a stage gives: copies of its tensors, and their form as JSON, padded with blanks."""

    tensors: list[torch.Tensor]
    form: bytes


def looks_of(tensors: Sequence[torch.Tensor]) -> list[Look]:
    return [Look(t.dtype, t.requires_grad, tuple(t.shape)) for t in tensors]


def _written(looks: list[Look], form: bytes, count: int) -> torch.Tensor:
    """As a message; count: how many micro-batches the mini-batch has."""
    message = torch.zeros(_WORDS, dtype=torch.int64)
    message[_ROWS:] = torch.frombuffer(bytearray(form), dtype=torch.int64)
    message[0], message[1] = len(looks), count
    for i, (dtype, tracked, shape) in enumerate(looks):
        row = torch.tensor([_DTYPES.index(dtype), int(tracked), len(shape), *shape])
        message[2 + i * _ROW : 2 + i * _ROW + len(row)] = row
    return message


def _read(message: torch.Tensor) -> tuple[list[Look], Any, int]:
    rows = message[2:_ROWS].view(_TENSORS, _ROW)[: int(message[0])].tolist()
    looks = [Look(_DTYPES[row[0]], bool(row[1]), tuple(row[3 : 3 + row[2]])) for row in rows]
    return looks, json.loads(message[_ROWS:].numpy().tobytes()), int(message[1])


class Edge:
    """To one neighbour.

    name: of the two stages, "pipe.0-1". peer: its global rank. group: a set that both are in. window: how many
    micro-batches may be in flight. every: after how many micro-batches shapes are sent anew; None: once. device: where
    what arrives lies.
    """

    def __init__(
        self, name: str, peer: int, group: hvd.ProcessSet, window: int, every: int | None, timeout: float | None,
        device: torch.device
    ) -> None:  # fmt: skip
        self.name, self.peer, self.group, self.window = name, peer, group, window
        self.every, self.timeout, self.device = every, timeout, device
        self._forms: tuple[int, list[Look], bytes] | None = None  # by number of the message
        self._received: tuple[int, list[Look], Any, int] | None = None
        self._sent: dict[str, Any] = {}  # handles, by name
        self._posted: dict[tuple[str, int], list[Any]] = {}

    def _message(self, k: int) -> int:
        """The number of the message with the shapes of micro-batch k."""
        return 0 if self.every is None else k // self.every

    def _name(self, what: str, k: int) -> str:
        return f"{self.name}.{what}.mb{k % self.window}"

    def _send(self, name: str, tensor: torch.Tensor) -> None:
        for other, handle in list(self._sent.items()):
            if other == name or hvd.poll(handle):  # the same place in the window, one window ago; or over: let it go
                hvd.synchronize(self._sent.pop(other), timeout=self.timeout)
        self._sent[name] = hvd.send_async(tensor, self.peer, name=name, process_set=self.group)

    def _receive(self, name: str, shape: tuple[int, ...], dtype: torch.dtype, device: Any) -> Any:
        tensor = torch.empty(shape, dtype=dtype, device=device)
        return hvd.recv_async(tensor, self.peer, name=name, process_set=self.group)

    def copies(self, out: Any) -> Output:
        """A forward's output, which its layers do not know: they may change theirs while it is in flight. ValueError
        for what cannot travel."""
        try:
            tensors, form = taken_apart(out)
        except TypeError as error:
            raise ValueError(
                f"{self.name}: the output has a value of type {error}: return tensors, plain values, and tuples, "
                "lists or dictionaries of them from a stage [HVD014]"
            ) from None
        written = json.dumps(form).encode().ljust(_FORM)
        if len(tensors) > _TENSORS or len(written) > _FORM:
            raise ValueError(
                f"{self.name}: an output has {len(tensors)} tensors and a form of {len(written)} bytes, but at most "
                f"{_TENSORS} tensors and {_FORM} bytes are supported [HVD014]"
            )
        return Output([t.clone(memory_format=torch.contiguous_format) for t in tensors], written)

    def give(self, out: Output, k: int, count: int) -> None:
        """A forward's output, to the next stage. ValueError for one that cannot travel or has changed."""
        looks, number = looks_of(out.tensors), self._message(k)
        if self._forms is None or self._forms[0] != number:
            self._check(looks)
            self._send(self._name("shapes", number), _written(looks, out.form, count))
            self._forms = number, looks, out.form
        elif (looks, out.form) != self._forms[1:]:
            raise ValueError(
                f"{self.name}: the output of micro-batch {k} is {_shown(looks)}, but {_shown(self._forms[1])} was "
                f'announced{_other(out.form, self._forms[2])}: pass shapes="each" to a pipeline whose shapes or values '
                "change from one micro-batch to the next [HVD014]"
            )
        for part, tensor in enumerate(out.tensors):
            self._send(self._name(f"f{part}", k), tensor.detach())

    def _check(self, looks: list[Look]) -> None:
        for part, look in enumerate(looks):
            if look.dtype not in _DTYPES or len(look.shape) > _DIMS:
                raise ValueError(
                    f"{self.name}: output {part} is {_shown([look])}: stages exchange tensors of at most {_DIMS} "
                    f"dimensions, of {', '.join(str(dtype)[6:] for dtype in _DTYPES)} [HVD014]"
                )

    def give_back(self, inputs: Sequence[torch.Tensor], looks: list[Look], k: int) -> None:
        """A backward's result, to the stage before: the gradients of what it gave, and which of them there are."""
        there = torch.zeros(_TENSORS, dtype=torch.uint8)
        for part, (t, look) in enumerate(zip(inputs, looks)):
            if look.tracked:
                there[part] = t.grad is not None
                gradient = torch.zeros_like(t) if t.grad is None else t.grad  # its receive may be posted already
                self._send(self._name(f"b{part}", k), gradient.detach().contiguous())
        if any(look.tracked for look in looks):
            self._send(self._name("b", k), there)

    def expect(self, k: int) -> None:
        """The input of micro-batch k may arrive from now on, if its shape is known; else the message with it."""
        number = self._message(k)
        if self._received is None or self._received[0] != number:
            if ("shapes", number) not in self._posted:
                handle = self._receive(self._name("shapes", number), (_WORDS,), torch.int64, "cpu")
                self._posted["shapes", number] = [handle]
        elif ("f", k) not in self._posted:
            self._posted["f", k] = [
                self._receive(self._name(f"f{part}", k), look.shape, look.dtype, self.device)
                for part, look in enumerate(self._received[1])
            ]

    def expect_back(self, looks: list[Look], k: int) -> None:
        """The gradients of what was given for micro-batch k, likewise."""
        if ("b", k) not in self._posted and any(look.tracked for look in looks):
            self._posted["b", k] = [
                self._receive(self._name(f"b{part}", k), look.shape, look.dtype, self.device) if look.tracked else None
                for part, look in enumerate(looks)
            ] + [self._receive(self._name("b", k), (_TENSORS,), torch.uint8, "cpu")]

    def _arrived(self, what: str, k: int) -> list[Any]:
        handles = self._posted[what, k]
        tensors = [None if handle is None else hvd.synchronize(handle, timeout=self.timeout) for handle in handles]
        del self._posted[what, k]
        return tensors

    def take(self, k: int) -> tuple[list[torch.Tensor], list[Look], Any, int]:
        """The input of micro-batch k, what it looks like on the other side, its form, and the micro-batches of its
        mini-batch."""
        number = self._message(k)
        self.expect(k)
        if self._received is None or self._received[0] != number:
            self._received = (number, *_read(self._arrived("shapes", number)[0]))
            self.expect(k)
        return (self._arrived("f", k), *self._received[1:])

    def take_back(self, looks: list[Look], k: int) -> list[torch.Tensor | None]:
        """The gradients of what was given for micro-batch k; None: there is none."""
        self.expect_back(looks, k)
        if ("b", k) not in self._posted:
            return [None] * len(looks)
        *gradients, there = self._arrived("b", k)
        return [gradient if flag else None for gradient, flag in zip(gradients, there.tolist())]

    def settle(self) -> None:
        """All sends have arrived."""
        while self._sent:
            hvd.synchronize(self._sent.popitem()[1], timeout=self.timeout)

    def apart(self) -> Edge:
        """Another with messages of its own before each micro-batch; for what is no training, while nothing is
        in flight here."""
        return Edge(f"{self.name}.eval", self.peer, self.group, self.window, 1, self.timeout, self.device)


def _shown(looks: list[Look]) -> str:
    return " and ".join(f"{str(dtype)[6:]} {list(shape)}{' with gradient' * t}" for dtype, t, shape in looks)


def _other(form: bytes, announced: bytes) -> str:
    return "" if form == announced else f" ({form.decode().strip()} and not {announced.decode().strip()})"
