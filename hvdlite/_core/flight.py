"""How is a request handed over, how does a thread wait for it, and what keeps tensor memory alive meanwhile?

A training loop asks for the same again and again. So what a call says but for its memory is a `Request`, made once
and kept; handing it over is one call of the core (`start`), waiting for it is one (`finish`), and a synchronous
collective is one altogether (`run`).

Invariants:
  - Whatever the core may touch is held until the core has finished with it, by a Pending or by who called `start`.
    Dropped early (an exception, a user who never synchronizes), it goes to `abandon`, and later submissions sweep it.
    If the job has failed a device may be at it although the core has finished: see device.py.
  - Waiting returns to Python every 50 ms, so that Ctrl-C works.
  - A Request never changes, so threads share it.
"""

from __future__ import annotations

import math
import warnings
from collections import OrderedDict, deque
from collections.abc import Callable
from typing import Any, NamedTuple

from .device import Point, let_go, risk
from .kept import remember
from .library import SEND, TEXT_BYTES, checked, error_for, ffi, lib, text_of, thread
from .patience import WAIT_MS, waited
from .unnamed import forget_unnamed

NOW, QUIET, SOON = lib.HVD_NOW, lib.HVD_QUIET, lib.HVD_SOON
_OK, _AGAIN, _DIMS_MAX = lib.HVD_OK, lib.HVD_AGAIN, lib.HVD_DIMS_MAX
_REDUCES = (lib.HVD_ALLREDUCE, lib.HVD_REDUCE, lib.HVD_REDUCESCATTER)
_run, _finish, _poll = lib.hvd_run, lib.hvd_finish, lib.hvd_poll
_WAIT_MS = WAIT_MS

_abandoned: deque[tuple[int, Any, Any]] = deque()
_requests: OrderedDict[Any, Request] = OrderedDict()
_flying: dict[Any, int] = {}  # by name, until somebody has waited: so that a duplicate fails at the call


class Request:
    """What a call says but for its memory. Shared by threads and never changed."""

    __slots__ = ("_lent", "name", "native")

    def __init__(self, native: Any, name: Any, lent: Any) -> None:
        self.native = native
        self.name = name  # by what it is known while in flight; None: unnamed
        self._lent = lent

    def start(self, source: int, target: int, quiet: int = NOW) -> int:
        """Submits it with these addresses; its number, for `finish`. The caller keeps the memory alive until then, or
        hands it on to `abandon`. Raises as `submit`."""
        if _abandoned:
            _sweep()
        name = self.name
        if name is not None and name in _flying:
            _refuse_twice(name)
        text = thread.text
        native: int = _run(self.native, source, target, quiet, 0, text, TEXT_BYTES)
        if native < 0:
            raise error_for(native, text_of(text))
        if name is not None:
            _flying[name] = native
        return native

    def run(self, source: int, target: int, keep: Any) -> None:
        """Submits it and waits. Raises as `submit` and `finish`. Not for collectives that have a result to fetch."""
        if _abandoned:
            _sweep()
        name = self.name
        if name is not None and name in _flying:
            _refuse_twice(name)
        text = thread.text
        outcome = _run(self.native, source, target, QUIET, _WAIT_MS, text, TEXT_BYTES)
        if outcome > 0:
            Pending(outcome, keep, self).finish()
        elif outcome < 0:
            raise error_for(outcome, text_of(text))

    def placed(self, device: int, ready: int, not_finite: int = 0) -> Request:
        """The same of memory on a device. not_finite: what was found there, for the NaN guard."""
        native = ffi.new("struct hvd_request *", self.native[0])
        native.device, native.ready, native.not_finite = device, ffi.cast("void *", ready), not_finite
        return Request(native, self.name, (self._lent, self.native))

    def check(self, source: int, target: int) -> None:
        """Raises what a submission would raise, and submits nothing."""
        whole = ffi.new("struct hvd_request *", self.native[0])
        whole.input, whole.output = ffi.cast("void *", source), ffi.cast("void *", target)
        checked(lib.hvd_check(whole, thread.text, TEXT_BYTES), thread.text)


def _refuse_twice(name: Any) -> None:
    if _poll(_flying.get(name, 0)) == _AGAIN:
        raise error_for(
            lib.HVD_EDUP,
            "Requested a collective of a tensor with the same name as another tensor that is currently being "
            f"processed: {name[0]!r} is in flight already. Synchronize it first, or give each tensor its own name."
            " [HVD205]",
        )


def finish(native: int, request: Request | None) -> None:
    """Waits for what `start` has submitted and gives its slot back. Raises why it failed."""
    text = thread.text
    code = _finish(native, _WAIT_MS, text, TEXT_BYTES)
    since = 0.0
    while code == _AGAIN:
        since = waited(since, request.name if request is not None else None)
        code = _finish(native, _WAIT_MS, text, TEXT_BYTES)
    if request is not None:
        landed(native, request)
    if code != _OK:
        raise error_for(code, text_of(text))


def done(native: int) -> bool:
    """Whether `finish` would return (or raise) at once."""
    return _poll(native) != _AGAIN


def landed(native: int, request: Request) -> None:
    """Its name is free again."""
    if request.name is not None and _flying.get(request.name) == native:
        _flying.pop(request.name, None)


def abandon(native: int, keep: Any, request: Request | None) -> None:
    """Nobody will wait for it: keeps the memory alive as long as the core needs it."""
    _abandoned.append((native, keep, request))


class Gathered(NamedTuple):
    """Result of a ragged collective in the core's memory; valid until its Pending is released."""

    address: Any
    bytes: int
    rows: int
    rows_of: list[int]


class Pending:
    """One request in flight. `keep` is everything whose memory the core may touch."""

    __slots__ = ("follow", "keep", "native", "ready", "request")

    def __init__(
        self, native: int, keep: Any, request: Request | None = None,
        follow: Callable[[int, Any], None] | None = None, ready: tuple[int, Any] | None = None
    ) -> None:  # fmt: skip
        self.native = native
        self.keep = keep
        self.request = request
        self.follow = follow
        self.ready = ready

    def done(self) -> bool:
        """Whether `wait` would return (or raise) at once."""
        return self.native == 0 or _poll(self.native) != _AGAIN

    def wait(self, bounded: bool = True) -> None:
        """Blocks until the request is finished, and keeps its result. Raises why it failed. bounded: by patience.py.

        On a device nobody waits for that: it blocks until the collective lies there, and lets the framework follow it.
        """
        native, text, since = self.native, thread.text, 0.0
        code = lib.hvd_wait(native, _WAIT_MS, text, TEXT_BYTES)
        while code == _AGAIN:
            if bounded:
                since = waited(since, self.request.name if self.request is not None else None)
            code = lib.hvd_wait(native, _WAIT_MS, text, TEXT_BYTES)
        if code != _OK:
            reason = text_of(text)
            self._lost()
            self.release()
            raise error_for(code, reason)
        if self.follow is not None:
            try:
                self.follow(native, self.ready)
            except Exception:
                self._lost()
                raise

    @property
    def there(self) -> Point | None:
        """What it began after, if who waits for it waits for its device, too."""
        owner = self.ready[1] if self.ready is not None else None
        return owner if isinstance(owner, Point) else None

    def _lost(self) -> None:
        """It has failed, but its device may still be at it."""
        point = self.there
        if point is not None:
            point.hold(self.keep)
        elif self.ready is not None:
            risk(self.keep)

    def finish(self) -> None:
        """`wait` and `release` in one call of the core, where there is no result to fetch."""
        finish(self.native, self.request)
        self.native = 0
        self.keep = None

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
            if self.request is not None:
                landed(native, self.request)
        self.keep = None
        del keep  # only now: forget has waited until the core is done with it

    def __del__(self) -> None:
        if self.native:
            abandon(self.native, self.keep, self.request)


def _sweep() -> None:
    """Lets go of requests that nobody will wait for, as far as they are finished."""
    for _ in range(len(_abandoned)):
        try:
            native, keep, request = _abandoned.popleft()
        except IndexError:
            return
        if _poll(native) == _AGAIN:
            _abandoned.append((native, keep, request))
        else:
            if request is not None and request.native.device:
                risk(keep)
            lib.hvd_forget(native)
            if request is not None:
                landed(native, request)


def forget_all() -> None:
    """After shutdown, when the core touches nothing any more: the next job counts from 1 again."""
    while _abandoned:  # a handle may be dropped meanwhile, by another thread or a collection of garbage
        try:
            _, keep, request = _abandoned.popleft()
        except IndexError:
            break
        if request is not None and request.native.device:
            risk(keep)
    let_go()
    _flying.clear()
    forget_unnamed(None)


def request(
    kind: int, op: int, dtype: int, name: str | None, shape: tuple[int, ...], *, root: int = 0, peer: int = 0,
    splits: tuple[int, ...] | None = None, prescale: float = 1.0, postscale: float = 1.0, process_set: int = 0,
    group: int = 0, group_count: int = 0, priority: int = 0, wire: int = 0
) -> Request:  # fmt: skip
    """The Request that says this, made when it is asked for the first time. wire: of an allreduce on devices, the dtype
    that it may travel as, counted from 1. Raises ValueError: a NUL in the name, a priority that is no int32."""
    key = (kind, op, dtype, name, shape, root, peer, splits, prescale, postscale, process_set, group, group_count,
           priority, wire)  # fmt: skip
    known = _requests.get(key)
    if known is None:
        known = _made(*key)
        if name is not None or group == 0:  # the numbers of unnamed groups do not come again
            remember(_requests, key, known)
    return known


def _made(
    kind: int, op: int, dtype: int, name: str | None, shape: tuple[int, ...], root: int, peer: int,
    splits: tuple[int, ...] | None, prescale: float, postscale: float, process_set: int, group: int, group_count: int,
    priority: int, wire: int
) -> Request:  # fmt: skip
    if name is not None and "\0" in name:
        raise ValueError(f"a tensor name must not contain a NUL character: {name!r} [HVD204]")
    if isinstance(priority, bool) or not isinstance(priority, int) or not -(2**31) <= priority < 2**31:
        raise ValueError(f"priority must be an int of 32 bits, not {priority!r} (tensor {name!r}) [HVD204]")
    c_name = ffi.NULL if name is None else ffi.new("char[]", name.encode("utf-8", "surrogatepass"))
    c_splits = ffi.NULL if splits is None else ffi.new("int64_t[]", splits)
    native = ffi.new("struct hvd_request *")
    native.name, native.kind, native.op, native.dtype = c_name, kind, op, dtype
    native.root, native.peer = root, peer
    native.splits, native.splits_count = c_splits, len(splits or ())
    if len(shape) > _DIMS_MAX:  # the core shows shapes in errors and needs the first dimension only
        shape = (*shape[: _DIMS_MAX - 1], math.prod(shape[_DIMS_MAX - 1 :]))
    native.ndim = len(shape)
    native.dims[0 : len(shape)] = shape
    native.prescale, native.postscale = prescale, postscale
    native.process_set, native.group, native.group_count = process_set, group, group_count
    native.priority, native.wire = priority, wire
    known_as = None if name is None else (name, process_set, root, peer) if kind == SEND else (name, process_set)
    return Request(native, known_as, (c_name, c_splits))


def submit(
    kind: int, op: int, dtype: int, name: str | None, shape: tuple[int, ...], source: int, target: int, keep: Any, *,
    quiet: int = NOW, only_check: bool = False, device: int = 0, ready: tuple[int, Any] | None = None,
    follow: Callable[[int, Any], None] | None = None, found: Callable[[], int] | None = None, **more: Any
) -> Pending:  # fmt: skip
    """Hand one contiguous tensor over. `source` and `target` are addresses; never waits for another rank.

    `quiet`: NOW; QUIET, the engine is not woken for it, because the caller soon waits, submits another one that is not
    quiet, or calls `kick()`; SOON, it is sent by itself within a millisecond. Forgotten it is not lost: `done()` and
    the other ranks' tensors send it, too.
    `only_check`: raise what a submission would raise, and submit nothing. `more`: as `request` has it; `priority`: the
    same on all ranks, of what is ready together, greater goes first.

    device: 0, or k + 1 for memory of CUDA's device k, which may be used after the event `ready`: (handle, its owner);
    `follow` is called with the request's number and `ready` when it was waited for, see `behind`; `found` says how many
    elements of what is to be reduced are NaN (times 2^32) and infinite.

    Raises ValueError (unsupported dtype or op, the name is in flight, no int32 as priority), HvdNotInitializedError,
    HvdPeerLostError.
    """
    known = request(kind, op, dtype, name, shape, **more)
    if device:
        sick = found() if found is not None and kind in _REDUCES and not only_check else 0
        known = known.placed(device, 0 if ready is None else ready[0], sick)
        keep = (keep, ready)
        tell_of_devices()
    if only_check:
        if known.name in _flying:
            _refuse_twice(known.name)
        known.check(source, target)
        return Pending(0, None)
    native = known.start(source, target, quiet)
    return Pending(native, keep, known, follow, ready)  # splits are lent until it is finished


def tell_of_devices() -> bool:
    """Warns of what the core has to say about devices, once, on the first rank of the set that it is about: True."""
    text = thread.text
    fresh: bool = lib.hvd_notice(text, TEXT_BYTES) == 1
    if fresh:
        warnings.warn(f"hvdlite: {text_of(text)}", stacklevel=2)
    return fresh


def kick() -> None:
    """Sends what was submitted quietly. Raises HvdNotInitializedError."""
    checked(lib.hvd_kick())
