"""How can a value stay on one rank and be used from others? Its owner keeps it and counts the references to it.

A Ref is one count. `remote` makes the first. A Ref that is sent is a second one for its receiver, and its owner
has counted it before the message leaves (calls.py): no count falls to 0 while a reference is under way. A Ref that is
dropped counts down, by a message that nobody waits for. The owner's socket thread alone changes counts, so they change
in the order in which they come.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ..errors import HvdError
from .calls import Calls, running
from .messages import found, leaving


class Ref:
    """A value on rank `rank`. It is freed there when the last Ref to it is dropped."""

    def __init__(self, rank: int, number: int) -> None:
        self.rank, self._number, self._calls = rank, number, running()

    def get(self, timeout: float | None = 60) -> Any:
        """A copy of the value; on its owner, the value itself."""
        calls = self._open()
        if calls.rank == self.rank:
            return _value(self._number)
        return calls.begin(self.rank, _value, (self._number,), {}).result(timeout)

    def call(self, method: str, /, *args: Any, timeout: float | None = 60, **kwargs: Any) -> Any:
        """What a method of the value gives, called on its owner."""
        return self._open().begin(self.rank, _method, (self._number, method, args, kwargs), {}).result(timeout)

    def _open(self) -> Calls:
        if self._calls.closed:
            raise _gone(self.rank)
        return self._calls

    def __reduce__(self) -> tuple[Callable[[int, int], Ref], tuple[int, int]]:
        if leaving.refs is None:
            raise TypeError(
                "a Ref can be sent only in arguments and results of hvd.rpc calls, which count references [HVD042]"
            )
        self._open()
        leaving.refs.append(self)
        return Ref, (self.rank, self._number)

    def __repr__(self) -> str:
        return f"<hvd.rpc.Ref {self._number} on rank {self.rank}>"

    def __del__(self) -> None:
        try:
            self._calls.count_down(self.rank, self._number)
        except Exception:  # the interpreter ends, or __init__ raised
            pass


class _First:
    """Travels as the Ref for which `make` has counted."""

    def __init__(self, rank: int, number: int) -> None:
        self._place = rank, number

    def __reduce__(self) -> tuple[Callable[[int, int], Ref], tuple[int, int]]:
        return Ref, self._place


def make(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> _First:
    """On the owner: calls the function of that name and keeps what it gives."""
    value, calls = found(name)(*args, **kwargs), running()
    return _First(calls.rank, calls.kept.add(value))


def _gone(rank: int) -> HvdError:
    return HvdError(f"the value of this Ref on rank {rank} is gone: hvd.shutdown() freed it [HVD044]")


def _value(number: int) -> Any:
    calls = running()
    try:
        return calls.kept.values[number]
    except KeyError:
        raise _gone(calls.rank) from None


def _method(number: int, method: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return getattr(_value(number), method)(*args, **kwargs)
