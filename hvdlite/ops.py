"""Every collective, written once. A framework's module binds them to its adapter:

    _ops = Collectives(adapter)
    allreduce, allreduce_, ... = _ops.allreduce, _ops.allreduce_, ...

Each collective has up to four forms: plain (a new tensor), `_` (in place), and `_async` of both, which return a Handle
for `poll` and `synchronize`. Arguments and names are Horovod's. A tensor named x travels as `allreduce.x`, so that an
allreduce and a broadcast of one name do not meet; unnamed calls are matched by the order in which ranks make them.

Non-contiguous tensors are copied to contiguous memory and, in place, back when the handle is synchronized.
Errors that this process can see alone (a wrong argument) are raised at the call, all others by `synchronize`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Generic

from . import _core
from .adapter import Adapter, T, View
from .process_set import ProcessSet, global_process_set, number_of

Average: int = _core.OPS["average"]
Sum: int = _core.OPS["sum"]
Min: int = _core.OPS["min"]
Max: int = _core.OPS["max"]
Product: int = _core.OPS["product"]


class Handle:
    """An asynchronous collective. It keeps its tensors alive; may be synchronized again and says the same.

    Several threads may have handles, but one handle is waited for by one thread at a time.
    """

    __slots__ = ("_error", "_finish", "_pending", "_result")

    def __init__(self, pending: list[_core.Pending], finish: Callable[[list[_core.Pending]], Any]) -> None:
        self._pending = pending
        self._finish: Callable[[list[_core.Pending]], Any] | None = finish
        self._result: Any = None
        self._error: Exception | None = None

    def done(self) -> bool:
        """Whether `wait` returns or raises at once."""
        return all(pending.done() for pending in self._pending)

    def wait(self) -> Any:
        """The result. Raises why the collective failed; in a group the first failure, after all have ended."""
        if self._finish is not None:
            for pending in self._pending:
                try:
                    pending.wait()
                except Exception as error:
                    self._error = self._error or error
            if self._error is None:
                self._result = self._finish(self._pending)
            for pending in self._pending:
                pending.release()
            self._finish, self._pending = None, []
        if self._error is not None:
            raise self._error
        return self._result


def poll(handle: Handle) -> bool:
    """Whether `synchronize(handle)` would return or raise at once. ValueError for what is no handle."""
    return _handle(handle).done()


def synchronize(handle: Handle) -> Any:
    """Wait for an asynchronous collective; its result, as the call without `_async` would have returned it.

    Raises HvdMismatchError (the ranks disagree about this tensor), HvdPeerLostError (a rank died or left), ValueError
    for what is no handle.
    """
    return _handle(handle).wait()


def barrier(process_set: ProcessSet = global_process_set) -> None:
    """Returns when every rank has called it. Raises HvdPeerLostError."""
    pending = _core.submit(_core.BARRIER, 0, 0, None, (), 0, 0, None, process_set=number_of(process_set), waits=True)
    pending.wait()
    pending.release()


def _handle(handle: Handle) -> Handle:
    if not isinstance(handle, Handle):
        raise ValueError(f"{handle!r} is not the handle of an asynchronous collective")
    return handle


def op_of(average: bool | None, op: int | None) -> int:
    """The reduction that Horovod's two arguments ask for. ValueError if both are given or the core has no such op."""
    if average is not None:
        if op is not None:
            raise ValueError("average and op must not both be given: op replaces average")
        return Average if average else Sum
    if op is None:
        return Average
    if _core.op_name(op) is None:
        known = "hvd.Average, hvd.Sum, hvd.Min, hvd.Max or hvd.Product"
        raise ValueError(f"op={op!r} is not supported: use {known}")
    return int(op)


def _full_name(kind: str, name: str | None) -> str | None:
    if name is None:
        return None
    if not isinstance(name, str):
        raise TypeError(f"name must be a str or None, not {type(name).__name__}")
    return kind + name


class Collectives(Generic[T]):
    """The collectives of one framework."""

    def __init__(self, adapter: Adapter[T]) -> None:
        self.adapter = adapter

    def _readable(self, tensor: T) -> tuple[T, View]:
        view = self.adapter.view(tensor)
        if view.contiguous:
            return tensor, view
        tensor = self.adapter.contiguous(tensor)
        return tensor, self.adapter.view(tensor)

    def _prepare(self, tensor: T, in_place: bool) -> tuple[T, View, T, int]:
        """What is read, its view, where the result comes, and that one's address."""
        source, view = self._readable(tensor)
        if in_place:
            return source, view, source, view.address
        target = self.adapter.like(source, view.shape)
        return source, view, target, self.adapter.view(target).address

    def _allreduce(
        self, tensor: Any, in_place: bool, average: bool | None, name: str | None, op: int | None,
        prescale_factor: float, postscale_factor: float, process_set: ProcessSet, waits: bool = False
    ) -> Handle:  # fmt: skip
        mine = self.adapter.accept(tensor, in_place)
        source, view, target, address = self._prepare(mine, in_place)
        pending = _core.submit(
            _core.ALLREDUCE, op_of(average, op), view.dtype, _full_name("allreduce.", name), view.shape, view.address,
            address, (source, target), prescale=float(prescale_factor), postscale=float(postscale_factor),
            process_set=number_of(process_set), waits=waits,
        )  # fmt: skip
        return Handle([pending], lambda _: self._landed(mine, target) if in_place else target)

    def _landed(self, tensor: T, target: T) -> T:
        """In place: a result that came to a contiguous copy goes back to the caller's tensor."""
        if target is not tensor:
            self.adapter.copy(tensor, target)
        return tensor

    def _grouped(
        self, tensors: Sequence[Any], in_place: bool, average: bool | None, name: str | None, op: int | None,
        prescale_factor: float, postscale_factor: float, process_set: ProcessSet, waits: bool = False
    ) -> Handle:  # fmt: skip
        if isinstance(tensors, (str, bytes)) or not isinstance(tensors, Sequence):
            raise TypeError(f"a group must be a list or tuple of tensors, not {type(tensors).__name__}")
        mine = [self.adapter.accept(tensor, in_place) for tensor in tensors]
        base = _full_name("grouped_allreduce.", name)
        count = len(mine)
        # Everything is looked at before anything is submitted.
        prepared = [self._prepare(tensor, in_place) for tensor in mine]
        chosen, number, group = op_of(average, op), number_of(process_set), _core.group_number(base)
        prescale, postscale = float(prescale_factor), float(postscale_factor)
        pending = [
            _core.submit(
                _core.ALLREDUCE, chosen, view.dtype, None if base is None else f"{base}_{i}of{count}", view.shape,
                view.address, address, (source, target), prescale=prescale, postscale=postscale, process_set=number,
                group=group, group_count=count, waits=waits,
            )
            for i, (source, view, target, address) in enumerate(prepared, 1)
        ]  # fmt: skip
        targets = [target for _, _, target, _ in prepared]

        def finish(_: list[_core.Pending]) -> list[T]:
            return [self._landed(*pair) for pair in zip(mine, targets)] if in_place else targets

        return Handle(pending, finish)

    def allreduce_async(
        self, tensor: Any, average: bool | None = None, name: str | None = None, op: int | None = None,
        prescale_factor: float = 1.0, postscale_factor: float = 1.0, process_set: ProcessSet = global_process_set
    ) -> Handle:  # fmt: skip
        """Reduce a tensor of the same shape and dtype over all ranks; `synchronize` returns a new one.

        op is Average (default), Sum, Min, Max or Product; every rank's tensor is multiplied by prescale_factor before
        and the result by postscale_factor after. The tensor must not be changed until synchronized.
        Raises ValueError for an unsupported dtype, op, or a name that is in flight.
        """
        return self._allreduce(
            tensor, False, average, name, op, prescale_factor, postscale_factor, process_set
        )  # fmt: skip

    def allreduce_async_(
        self, tensor: Any, average: bool | None = None, name: str | None = None, op: int | None = None,
        prescale_factor: float = 1.0, postscale_factor: float = 1.0, process_set: ProcessSet = global_process_set
    ) -> Handle:  # fmt: skip
        """allreduce_async whose result overwrites the tensor."""
        return self._allreduce(
            tensor, True, average, name, op, prescale_factor, postscale_factor, process_set
        )  # fmt: skip

    def allreduce(
        self, tensor: Any, average: bool | None = None, name: str | None = None, *, op: int | None = None,
        prescale_factor: float = 1.0, postscale_factor: float = 1.0, process_set: ProcessSet = global_process_set
    ) -> T:  # fmt: skip
        """allreduce_async and synchronize: the reduced tensor, a new one."""
        return self._allreduce(
            tensor, False, average, name, op, prescale_factor, postscale_factor, process_set, True
        ).wait()  # fmt: skip

    def allreduce_(
        self, tensor: Any, average: bool | None = None, name: str | None = None, op: int | None = None,
        prescale_factor: float = 1.0, postscale_factor: float = 1.0, process_set: ProcessSet = global_process_set
    ) -> T:  # fmt: skip
        """allreduce in place: overwrites and returns the tensor."""
        return self._allreduce(
            tensor, True, average, name, op, prescale_factor, postscale_factor, process_set, True
        ).wait()  # fmt: skip

    def grouped_allreduce_async(
        self, tensors: Sequence[Any], average: bool | None = None, name: str | None = None, op: int | None = None,
        prescale_factor: float = 1.0, postscale_factor: float = 1.0, process_set: ProcessSet = global_process_set
    ) -> Handle:  # fmt: skip
        """allreduce_async of several tensors that become ready as one; `synchronize` returns the list."""
        return self._grouped(
            tensors, False, average, name, op, prescale_factor, postscale_factor, process_set
        )  # fmt: skip

    def grouped_allreduce_async_(
        self, tensors: Sequence[Any], average: bool | None = None, name: str | None = None, op: int | None = None,
        prescale_factor: float = 1.0, postscale_factor: float = 1.0, process_set: ProcessSet = global_process_set
    ) -> Handle:  # fmt: skip
        """grouped_allreduce_async in place."""
        return self._grouped(
            tensors, True, average, name, op, prescale_factor, postscale_factor, process_set
        )  # fmt: skip

    def grouped_allreduce(
        self, tensors: Sequence[Any], average: bool | None = None, name: str | None = None, *, op: int | None = None,
        prescale_factor: float = 1.0, postscale_factor: float = 1.0, process_set: ProcessSet = global_process_set
    ) -> list[T]:  # fmt: skip
        """allreduce of several tensors that travel as one group: the list of reduced tensors."""
        return self._grouped(
            tensors, False, average, name, op, prescale_factor, postscale_factor, process_set, True
        ).wait()  # fmt: skip

    def grouped_allreduce_(
        self, tensors: Sequence[Any], average: bool | None = None, name: str | None = None, op: int | None = None,
        prescale_factor: float = 1.0, postscale_factor: float = 1.0, process_set: ProcessSet = global_process_set
    ) -> list[T]:  # fmt: skip
        """grouped_allreduce in place."""
        return self._grouped(
            tensors, True, average, name, op, prescale_factor, postscale_factor, process_set, True
        ).wait()  # fmt: skip

    def allgather_async(
        self, tensor: Any, name: str | None = None, process_set: ProcessSet = global_process_set
    ) -> Handle:  # fmt: skip
        """Concatenate every rank's tensor along the first dimension, which may differ between ranks.

        The other dimensions and the dtype must be the same. ValueError for a tensor without dimensions.
        """
        return self._allgather(tensor, name, process_set, False)

    def _allgather(self, tensor: Any, name: str | None, process_set: ProcessSet, waits: bool) -> Handle:
        mine, view = self._readable(self.adapter.accept(tensor))
        if not view.shape:
            raise ValueError("allgather needs a tensor of at least one dimension: a scalar can be reshaped to (1,)")
        pending = _core.submit(
            _core.ALLGATHER, 0, view.dtype, _full_name("allgather.", name), view.shape, view.address, 0, mine,
            process_set=number_of(process_set), waits=waits,
        )  # fmt: skip

        def finish(pending: list[_core.Pending]) -> T:
            gathered = pending[0].gathered()
            result = self.adapter.like(mine, (gathered.rows, *view.shape[1:]))
            _core.copy(self.adapter.view(result).address, gathered.address, gathered.bytes)
            return result

        return Handle([pending], finish)

    def allgather(self, tensor: Any, name: str | None = None, process_set: ProcessSet = global_process_set) -> T:
        """allgather_async and synchronize: every rank's tensor, concatenated along the first dimension."""
        return self._allgather(tensor, name, process_set, True).wait()

    def _broadcast(
        self, tensor: Any, in_place: bool, root_rank: int, name: str | None, process_set: ProcessSet,
        waits: bool = False
    ) -> Handle:  # fmt: skip
        accepted = self.adapter.accept(tensor, in_place)
        mine, view, target, address = self._prepare(accepted, in_place)
        pending = _core.submit(
            _core.BROADCAST, 0, view.dtype, _full_name("broadcast.", name), view.shape, view.address, address,
            (mine, target), root=root_rank, process_set=number_of(process_set), waits=waits,
        )  # fmt: skip
        return Handle([pending], lambda _: self._landed(accepted, target) if in_place else target)

    def broadcast_async(
        self, tensor: Any, root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set
    ) -> Handle:
        """The root's tensor on every rank, as a new one; shape and dtype must be the same on all."""
        return self._broadcast(tensor, False, root_rank, name, process_set)

    def broadcast_async_(
        self, tensor: Any, root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set
    ) -> Handle:
        """broadcast_async that overwrites the tensor."""
        return self._broadcast(tensor, True, root_rank, name, process_set)

    def broadcast(
        self, tensor: Any, root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set
    ) -> T:
        """broadcast_async and synchronize: a new tensor."""
        return self._broadcast(tensor, False, root_rank, name, process_set, True).wait()

    def broadcast_(
        self, tensor: Any, root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set
    ) -> T:
        """broadcast in place: overwrites and returns the tensor."""
        return self._broadcast(tensor, True, root_rank, name, process_set, True).wait()
