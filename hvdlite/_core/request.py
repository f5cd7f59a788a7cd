"""Requests: submit one to the core, and wait for its result.

A training loop repeats its calls. So the arguments of a call except its memory are a `Request`, made once
and kept; handing it over is one call of the core (`start`), waiting for it is one, and a synchronous collective is one
altogether (`run`). What holds the tensors meanwhile stands in inflight.py.

A Request never changes, so threads share it.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from ..errors import is_outcome
from ..errors.user_warning import warn
from ..system.bounded_cache import remember
from . import inflight
from .device import risk
from .inflight import BatchedFlight, Flight, Flights, abandon, abandoned, idle, in_flight, refuse_twice, sweep, take
from .library import SEND, TEXT_BYTES, checked, error_for, ffi, lib, require_job, text_of, thread
from .wait_limit import WAIT_MS, waited

NOW, QUIET, SOON, ASIDE = lib.HVD_NOW, lib.HVD_QUIET, lib.HVD_SOON, lib.HVD_ASIDE
_OK, _AGAIN, _DIMS_MAX = lib.HVD_OK, lib.HVD_AGAIN, lib.HVD_DIMS_MAX
_REDUCES = (lib.HVD_ALLREDUCE, lib.HVD_REDUCE, lib.HVD_REDUCESCATTER)
_run = lib.hvd_run
_WAIT_MS, _WAIT_NS = WAIT_MS, WAIT_MS * 1_000_000

_requests: OrderedDict[Any, Request] = OrderedDict()


class Request:
    """The arguments of a call except its memory. Shared by threads and never changed."""

    __slots__ = ("_borrowed", "name", "native")

    def __init__(self, native: Any, name: Any, borrowed: Any) -> None:
        self.native = native
        self.name = name  # by what it is known while in flight; None: unnamed
        self._borrowed = borrowed

    def start(self, source: int, target: int, quiet: int, flight: Flight, keep: Any) -> None:
        """Submits it with these addresses, whose memory `keep` holds. The flight's owner waits for it, or hands it on
        to `abandon`, also if this raises. Raises as `submit`."""
        if abandoned:
            sweep()
        name = self.name
        if name is not None and name in in_flight:
            refuse_twice(name)
        flight.keep, flight.request = keep, self
        if name is not None:
            in_flight[name] = flight
        text = thread.text
        code = _run(self.native, source, target, quiet, 0, flight.native, text, TEXT_BYTES)
        if code != _AGAIN:
            raise error_for(code, text_of(text))

    def run(self, source: int, target: int, keep: Any, seconds: float | None = None) -> None:
        """Submits it and waits, so many seconds at most if that is given. Raises as `submit`, `Flight.wait` and
        `Flight.wait_for`. Not for collectives that have a result to fetch: an even one needs a target of
        `output_bytes`, apart from its source (an allgather's may be its place there)."""
        if abandoned:
            sweep()
        name = self.name
        if name is not None and name in in_flight:
            refuse_twice(name)
        text = thread.text
        flight = take()
        error = None
        try:
            flight.keep, flight.request = keep, self
            code = _run(self.native, source, target, QUIET, _WAIT_NS, flight.native, text, TEXT_BYTES)
            if code == _AGAIN:
                error = flight.wait() if seconds is None else flight.wait_for(seconds)
            elif code != _OK:
                error = error_for(code, text_of(text))
        except BaseException:  # a signal handler's
            abandoned.append(flight)
            raise
        flight.keep = flight.request = None
        idle.append(flight)
        if error is not None:
            raise error

    def placed(self, device: int, ready: int, not_finite: int = 0) -> Request:
        """The same of memory on a device. not_finite: what was found there, for the NaN guard."""
        native = ffi.new("struct hvd_request *", self.native[0])
        native.device, native.ready, native.not_finite = device, ffi.cast("void *", ready), not_finite
        return Request(native, self.name, (self._borrowed, self.native))

    def check(self, source: int, target: int) -> None:
        """Raises what a submission would raise, and submits nothing."""
        whole = ffi.new("struct hvd_request *", self.native[0])
        whole.input, whole.output = ffi.cast("void *", source), ffi.cast("void *", target)
        checked(lib.hvd_check(whole, thread.text, TEXT_BYTES), thread.text)


class RaggedResult(NamedTuple):
    """Result of a ragged collective; valid until its Pending is released. address: that of the target, if the result
    has its `output_bytes`; else the core's memory, always on a device."""

    address: Any
    bytes: int
    rows: int
    rows_of: list[int]


class Pending:
    """One request, from before it is handed over. `keep` is everything whose memory the core may touch."""

    __slots__ = ("_flight", "follow", "ready", "request")

    def __init__(
        self, request: Request | None, follow: Callable[[int, Any], None] | None = None,
        ready: tuple[int, Any] | None = None, flight: Flight | None = None
    ) -> None:  # fmt: skip
        self._flight = flight
        self.request = request
        self.follow = follow
        self.ready = ready

    @property
    def native(self) -> int:
        """The core's handle of the request in flight, or over and not released yet; else 0."""
        return self._flight.native.handle if self._flight is not None else 0

    def start(self, source: int, target: int, quiet: int, keep: Any) -> Pending:
        """Hands it over. Raises as `submit`."""
        assert self.request is not None
        self._flight = take()
        self.request.start(source, target, quiet, self._flight, keep)
        return self

    def done(self) -> bool:
        """Whether `wait` would return (or raise) at once."""
        return self._flight is None or self._flight.polled()

    def ended(self, bounded: bool = True) -> Exception | None:
        """Blocks until the request is finished, and keeps its result; why it failed. May be called again. bounded: by
        wait_limit.py.

        On a device no thread waits for that: it blocks until the collective lies there, and lets the framework follow
        it.
        """
        native, text, since = self.native, thread.text, 0.0
        if not native:
            return inflight.dropped() if self.request is None else None
        code = lib.hvd_wait(native, _WAIT_MS, text, TEXT_BYTES)
        while code == _AGAIN:
            if bounded:
                since = waited(since, self.request.name if self.request is not None else None)
            code = lib.hvd_wait(native, _WAIT_MS, text, TEXT_BYTES)
        if code != _OK:
            error = error_for(code, text_of(text))
            self._lost()
            return error
        if self.follow is not None:
            try:
                self.follow(native, self.ready)
            except Exception as error:
                if not is_outcome(error):
                    raise
                self._lost()
                return error
        return None

    def wait(self, bounded: bool = True) -> None:
        """`ended`, and raises why it failed."""
        error = self.ended(bounded)
        if error is not None:
            self.release()
            raise error

    def _lost(self) -> None:
        """It has failed, but its device may still be at it."""
        if self.ready is not None:
            risk(self._flight.keep if self._flight is not None else None)

    def gathered(self) -> RaggedResult:
        """After `wait`: what a ragged collective has brought."""
        output = ffi.new("struct hvd_output *")
        code = lib.hvd_result(self.native, output)
        if code != _OK:
            raise error_for(code, "the result of this collective is no longer there")
        rows_of = [] if output.rows_of == ffi.NULL else [output.rows_of[i] for i in range(output.size)]  # join has none
        return RaggedResult(output.data, output.bytes, output.rows, rows_of)

    def release(self) -> None:
        """Gives the core its slot and its result back and lets go of `keep`: now or, should it still be in flight, as
        soon as the core is done with it."""
        flight = self._flight
        if flight is None:
            return
        handle = flight.native.handle
        if handle and lib.hvd_forget(handle) == _AGAIN:
            self._flight = None
            abandon(flight)
            return
        flight.native.handle = 0
        self._flight = None
        flight.complete()

    def __del__(self) -> None:
        flight = getattr(self, "_flight", None)  # a signal handler may raise before there is any
        if flight is not None:
            self._flight = self.request = None
            abandon(flight)


def request(
    kind: int, op: int, dtype: int, name: str | None, shape: tuple[int, ...], *, root: int = 0, peer: int = 0,
    splits: tuple[int, ...] | None = None, prescale: float = 1.0, postscale: float = 1.0, process_set: int = 0,
    group: int = 0, group_count: int = 0, priority: int = 0, output_bytes: int = 0, even: bool = False
) -> Request:  # fmt: skip
    """The Request with these arguments, made at the first call. output_bytes: how many an allgather's
    or alltoall's result has, if the target shall receive it; see `RaggedResult`. even: all ranks give an allgather or
    alltoall equally many rows, and pass no splits. Raises ValueError: a NUL in the name, a priority that is no int32.
    """
    key = (kind, op, dtype, name, shape, root, peer, splits, prescale, postscale, process_set, group, group_count,
           priority, output_bytes, even)  # fmt: skip
    known = _requests.get(key)
    if known is None:
        known = made(*key)
        if name is not None or group == 0:  # the numbers of unnamed groups do not come again
            remember(_requests, key, known)
    return known


def made(
    kind: int, op: int, dtype: int, name: str | None, shape: tuple[int, ...], root: int, peer: int,
    splits: tuple[int, ...] | None, prescale: float, postscale: float, process_set: int, group: int, group_count: int,
    priority: int, output_bytes: int = 0, even: bool = False
) -> Request:  # fmt: skip
    """A Request of one's own. As `request` has it."""
    require_job(kind)
    if name is not None and "\0" in name:
        raise ValueError(f"a tensor name must not contain a NUL character: {name!r} [HVD204]")
    if isinstance(priority, bool) or not isinstance(priority, int) or not -(2**31) <= priority < 2**31:
        raise ValueError(f"priority must be a 32-bit integer, not {priority!r} (tensor {name!r}) [HVD204]")
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
    native.priority, native.output_bytes, native.even = priority, output_bytes, even
    known_as = None if name is None else (name, process_set, root, peer) if kind == SEND else (name, process_set)
    return Request(native, known_as, (c_name, c_splits))


class Submission(NamedTuple):
    """What a submission needs to know: of which request, where its tensors lie, and what holds them. ready, follow: as
    `submission` has them."""

    request: Request
    source: int
    target: int
    keep: Any
    follow: Callable[[int, Any], None] | None
    ready: tuple[int, Any] | None


def submission(
    kind: int, op: int, dtype: int, name: str | None, shape: tuple[int, ...], source: int, target: int, keep: Any, *,
    device: int = 0, ready: tuple[int, Any] | None = None, follow: Callable[[int, Any], None] | None = None,
    found: Callable[[], int] | None = None, **more: Any
) -> Submission:  # fmt: skip
    """One contiguous tensor for `submit` or `submit_group`. `source` and `target` are addresses, `keep` is everything
    whose memory the core may touch. `more`: as `request` has it; `priority`: the same on all ranks, of what is ready
    together, greater goes first.

    device: 0, or k + 1 for memory of CUDA's device k, which may be used after the event `ready`: (handle, its owner);
    `follow` is called with the request's number and `ready` when it was waited for, see `behind`; `found` says how many
    elements of what is to be reduced are NaN (times 2^32) and infinite.
    """
    known = request(kind, op, dtype, name, shape, **more)
    if device:
        sick = found() if found is not None and kind in _REDUCES else 0
        known = known.placed(device, 0 if ready is None else ready[0], sick)
        keep = (keep, ready)
        report_device_notice()
    return Submission(known, source, target, keep, follow, ready)


def submit(*what: Any, quiet: int = NOW, **more: Any) -> Pending:
    """Hand over a `submission`; never waits for another rank.

    `quiet`: NOW; QUIET, the engine is not woken for it, because the caller soon waits, submits another one that is not
    quiet, or calls `kick()`; SOON, it is sent by itself within a millisecond. Forgotten it is not lost: `done()` and
    the other ranks' tensors send it, too.

    Raises ValueError (unsupported dtype or op, the name is in flight, no int32 as priority), HvdNotInitializedError,
    HvdPeerLostError.
    """
    known, source, target, keep, follow, ready = submission(*what, **more)
    return Pending(known, follow, ready).start(source, target, quiet, keep)  # splits are borrowed until it is finished


def submit_group(members: Sequence[Submission], quiet: int) -> list[Pending]:
    """Hands all over in one call, so that nothing comes between them: half a group would never become ready. All is
    looked at before. Raises as `submit`."""
    if not members:
        return []
    if abandoned:
        sweep()
    for member in members:
        if member.request.name in in_flight:
            refuse_twice(member.request.name)
        member.request.check(member.source, member.target)
    count = len(members)
    natives, pointers = ffi.new("struct hvd_request[]", count), ffi.new("struct hvd_request *[]", count)
    group = Flights(count, members)
    pendings = []
    for index, (known, source, target, keep, follow, ready) in enumerate(members):
        natives[index] = known.native[0]
        native = pointers[index] = natives + index
        native.input, native.output, native.quiet = ffi.cast("void *", source), ffi.cast("void *", target), quiet
        flight = BatchedFlight(group, index)
        flight.keep, flight.request = keep, known
        if known.name is not None:
            in_flight[known.name] = flight
        pendings.append(Pending(known, follow, ready, flight))
    taken = lib.hvd_submit_many(pointers, count, group.owners, thread.text, TEXT_BYTES)
    if taken != count:
        raise error_for(taken if taken < 0 else group.owners[taken].code, text_of(thread.text))
    return pendings


def report_device_notice() -> bool:
    """Prints the core's warning about devices once, on the first rank of the set that it is about: True."""
    text = thread.text
    fresh: bool = lib.hvd_notice(text, TEXT_BYTES) == 1
    if fresh:
        warn(f"hvdlite: {text_of(text)}")
    return fresh


def kick() -> None:
    """Sends what was submitted quietly. Raises HvdNotInitializedError."""
    checked(lib.hvd_kick())
