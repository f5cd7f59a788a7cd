"""A rank of hvdlite.run: fetch the call, run it, return its result.

    hvdlite.executors.worker ADDRESS PORT

ADDRESS and PORT are of the caller's function server (launcher/function_server.py); the key to it is in the environment,
from where it is taken before anything of the user's runs. The call is a pickle of cloudpickle's: the folders that the
caller imports from, the function and its arguments. Only a process that knows the key can have sent it.

An exception is handed in with its traceback and ends this process with code 1. The other ranks get it as any uncaught
one; the traceback is not printed here, since the caller gets it.
"""

from __future__ import annotations

import os
import pickle
import socket
import sys
import time
import traceback
from collections.abc import Sequence
from importlib import import_module
from types import TracebackType
from typing import Any

from .. import config
from ..errors import HvdPeerLostError
from ..errors.codes import coded
from ..launcher import function_server
from ..launcher.control import registration
from ..rendezvous import discovery, elastic_member
from ..security import framing

_REPORT_S = 60.0
_OURS = (__file__, os.path.join(os.path.dirname(__file__), "driver.py"))  # frames that users do not need


def main(argv: Sequence[str]) -> None:
    """The process. Raises what the function raises, once the caller has it."""
    environ = config.environ()
    key = bytes.fromhex(environ[function_server.KEY])
    config.write(function_server.KEY, None)
    member = config.read(environ).values["member"]  # of an elastic job, where ranks change
    number = discovery.discover(environ).rank if member is None else member
    hello = {"rank": number, "pid": os.getpid(), "host": socket.gethostname()}
    link, session = registration.report((argv[0], int(argv[1])), key, hello, time.monotonic() + _REPORT_S)
    link.settimeout(None)
    sys.excepthook = _silent  # init() puts one before it that reports to the other ranks
    try:
        kind, answer = function_server.RETURNED, made(_fetched(link, session), number)
    except BaseException as error:
        if member is not None and isinstance(error, SystemExit):  # it was removed, or all have saved and end
            raise
        if member is not None and not elastic_member.entered:  # the others go on, and the caller may not be shown it
            traceback.print_exc()
        kind = function_server.SUFFERED if isinstance(error, HvdPeerLostError) else function_server.RAISED
        try:
            _hand_in(link, session, kind, described(error, number))
        except OSError:  # the caller is gone
            traceback.print_exc()
        raise
    _hand_in(link, session, kind, answer)


def _rank(number: int) -> int:
    """Of this process now, which has begun with this number."""
    return int(config.environ().get("HVDLITE_RANK", number))


def made(call: bytes, number: int) -> bytes:
    """The rank and the result of the call, pickled."""
    import cloudpickle

    folders, as_horovod, inner = pickle.loads(call)
    sys.path += [folder for folder in folders if folder not in sys.path]
    if as_horovod:
        import_module("hvdlite.as_horovod")
    function, args, kwargs = pickle.loads(inner)
    result = function(*args, **kwargs)
    try:
        return bytes(cloudpickle.dumps((_rank(number), result)))
    except Exception as error:
        raise TypeError(
            coded("HVD245", f"the result, a {type(result).__name__}, cannot be sent to the caller: {error}")
        ) from error


def result_of(body: bytes) -> Any:
    """The result of a call, from `made`."""
    return pickle.loads(body)[1]


def described(error: BaseException, number: int) -> bytes:
    """What the caller gets of an exception: rank, text, traceback, and itself, if it can be sent."""
    import cloudpickle

    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None and trace.tb_frame.f_code.co_filename in _OURS:
        trace = trace.tb_next
    lines = traceback.format_exception(type(error), error, trace)
    text = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
    try:
        itself = cloudpickle.dumps(error)
        pickle.loads(itself)  # a class may make what it cannot read
    except Exception:
        itself = None
    return pickle.dumps((_rank(number), text, "".join(lines), itself))


def _hand_in(link: socket.socket, session: framing.Session, kind: int, body: bytes) -> None:
    for frame in function_server.frames(session, kind, body):
        link.sendall(frame)
    link.close()


def _fetched(link: socket.socket, session: framing.Session) -> bytes:
    """The call. Raises WireError where it is not what the caller sent: then nothing of it is used."""
    held, reader = bytearray(), framing.FrameReader(session, function_server.PART_BYTES + 1)
    while chunk := link.recv(1 << 20):
        for kind, body in reader.feed(chunk):
            held += body
            if kind == function_server.CALL:
                return bytes(held)
    reader.end()
    raise ConnectionError("the process that called hvdlite.run is gone [HVD403]")


def _silent(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    """Prints nothing."""
