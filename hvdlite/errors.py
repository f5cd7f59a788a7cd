"""The classes of error a user meets, and which code of the core becomes which class.

Three questions decide the class: did the caller make a mistake that this process can see alone (ValueError, TypeError);
do the ranks disagree about one tensor (HvdMismatchError: a bug in the script, the job can go on); or is a rank gone
(HvdPeerLostError: nothing can be done on this set of ranks any more)? Elastic training retries the last kind only,
so that a deterministic bug never loops. The texts come from where the fact is known, mostly the core; nothing here
rewords them.
"""

from __future__ import annotations

import signal
from typing import Any

from ._coded import code_of


class HvdError(RuntimeError):
    """Anything that hvdlite raises about collectives. `rank` is the rank at fault, or None."""

    rank: int | None = None

    @property
    def code(self) -> str | None:
        """What ERRORS.md and `hvdlite-run --explain` tell more about, as "HVD301": the code that the text ends with."""
        return code_of(str(self))


# What a collective can end with. Whoever waits for several takes these as their outcome and waits for the others; all
# else comes from a signal handler of the user's (Ctrl-C, an alarm), which comes out at once.
OUTCOMES = (HvdError, MemoryError, ValueError)


def is_outcome(error: BaseException) -> bool:
    """Whether it is one of OUTCOMES, and the core's or with a code: a signal handler may raise a ValueError, too."""
    return isinstance(error, OUTCOMES) and (hasattr(error, "_hvdlite") or code_of(str(error)) is not None)


def let_out(error: OSError) -> None:
    """Raises it again if it is a signal handler's: an alarm's TimeoutError is an OSError, as what sockets raise."""
    handlers = {_run_by(signal.getsignal(number)) for number in signal.valid_signals()} - {None}
    step = error.__traceback__
    while step is not None:
        if step.tb_frame.f_code in handlers:
            raise error
        step = step.tb_next


def _run_by(handler: Any) -> Any:
    """The code of a function, of a method or of an object that is called; None for what is not Python's."""
    handler = getattr(handler, "func", handler)  # of a functools.partial
    if not hasattr(handler, "__code__"):
        handler = next((vars(each)["__call__"] for each in type(handler).__mro__ if "__call__" in vars(each)), None)
    return getattr(handler, "__code__", None)


class HvdMismatchError(HvdError, ValueError):
    """The ranks disagree about one tensor: its shape, dtype, op, root or scale. The engine goes on working. `ranks`:
    those that differ from the first rank, as far as that is known."""

    ranks: tuple[int, ...] = ()


class HvdArgumentError(HvdError, ValueError):
    """A tensor that a collective cannot take, or cannot take now (another rank has joined). A ValueError and, as every
    HvdError, a RuntimeError: Horovod raises the one at the call and the other when it synchronizes."""


class HvdNotInitializedError(HvdError, ValueError):
    """A call before init() or after shutdown(), or of a process that joins an elastic job later."""


class HorovodInternalError(HvdError):
    """The job cannot go on with these ranks. Horovod's name of it."""


class HvdNotFiniteError(HvdError, FloatingPointError):
    """HVDLITE_NAN_GUARD: a rank gave NaN or infinities to be reduced. The text, the same on all ranks, says which
    tensor, which ranks, and how many; the tensor was not reduced, and the engine goes on working."""


class HvdPeerLostError(HorovodInternalError):
    """A rank has died or has left; `rank` says which. The only error that elastic training retries."""


class HvdInitError(HvdError):
    """init() did not succeed; the text says which rank, in which step, and what to do."""

    _over = False  # the job ends, and its launcher says why
    _again = False  # the link to a rank that lives is cut, in an elastic job: the ranks meet anew


class HvdRemoved(HvdInitError):
    """Elastic training: this rank is to leave the job, whose other ranks go on. `hvd.elastic.run` ends the process by
    SystemExit(0)."""


class HvdStateError(HvdError, ValueError):
    """A file of State.save_to cannot be taken: it is not whole, or of another state; or a part of a State can
    be neither kept nor sent. The text names it."""


class HvdOptionError(HvdInitError, ValueError):
    """An environment variable or a flag has a value that cannot be; the text names both."""


class HvdTimeoutError(HvdError):
    """Something took longer than its limit. `handle`: where that was the `timeout=` of one call, the collective that
    is still under way; `hvd.synchronize(error.handle)` waits for it again. Else None."""

    handle: Any = None


class HvdRunError(HvdError):
    """A job that run() has started did not succeed. `rank` has failed (None: none was called).

    `exit_code` is the job's. The text has the traceback of that rank; what it raised is the cause, if it could be sent.
    """

    def __init__(self, text: str, rank: int | None = None, exit_code: int = 1) -> None:
        super().__init__(text)
        self.rank, self.exit_code = rank, exit_code


class HvdForkError(HvdError):
    """hvdlite was called in a forked child of a rank, for example in a DataLoader worker."""


class HvdNotYetError(HvdError, NotImplementedError):
    """Part of Horovod's surface that comes with a later version; the text says what to do until then."""


class HvdNotYetModuleError(ModuleNotFoundError, HvdNotYetError):
    """A module of Horovod's that comes with a later version. `except ImportError` catches it, as scripts expect."""


class HostsUpdatedInterrupt(RuntimeError):
    """Elastic training: the hosts have changed. No failure, so no HvdError. `skip_sync` says that hosts have only gone;
    `hvd.elastic.run` sends the state all the same, since others may have come by then."""

    def __init__(self, skip_sync: bool = False) -> None:
        super().__init__("the hosts of the job have changed")
        self.skip_sync = skip_sync


def get_version_mismatch_message(name: str, version: str, installed_version: str) -> str:
    """Horovod's text about a framework that is not the one it was compiled against."""
    return (
        f"{name} {version} is in use, but {installed_version} was found when the library was installed. "
        "hvdlite is compiled against no framework and never needs a new installation for a new one."
    )


class HorovodVersionMismatchError(ImportError):
    """Horovod's: a framework is not the one it was compiled against. hvdlite never raises it."""

    def __init__(self, name: str, version: str, installed_version: str) -> None:
        super().__init__(get_version_mismatch_message(name, version, installed_version))
        self.name, self.version, self.installed_version = name, version, installed_version


NOT_INITIALIZED = "hvdlite has not been initialized; use hvd.init(). [HVD101]"
PREPARING = (
    "this process has come later and joins the others when its training function (hvd.elastic.run) begins: until then "
    "there is nobody to exchange anything with. Call collectives inside of that function; broadcasts of what the State "
    "holds can be left out, since it is synchronized then. [HVD426]"
)

# By the names of the core's codes (csrc/hvdlite.h), so that this file needs no extension to be imported.
CLASS_OF_CODE: dict[str, type[Exception]] = {
    "HVD_EINVAL": HvdArgumentError,
    "HVD_ETYPE": HvdArgumentError,
    "HVD_EDUP": ValueError,
    "HVD_EMISMATCH": HvdMismatchError,
    "HVD_EPEER": HvdPeerLostError,
    "HVD_EINIT": HvdInitError,
    "HVD_ETIMEOUT": HvdTimeoutError,
    "HVD_ENOMEM": MemoryError,
    "HVD_ESTATE": HvdNotInitializedError,
    "HVD_EFORK": HvdForkError,
    "HVD_EHANDLE": ValueError,
    "HVD_EINTERNAL": HorovodInternalError,
    "HVD_ENAN": HvdNotFiniteError,
    "HVD_EFULL": HorovodInternalError,
}


def error_of(code_name: str, text: str, rank: int | None = None) -> Exception:
    """The exception for a code of the core. `rank` is the culprit where the core knows one."""
    error = CLASS_OF_CODE.get(code_name, HorovodInternalError)(text)
    if isinstance(error, HvdError):
        error.rank = rank
    else:
        error.code = code_of(text)  # type: ignore[attr-defined]
    return error
