"""Flight recorder: dumps of a rank's ring of events to a file.

`dump_trace` writes a flight record now. Without it the core writes one when the job fails, by itself; here only two
cases are added: a rank whose script ends by an exception that ended no other rank, and a job that goes well with a
folder that was asked for, whose ranks write theirs when they leave. `start_timeline` and `stop_timeline` are Horovod's.

`begin` and `end` belong to init() and shutdown(), which call them with their lock held.
"""

from __future__ import annotations

import os
import sys
import threading
from typing import TYPE_CHECKING, Any

from .. import _core, config
from .._core import ffi, lib
from ..config.options import DYNAMIC
from ..errors.codes import coded
from . import directory

if TYPE_CHECKING:
    from ..config import Settings
    from .timeline import Timeline


class _State:
    """What is written in this process."""

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.trace_dir_set = False  # there is a folder that the user has named
        self.timeline: Timeline | None = None
        self.number: int | None = None  # of the signal that asks for a record
        self.handled: Any = None  # what Python knew as its handler when this process became a rank


_state = _State()


def dump_trace(path: str | os.PathLike[str] | None = None) -> str:
    """Write the flight record of this rank, and return the path of the file.

    Any rank may call it, at any time and from any thread. ``hvdlite-trace analyze`` reads the records of all ranks
    together.

    Args:
        path (str or path, optional): folder for the file, which is made if it is missing. Default: the folder of
            ``HVDLITE_TRACE_DIR``, or the folder for failed jobs.

    Returns:
        str: path of the file ``rank-K.flight.json``.

    Raises:
        OSError: if the file cannot be written.
        HvdNotInitializedError: before ``init``.
        ValueError: if there is no folder, or ``path`` is not a name.
        TypeError: if ``path`` has a wrong type.

    Example:
        >>> import os, tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     os.path.basename(hvd.dump_trace(folder))
        'rank-0.flight.json'  # rank 0
        'rank-1.flight.json'  # rank 1
    """
    _core.require_job()
    folder = None if path is None else os.path.abspath(_path_of(path))
    return _dump(folder, lib.HVD_WHY_ASKED)


def _path_of(path: Any) -> str:
    """A path that can be one. TypeError, ValueError."""
    if not isinstance(path, (str, os.PathLike)):
        raise TypeError(f"path must be a str or a path, not {type(path).__name__} [HVD242]")
    text = os.fspath(path)
    if not isinstance(text, str) or not text or "\0" in text:
        raise ValueError(f"path must be a name, not {text!r} [HVD242]")
    return text


def _dump(folder: str | None, why: int) -> str:
    text = ffi.new("char[]", _core.TEXT_BYTES)
    code = lib.hvd_dump(_core.bytes_or_null(folder), why, text, _core.TEXT_BYTES)
    message = _core.text_of(text)
    if code == lib.HVD_EINIT:
        raise OSError(coded("HVD725", message))
    if code != lib.HVD_OK:
        raise _core.error_for(code, message)
    return message


def start_timeline(file_path: str | os.PathLike[str], mark_cycles: bool = False) -> None:
    """Start to record a timeline of collectives, for chrome://tracing and Perfetto.

    Any rank may call it. Rank 0 writes ``file_path``, rank K writes ``file_path`` with ``.rank-K.json`` appended.
    ``hvdlite-trace merge`` makes one file of them.

    Args:
        file_path (str or path): file to write; its folder is made if it is missing.
        mark_cycles (bool): True also records each agreement between the ranks. Default: False.

    Raises:
        OSError: if the file cannot be written.
        HvdNotInitializedError: before ``init``.
        ValueError: while a timeline is being recorded, and if ``file_path`` is not a name.
        TypeError: if ``file_path`` has a wrong type.

    Example:
        >>> import os, tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     hvd.start_timeline(os.path.join(folder, "timeline.json"))
        ...     hvd.stop_timeline()
        ...     os.listdir(folder)
        ['timeline.json']  # rank 0
        ['timeline.json.rank-1.json']  # rank 1
    """
    path = _path_of(file_path)
    _core.require_job()
    rank = _core.rank()
    with _state.lock:
        if _state.timeline is not None:
            raise ValueError(
                f"a timeline is being recorded to {_state.timeline.path}: call hvd.stop_timeline() before the next "
                "[HVD725]"
            )
        from .timeline import Timeline

        _state.timeline = Timeline(path if rank == 0 else f"{path}.rank-{rank}.json", mark_cycles)


def stop_timeline() -> None:
    """End the timeline that ``start_timeline`` or ``HVDLITE_TIMELINE`` began, and complete its file.

    It does nothing if no timeline is being recorded.

    Raises:
        OSError: if the file cannot be written.
        HvdNotInitializedError: before ``init``.

    Example:
        >>> hvd.stop_timeline()  # none is being recorded
    """
    _core.require_job()
    _stop()


def _stop() -> None:
    with _state.lock:
        timeline, _state.timeline = _state.timeline, None
        if timeline is not None:
            timeline.close()


def begin(settings: Settings) -> None:
    """This process has become a rank."""
    values = settings.values
    _state.trace_dir_set = values["trace_dir"] is not None and values["trace_dir"] not in directory.OFF
    _listen(values["trace_signal"])
    path = values["timeline"]
    if path is not None and path != DYNAMIC:
        try:
            start_timeline(os.path.abspath(path), values["timeline_mark_cycles"])
        except OSError as error:  # as Horovod: this may be one rank of many, and a job that has waited for hours
            failure = f"rank {_core.rank()} writes no timeline, the job goes on: HVDLITE_TIMELINE (--timeline-filename)"
            print(coded("HVD725", f"hvdlite: {failure}: {error}"), file=sys.stderr, flush=True)


def _listen(number: int | None) -> None:
    """To the signal that the user has named. A handler that the script has set before is called, too."""
    _state.number = number
    if number is None:
        return
    import signal

    _state.handled = signal.getsignal(number)
    if _core.size() == 1 and threading.current_thread() is threading.main_thread():
        signal.signal(number, _on_signal)  # a single rank has no engine thread, which else receives it


def _listen_no_more() -> None:
    """What there was before is there again. A handler that the script has set since then stays, and is reported."""
    number, _state.number = _state.number, None
    if number is None:
        return
    import signal

    now = signal.getsignal(number)
    if now is _on_signal:
        if threading.current_thread() is threading.main_thread():
            signal.signal(number, _state.handled or signal.SIG_DFL)
    elif now is not _state.handled:
        print(
            f"hvdlite: rank {_core.rank()}: the script has set its own handler for signal {number} after hvd.init(), "
            "so this signal (HVDLITE_TRACE_SIGNAL) no longer writes a flight record: set the handler before "
            "hvd.init(), then both are called [HVD725]",
            file=sys.stderr, flush=True,
        )  # fmt: skip


def _on_signal(*received: Any) -> None:
    if callable(_state.handled):
        _state.handled(*received)
    try:
        _dump(None, lib.HVD_WHY_SIGNAL)
    except Exception as error:
        print(coded("HVD725", f"hvdlite: {error}"), file=sys.stderr, flush=True)


def end() -> None:
    """It is about to leave. A failed write is reported, and does not keep the rank from leaving."""
    if lib.hvd_initialized() != 1:
        return
    try:
        _listen_no_more()
        _stop()
        failed = _core.failure_of_job() is not None
        raised = getattr(sys, "last_type", None) is not None and not sys.flags.interactive
        if raised and not failed:
            _dump(None, lib.HVD_WHY_ERROR)  # the core decides: the failure may be on its way
        elif _state.trace_dir_set and not failed:
            _dump(None, lib.HVD_WHY_ASKED)
        if (failed or raised) and not _state.trace_dir_set:
            directory.prune(config.environ())
    except ValueError:
        pass  # no folder is wanted
    except Exception as error:
        print(coded("HVD725", f"hvdlite: {error}"), file=sys.stderr, flush=True)
