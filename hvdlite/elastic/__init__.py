"""Elastic training without a framework: state in memory, its commits, the loop around the training function.

A State is saved (committed) every so often, restored when a collective has failed, and synchronized from rank 0
whenever the ranks have changed. `run_fn` makes a training function that does so. The names and the order of calls are
Horovod's. In a job that is not elastic there is no second rendezvous: `run` ends with HvdNotYetError, which names the
cause.

A lost rank (HorovodInternalError) means: go back to the last commit, and on with the others. What ranks disagree about
and what the training function itself raises are bugs that would come again, and go to the caller. Where the hosts have
changed (HostsUpdatedInterrupt) all ranks are at the same place: they save there, so that nothing is done twice.

Commits are numbered, the same on all ranks. A commit saves first and asks all ranks after, so where one rank has passed
commit k, all have saved k: numbers of survivors differ by one at most. They go on from the lowest, which rank 0 has, by
the launcher's order. So what only the rank itself knows (a sampler's samples) is kept for the last two commits.

A state may also be kept in a file (`State.save_to`), from which a job that is started again goes on. When the machine
is about to be taken away the launcher informs the ranks: they save at the next commit, and end with PREEMPTED if the
file has that commit, else with UNKEPT.

While state is sent no rank's saved copy changes: if a rank is lost meanwhile, the others can go back. A newcomer whose
model is another one cannot take the state: it alone raises the error, and the others have a rendezvous without it.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import queue
import sys
from collections.abc import Callable, Iterable
from typing import Any, NoReturn

from .. import _core
from ..errors import (
    HorovodInternalError,
    HostsUpdatedInterrupt,
    HvdInitError,
    HvdMismatchError,
    HvdNotYetError,
    HvdRemoved,
    HvdStateError,
    HvdTimeoutError,
)
from ..errors.user_warning import warn
from ..lifecycle import init
from ..ops.objects import allgather_object
from ..rendezvous import elastic_member
from . import checkpoint, state_form

PREEMPTED = 75  # exit code; EX_TEMPFAIL of sysexits.h: try again later
UNKEPT = 74  # EX_IOERR


class _Preempted(HostsUpdatedInterrupt):
    """All ranks are to save and to end."""


class HostUpdateResult:
    """How the hosts have changed, as bits: ``no_update`` 0, ``removed`` 1, ``added`` 2, ``mixed`` 3.

    Example:
        >>> hvd.elastic.HostUpdateResult.removed | hvd.elastic.HostUpdateResult.added
        3
    """

    no_update, removed, added = 0, 1, 2
    mixed = removed | added


class State:
    """What training keeps in memory, so that it can go on when ranks come and go. Base class; use a subclass.

    ``hvd.elastic.run`` synchronizes the state from rank 0 before each start of the training function, and restores it
    after a rank is lost. Subclasses define ``save``, ``restore``, ``sync`` and, for ``save_to``, ``state_dict`` and
    ``load_state_dict``. Ready subclasses: ``ObjectState``, ``TorchState``, ``TensorFlowState`` and ``KerasState``.

    Args:
        bcast_object (callable): a function of an object that returns rank 0's object on every rank.
        get_rank (callable): a function that returns this rank's number.

    Example:
        >>> class Counter(hvd.elastic.State):
        ...     count = 0
        ...     def save(self):
        ...         self.saved = self.count
        ...     def restore(self):
        ...         self.count = self.saved
        ...     def sync(self):
        ...         self.count = self.saved = hvd.broadcast_object(self.count)
        >>> state = Counter(hvd.broadcast_object, hvd.rank)
        >>> state.count = 2
        >>> state.commit()
        >>> state.count = 3
        >>> state.restore()
        >>> state.count
        2
    """

    _number = -1  # of the commit that is being saved, or that all go on from while they sync
    _call: int | None = None  # of a training function, which it was last synchronized for

    def __init__(self, bcast_object: Callable[[Any], Any], get_rank: Callable[[], int]) -> None:
        self._bcast_object = bcast_object
        self._rank = get_rank
        self._host_messages: queue.Queue[tuple[float, int]] = queue.Queue()
        self._last_updated_timestamp: float = 0
        self._reset_callbacks: list[Callable[[], None]] = []
        self._file: checkpoint.Kept | None = None

    def save_to(self, path: str, seconds: float = 0.0) -> None:
        """Also keep the state in a file, from which a job that is started again goes on.

        Call it on all ranks before the training function. Rank 0 writes the file at a commit if the last write was
        ``seconds`` or more before it. It also writes when the training function returns and when the job is preempted.
        A job that begins reads the file before the first sync. The file is always replaced as a whole. Put it where
        every host sees it, because rank 0 may be on another host next time. It is a pickle, and reading it runs code:
        trust it as you trust the script.

        A file that cannot be written, or that another job writes too, causes a warning and not an error::

            state.save_to("run7.state", seconds=60)

        Args:
            path (str): the file. It need not exist.
            seconds (float): the least time between two writes, in seconds. 0 (default): every commit writes.

        Raises:
            HvdStateError: a part of the state cannot be kept, or the class has no ``state_dict``. When the training
                function begins: the file is damaged or has the state of another training.
        """
        self.state_dict()
        self._file = checkpoint.Kept(path, seconds, unread=self._number < 0)

    def _form(self) -> dict[str, str]:
        """What it is made of: kinds by name. What differs among ranks could not be synchronized."""
        return {}

    def state_dict(self) -> dict[str, Any]:
        """Return what was saved last, as one object that can be pickled.

        Returns:
            dict: for ``load_state_dict``, in this job or another one.

        Raises:
            HvdStateError: a part of the state cannot be kept.
        """
        raise HvdStateError(f"{type(self).__name__} has no state_dict and load_state_dict: save_to needs both [HVD425]")

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go back to a state that ``state_dict`` has returned. Subclasses define it.

        Args:
            state_dict (dict): the value of ``state_dict``, from this job or another one.

        Raises:
            NotImplementedError: the class does not define it.
        """
        raise NotImplementedError

    def register_reset_callbacks(self, callbacks: Iterable[Callable[[], None]]) -> None:
        """Add functions to call when the set of ranks has changed, before the state is synchronized.

        They run in the order given, on all ranks. They run on new ranks too, whose ``hvd.rank()`` and ``hvd.size()``
        were only expected values until then. A usual callback scales the learning rate to the new ``hvd.size()``.

        Args:
            callbacks (iterable of callables): functions without arguments.
        """
        self._reset_callbacks.extend(callbacks)

    def on_reset(self) -> None:
        """Call ``reset``, then the reset callbacks. ``hvd.elastic.run`` calls it when the ranks have changed."""
        self._host_messages = queue.Queue()
        if self._file is not None:
            self._file.ranks_changed()
        self.reset()
        for callback in self._reset_callbacks:
            callback()

    def on_hosts_updated(self, timestamp: float, update_res: int = HostUpdateResult.mixed) -> None:
        """Record that hosts were added or removed. The next ``check_host_updates`` reports it. Any thread may call it.

        Args:
            timestamp (float): the time of the change on this process's clock. An older one than before is ignored.
            update_res (int): bits of ``HostUpdateResult``. Default: ``HostUpdateResult.mixed``.
        """
        self._host_messages.put((timestamp, update_res))

    def commit(self) -> None:
        """Save the state, then check for host changes. All ranks must call it equally often.

        After a rank is lost, the others go back to the last commit. In an elastic job this is also where ranks join and
        leave, so commit often enough that they need not wait long. The cost is one copy of the state and one broadcast
        of a small object.

        Raises:
            HostsUpdatedInterrupt: the hosts have changed. ``hvd.elastic.run`` catches it.
            HvdPeerLostError: a rank has left or died. ``hvd.elastic.run`` catches it.
            HvdStateError: with ``save_to``, a part of the state cannot be pickled.
        """
        self._save_commit()
        if self._file is not None:
            self._commit_to_file(self._file)
        self.check_host_updates()

    def _commit_to_file(self, file: checkpoint.Kept) -> None:
        """A commit is made. All ranks call it, as the two below."""
        if self._rank() == 0:
            file.committed(self.state_dict)

    def _end_to_file(self, file: checkpoint.Kept) -> None:
        """The training function has returned."""
        if self._rank() == 0:
            file.ended(self.state_dict)

    def _last_to_file(self, file: checkpoint.Kept) -> bool:
        """The job ends: whether the file has the last commit, as rank 0 knows."""
        return self._rank() == 0 and file.write(self.state_dict())

    def _save_commit(self) -> None:
        """save, as the commit that follows the last one."""
        self._number = elastic_member.commit + 1
        self.save()
        elastic_member.commit = self._number

    def check_host_updates(self) -> None:
        """Raise on all ranks if rank 0 has received news of changed hosts. All ranks must call it; ``commit`` does.

        Raises:
            HostsUpdatedInterrupt: the hosts have changed. ``hvd.elastic.run`` catches it.
            HvdPeerLostError: a rank has left or died. ``hvd.elastic.run`` catches it.
        """
        news = elastic_member.news() if self._rank() == 0 else {}  # of an elastic job's launcher
        what = HostUpdateResult.added * bool(news.get("come")) | HostUpdateResult.removed * bool(news.get("go"))
        while not self._host_messages.empty():
            timestamp, update = self._host_messages.get()
            if timestamp > self._last_updated_timestamp:  # of this process alone: clocks of hosts differ
                self._last_updated_timestamp = timestamp
                what |= update
        mine = what, news.get("end"), self._file is not None and self._file.taken
        what, ends, taken = self._bcast_object(mine)
        if self._file is not None:
            self._file.taken = taken  # the next rank 0 leaves the file alone, too
        if ends:
            raise _Preempted
        if what != HostUpdateResult.no_update:
            raise HostsUpdatedInterrupt(what == HostUpdateResult.removed)

    def save(self) -> None:
        """Keep a copy of the state in memory. Subclasses define it.

        Raises:
            NotImplementedError: the class does not define it.
        """
        raise NotImplementedError

    def restore(self) -> None:
        """Go back to the copy that ``save`` kept last. Subclasses define it.

        Raises:
            NotImplementedError: the class does not define it.
        """
        raise NotImplementedError

    def sync(self) -> None:
        """Give every rank the state of rank 0, and keep a copy when all of it has arrived. All ranks must call it.

        A failure must change no copy, so that ``restore`` still goes back to the last commit.

        Raises:
            NotImplementedError: the class does not define it.
        """
        raise NotImplementedError

    def reset(self) -> None:
        """Adapt to a changed set of ranks. The default does nothing."""

    def _begin(self) -> None:
        """A training function is called. What was set before the call must outlast a rank that is lost in the sync."""


class ObjectState(State):
    """Python objects, given by keyword and kept as attributes, such as ``state.epoch``.

    Objects are copied with ``copy.deepcopy`` and sent as pickles. An object that cannot be copied is kept by reference.
    A subclass that keeps more calls ``save`` and ``sync`` of this class last, and replaces its own copies after that. A
    failure then leaves all copies at the same commit.

    Args:
        bcast_object (callable): a function of an object that returns rank 0's object on every rank.
        get_rank (callable): a function that returns this rank's number.
        kwargs: the objects, by the name of the attribute.

    Example:
        >>> state = hvd.elastic.ObjectState(hvd.broadcast_object, hvd.rank, epoch=0)
        >>> state.epoch = 3
        >>> state.restore()
        >>> state.epoch
        0
    """

    def __init__(self, bcast_object: Callable[[Any], Any], get_rank: Callable[[], int], **kwargs: Any) -> None:
        for name, value in kwargs.items():
            setattr(self, name, value)
        self._saved_state = {name: _copied(value) for name, value in kwargs.items()}
        super().__init__(bcast_object=bcast_object, get_rank=get_rank)

    def save(self) -> None:
        """Keep a copy of each attribute in memory, or the object itself if it cannot be copied."""
        self._saved_state = {name: _copied(getattr(self, name)) for name in self._saved_state}

    def restore(self) -> None:
        """Set the attributes to the values saved last."""
        self._set(self._saved_state)

    def _begin(self) -> None:
        self.save()

    def _form(self) -> dict[str, str]:
        return dict.fromkeys(self._saved_state, "an object")

    def state_dict(self) -> dict[str, Any]:
        """Return the attributes as they were saved last.

        Returns:
            dict: ``{"objects": {name: value}}``.
        """
        return {"objects": dict(self._saved_state)}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Set the attributes to the values in ``state_dict``.

        Args:
            state_dict (dict): the value of ``state_dict``, from this job or another one.

        Raises:
            HvdStateError: the names of the attributes differ.
        """
        self._saved_state = dict(state_form.of_same_names(state_dict["objects"], self._saved_state))
        self._set(self._saved_state)

    def sync(self) -> None:
        """Set the attributes to the values of rank 0, and keep a copy. All ranks must call it.

        Raises:
            HvdPeerLostError: a rank has left or died. Attributes and copies stay as they were.
            HvdStateError: an object cannot be pickled.
        """
        if self._saved_state:
            mine = {name: getattr(self, name) for name in self._saved_state}  # what it is now, as models are sent
            with checkpoint.named(mine):
                received = self._bcast_object(mine)
            self._saved_state = {name: _copied(value) for name, value in received.items()}
            self._set(received)

    def _set(self, values: dict[str, Any]) -> None:
        for name, value in values.items():
            setattr(self, name, _copied(value))


def _copied(value: Any) -> Any:
    try:
        return copy.deepcopy(value)
    except Exception:  # an open file, a lock: whatever the class raises
        return value


def _warn_of_sums() -> None:
    """The ranks go on in the middle of a window of several passes, in which each rank had sums of its own."""
    if _core.rank() == 0 and _core.size() > 1:
        warn(
            "rank 0: the ranks were synchronized in the middle of a window of backward_passes_per_step or no_sync. The "
            "sums of rank 0 stand for those of all ranks in this step: commit at the end of a window [HVD243]"
        )


def run_fn(func: Callable[..., Any], reset: Callable[[], None]) -> Callable[..., Any]:
    """Make a training function elastic, with a function of your own that gathers the ranks again.

    ``hvd.elastic.run`` is this function with ``hvd.elastic.reset``; it describes what happens to the state.

    Args:
        func (callable): the training function, ``func(state, *args, **kwargs)``.
        reset (callable): a function without arguments, called on each rank after the set of ranks has changed.

    Returns:
        callable: a function with the arguments and the result of ``func``.

    Raises:
        HvdNotYetError: as ``hvd.elastic.run``. The returned function raises it, and the other errors listed there.

    Example:
        >>> train = hvd.elastic.run_fn(lambda state, more: state.step + more, reset=lambda: None)
        >>> train(hvd.elastic.ObjectState(hvd.broadcast_object, hvd.rank, step=2), 3)
        5
    """

    @functools.wraps(func)
    def wrapper(state: State, *args: Any, **kwargs: Any) -> Any:
        cause: Exception | None = None
        elastic_member.calls += 1
        elastic_member.trains(False)
        # called after the rendezvous
        reset_done: Callable[[], None] | None = state.on_reset if elastic_member.enter() else None
        while True:
            try:
                if reset_done is not None:
                    _rejoin(reset, cause)
                    reset_done()
                cause = _synchronize(state)
                if cause is None:
                    result = _trained(func, state, args, kwargs)
                    elastic_member.trains(True)
                    return result
                state.restore()
            except (HorovodInternalError, HvdTimeoutError) as error:
                if not _is_loss(error, state):
                    elastic_member.trains(None)
                    raise
                cause = error
                state.restore()
            except _Preempted:
                _end_preempted(state)
            except HostsUpdatedInterrupt as interrupt:
                # Its skip_sync is ignored: newcomers may have come as well, and they wait for a sync (horovod 3494).
                cause = interrupt
            except Exception:
                elastic_member.trains(None)
                raise
            reset_done = state.on_reset

    return wrapper


def _synchronize(state: State) -> HvdMismatchError | None:
    """Rank 0's state on all ranks; or the error that a newcomer has raised, whose state is of another form: it has left
    the job. Raises HvdMismatchError on all ranks where the forms differ among ranks that were there before."""
    if state._call != elastic_member.calls:
        state._call = elastic_member.calls
        state._begin()
    mine = elastic_member.commit, elastic_member.calls, state._form()
    reported = allgather_object(mine, "elastic.commits") if elastic_member.is_elastic() else [mine]
    commits, file = [commit for commit, *_ in reported], state._file
    if state._rank() == 0:
        elastic_member.news()  # from here on the launcher knows that they train
    if file is not None and file.unread and state._rank() == 0:  # of ranks with state and without it, rank 0 has it
        file.load_into(state)
    state._number = max(0, commits[0])
    try:
        state_form.require_same([each[1:] for each in reported])
        state.sync()
    except HvdMismatchError as error:
        unfit = {rank for rank in error.ranks if commits[rank] < 0 <= commits[0]}
        if not unfit:
            raise
        if state._rank() in unfit:
            init.leave_unfit()
            raise
        return error
    if file is not None:
        file.unread = False
    elastic_member.commit = state._number
    return None


def _trained(func: Callable[..., Any], state: State, args: Any, kwargs: Any) -> Any:
    """What the function returns. An interrupt saves first: no rank is lost and all are at the same place."""
    try:
        result = func(state, *args, **kwargs)
    except HostsUpdatedInterrupt:
        state._save_commit()
        raise
    if state._file is not None:
        state._end_to_file(state._file)
    return result


def _end_preempted(state: State) -> NoReturn:
    """All have saved at the same place: the file as well, and on to the end of this process."""
    kept = False
    with contextlib.suppress(HorovodInternalError, HvdTimeoutError):  # without the news: rank 0 knows, if it is alive
        kept = state._file is not None and state._last_to_file(state._file)
        kept = state._bcast_object(kept)
    init.shutdown()  # all leave together: this end is no failure
    sys.exit(PREEMPTED if kept else UNKEPT)


def _is_loss(error: Exception, state: State) -> bool:
    """Whether the others go on without a rank. One that hangs longer than the job's limit is killed by an elastic job's
    launcher; the limit of one call (`timeout=`) says nothing of the rank."""
    if isinstance(error, HvdTimeoutError):
        return elastic_member.is_elastic() and error.handle is None and error.rank not in (None, state._rank())
    return True


def _rejoin(reset: Callable[[], None], cause: Exception | None) -> None:
    """The rendezvous of the ranks, as often as it takes. Ends this process if it was removed from the job."""
    while True:
        try:
            return reset()
        except HorovodInternalError as error:  # one more is lost meanwhile
            cause = error
        except HvdRemoved as removed:
            print(f"hvdlite: {removed}", file=sys.stderr, flush=True)
            sys.exit(0)
        except HvdNotYetError as refusal:
            raise refusal from cause
        except HvdInitError as error:
            if not error._again:
                error._over = elastic_member.commit >= 0
                raise
            cause = error  # the link to that rank is cut: one of the two will be killed


def reset() -> None:
    """Leave the job and meet the ranks that are there now, as ``hvd.shutdown()`` and ``hvd.init()``.

    ``hvd.elastic.run`` calls it after a rank is lost or the hosts have changed. It blocks until the launcher opens the
    next round with all its ranks.

    Raises:
        HvdInitError: the ranks could not meet.
        HvdNotYetError: the job is not elastic, so its ranks cannot change.
        HvdRemoved: this rank is no longer part of the job.

    Example:
        >>> hvd.elastic.reset()
        Traceback (most recent call last):
            ...
        hvdlite.errors.HvdNotYetError: the number of ranks of this job is fixed: ... [HVD246]
    """
    if not elastic_member.is_elastic():
        raise HvdNotYetError(
            "the number of ranks of this job is fixed: start it with hvdlite-run --min-np N, or restart it from its "
            "last checkpoint; the exception above has the reason. [HVD246]"
        )
    init.shutdown()
    init.init()


def run(func: Callable[..., Any]) -> Callable[..., Any]:
    """Decorate a training function so that it survives lost ranks and uses new ones.

    The first argument of the function is a ``State``. Each call synchronizes the state from rank 0, then calls the
    function. If a rank is lost, the state goes back to the last commit, the remaining ranks meet again, and the
    function is called again. If ranks are to come or go, the state is saved at the current commit first, so no work is
    repeated. A function that loops from ``state.epoch``, say, continues where it was.

    Only jobs started with ``hvdlite-run --min-np`` can change their ranks. In other jobs the function runs once. Errors
    that the ranks disagree about, and errors of the function itself, are passed on and not retried.

    Args:
        func (callable): the training function, ``func(state, *args, **kwargs)``. All ranks must call it.

    Returns:
        callable: a function with the arguments and the result of ``func``.

    Raises:
        HvdMismatchError: when called, the states of the ranks have different attributes or parts.
        HvdNotYetError: when called, a rank was lost in a job that is not elastic. ``__cause__`` is the first error.
        HvdStateError: when called, a part of the state cannot be sent, or the file of ``State.save_to`` does not fit.
        HvdTimeoutError: when called, a collective exceeded its own ``timeout``. In a job that is not elastic also the
            limit of the job.
        SystemExit: this rank was removed (code 0), or the job was preempted. The code is then 75 if the file of
            ``State.save_to`` has the last commit, else 74.

    Example:
        >>> @hvd.elastic.run
        ... def train(state):
        ...     while state.step < 3:
        ...         state.step += 1
        ...         state.commit()
        ...     return state.step
        >>> train(hvd.elastic.ObjectState(hvd.broadcast_object, hvd.rank, step=0))
        3
    """
    return run_fn(func, reset)
