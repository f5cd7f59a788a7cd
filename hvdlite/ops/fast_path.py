"""Fast path of what a training loop repeats: the same arguments with the same kind of tensor.

The first call checks its arguments one by one (`arguments`, `tensors`); the result is a request without
memory (`_core.Request`). It is remembered under the arguments of the call, beside the tensor's dtype and
shape. When they come again, all that is left to look at is the tensor: is it one whose address is all that the core
needs to know? Whatever is not so plain (a process set, which may be closed by now; a tensor that must be copied;
arguments that cannot be hashed) takes the slow path, where the errors are.

Equal arguments are the same here, but True is not 1: an op that is a bool is refused, and stays so.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

from .. import _core
from ..process_sets.process_set import ProcessSet, global_process_set
from .adapter import Adapter, T
from .arguments import Op, Terms, full_name
from .handle import Handle
from .tensors import Tensors

_SIMPLE = frozenset((str, int, float, bool, type(None), type, Op))  # what stays what it was


class DirectHandle(Handle):
    """The handle of one tensor whose result lies where it shall be when the core has finished."""

    __slots__ = ("_adapter", "_flight", "_in_place")

    def __init__(self, adapter: Adapter[Any], request: _core.Request, tensor: Any, in_place: bool = False) -> None:
        self._flight: _core.Flight | None = None
        self._adapter = adapter
        self._in_place = in_place
        self._error = None
        source = target = adapter.address(tensor)
        self._result = tensor
        if not in_place:
            self._result, target = adapter.twin(tensor)
        self._flight = flight = _core.take()
        request.start(source, target, _core.SOON, flight, (adapter.memory(tensor), self._result))

    def done(self) -> bool:
        """Whether `wait` returns or raises at once."""
        flight = self._flight
        return flight is None or flight.polled()

    def wait(self, timeout: Any = None) -> Any:
        """The result. Raises why the collective failed. timeout: as `synchronize` has it."""
        flight = self._flight
        if flight is not None:
            if timeout is not None and flight.native.handle:
                self._within(timeout, [(flight.native.handle, flight.request)])
            with flight.turn:
                if self._flight is flight:  # else another thread has had the result, and the flight may serve another
                    self._error = flight.wait()
                    if self._in_place and self._error is None:
                        self._adapter.written(self._result)
                    self._flight = None
                    flight.complete()
        if self._error is not None:
            raise self._error
        return self._result

    def __del__(self) -> None:
        flight = getattr(self, "_flight", None)  # a signal handler may raise before there is any
        if flight is not None:
            self._flight, self._error = None, _core.dropped()
            _core.abandon(flight)


class Quick(Tensors[T]):
    """Remembers the arguments of calls."""

    def __init__(self, adapter: Adapter[T]) -> None:
        super().__init__(adapter)
        self._known: OrderedDict[Any, _core.Request] = OrderedDict()

    def _again(self, tensor: Any, words: tuple[Any, ...], process_set: ProcessSet) -> _core.Request | None:
        """The request that these arguments made of such a tensor before. None: take the slow path."""
        if process_set is not global_process_set:
            return None
        try:
            return self._known.get((words, self.adapter.form(tensor)))
        except TypeError:
            return None

    def _remember(self, tensor: Any, words: tuple[Any, ...], name: str | None, terms: Terms) -> None:
        """The request of an allreduce with these arguments, after it has succeeded on the slow path."""
        form = self.adapter.form(tensor)
        if form is None or terms.process_set is not global_process_set or not _SIMPLE.issuperset(map(type, words)):
            return
        view = self.adapter.view(tensor)
        request = _core.request(
            _core.ALLREDUCE, terms.op, view.dtype, full_name("allreduce.", name), view.shape, prescale=terms.prescale,
            postscale=terms.postscale, priority=terms.priority,
        )  # fmt: skip
        _core.remember(self._known, (words, form), request)

    def _tracked(self, tensor: Any) -> bool:
        """Whether the result shall have a history."""
        return False
