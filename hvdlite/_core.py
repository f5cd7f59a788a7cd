"""Where Python meets the C core: the only file that imports hvdlite._cffi.

What is decided here: how a request is handed over, how a thread waits for it, which exception a code of the core
becomes, and how tensor memory is kept alive while the core works on it (`Pending`).

Invariants:
  - A Pending holds on to everything that the core may touch until the core has finished with it. Dropped early (an
    exception, a user who never synchronizes), it hands that on to `_abandoned`, which later submissions sweep.
  - Waiting returns to Python every 50 ms, so that Ctrl-C works; the GIL is free during every call.
  - No layout of a struct and no number of a dtype is repeated here: cffi has them from the header, the tables from C.

Not here: how a process becomes a rank and leaves (_life), what a tensor is (adapters), what a collective means (ops).
"""

from __future__ import annotations

import math
import os
import threading
from collections import deque
from collections.abc import Sequence
from typing import Any, NamedTuple

from .errors import NOT_INITIALIZED, error_of

try:
    from ._cffi import ffi, lib
except ModuleNotFoundError as error:
    _FOLDER = os.path.dirname(os.path.abspath(__file__))
    raise ImportError(
        f"hvdlite in {_FOLDER} has no compiled extension: it looks like a clone that shadows the installed package. "
        f"Start Python in another folder, or install the clone in place: pip install -e {os.path.dirname(_FOLDER)}"
    ) from error

ALLREDUCE, ALLGATHER, BROADCAST, BARRIER = lib.HVD_ALLREDUCE, lib.HVD_ALLGATHER, lib.HVD_BROADCAST, lib.HVD_BARRIER
JOIN, ALLTOALL, REDUCESCATTER = lib.HVD_JOIN, lib.HVD_ALLTOALL, lib.HVD_REDUCESCATTER
REDUCE, SEND = lib.HVD_REDUCE, lib.HVD_SEND
_OK, _AGAIN = lib.HVD_OK, lib.HVD_AGAIN
_DIMS_MAX, _TEXT_BYTES = lib.HVD_DIMS_MAX, lib.HVD_TEXT_MAX
_WAIT_MS, _REQUESTS_KEPT = 50, 8192
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
VERSION, WIRE_VERSION = text_of(lib.hvd_version()), lib.hvd_wire_version()


class _PerThread(threading.local):
    """What each thread reuses in its calls into the core."""

    def __init__(self) -> None:
        self.text = ffi.new("char[]", _TEXT_BYTES)
        self.requests: dict[Any, tuple[Any, Any]] = {}  # what a training loop asks for again and again


_thread = _PerThread()
_abandoned: deque[tuple[int, Any]] = deque()
_groups: dict[int, int] = {}  # process set -> unnamed groups so far
_latest: dict[tuple[Any, ...], int] = {}  # the last request of each name, so that a duplicate fails at the call


def error_for(code: int, text: str) -> Exception:
    """The exception for a code of the core, with the rank at fault where the core knows it."""
    name = _CODE_NAMES.get(code, "HVD_EINTERNAL")
    if name == "HVD_EFORK":
        text = (
            f"process {os.getpid()} is a forked child of a rank and no rank itself: hvdlite works only in the process "
            "that called init(). In DataLoader workers and other subprocesses do without it."
        )
    elif name == "HVD_ESTATE" and (not text or lib.hvd_initialized() != 1):
        text = text if "shut down" in text else NOT_INITIALIZED
    return error_of(name, text or f"hvdlite: {name}", failed_rank() if name == "HVD_EPEER" else None)


def failed_rank() -> int | None:
    """The rank whose end or abort made this job fail; None if the job has not failed or nobody is named."""
    failure = failure_of_job()
    return failure[0] if failure is not None and failure[0] >= 0 else None


def failure_of_job() -> tuple[int, int, str] | None:
    """(culprit, code, text) of the first failure of the job, or None."""
    culprit, code, text = ffi.new("int *"), ffi.new("int *"), ffi.new("char[]", _TEXT_BYTES)
    if lib.hvd_failure(culprit, code, text, _TEXT_BYTES) != 1:
        return None
    return culprit[0], code[0], text_of(text)


def _checked(number: int, text: Any = ffi.NULL) -> int:
    if number < 0:
        raise error_for(number, text_of(text))
    return number


def rank() -> int:
    """Number of this rank, from 0. Raises HvdNotInitializedError (a ValueError) before init()."""
    return _checked(lib.hvd_rank())


def size() -> int:
    """Number of ranks. Raises HvdNotInitializedError before init()."""
    return _checked(lib.hvd_size())


def local_rank() -> int:
    """Number of this rank on its host. Raises HvdNotInitializedError before init()."""
    return _checked(lib.hvd_local_rank())


def local_size() -> int:
    """Number of ranks on this host. Raises HvdNotInitializedError before init()."""
    return _checked(lib.hvd_local_size())


def cross_rank() -> int:
    """Number of this rank's host. Raises HvdNotInitializedError before init()."""
    return _checked(lib.hvd_cross_rank())


def cross_size() -> int:
    """Number of hosts. Raises HvdNotInitializedError before init()."""
    return _checked(lib.hvd_cross_size())


def set_open(ranks: Sequence[int]) -> int:
    """Opens a process set here; its number, the same on all ranks if all make the same calls in the same order.

    Nobody may submit to it before this has returned on all ranks: exchange something over the global set first.
    Raises ValueError (ranks out of range, doubled, not ascending, none), MemoryError, HvdNotInitializedError.
    """
    number: int = lib.hvd_set_open(ffi.new("int[]", list(ranks)), len(ranks), _thread.text, _TEXT_BYTES)
    return _checked(number, _thread.text)


def set_close(number: int) -> None:
    """Closes a process set here; what is still pending in it fails. Raises ValueError: 0, or there is no such set."""
    _checked(lib.hvd_set_close(number, _thread.text, _TEXT_BYTES), _thread.text)


class Gathered(NamedTuple):
    """Result of a ragged collective in the core's memory; valid until its Pending is released."""

    address: Any
    bytes: int
    rows: int
    rows_of: list[int]


class Pending:
    """One request in flight. `keep` is everything whose memory the core may touch."""

    __slots__ = ("keep", "native")

    def __init__(self, native: int, keep: Any) -> None:
        self.native = native
        self.keep = keep

    def done(self) -> bool:
        """Whether `wait` would return (or raise) at once."""
        return self.native == 0 or lib.hvd_poll(self.native) != _AGAIN

    def wait(self) -> None:
        """Blocks until the request is finished. Raises why it failed."""
        native, text = self.native, _thread.text
        code = lib.hvd_wait(native, _WAIT_MS, text, _TEXT_BYTES)
        while code == _AGAIN:
            code = lib.hvd_wait(native, _WAIT_MS, text, _TEXT_BYTES)
        if code != _OK:
            reason = text_of(text)
            self.release()
            raise error_for(code, reason)

    def gathered(self) -> Gathered:
        """After `wait`: what a ragged collective has brought."""
        output = ffi.new("struct hvd_output *")
        code = lib.hvd_result(self.native, output)
        if code != _OK:
            raise error_for(code, "the result of this collective is no longer there")
        rows_of = [] if output.rows_of == ffi.NULL else [output.rows_of[i] for i in range(output.size)]  # join has none
        return Gathered(output.data, output.bytes, output.rows, rows_of)

    def release(self) -> None:
        """Gives the core its slot and its result back and lets go of `keep`."""
        native, self.native, keep = self.native, 0, self.keep
        if native:
            lib.hvd_forget(native)
        self.keep = None
        del keep  # only now: forget has waited until the core is done with it

    def __del__(self) -> None:
        if self.native:
            _abandoned.append((self.native, self.keep))


def _sweep() -> None:
    """Lets go of requests that nobody will wait for, as far as they are finished."""
    for _ in range(len(_abandoned)):
        try:
            native, keep = _abandoned.popleft()
        except IndexError:
            return
        if lib.hvd_poll(native) == _AGAIN:
            _abandoned.append((native, keep))
        else:
            lib.hvd_forget(native)


def forget_all() -> None:
    """After shutdown, when the core touches nothing any more: the next job counts from 1 again."""
    _abandoned.clear()
    _latest.clear()
    _groups.clear()


def group_number(name: str | None, process_set: int = 0) -> int:
    """The number that the members of a group have in common: of its name, else of how many unnamed came before."""
    if name is not None:
        import hashlib  # loads OpenSSL, which few need

        return int.from_bytes(hashlib.blake2b(name.encode(), digest_size=8).digest(), "little") | 1 << 63
    _groups[process_set] = _groups.get(process_set, 0) + 1
    return _groups[process_set]


def _request(
    kind: int, op: int, dtype: int, name: str | None, shape: tuple[int, ...], root: int, peer: int,
    splits: tuple[int, ...] | None, prescale: float, postscale: float, process_set: int, group: int, group_count: int,
    priority: int
) -> tuple[Any, Any]:  # fmt: skip
    """A request but for its addresses, and the memory that it points to."""
    if name is not None and "\0" in name:
        raise ValueError(f"a tensor name must not contain a NUL character: {name!r}")
    if isinstance(priority, bool) or not isinstance(priority, int) or not -(2**31) <= priority < 2**31:
        raise ValueError(f"priority must be an int of 32 bits, not {priority!r} (tensor {name!r})")
    c_name = ffi.NULL if name is None else ffi.new("char[]", name.encode("utf-8", "surrogatepass"))
    request = ffi.new("struct hvd_request *")
    request.name, request.kind, request.op, request.dtype = c_name, kind, op, dtype
    request.root, request.peer = root, peer
    c_splits = ffi.NULL if splits is None else ffi.new("int64_t[]", splits)
    request.splits, request.splits_count = c_splits, len(splits or ())
    if len(shape) > _DIMS_MAX:  # the core shows shapes in errors and needs the first dimension only
        shape = (*shape[: _DIMS_MAX - 1], math.prod(shape[_DIMS_MAX - 1 :]))
    request.ndim = len(shape)
    request.dims[0 : len(shape)] = shape
    request.prescale, request.postscale = prescale, postscale
    request.process_set, request.group, request.group_count = process_set, group, group_count
    request.priority = priority
    return request, (c_name, c_splits)


def submit(
    kind: int, op: int, dtype: int, name: str | None, shape: tuple[int, ...], source: int, target: int, keep: Any, *,
    root: int = 0, peer: int = 0, splits: tuple[int, ...] | None = None, prescale: float = 1.0, postscale: float = 1.0,
    process_set: int = 0, group: int = 0, group_count: int = 0, priority: int = 0, quiet: bool = False,
    only_check: bool = False
) -> Pending:  # fmt: skip
    """Hand one contiguous tensor over. `source` and `target` are addresses; never waits for another rank.

    `quiet`: the engine is not woken for it, because the caller soon waits, submits another one that is not quiet, or
    calls `kick()`. Forgotten it is not lost: `done()` and the other ranks' tensors send it, too.
    `priority`: the same on all ranks; of what is ready together, greater goes first.
    `only_check`: raise what a submission would raise, and submit nothing.

    Raises ValueError (unsupported dtype or op, the name is in flight, no int32 as priority), HvdNotInitializedError,
    HvdPeerLostError.
    """
    if _abandoned:
        _sweep()
    tensor = (name, process_set, root, peer) if kind == SEND else (name, process_set)
    if name is not None:
        earlier = _latest.get(tensor)
        if earlier is not None and lib.hvd_poll(earlier) == _AGAIN:
            raise error_for(
                lib.HVD_EDUP,
                "Requested a collective of a tensor with the same name as another tensor that is currently being "
                f"processed: {name!r} is in flight already. Synchronize it first, or give each tensor its own name.",
            )
    thread = _thread
    key = (kind, op, dtype, name, shape, root, peer, splits, prescale, postscale, process_set, group, group_count,
           priority)  # fmt: skip
    known = thread.requests.get(key)
    if known is None:
        known = _request(*key)
        if name is not None or group == 0:  # the numbers of unnamed groups do not come again
            if len(thread.requests) >= _REQUESTS_KEPT:
                thread.requests.clear()
            thread.requests[key] = known
    request = known[0]
    request.input, request.output = ffi.cast("void *", source), ffi.cast("void *", target)
    request.quiet = quiet
    native = (lib.hvd_check if only_check else lib.hvd_submit)(request, thread.text, _TEXT_BYTES)
    _checked(native, thread.text)
    if only_check:
        return Pending(0, None)
    if name is not None:
        if len(_latest) >= _REQUESTS_KEPT:
            _latest.clear()
        _latest[tensor] = native
    return Pending(native, (keep, known))  # splits are lent until the request is finished


def kick() -> None:
    """Sends what was submitted quietly. Raises HvdNotInitializedError."""
    _checked(lib.hvd_kick())


def tune(fusion_bytes: int) -> None:
    """Proposes a size of buckets for the global set (`hvd_tune`). Raises TypeError, OverflowError, ValueError."""
    _checked(lib.hvd_tune(fusion_bytes, _thread.text, _TEXT_BYTES), _thread.text)


def fusion_bytes() -> int:
    """The size of buckets in force in the global set on this rank. Raises HvdNotInitializedError."""
    return _checked(lib.hvd_fusion_bytes())


def op_name(op: int) -> str | None:
    """The name of a reduce op, None if the core has none of that number."""
    return _OP_NAMES.get(op)


def dtype_name(dtype: int) -> str:
    """The name of a dtype that the core has."""
    return text_of(lib.hvd_dtype_name(dtype))


def dtype_bytes(dtype: int) -> int:
    """Bytes of one element."""
    return lib.hvd_dtype_bytes(dtype)
