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

from .codes import code_of


class HvdError(RuntimeError):
    """Base class of the errors that hvdlite raises about collectives.

    It is a ``RuntimeError``. Every text ends with a code such as ``[HVD301]``; ``hvdlite-run --explain HVD301``
    explains it.

    Attributes:
        rank (int): the rank at fault, or None.

    Example:
        >>> try:
        ...     hvd.allgather(np.array(1.0))
        ... except hvd.HvdError as error:
        ...     print(type(error).__name__, error.code, error.rank)
        HvdArgumentError HVD210 None
    """

    rank: int | None = None

    @property
    def code(self) -> str | None:
        """The code at the end of the text, such as ``"HVD301"``; None if it has none."""
        return code_of(str(self))


# Outcomes of a collective. A caller that waits for several takes these as their outcome and waits for the others; all
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
    """The ranks disagree about one tensor: its shape, dtype, op, root or factors.

    All ranks raise it. It points to an error in the script; correct the script. The job and other collectives go on.

    Attributes:
        ranks (tuple of int): ranks that differ from the first rank, as far as they are known.

    Example:
        >>> try:
        ...     hvd.broadcast(np.array([1.0]), root_rank=hvd.rank())
        ... except hvd.HvdMismatchError as error:
        ...     print("ranks disagree on the root rank" in str(error))
        True
    """

    ranks: tuple[int, ...] = ()


class HvdArgumentError(HvdError, ValueError):
    """A tensor or an argument that a collective cannot take.

    It is also raised for a collective that is refused because another rank has joined. Correct the call. It is a
    ``ValueError`` and a ``RuntimeError``, because Horovod raises the one at the call and the other when it
    synchronizes.
    """


class HvdSparseError(HvdArgumentError, NotImplementedError):
    """A reduction that sparse tensors do not have. It is also a ``NotImplementedError``, which Horovod raises."""


class HvdNotInitializedError(HvdError, ValueError):
    """A call before ``init``, after ``shutdown``, or in a process that has not joined its elastic job yet.

    Call ``hvd.init()`` first.
    """


class HorovodInternalError(HvdError):
    """The job cannot go on with these ranks.

    The name is Horovod's. Elastic training retries its subclass ``HvdPeerLostError`` only. Without elastic training,
    start the job again from a checkpoint.
    """


class HvdNotFiniteError(HvdError, FloatingPointError):
    """A rank gave NaN or infinity to a reduction while ``HVDLITE_NAN_GUARD`` was on.

    All ranks raise it with the same text, which names the tensor, the ranks and the number of such values. The tensor
    was not reduced, and the job goes on. It is also a ``FloatingPointError``.
    """


class HvdPeerLostError(HorovodInternalError):
    """A rank has died or has left the job.

    The job cannot go on with these ranks. Elastic training retries this error, and no other. Without elastic training,
    start the job again from a checkpoint.

    Attributes:
        rank (int): the rank that was lost, or None if it is not known.
    """


class HvdInitError(HvdError):
    """``init`` did not succeed.

    The text names the rank, the step that failed, and what to do.
    """

    _over = False  # the job ends, and its launcher says why
    _again = False  # the link to a living rank is cut, in an elastic job: the ranks join a new rendezvous


class HvdRemoved(HvdInitError):
    """Elastic training: this rank is to leave the job, whose other ranks go on. `hvd.elastic.run` ends the process by
    SystemExit(0)."""


class HvdStateError(HvdError, ValueError):
    """A file of ``State.save_to`` cannot be loaded, or a part of a State can be neither saved nor sent.

    The text names the file or the part. Load a file that is complete and was saved from a state of the same form.
    """


class HvdOptionError(HvdInitError, ValueError):
    """An environment variable or a flag has an invalid value.

    The text names both. Correct the value.
    """


class HvdTimeoutError(HvdError):
    """A call took longer than its limit.

    After a ``timeout=`` the job goes on; call ``hvd.synchronize(error.handle)`` to wait for the collective again. A
    limit of the job, such as ``HVDLITE_COLLECTIVE_TIMEOUT``, ends it.

    Attributes:
        handle (Handle): the collective that is still in flight, if ``timeout=`` of one call has passed; else None.

    Example:
        >>> if hvd.rank() == 0:
        ...     try:
        ...         hvd.allreduce(np.array([1.0]), name="late", op=hvd.Sum, timeout=0.01)
        ...     except hvd.HvdTimeoutError as error:
        ...         hvd.barrier()
        ...         print(hvd.synchronize(error.handle).tolist())
        ... else:
        ...     hvd.barrier()
        ...     print(hvd.allreduce(np.array([1.0]), name="late", op=hvd.Sum).tolist())
        [2.0]
    """

    handle: Any = None


class HvdRunError(HvdError):
    """A job that ``hvd.run`` has started did not succeed.

    The text has the traceback of the rank that failed. The exception of the rank is the ``__cause__``, if it could be
    sent.

    Args:
        text (str): the text.
        rank (int, optional): the rank that failed.
        exit_code (int): exit code of the job. Default: 1.

    Attributes:
        rank (int): the rank that failed; None if no rank is known to have failed first.
        exit_code (int): exit code of the job.
    """

    def __init__(self, text: str, rank: int | None = None, exit_code: int = 1) -> None:
        super().__init__(text)
        self.rank, self.exit_code = rank, exit_code


class HvdForkError(HvdError):
    """hvdlite was called in a forked child of a rank, such as a worker of a DataLoader.

    Call it in the rank's own process only, or start workers by ``spawn``.
    """


class HvdNotYetError(HvdError, NotImplementedError):
    """A part of Horovod's interface that this version does not have.

    The text names a substitute. It is also a ``NotImplementedError``.
    """


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
    "this process joins the job later and cannot communicate before its training function (hvd.elastic.run) begins, "
    "but with itself: allreduce, allgather, broadcast, barrier, join and objects. Call this inside that function. "
    "[HVD426]"
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
