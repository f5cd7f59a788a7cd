"""Remote references: a value stays with its owner, which counts the references to it.

A Ref is one count. `remote` makes the first. A Ref that is sent is a second one for its receiver, and its owner
has counted it before the message leaves (calls.py): no count falls to 0 while a reference is in flight. The receiver
has it before it unpickles the message, and a sender that cannot deliver the message drops it. A Ref that is
dropped counts down, by a message without an answer. The owner's socket thread alone changes counts, so they change
in the order in which they come.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ..errors import HvdError
from .calls import Calls, running
from .messages import arriving, found, leaving


class Ref:
    """Reference to a value that stays on a rank. ``hvd.rpc.remote`` makes it.

    The value is freed when the last reference to it, on any rank, is gone, and by ``hvd.shutdown()``.

    Args:
        rank (int): the rank that has the value.
        number (int): the number of the value there.

    Example:
        >>> hvd.rpc.start()
        >>> numbers = hvd.rpc.remote(0, "builtins:list", "ab")
        >>> numbers.call("append", "c")
        >>> numbers.get()
        ['a', 'b', 'c']
    """

    def __init__(self, rank: int, number: int) -> None:
        self.rank, self._number, self._calls = rank, number, running()

    def get(self, timeout: float | None = 60) -> Any:
        """Return a copy of the value. On its owner this is the value itself.

        Args:
            timeout (float, optional): seconds to wait. Default: 60. None: no limit.

        Returns:
            The value.

        Raises:
            HvdError: ``hvd.shutdown()`` has freed the value.
            HvdPeerLostError: a rank of the job has died, or the owner has left.
            HvdTimeoutError: no answer within ``timeout``.
        """
        calls = self._open()
        if calls.rank == self.rank:
            return _value(self._number)
        return calls.begin(self.rank, _value, (self._number,), {}).result(timeout)

    def call(self, method: str, /, *args: Any, timeout: float | None = 60, **kwargs: Any) -> Any:
        """Call a method of the value on its owner, and return the result.

        Args:
            method (str): the name of the method.
            args: positional arguments of the method.
            timeout (float, optional): seconds to wait. Default: 60. None: no limit.
            kwargs: keyword arguments of the method.

        Returns:
            The result of the method.

        Raises:
            AttributeError: the value has no such method. What the method raises is raised here too.
            HvdError: ``hvd.shutdown()`` has freed the value.
            HvdPeerLostError: a rank of the job has died, or the owner has left.
            HvdTimeoutError: no answer within ``timeout``.
        """
        return self._open().begin(self.rank, _method, (self._number, method, args, kwargs), {}).result(timeout)

    def _open(self) -> Calls:
        if self._calls.closed:
            raise _freed(self.rank)
        return self._calls

    def __reduce__(self) -> tuple[Callable[[int], Ref], tuple[int]]:
        if leaving.refs is None:
            raise TypeError(
                "a Ref can be sent only in arguments and results of hvd.rpc calls, which count references [HVD042]"
            )
        self._open()
        leaving.refs.append(self)
        return _arrived, (len(leaving.refs) - 1,)

    def __repr__(self) -> str:
        return f"<hvd.rpc.Ref {self._number} on rank {self.rank}>"

    def __del__(self) -> None:
        try:
            self._calls.count_down(self.rank, self._number)
        except Exception:  # the interpreter ends, or __init__ raised
            pass


def _arrived(at: int) -> Ref:
    """The Ref of that place in the list that came with what is unpickled."""
    if arriving.refs is None:
        raise TypeError("a Ref can be unpickled only by hvd.rpc [HVD042]")
    ref: Ref = arriving.refs[at]
    return ref


def make(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Ref:
    """On the owner: calls the function of that name and keeps what it gives."""
    value, calls = found(name)(*args, **kwargs), running()
    return Ref(calls.rank, calls.kept.add(value))


def _freed(rank: int) -> HvdError:
    return HvdError(f"the value of this Ref on rank {rank} is gone: hvd.shutdown() freed it [HVD044]")


def _value(number: int) -> Any:
    calls = running()
    try:
        return calls.kept.values[number]
    except KeyError:
        raise _freed(calls.rank) from None


def _method(number: int, method: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return getattr(_value(number), method)(*args, **kwargs)
