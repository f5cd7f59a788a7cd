"""Uncaught exceptions: every way in which a rank fails in Python, and the report to the other ranks.

The first failure of a job is the cause that every rank raises, so the rank where it happened has to report it, in one
line: `rank 1 raised ValueError: boom (train.py:12)`. Three ways lead out of a script, and only two of them pass
a hook of Python's:

- an uncaught exception: sys.excepthook. A script may replace that hook later by one that does not call ours;
  then Python keeps the exception (sys.last_value), and it is reported at exit;
- one in a thread: threading.excepthook. It ends that thread only, which is no failure of the rank, unless the thread
  has taken part in collectives: then the others wait for what never comes;
- sys.exit(3) and exit(3) raise SystemExit, which no hook sees, and at exit the reason is lost. So both are wrapped,
  and the exception carries an object that notices its end. If that comes when no frame is left, it has ended the
  script; else the script has caught it.

The traceback that matters is that rank's. The others end by an error with the same text, and print one line of it.
Under hvdlite-run they print none, since its last line has it, unless that rank has died without a report.

A signal handler may raise in any line of this, as torch's DataLoader does when a worker has died. So nothing here reads
files, and what can fail has a simpler fallback.

Everything else (os._exit, a signal) is seen by other processes: abort.c in the core and the launcher report what they
know.
"""

from __future__ import annotations

import functools
import os
import re
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from types import FrameType, TracebackType
from typing import TYPE_CHECKING, Any

from .. import _core, config
from ..errors import HvdError, HvdInitError, HvdPeerLostError, HvdTimeoutError
from ..errors.codes import code_of, coded, uncoded

if TYPE_CHECKING:
    from ..rendezvous import store_client

_exit: list[tuple[str, int]] = []  # the report of the sys.exit that has ended the script, and the exit code
_ROOM = 1000  # characters of an exception's text
_CODE = re.compile(r"\[(HVD\d{3})\](?:\x1b\[\d*m)?[ \t\r]*$", re.MULTILINE)  # Keras prints its causes in bold
_OWN_REPORT = re.compile(r"rank \d+( \([^)]*\))? (raised|called) ")  # by the rank itself
# What a paragraph begins after: an empty line, or "(0) UNKNOWN: " where TensorFlow reports several errors.
_BEFORE = re.compile(r"\n\s*\n(?:\x1b\[\d*m)?|^\s*\(\d+\) [A-Za-z_ ]+: ", re.MULTILINE)


class _Leaving:
    """What a SystemExit carries."""

    def __init__(self, text: str, code: int) -> None:
        self._exit = text, code

    def __del__(self) -> None:
        try:
            sys._getframe(1)
        except ValueError:  # no caller: no script is left
            _exit[:] = [self._exit]


@functools.cache
def install(report: Callable[[str, BaseException | None], None]) -> None:
    """Calls `report` with the report of this rank ("raised ...") and the exception, around Python's own hooks. These
    print no traceback of an exception that only reports another rank's failure. Once per process."""
    previous, of_threads, leave = sys.excepthook, threading.excepthook, sys.exit
    plain = previous is sys.__excepthook__  # it is quick, so the traceback is there before an mpirun ends this rank

    def excepthook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        try:
            if plain and not _only_consequence(error, trace) and not _to_user(error, trace):
                previous(kind, error, trace)
        finally:
            try:
                _report(report, f"raised {_described(kind, error, trace)}", error)
            finally:
                if not plain:
                    previous(kind, error, trace)

    def in_thread(hooked: Any) -> None:
        thread = hooked.thread
        try:
            if hooked.exc_type is not SystemExit and thread is not None and thread in _core.callers:
                what = _described(hooked.exc_type, hooked.exc_value or hooked.exc_type(), hooked.exc_traceback)
                _report(report, f"raised {what} in thread {thread.name!r}", hooked.exc_value)
        finally:
            if of_threads is not threading.__excepthook__ or not _only_consequence(
                hooked.exc_value, hooked.exc_traceback
            ):
                of_threads(hooked)

    def exit(status: Any = None, /) -> None:
        try:
            leave(status)
        except SystemExit as error:
            _carry("sys.exit", error, sys._getframe(1))
            raise

    exit.__doc__, exit.__module__, exit.__qualname__ = leave.__doc__, "sys", "exit"
    sys.excepthook, threading.excepthook, sys.exit = excepthook, in_thread, exit  # type: ignore[assignment]
    _wrap_quitters()


def _report(report: Callable[[str, BaseException | None], None], what: str, error: BaseException | None) -> None:
    for again in (True, True, False):
        try:
            return report(what, meant(error))
        except BaseException:
            if not again:
                sys.__excepthook__(*sys.exc_info())  # type: ignore[arg-type]


def _only_consequence(error: BaseException | None, trace: TracebackType | None) -> bool:
    """Whether the exception only reports another rank's failure, and has been printed in one line: the traceback that
    matters is that rank's. No line where that rank has reported it itself and hvdlite-run does at the end."""
    try:
        if isinstance(error, HvdInitError) and error._over:
            return True
        line = _consequence(error, trace)
        if line and not (_OWN_REPORT.search(line) and {"HVDLITE_STORE_PORT", "HVDLITE_AGENT"} & set(config.environ())):
            print(line, file=sys.stderr, flush=True)
        return line is not None
    except BaseException:
        return False


def _to_user(error: BaseException, trace: TracebackType | None) -> bool:
    """Whether an error of ours has been printed with its calls down to the user's own line, without those of ours and
    of a framework below it. Python's development mode (python -X dev) shows them."""
    try:
        if sys.flags.dev_mode or code_of(_text(error)) is None:
            return False
        import traceback

        formatted = traceback.TracebackException(type(error), error, trace)
        own = max((at for at, call in enumerate(formatted.stack, 1) if not _installed(call.filename)), default=0)
        del formatted.stack[own or len(formatted.stack) :]
        print("".join(formatted.format()), end="", file=sys.stderr, flush=True)
        return True
    except BaseException:
        return False


def _consequence(error: BaseException | None, trace: TracebackType | None) -> str | None:
    """`train.py:12: HvdPeerLostError: allreduce of 'x' on rank 0: rank 1 raised ...`; None for what else has failed."""
    lost = meant(error)
    if error is None or not isinstance(lost, HvdPeerLostError) or lost.rank in (None, _core.lib.hvd_rank()):
        return None
    if error.__cause__ is not None or (error.__context__ is not None and not error.__suppress_context__):
        return None  # something has failed here before
    return f"{_place(_passed(trace)).strip(' ()')}: HvdPeerLostError: {_line(_cause(_text(error)))}"


def _wrap_quitters() -> None:
    """exit() and quit(), which `site` has put among the builtins."""
    quitters = sys.modules.get("_sitebuiltins")
    if quitters is None:
        return
    quit = quitters.Quitter.__call__

    def call(self: Any, code: Any = None) -> None:
        try:
            quit(self, code)
        except SystemExit as error:
            _carry(self.name, error, sys._getframe(1))
            raise

    quitters.Quitter.__call__ = call


def _carry(called: str, error: SystemExit, frame: FrameType) -> None:
    good = error.code is None or (isinstance(error.code, int) and error.code == 0)
    if not good and threading.current_thread() is threading.main_thread():
        code = error.code & 0xFF if isinstance(error.code, int) else 1
        error._hvdlite = _Leaving(_of_exit(called, error.code, frame), code)  # type: ignore[attr-defined]


def exited() -> tuple[str, BaseException | None] | None:
    """At exit: the report of this rank if its script ended by an exit with a bad status, or by an exception that no
    hook of ours has seen; None: neither."""
    if _exit:
        return _exit[0][0], None
    error = getattr(sys, "last_value", None)
    if error is None or sys.flags.interactive or error.__traceback__ is None:
        return None
    first = error.__traceback__.tb_frame.f_code  # consoles and notebooks go on after what they remember
    if first.co_name not in ("<module>", "_run_module_as_main") or first.co_filename in ("<stdin>", "<console>"):
        return None
    return f"raised {_described(type(error), error, error.__traceback__)}", meant(error)


def status() -> int:
    """At exit: the exit code of this process, as far as hooks have seen it."""
    if _exit:
        return _exit[0][1]
    if exited() is None:
        return 0
    return 128 + signal.SIGINT if isinstance(getattr(sys, "last_value", None), KeyboardInterrupt) else 1


def _of_exit(called: str, status: Any, frame: FrameType) -> str:
    value = repr(status) if isinstance(status, int) else repr(str(status)[:400])
    text = f"called {called}({value}){_place(_frames(frame))}"
    before = sys.exc_info()[1]
    if isinstance(before, SystemExit):  # the error was raised while that one was handled
        before = before.__context__
    if before is not None and not isinstance(before, SystemExit):
        text += f" after {_described(type(before), before, before.__traceback__)}"
    return " ".join(text.split())


def refused(store: store_client.Rendezvous, rank: int, error: BaseException, again: bool) -> None:
    """Reports to the other ranks why this rank's init has failed. A rank that waited in vain is not the cause: the
    rank that did not come is. again: ranks that cannot reach each other make a new rendezvous."""
    if isinstance(error, HvdTimeoutError) and error.rank is not None and error.rank != rank:
        store.abort(error.rank, _core.lib.HVD_ETIMEOUT, str(error))
    elif isinstance(error, HvdInitError) and error.rank not in (None, rank) and again:
        error._again = True
        store.abort(error.rank, _core.lib.HVD_EPEER, str(error))
    elif not isinstance(error, HvdPeerLostError):  # which has come from them
        store.abort(rank, _core.lib.HVD_EINIT, f"{type(error).__name__}: {error}")


def describe(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> str:
    """`ValueError: boom (train.py:12)`: the innermost line that is the user's own, not of an installed package."""
    text = _cause(_text(error))
    code = code_of(text)
    text = f"{kind.__name__}: {uncoded(text)}" if text else kind.__name__
    return _line(text)[:_ROOM] + _place(_passed(trace)) + (f" [{code}]" if code else "")


def _text(error: BaseException) -> str:
    try:
        return str(error)
    except Exception:
        return ""


def _cause(text: str) -> str:
    """Of a text in whose midst one of ours stands, the paragraph that ends with its code; else the text.

    An error that comes out of a graph of TensorFlow begins with the calls that made the node, longer than there is room
    for, and ends with the node's name.
    """
    found = _CODE.search(text)
    if found is None or (len(text) <= _ROOM and code_of(text)):
        return text
    text = text[: found.end(1) + 1]
    return text[max((before.end() for before in _BEFORE.finditer(text)), default=0) :].strip()


def meant(error: BaseException | None) -> BaseException | None:
    """The HvdPeerLostError that an exception which is none of ours quotes, as those of a graph of TensorFlow do, with
    the rank that is lost; else the exception."""
    if error is None or isinstance(error, HvdError):
        return error
    text = _cause(_text(error))
    code = code_of(text) or ""
    others = ("HVD029", "HVD401", "HVD402", "HVD458", "HVD459")
    if code not in others and not "HVD450" <= code <= "HVD456":  # of what ended a job
        return error
    own = _core.lib.hvd_rank()
    text = re.sub(rf"^.* on rank {own}: ", "", text, flags=re.DOTALL)  # "allreduce of 'x' on rank 0: rank 1 left"
    lost = HvdPeerLostError(coded(code, text))
    lost.rank = next((rank for rank in map(int, re.findall(r"\brank (\d+) ", text)) if rank != own), None)
    return error if lost.rank is None else lost


def _described(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> str:
    """The same, of which the name is left if something else fails meanwhile."""
    for _ in range(3):
        try:
            return describe(kind, error, trace)
        except BaseException:
            continue
    return kind.__name__


def _line(text: str) -> str:
    """In one line that a terminal can print: what is no printable character is escaped."""
    return "".join(
        one if one.isprintable() else one.encode("unicode_escape").decode() for one in " ".join(text.split())
    )


def _frames(frame: FrameType | None) -> Iterator[tuple[str, int]]:
    """File and line of a call and its callers, the innermost first."""
    while frame is not None:
        yield frame.f_code.co_filename, frame.f_lineno
        frame = frame.f_back


def _passed(trace: TracebackType | None) -> Iterator[tuple[str, int]]:
    """Of a traceback, likewise."""
    calls = []
    while trace is not None:
        calls.append((trace.tb_frame.f_code.co_filename, trace.tb_lineno))
        trace = trace.tb_next
    return reversed(calls)


def _place(calls: Iterator[tuple[str, int]]) -> str:
    innermost = None
    for file, line in calls:
        innermost = innermost or (file, line)
        if not _installed(file):
            return f" ({_line(os.path.basename(file))}:{line})"
    return f" ({_line(os.path.basename(innermost[0]))}:{innermost[1]})" if innermost else ""


def _installed(filename: str) -> bool:
    package = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
    return filename.startswith(("<frozen", package, os.path.dirname(os.__file__))) or "site-packages" in filename
