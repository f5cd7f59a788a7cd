"""What must training keep in memory, so that it goes on when ranks come and go? The part without a framework.

A State is saved (committed) every so often, restored when a collective has failed, and synchronized from rank 0
whenever the ranks have changed. `run_fn` makes a training function that does so. The names and the order of calls are
Horovod's. In a job that is not elastic the ranks cannot meet anew: `run` ends with HvdNotYetError, which names the
cause.

A lost rank (HorovodInternalError) means: go back to the last commit, and on with the others. What ranks disagree about
and what the training function itself raises are bugs that would come again, and go to the caller. Where the hosts have
changed (HostsUpdatedInterrupt) all ranks are at the same place: they save there, so that nothing is done twice.

Commits are numbered, the same on all ranks. A commit saves first and asks all ranks after, so where one rank has passed
commit k, all have saved k: numbers of survivors differ by one at most. They go on from the lowest, which rank 0 has, by
the launcher's order. So what only the rank itself knows (a sampler's samples) is kept for the last two commits.

A state may also be kept in a file (`State.save_to`), from which a job that is started again goes on. When the machine
is about to be taken away the launcher tells the ranks so: they save at the next commit, and end with PREEMPTED if the
file has that commit, else with UNKEPT.

While state is sent nobody's saved copy changes: whoever is lost meanwhile, the others can go back. A newcomer whose
model is another one cannot take the state: it alone raises the error, and the others meet again without it.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import queue
import sys
import time
from collections.abc import Callable, Iterable
from typing import Any, NoReturn

from . import _life, _member, _state_file, _state_form
from .errors import (
    HorovodInternalError,
    HostsUpdatedInterrupt,
    HvdInitError,
    HvdMismatchError,
    HvdNotYetError,
    HvdRemoved,
    HvdStateError,
    HvdTimeoutError,
)
from .objects import allgather_object

PREEMPTED = 75  # exit code; EX_TEMPFAIL of sysexits.h: try again later
UNKEPT = 74  # EX_IOERR


class _Preempted(HostsUpdatedInterrupt):
    """All ranks are to save and to end."""


class HostUpdateResult:
    """What has happened to the hosts: bits that are combined."""

    no_update, removed, added = 0, 1, 2
    mixed = removed | added


class State:
    """What training keeps; subclasses say how to save, restore and sync it.

    bcast_object: a function that gives every rank rank 0's object. get_rank: a function that gives this rank's number.
    """

    _number = -1  # of the commit that is being saved, or that all go on from while they sync

    def __init__(self, bcast_object: Callable[[Any], Any], get_rank: Callable[[], int]) -> None:
        self._bcast_object = bcast_object
        self._rank = get_rank
        self._host_messages: queue.Queue[tuple[float, int]] = queue.Queue()
        self._last_updated_timestamp: float = 0
        self._reset_callbacks: list[Callable[[], None]] = []
        self._file: _state_file.Kept | None = None

    def save_to(self, path: str, seconds: float = 0.0) -> None:
        """Also keep the state in a file: rank 0 writes it at each commit that is `seconds` or more after the last one
        that was written, when the training function returns, and when the job is preempted. A job that begins reads it
        before the first sync and goes on from there. Call it on all ranks, before the training function.

        The file is replaced as a whole. Put it where each host sees it: rank 0 may be on another one next time. It is a
        pickle, so trust it as the script. HvdStateError: a part of the state cannot be kept; and, when it is read, the
        file is damaged or of another state. One that cannot be written, or that another job writes too, is a warning.

            state.save_to("run7.state", seconds=60)
        """
        self.state_dict()
        self._file = _state_file.Kept(path, seconds, unread=self._number < 0)

    def _form(self) -> dict[str, str]:
        """What it is made of: kinds by name. What differs among ranks could not be synchronized."""
        return {}

    def state_dict(self) -> dict[str, Any]:
        """What was saved last, as an object that can be pickled. HvdStateError where a part cannot be kept."""
        raise HvdStateError(f"{type(self).__name__} has no state_dict and load_state_dict: save_to needs both [HVD425]")

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go back to what `state_dict` has given, in this job or another."""
        raise NotImplementedError

    def register_reset_callbacks(self, callbacks: Iterable[Callable[[], None]]) -> None:
        """Functions to be called, in this order, when the ranks have changed, before the state is synchronized. On
        newcomers as well: what hvd.rank() and hvd.size() have told them until then was a guess."""
        self._reset_callbacks.extend(callbacks)

    def on_reset(self) -> None:
        """The ranks have changed: forget news of hosts, reset, call the callbacks."""
        self._host_messages = queue.Queue()
        if self._file is not None:
            self._file.ranks_changed()
        self.reset()
        for callback in self._reset_callbacks:
            callback()

    def on_hosts_updated(self, timestamp: float, update_res: int = HostUpdateResult.mixed) -> None:
        """Hosts were added or removed at that time. May be called from any thread."""
        self._host_messages.put((timestamp, update_res))

    def commit(self) -> None:
        """save, then check_host_updates. All ranks have to call it."""
        self._save_commit()
        if self._file is not None and self._rank() == 0:
            self._file.committed(self.state_dict)
        self.check_host_updates()

    def _save_commit(self) -> None:
        """save, as the commit that follows the last one."""
        self._number = _member.commit + 1
        self.save()
        _member.commit = self._number

    def check_host_updates(self) -> None:
        """Raises HostsUpdatedInterrupt on all ranks if rank 0 has heard that hosts have changed."""
        news: dict[str, int] = {}
        if self._rank() == 0:
            news = _member.news()  # of an elastic job's launcher: how many ranks wait to come, and how many are to go
            changed = HostUpdateResult.added * bool(news.get("come")) | HostUpdateResult.removed * bool(news.get("go"))
            if changed:
                self.on_hosts_updated(time.time(), changed)
        before = latest = self._last_updated_timestamp
        what = HostUpdateResult.no_update
        while not self._host_messages.empty():
            timestamp, update = self._host_messages.get()
            if timestamp > latest:
                latest = timestamp
                what |= update
        told = before, latest, what, news.get("end"), self._file is not None and self._file.taken
        before, self._last_updated_timestamp, what, ends, taken = self._bcast_object(told)
        if self._file is not None:
            self._file.taken = taken  # whoever is rank 0 next leaves the file alone, too
        if ends:
            raise _Preempted
        if self._last_updated_timestamp > before:
            raise HostsUpdatedInterrupt(what == HostUpdateResult.removed)

    def save(self) -> None:
        """Keep a copy of the state in memory."""
        raise NotImplementedError

    def restore(self) -> None:
        """Go back to what was saved last."""
        raise NotImplementedError

    def sync(self) -> None:
        """Give every rank rank 0's state, and keep a copy once all of it has come; a failure changes no copy."""
        raise NotImplementedError

    def reset(self) -> None:
        """Adapt to changed ranks; nothing by default."""


class ObjectState(State):
    """Python objects, given as keywords and kept as attributes: `state.epoch += 1`.

    A subclass that keeps more calls save and sync of this class last, and takes its own copies into use after them:
    then a failure leaves the copies of one commit."""

    def __init__(self, bcast_object: Callable[[Any], Any], get_rank: Callable[[], int], **kwargs: Any) -> None:
        for name, value in kwargs.items():
            setattr(self, name, value)
        self._saved_state = {name: _copied(value) for name, value in kwargs.items()}
        super().__init__(bcast_object=bcast_object, get_rank=get_rank)

    def save(self) -> None:
        """Keep a copy of each attribute, or the object itself where there can be no copy."""
        self._saved_state = {name: _copied(getattr(self, name)) for name in self._saved_state}

    def restore(self) -> None:
        """Set the attributes as they were saved."""
        self._set(self._saved_state)

    def _form(self) -> dict[str, str]:
        return dict.fromkeys(self._saved_state, "an object")

    def state_dict(self) -> dict[str, Any]:
        """The attributes as they were saved, below "objects"."""
        return {"objects": dict(self._saved_state)}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Set the attributes as they are there. HvdStateError where the names differ."""
        self._saved_state = dict(_state_form.of_same_names(state_dict["objects"], self._saved_state))
        self._set(self._saved_state)

    def sync(self) -> None:
        """Set the attributes as rank 0 has saved them."""
        if self._saved_state:
            with _state_file.named(self._saved_state):
                received = self._bcast_object(self._saved_state)
            self._set(received)
            self._saved_state = received

    def _set(self, values: dict[str, Any]) -> None:
        for name, value in values.items():
            setattr(self, name, _copied(value))


def _copied(value: Any) -> Any:
    try:
        return copy.deepcopy(value)
    except Exception:  # an open file, a lock: whatever the class raises
        return value


def run_fn(func: Callable[..., Any], reset: Callable[[], None]) -> Callable[..., Any]:
    """The training function `func(state, ...)` made elastic. `reset` gathers the ranks anew."""

    @functools.wraps(func)
    def wrapper(state: State, *args: Any, **kwargs: Any) -> Any:
        cause: Exception | None = None
        _member.calls += 1
        met: Callable[[], None] | None = state.on_reset if _member.enter() else None  # follows when ranks have met
        while True:
            try:
                if met is not None:
                    _meet(reset, cause)
                    met()
                cause = _synchronize(state)
                if cause is None:
                    return _trained(func, state, args, kwargs)
                state.restore()
            except (HorovodInternalError, HvdTimeoutError) as error:
                if not _is_loss(error, state):
                    raise
                cause = error
                state.restore()
            except _Preempted:
                _end_preempted(state)
            except HostsUpdatedInterrupt as interrupt:
                # Its skip_sync is ignored: newcomers may have come as well, and they wait for a sync (horovod 3494).
                cause = interrupt
            met = state.on_reset

    return wrapper


def _synchronize(state: State) -> HvdMismatchError | None:
    """Rank 0's state on all ranks; or the error that a newcomer has raised, whose state is of another form: it has left
    the job. Raises HvdMismatchError on all ranks where the forms differ among ranks that were there before."""
    mine = _member.commit, _member.calls, state._form()
    told = allgather_object(mine, "elastic.commits") if _member.is_elastic() else [mine]
    commits, file = [commit for commit, *_ in told], state._file
    if file is not None and file.unread and state._rank() == 0:  # of ranks with state and without it, rank 0 has it
        file.load_into(state)
    state._number = max(0, commits[0])
    try:
        _state_form.require_same([each[1:] for each in told])
        state.sync()
    except HvdMismatchError as error:
        unfit = {rank for rank in error.ranks if commits[rank] < 0 <= commits[0]}
        if not unfit:
            raise
        if state._rank() in unfit:
            _life.leave_unfit()
            raise
        return error
    if file is not None:
        file.unread = False
    _member.commit = state._number
    return None


def _trained(func: Callable[..., Any], state: State, args: Any, kwargs: Any) -> Any:
    """What the function returns. An interrupt saves first: no rank is lost and all are at the same place."""
    try:
        result = func(state, *args, **kwargs)
    except HostsUpdatedInterrupt:
        state._save_commit()
        raise
    if state._file is not None and state._rank() == 0:
        state._file.ended(state.state_dict)
    return result


def _end_preempted(state: State) -> NoReturn:
    """All have saved at the same place: the file as well, and on to the end of this process."""
    kept = state._file is not None and state._rank() == 0 and state._file.write(state.state_dict())
    with contextlib.suppress(HorovodInternalError, HvdTimeoutError):  # without the news: rank 0 knows, if it lives
        kept = state._bcast_object(kept)
    _life.shutdown()  # all leave together: this end is no failure
    sys.exit(PREEMPTED if kept else UNKEPT)


def _is_loss(error: Exception, state: State) -> bool:
    """Whether the others go on without a rank. One that hangs longer than the job's limit is killed by an elastic job's
    launcher; the limit of one call (`timeout=`) says nothing of the rank."""
    if isinstance(error, HvdTimeoutError):
        return _member.is_elastic() and error.handle is None and error.rank not in (None, state._rank())
    return True


def _meet(reset: Callable[[], None], cause: Exception | None) -> None:
    """The ranks meet anew, as often as it takes. Ends this process if it was removed from the job."""
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
                error._over = _member.commit >= 0
                raise
            cause = error  # the link to that rank is cut: one of the two will be killed


def reset() -> None:
    """Gathers the ranks anew. Raises HvdNotYetError where the launcher was not told that they may change."""
    if not _member.is_elastic():
        raise HvdNotYetError(
            "the number of ranks of this job is fixed: start it with hvdlite-run --min-np N, or restart it from its "
            "last checkpoint; the exception above has the reason. [HVD246]"
        )
    _life.shutdown()
    _life.init()


def run(func: Callable[..., Any]) -> Callable[..., Any]:
    """Decorator of a training function whose first argument is a State: synchronizes the state, then calls it.

    Where a rank is lost the state is restored, and the others go on; other exceptions pass.
    """
    return run_fn(func, reset)
