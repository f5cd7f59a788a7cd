"""How is a request handed over, how does a thread wait for it, and what keeps tensor memory alive meanwhile?

Invariants:
  - A Pending holds on to everything that the core may touch until the core has finished with it. Dropped early (an
    exception, a user who never synchronizes), it hands that on to `_abandoned`, which later submissions sweep.
  - Waiting returns to Python every 50 ms, so that Ctrl-C works.
"""

from __future__ import annotations

import math
import threading
from collections import deque
from typing import Any, NamedTuple

from .library import SEND, TEXT_BYTES, checked, error_for, ffi, lib, text_of, thread

_OK, _AGAIN, _DIMS_MAX = lib.HVD_OK, lib.HVD_AGAIN, lib.HVD_DIMS_MAX
_WAIT_MS, _REQUESTS_KEPT = 50, 8192


class _Requests(threading.local):
    """What a thread's training loop asks for again and again."""

    def __init__(self) -> None:
        self.known: dict[Any, tuple[Any, Any]] = {}


_requests = _Requests()
_abandoned: deque[tuple[int, Any]] = deque()
_groups: dict[int, int] = {}  # process set -> unnamed groups so far
_latest: dict[tuple[Any, ...], int] = {}  # the last request of each name, so that a duplicate fails at the call


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
        native, text = self.native, thread.text
        code = lib.hvd_wait(native, _WAIT_MS, text, TEXT_BYTES)
        while code == _AGAIN:
            code = lib.hvd_wait(native, _WAIT_MS, text, TEXT_BYTES)
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
    requests = _requests.known
    key = (kind, op, dtype, name, shape, root, peer, splits, prescale, postscale, process_set, group, group_count,
           priority)  # fmt: skip
    known = requests.get(key)
    if known is None:
        known = _request(*key)
        if name is not None or group == 0:  # the numbers of unnamed groups do not come again
            if len(requests) >= _REQUESTS_KEPT:
                requests.clear()
            requests[key] = known
    request = known[0]
    request.input, request.output = ffi.cast("void *", source), ffi.cast("void *", target)
    request.quiet = quiet
    native = (lib.hvd_check if only_check else lib.hvd_submit)(request, thread.text, TEXT_BYTES)
    checked(native, thread.text)
    if only_check:
        return Pending(0, None)
    if name is not None:
        if len(_latest) >= _REQUESTS_KEPT:
            _latest.clear()
        _latest[tensor] = native
    return Pending(native, (keep, known))  # splits are lent until the request is finished


def kick() -> None:
    """Sends what was submitted quietly. Raises HvdNotInitializedError."""
    checked(lib.hvd_kick())
