"""init and shutdown: a process becomes a rank, and stops being one.

`init` finds this process's rank assignment, makes the rendezvous with the other ranks and starts the engine; `shutdown`
leaves by agreement. A script that simply ends leaves as well (atexit). One that ends badly aborts instead, so that
every other rank raises an error that names this rank and the cause (uncaught.py). A forked child is no rank: it drops
what it has inherited.

The order of leaving matters: the engine first (its shutdown is agreed and bounded), then the store's connection, which
the engine borrows and whose end without a `bye` would count as a death.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import socket
import sys
import threading
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from .. import _core, autotune, config, metrics, mpi
from .._core import ffi, lib, nan_guard
from ..errors import HvdInitError, HvdNotYetError, HvdPeerLostError
from ..errors.codes import coded, ending
from ..mpi import hydra
from ..process_sets import process_set, static
from ..process_sets.open import use_links
from ..process_sets.process_set import ProcessSet
from ..rendezvous import bootstrap, discovery, elastic_member
from ..security.signed_pickle import Seals, use_seals
from ..trace import recorder
from . import engine_options, uncaught

if TYPE_CHECKING:
    from ..rendezvous import store_client
    from ..rendezvous.placement import HostLayout
    from ..transport.mesh import JobLinks


class _State:
    """What this process holds as a rank."""

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.pid = 0  # of the process that registered the hooks
        self.store: store_client.Rendezvous | None = None
        self.links: JobLinks | None = None
        self.homogeneous = True
        self.aborts = False  # whether this rank ends by an exception; the engine may not have taken note of it yet
        self.inits = 0


_state = _State()
hydra.watch(config.environ())
closers: list[Callable[[bool], Callable[[], None]]] = []  # of hvd.ps and hvd.rpc: see `shutdown`
_inherited: list[Any] = []  # what a forked child must neither use nor close


class _Boot:
    """The bootstrap that the engine calls back during hvd_init. One rank alone needs no store."""

    def __init__(self, store: store_client.Rendezvous | None) -> None:
        self.store = store
        self.error: BaseException | None = None

    def allgather(self, mine: bytes) -> list[bytes]:
        return [mine] if self.store is None else self.store.allgather(mine)


@ffi.def_extern(error=lib.HVD_EINIT)
def hvd_py_allgather(self: Any, mine: Any, count: int, everyone: Any, text: Any, text_bytes: int) -> int:
    """The engine's allgather over the store or MPI. Keeps the exception for `init`, which raises it."""
    boot = ffi.from_handle(self)
    try:
        parts = boot.allgather(bytes(ffi.buffer(mine, count)) if count else b"")
        if any(len(part) != count for part in parts):
            raise HvdInitError(
                "ranks sent records of different lengths: install the same hvdlite on all hosts. [HVD104]"
            )
        joined = b"".join(parts)
        ffi.memmove(everyone, joined, len(joined))
        return lib.HVD_OK
    except BaseException as error:
        boot.error = error
        if text_bytes:
            reason = str(error).encode("utf-8", "replace")[: text_bytes - 1] + b"\0"
            ffi.memmove(text, reason, len(reason))
        return lib.HVD_EPEER if isinstance(error, HvdPeerLostError) else lib.HVD_EINIT


def init(comm: Any = None, process_sets: Sequence[ProcessSet] | str | None = None) -> None:
    """Make this process a rank of its job, and return when all ranks have met.

    Call it on every rank before anything else. A second call changes nothing. Without a launcher the process is rank 0
    of a job of one rank. It waits at most ``HVDLITE_START_TIMEOUT`` seconds (30 by default) for the other ranks. Ranks
    that ``mpirun``, ``mpiexec`` or ``srun --mpi`` has started meet over MPI.

    Args:
        comm (mpi4py.MPI.Comm, list of int, or list of mpi4py.MPI.Comm, optional): communicator whose ranks form the
            job; it is duplicated. A list of ints gives ranks of ``MPI_COMM_WORLD``, and only these ranks call ``init``.
            Of a list of communicators, the first one forms the job and the others become process sets. Default: all
            ranks.
        process_sets (list of ProcessSet, optional): sets to register, the same on all ranks. The string ``"dynamic"``
            is accepted for Horovod's sake and has no effect. Default: the sets of the last ``init`` of this process.

    Raises:
        HvdInitError: if the ranks do not meet. The text names the rank and the step that failed.
        HvdOptionError: if an environment variable has an invalid value.
        HvdPeerLostError: if a rank dies meanwhile.
        HvdMismatchError: if the ranks name different process sets.
        HvdNotYetError: if ``comm`` names some of the ranks in a job without MPI.
        HvdForkError: in a forked child of a rank.
        ValueError: for invalid process sets, and for a new set in a second call.

    Example:
        >>> hvd.init()  # changes nothing: this process is a rank already
        >>> hvd.rank(), hvd.size()
        (0, 2)  # rank 0
        (1, 2)  # rank 1
    """
    while True:
        try:
            _init(comm, process_sets)
            return
        except HvdPeerLostError:
            if elastic_member.entered or not elastic_member.is_elastic():
                raise
            # A rank is lost before the job existed: the others make a rendezvous without it.


def _init(comm: Any, process_sets: Sequence[ProcessSet] | str | None) -> None:
    """Once."""
    with _state.lock, mpi.settling():
        if lib.hvd_forked() == 1:
            raise _core.error_for(lib.HVD_EFORK, "")
        comm, more = mpi.first_of(comm)
        sets = static.given(process_sets, more)
        if lib.hvd_initialized() == 1:
            new = [each for each in sets or [] if each.process_set_id is None]
            if new:
                raise ValueError(f"init() was called before: register {new[0]!r} with hvd.add_process_set() [HVD102]")
            return
        uncaught.install(abort)
        environ = config.environ()
        settings = config.read(environ)
        if settings.values["member"] is not None and elastic_member.wait_preparing(settings.values):
            static.keep(sets)  # for the init that follows
            _prepare(settings)
            return
        place, store = (
            comm.taken(settings.values) if isinstance(comm, bootstrap.Met) else _found(comm, environ, settings)
        )
        refused = bootstrap.refusal(place)
        if refused is not None:
            raise HvdInitError(coded("HVD106", refused))
        if place.rank == 0 and _state.inits == 0:
            for note in settings.notes:
                print(f"hvdlite: {note}", file=sys.stderr, flush=True)
        autotune.check(settings, place.rank)
        layout = None
        try:
            sets = static.of_incarnation(sets, place.rank, place.size)
            if place.size > 1:
                named = [[] if each.mpi_comm is not None else each.ranks for each in sets]
                store, layout = bootstrap.meet(place, settings, _core.VERSION, _core.WIRE_VERSION, named, store)
        except BaseException:
            if store is not None:
                store.close()
            raise
        place = bootstrap.completed(place, layout)
        if settings.values["member"] is not None:
            elastic_member.update_environment(place)
        _state.links = _start(place, settings, store, layout)
        _state.store, _state.homogeneous, _state.aborts = store, layout is None or layout.homogeneous, False
        process_set.host_of[:] = [] if layout is None else layout.host_of
        use_links(_state.links)
        use_seals(Seals(*engine_options.of_job(settings, store, _state.inits), place.rank))
        _core.bound(settings.stall_limits()[1])
        nan_guard.begin(settings.values["nan_guard"])
        _state.inits += 1
        _hook()
        _register(sets)
        autotune.begin(settings, place.rank, place.size)
        recorder.begin(settings)
        metrics.begin(settings, place.rank)


def _prepare(settings: config.Settings) -> None:
    """This process joins an elastic job later. Until then it may communicate with itself."""
    _start(discovery.SINGLE, settings, None, None)
    use_links(None)
    use_seals(Seals(*engine_options.of_job(settings, None, _state.inits), discovery.SINGLE.rank))
    _core.bound(settings.stall_limits()[1])
    _hook()


def _found(
    comm: Any, environ: dict[str, str], settings: config.Settings
) -> tuple[discovery.Place, store_client.Rendezvous | None]:
    """The rank assignment, and the rendezvous if that is MPI."""
    if settings.values["member"] is not None:
        return elastic_member.joined(settings.values, _core.VERSION, _core.WIRE_VERSION)
    assigned: discovery.Place | None = None
    try:
        assigned = discovery.discover(environ)
    except HvdInitError:
        if not mpi.is_communicator(comm):  # with a communicator, the launcher may be unknown
            raise
    values = settings.values
    bootstrap.settle_secret(values, assigned)
    if mpi.wanted(comm, assigned, environ, values["plane"]):
        from ..mpi import world

        met = world.open_world(
            comm, assigned, values["start_timeout"], _state.inits, values["secret_key"], values["agent"]
        )
        return met.place, met
    assert assigned is not None
    _require_all(comm, assigned.size)
    return assigned, None


def _require_all(comm: Any, size: int) -> None:
    """Raises HvdNotYetError if init is to make a job of some ranks only."""
    if comm is None or (isinstance(comm, (list, tuple, range)) and sorted(comm) in ([], list(range(size)))):
        return
    value = f"comm={comm!r}" if isinstance(comm, (list, tuple, range)) else f"a comm of type {type(comm).__name__}"
    raise HvdNotYetError(
        f"hvd.init with {value} needs a job under MPI (started with mpirun or mpiexec). This job has {size} "
        f"rank{('s' if size > 1 else '')}, and init needs all of them: leave out comm, and use hvd.ProcessSet for a "
        "subset. [HVD126]"
    )


def _register(sets: list[ProcessSet]) -> None:
    """On failure there is no job."""
    try:
        for each in sets:
            process_set.add_process_set(each)
    except BaseException:
        static.forget()
        shutdown()
        raise


def _start(
    place: discovery.Place, settings: config.Settings, store: store_client.Rendezvous | None, layout: HostLayout | None
) -> JobLinks | None:
    """Start the engine; on failure report it to the store and close that."""
    boot, links = _Boot(store), None
    try:
        rows = None
        if store is not None and layout is not None and (layout.hosts > 1 or settings.values["plane"] == "p2p"):
            links, rows = bootstrap.link(place, settings, store, layout)
        options, _borrowed = engine_options.options(place, settings, store, layout, rows, _state.inits)
        handle, text = ffi.new_handle(boot), ffi.new("char[]", lib.HVD_TEXT_MAX)
        code = lib.hvd_init(options, lib.hvd_py_allgather, handle, text, lib.HVD_TEXT_MAX)
        if code == lib.HVD_OK and boot.error is None:
            return links
        if code == lib.HVD_OK:  # interrupted in a callback whose result the engine did not need
            lib.hvd_shutdown(-1)
        raise boot.error or _core.error_for(code, _core.text_of(text))
    except BaseException as error:
        if links is not None:
            links.close()
        if store is not None:
            uncaught.refused(store, place.rank, error, elastic_member.entered)
            store.close()
        raise


def shutdown() -> None:
    """Leave the job, and return when the other ranks have acknowledged.

    It waits at most ``HVDLITE_LEAVE_TIMEOUT`` seconds (2 by default) for them. Collectives that are still in flight
    fail. It does nothing before ``init``. A script that ends calls it by itself. ``init`` may follow.

    Raises:
        HvdForkError: in a forked child of a rank.

    Example:
        >>> hvd.shutdown()  # doctest: +SKIP
        >>> # skipped here, since the examples after it need the job
    """
    with _state.lock:
        if lib.hvd_forked() == 1:
            raise _core.error_for(lib.HVD_EFORK, "")
        autotune.end()
        recorder.end()
        metrics.end()
        nan_guard.end()
        failed = _state.aborts or _core.failure_of_job() is not None
        ends, closers[:] = [close(failed) for close in closers], []  # what they have sent arrives; then they end
        while lib.hvd_shutdown(_core.WAIT_MS) == lib.HVD_AGAIN:
            pass  # a signal handler may run here; another call of shutdown continues the same one
        for end in ends:
            end()
        _core.forget_all()
        process_set.forget_all()
        links, _state.links = _state.links, None
        if links is not None:
            links.close()
        store, _state.store = _state.store, None
        if store is not None:
            store.failed = failed
            store.bye()


def leave_unfit() -> None:
    """Leaves an elastic job as one whose state is of another form: the others go on without it."""
    from ..rendezvous import store_client  # late: what it loads takes its time

    if isinstance(_state.store, store_client.Store):
        _state.store.unfit = True
    shutdown()


def is_initialized() -> bool:
    """Return whether this process is a rank: ``init`` has been called and ``shutdown`` has not.

    Returns:
        bool: also True in a process that waits to join an elastic job.

    Example:
        >>> hvd.is_initialized()
        True
    """
    return lib.hvd_initialized() == 1 or bool(_core.preparing)


def incarnations() -> int:
    """How many times this process has become a rank."""
    return _state.inits


def is_homogeneous() -> bool:
    """Return whether every host has the same number of ranks.

    Returns:
        bool: the same on all ranks.

    Raises:
        HvdNotInitializedError: before ``init`` and after ``shutdown``. It is also a ``ValueError``.

    Example:
        >>> hvd.is_homogeneous()
        True
    """
    _core.require_job()
    return _state.homogeneous


def _hook() -> None:
    """Exit handling, once per process: only a process that has been a rank has anything to report."""
    if _state.pid == os.getpid():
        return
    first, _state.pid = _state.pid == 0, os.getpid()
    if first:
        atexit.register(_at_exit)
        with contextlib.suppress(AttributeError, RuntimeError):  # it is CPython's own, and refuses while Python ends
            threading._register_atexit(_script_ended)  # type: ignore[attr-defined]
        os.register_at_fork(after_in_child=_in_child)


def _script_ended() -> None:
    """Before the first exit handler. A rank that runs those gets the time for them, whichever rank has failed."""
    if os.getpid() == _state.pid and lib.hvd_forked() != 1 and lib.hvd_initialized() == 1:
        lib.hvd_script_ended()


def abort(what: str, error: BaseException | None = None) -> None:
    """Report to all ranks that this one ends badly, unless the job has failed already.

    If another rank left early, this one ends by HvdPeerLostError, and that rank is reported as the cause.
    """
    if os.getpid() != _state.pid or lib.hvd_initialized() != 1 or _core.failure_of_job() is not None:
        return
    if _core.preparing:  # no rank waits for it
        return
    rank, culprit = _core.rank(), _core.rank()
    reason = f"rank {rank}{_host()} {what}"
    if isinstance(error, HvdPeerLostError):
        if error.rank is None:
            return
        culprit, reason = error.rank, str(error)[max(0, str(error).find(f"rank {error.rank} ")) :]
    _state.aborts = True
    lib.hvd_abort(culprit, lib.HVD_EPEER, ffi.new("char[]", ending("HVD401", reason, 1500)))


def _host() -> str:
    """Where this rank is, if that does not go without saying."""
    return f" (host {socket.gethostname()})" if lib.hvd_cross_size() > 1 else ""


def _at_exit() -> None:
    if os.getpid() != _state.pid or lib.hvd_forked() == 1:
        return
    try:
        mpi.exit_code = uncaught.status()
        exited = uncaught.exited() if lib.hvd_initialized() == 1 else None
        if exited is not None:
            abort(*exited)
        shutdown()
    except Exception:
        import traceback

        traceback.print_exc()


def _in_child() -> None:
    """The core has closed the store's descriptor in the child; Python must not close that number again."""
    (store, _state.store), _state.lock, closers[:] = (_state.store, None), threading.RLock(), []
    if _state.links is not None:
        _state.links.close()
    if store is None:
        return
    if lib.hvd_forked() == 1:
        _inherited.append(store)  # never collected: its number may serve another file by then
    else:
        store.close()
