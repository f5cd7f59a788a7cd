"""Messages of calls: a function is a name; values and exceptions are pickled.

A function goes by its module and its qualified name, because all ranks run the same program: sent by value it would
bring copies of the globals that it uses, and each call would see other ones. For the same reason classes and functions
of `__main__` inside of arguments are named, where cloudpickle would copy them: an exception that comes back is of the
class that the caller catches.

References are pickled as numbers of a list (`leaving`) that travels beside the bytes. Their owners count them up before
the bytes leave, and the receiver takes over the whole list before it unpickles (`arriving`): so counts are right
whatever becomes of the bytes.
"""

from __future__ import annotations

import io
import operator
import pickle
import struct
import threading
from collections.abc import Sequence
from functools import partial
from importlib import import_module
from types import FunctionType
from typing import Any

import cloudpickle

from ..errors import HvdError
from ..security.curve import MESSAGE_MAX

BODY_MAX = MESSAGE_MAX - 64  # a frame is a little longer when it is encrypted
TEXT_MAX = 1 << 20  # characters of a traceback


class _Leaving(threading.local):
    """The references in what this thread pickles, or unpickles; None: it does so for something else than a call."""

    refs: list[Any] | None = None


leaving, arriving = _Leaving(), _Leaving()
_REFERENCE = struct.Struct("<QQ")  # rank and number of a reference


def packed_refs(refs: Sequence[Any]) -> bytes:
    """The list of references as bytes."""
    return b"".join(_REFERENCE.pack(ref.rank, ref._number) for ref in refs)


def taken(listed: bytes, made: Any) -> list[Any]:
    """The references of a list, by made(rank, number). They are this process's now: what is dropped is counted."""
    return [made(*reference) for reference in _REFERENCE.iter_unpack(listed)]


def found(name: str) -> Any:
    """The function of that name."""
    module, _, qualified = name.partition(":")
    return operator.attrgetter(qualified)(import_module(module))


def named(f: Any) -> str:
    """ "module:name", by which every rank finds f. TypeError where there is no such name."""
    if isinstance(f, str) and all(f.partition(":")):
        return f
    for attribute in ("__qualname__", "__name__"):
        own = getattr(f, attribute, None)
        if isinstance(own, str) and _leads_to(name := f"{_module_of(f, own)}:{own}", f):
            return name
    raise TypeError(
        f"{f!r} has no name that other ranks can find. Lambdas, nested functions and bound methods have none: "
        'define a function at the top level of a module, pass it as "module:name", or call a method of a value '
        "that hvd.rpc.remote created: ref.call(method) [HVD041]"
    )


def whole(f: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[str, tuple[Any, ...], dict[str, Any]]:
    """(name, args, kwargs) of a call; a functools.partial gives its own arguments."""
    while type(f) is partial:
        f, args, kwargs = f.func, (*f.args, *args), {**f.keywords, **kwargs}
    return named(f), args, kwargs


def _module_of(f: Any, name: str) -> str:
    where: str = pickle.whichmodule(f, name)  # type: ignore[attr-defined]  # as pickle itself does it
    return where


def _leads_to(name: str, f: Any) -> bool:
    try:
        return bool(found(name) == f)
    except Exception:  # whatever an import raises
        return False


class _Pickler(cloudpickle.Pickler):  # type: ignore[misc, unused-ignore]
    def reducer_override(self, obj: Any) -> Any:
        if (
            isinstance(obj, (type, FunctionType))
            and obj.__module__ == "__main__"
            and _leads_to(f"__main__:{obj.__qualname__}", obj)
        ):
            return NotImplemented  # by name, as pickle does
        return super().reducer_override(obj)


def pickled(what: str, value: Any) -> tuple[bytes, list[Any]]:
    """The value as bytes, and the references in it. what: names it in errors. TypeError or ValueError if it cannot be
    sent."""
    before, leaving.refs = leaving.refs, []
    try:
        file = io.BytesIO()
        _Pickler(file).dump(value)
        body, refs = file.getvalue(), leaving.refs
    except Exception as error:
        raise TypeError(f"{what} cannot be pickled: {type(error).__name__}: {error} [HVD042]") from error
    finally:
        leaving.refs = before
    if len(body) > BODY_MAX:
        raise ValueError(
            f"{what} is {len(body):,} bytes when pickled, and at most {BODY_MAX:,} can be sent at once: split it, or "
            "keep it on its rank (hvd.rpc.remote) [HVD045]"
        )
    return body, refs


def unpickled(what: str, body: bytes, refs: list[Any]) -> Any:
    """The value. TypeError if it cannot be made here, also where something in it asks to end the process."""
    try:
        return _loaded(body, refs)
    except KeyboardInterrupt as error:
        if threading.current_thread() is threading.main_thread():  # Ctrl-C
            raise
        raise TypeError(f"{what} cannot be unpickled: {type(error).__name__}: {error} [HVD042]") from error
    except BaseException as error:
        raise TypeError(f"{what} cannot be unpickled: {type(error).__name__}: {error} [HVD042]") from error


def _loaded(body: bytes, refs: list[Any]) -> Any:
    before, arriving.refs = arriving.refs, refs
    try:
        return pickle.loads(body)
    finally:
        arriving.refs = before


def raised(name: str, rank: int, body: bytes, text: str, refs: list[Any]) -> Exception:
    """The exception that a call raised on a rank. body: itself, or nothing where it could not be pickled, or would end
    the process that raises it (SystemExit, KeyboardInterrupt)."""
    try:
        error, notes = _loaded(body, refs), [f"raised by {name} on rank {rank}:\n{text.rstrip()}"]
        assert isinstance(error, Exception)
    except BaseException:  # its class is not here, or takes other arguments than it has kept
        last = text.rstrip().rpartition("\n")[2]
        error = HvdError(f"{name} on rank {rank} raised what cannot be sent: {last}\n\n{text.rstrip()}\n[HVD046]")
        notes = []
    try:
        error.remote_traceback = text
        for note in notes if hasattr(error, "add_note") else []:  # Python 3.11
            error.add_note(note)
    except Exception:  # a class that takes no attributes
        pass
    return error  # type: ignore[no-any-return, unused-ignore]
