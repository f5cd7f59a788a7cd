"""Tables of the compiled core: error codes, topology, process sets, settings.

No layout of a struct and no number of a dtype is repeated in Python: cffi has them from the header, and the tables are
read here, once, at import. A code of the core becomes an exception in `error_for`, in words that scripts
may look for them. The GIL is free during every call. Only this file imports hvdlite._cffi.
"""

from __future__ import annotations

import os
import sys
import threading
import weakref
from collections.abc import Sequence
from typing import Any

from ..errors import NOT_INITIALIZED, PREPARING, error_of

try:
    from .._cffi import ffi, lib
except ModuleNotFoundError as error:
    _FOLDER = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
    raise ImportError(
        f"hvdlite in {_FOLDER} has no compiled extension: it looks like a clone that shadows the installed package. "
        f"Start Python in another folder, or install the clone in place: pip install -e {os.path.dirname(_FOLDER)}"
        " [HVD808]"
    ) from error

ALLREDUCE, ALLGATHER, BROADCAST, BARRIER = lib.HVD_ALLREDUCE, lib.HVD_ALLGATHER, lib.HVD_BROADCAST, lib.HVD_BARRIER
JOIN, ALLTOALL, REDUCESCATTER = lib.HVD_JOIN, lib.HVD_ALLTOALL, lib.HVD_REDUCESCATTER
REDUCE, SEND = lib.HVD_REDUCE, lib.HVD_SEND
TEXT_BYTES = lib.HVD_TEXT_MAX
EXTENSION = str(sys.modules["hvdlite._cffi"].__file__)  # its file, for csrc/python
_CODE_NAMES = {getattr(lib, name): name for name in dir(lib) if name.startswith("HVD_E")}


def text_of(pointer: Any) -> str:
    """The C string as text; empty for NULL."""
    return "" if pointer == ffi.NULL else ffi.string(pointer).decode("utf-8", "replace")


def _dtypes() -> dict[str, int]:
    found: dict[str, int] = {}
    while lib.hvd_dtype_name(len(found)) != ffi.NULL:
        found[text_of(lib.hvd_dtype_name(len(found)))] = len(found)
    return found


def _ops() -> dict[str, int]:
    found: dict[str, int] = {}
    while (number := lib.hvd_op_number(len(found))) >= 0:
        found[text_of(lib.hvd_op_name(number))] = number
    return found


DTYPES = _dtypes()
OPS = _ops()
_OP_NAMES = {number: name for name, number in OPS.items()}
VERSION, WIRE_VERSION = text_of(lib.hvd_version()), lib.hvd_stream_version()


class _PerThread(threading.local):
    """Where the core writes a thread's error texts."""

    def __init__(self) -> None:
        self.text = ffi.new("char[]", TEXT_BYTES)
        callers.add(threading.current_thread())


callers: weakref.WeakSet[threading.Thread] = weakref.WeakSet()  # that have handed something to the core
thread = _PerThread()


def error_for(code: int, text: str) -> Exception:
    """The exception for a code of the core, with the rank at fault where the core knows it."""
    name = _CODE_NAMES.get(code, "HVD_EINTERNAL")
    if name == "HVD_EFORK":
        text = (
            f"process {os.getpid()} is a forked child of a rank, not a rank: hvdlite works only in the process that "
            "called init(). Do not call hvdlite in DataLoader workers and other subprocesses. [HVD122]"
        )
    elif name == "HVD_ESTATE" and (not text or lib.hvd_initialized() != 1):
        text = text if "shut down" in text else NOT_INITIALIZED
    rank = failed_rank() if name in ("HVD_EPEER", "HVD_ETIMEOUT") else None
    error = error_of(name, text or f"hvdlite: {name} [HVD901]", rank)
    error._hvdlite = True  # type: ignore[attr-defined]  # see is_outcome
    return error


def failed_rank() -> int | None:
    """The rank whose end or abort made this job fail, or that has left; None if there is none or no rank is named."""
    failure = failure_of_job()
    culprit: int = lib.hvd_left() if failure is None else failure[0]
    return culprit if culprit >= 0 else None


def failure_of_job() -> tuple[int, int, str] | None:
    """(culprit, code, text) of the first failure of the job, or None."""
    culprit, code, text = ffi.new("int *"), ffi.new("int *"), ffi.new("char[]", TEXT_BYTES)
    if lib.hvd_failure(culprit, code, text, TEXT_BYTES) != 1:
        return None
    return culprit[0], code[0], text_of(text)


def checked(number: int, text: Any = ffi.NULL) -> int:
    """The number, unless it is a code of an error."""
    if number < 0:
        raise error_for(number, text_of(text))
    return number


preparing: list[tuple[int, int, int, int, int, int]] = []  # of a process that waits to join an elastic job
_borrowed: list[Any] = []  # the same, borrowed by the core: graphs of TensorFlow read it
_ALONE = ALLREDUCE, ALLGATHER, BROADCAST, BARRIER, JOIN  # what such a process may do: with itself, in a core of its own


def prepare(assignment: tuple[int, int, int, int, int, int] | None) -> None:
    """This process has yet to join its job, and has this rank assignment until then; None: no more."""
    preparing[:] = [] if assignment is None else [assignment]
    borrowed = ffi.NULL if assignment is None else ffi.new("int[]", assignment)
    lib.hvd_tell_place(borrowed)
    _borrowed[:] = [borrowed]


def require_job(kind: int | None = None) -> None:
    """HvdNotInitializedError where there are no other ranks, or none yet: for what needs more than a guess. kind: of a
    collective, which may need no other rank."""
    if preparing and kind not in _ALONE:
        raise error_of("HVD_ESTATE", PREPARING)
    if kind is None:
        checked(lib.hvd_rank())


def is_root(root_rank: int) -> bool:
    """Whether this rank is the root of a collective. A process that prepares is alone in its core."""
    return bool(preparing) or rank() == root_rank


def rank() -> int:
    """Return the number of this rank in the job.

    Returns:
        int: from 0 to ``size() - 1``.

    Raises:
        HvdNotInitializedError: before ``init`` and after ``shutdown``. It is also a ``ValueError``.

    Example:
        >>> hvd.rank()
        0  # rank 0
        1  # rank 1
    """
    return preparing[0][0] if preparing else checked(lib.hvd_rank())


def size() -> int:
    """Return the number of ranks in the job.

    Returns:
        int: at least 1.

    Raises:
        HvdNotInitializedError: before ``init`` and after ``shutdown``. It is also a ``ValueError``.

    Example:
        >>> hvd.size()
        2
    """
    return preparing[0][1] if preparing else checked(lib.hvd_size())


def local_rank() -> int:
    """Return the number of this rank on its host, which is the usual index of its GPU.

    Returns:
        int: from 0 to ``local_size() - 1``.

    Raises:
        HvdNotInitializedError: before ``init`` and after ``shutdown``. It is also a ``ValueError``.

    Example:
        >>> hvd.local_rank()  # both ranks are on one host
        0  # rank 0
        1  # rank 1
    """
    return preparing[0][2] if preparing else checked(lib.hvd_local_rank())


def local_size() -> int:
    """Return the number of ranks on this host.

    Returns:
        int: at least 1.

    Raises:
        HvdNotInitializedError: before ``init`` and after ``shutdown``. It is also a ``ValueError``.

    Example:
        >>> hvd.local_size()
        2
    """
    return preparing[0][3] if preparing else checked(lib.hvd_local_size())


def cross_rank() -> int:
    """Return the number of this rank's host.

    Returns:
        int: from 0 to ``cross_size() - 1``.

    Raises:
        HvdNotInitializedError: before ``init`` and after ``shutdown``. It is also a ``ValueError``.

    Example:
        >>> hvd.cross_rank()
        0
    """
    return preparing[0][4] if preparing else checked(lib.hvd_cross_rank())


def cross_size() -> int:
    """Return the number of hosts in the job.

    Returns:
        int: at least 1.

    Raises:
        HvdNotInitializedError: before ``init`` and after ``shutdown``. It is also a ``ValueError``.

    Example:
        >>> hvd.cross_size()
        1
    """
    return preparing[0][5] if preparing else checked(lib.hvd_cross_size())


def bytes_or_null(text: str | None) -> Any:
    """A `const char *` for the core, to be kept as long as it is borrowed; NULL for None."""
    return ffi.NULL if text is None else ffi.new("char[]", text.encode("utf-8"))


def named(plane: str | None, algo: str | None) -> str | None:
    """Why this build does not have the plane and algorithm of these names; None: it has."""
    borrowed = [bytes_or_null(name) for name in (plane, algo)]
    code = lib.hvd_named(*borrowed, thread.text, TEXT_BYTES)
    return None if code == lib.HVD_OK else text_of(thread.text)


def row_or_null(descriptors: Sequence[int] | None) -> Any:
    """Descriptors by rank for the core, to be kept as long as they are borrowed; NULL for None."""
    return ffi.NULL if descriptors is None else ffi.new("int[]", list(descriptors))


def keys_or_null(keys: bytes | None) -> Any:
    """Keys of connections for the core, borrowed as long as this is kept; NULL for None, and where there are none."""
    return ffi.from_buffer("unsigned char[]", keys) if keys else ffi.NULL


def set_open(
    number: int,
    incarnation: int,
    ranks: Sequence[int],
    vote_fds: Sequence[int] | None = None,
    tensor_fds: Sequence[int] | None = None,
    vote_keys: bytes | None = None,
    tensor_keys: bytes | None = None,
) -> None:
    """Opens a process set here, under the number and incarnation that all its members give.

    number: free on all of them. incarnation: greater than all that one of them has given before.
    vote_fds, tensor_fds: connected sockets by rank in the set, -1 where there is none; the core's from now on. Their
    keys: 64 bytes for each rank, by which the core signs what crosses them; None: it does not.

    No member may submit to it before this has returned on all members: exchange something among them first.
    Raises ValueError (ranks out of range, doubled, not ascending, none; a number in use or none that there is),
    MemoryError, HvdNotInitializedError.
    """
    votes, tensors = row_or_null(vote_fds), row_or_null(tensor_fds)
    members = ffi.new("int[]", list(ranks))
    keys = [keys_or_null(vote_keys), keys_or_null(tensor_keys)]
    checked(
        lib.hvd_set_open(number, incarnation, members, len(ranks), votes, tensors, *keys, thread.text, TEXT_BYTES),
        thread.text,
    )


def set_close(number: int) -> None:
    """Closes a process set here; what is still pending in it fails. Raises ValueError: 0, or there is no such set."""
    checked(lib.hvd_set_close(number, thread.text, TEXT_BYTES), thread.text)


def tune(fusion_bytes: int) -> None:
    """Proposes a size of buckets for the global set (`hvd_tune`). Raises TypeError, OverflowError, ValueError."""
    checked(lib.hvd_tune(fusion_bytes, thread.text, TEXT_BYTES), thread.text)


def fusion_bytes() -> int:
    """The size of buckets in force in the global set on this rank. Raises HvdNotInitializedError."""
    return checked(lib.hvd_fusion_bytes())


def gpu_libraries(cuda: str | None, nccl: str | None) -> None:
    """Which files the core loads when the first tensor on a GPU comes, if not those that are loaded already; None: by
    name."""
    lib.hvd_gpu_libraries(bytes_or_null(cuda), bytes_or_null(nccl))


def clock() -> tuple[int, int, str]:
    """(offset_ns, error_ns, host): added to this rank's CLOCK_MONOTONIC the offset makes it that of rank 0, give or
    take the error (-1: not known). HvdNotInitializedError before init()."""
    offset, error, host = ffi.new("int64_t *"), ffi.new("int64_t *"), ffi.new("char[]", 128)
    checked(lib.hvd_clock(offset, error, host, 128))
    return offset[0], error[0], text_of(host)


def keep(path: str) -> dict[str, Any]:
    """Renames a file of records that another incarnation of a job has left at this path. Returns what identifies
    this incarnation, for the beginning of the new file. HvdNotInitializedError before init()."""
    job, epoch = ffi.new("uint64_t *"), ffi.new("uint64_t *")
    checked(lib.hvd_rotate(os.fsencode(path), job, epoch))
    return {"job": f"{job[0]:016x}", "epoch": int(epoch[0])}


def behind(native: int, stream: int) -> None:
    """What is put on this stream of the tensor's device from now on comes after a collective that was waited for.

    Raises HvdPeerLostError (the job has failed meanwhile), HvdError.
    """
    checked(lib.hvd_behind(native, stream, thread.text, TEXT_BYTES), thread.text)


def fetch(native: int, target: int, stream: int) -> None:
    """`behind`, and the result of a ragged collective on a device is copied to this address on that stream. Raises as
    `behind`."""
    checked(lib.hvd_fetch(native, target, stream, thread.text, TEXT_BYTES), thread.text)


def addresses(*names: str) -> list[int]:
    """Where functions of the core lie, by their names in the header: for code that is compiled apart."""
    return [int(ffi.cast("uintptr_t", ffi.addressof(lib, name))) for name in names]


def op_name(op: int) -> str | None:
    """The name of a reduce op, None if the core has none of that number."""
    return _OP_NAMES.get(op)


def dtype_name(dtype: int) -> str:
    """The name of a dtype that the core has."""
    return text_of(lib.hvd_dtype_name(dtype))


def dtype_bytes(dtype: int) -> int:
    """Bytes of one element."""
    return lib.hvd_dtype_bytes(dtype)
