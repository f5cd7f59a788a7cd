"""What must training keep in memory, so that it can go on when ranks come and go? The part without a framework.

A State is saved (committed) every so often, restored when a collective has failed, and synchronized from rank 0
whenever the ranks have changed. `run_fn` makes a training function that does so. The names and the order of calls are
Horovod's.

Only HorovodInternalError, a lost rank, means "roll back and go on with the others"; what ranks disagree about and what
the training function itself raises are bugs that would come again, and go to the caller. This version cannot yet
gather ranks anew: `run` ends with HvdNotYetError where that would be needed, naming the cause. All else works as it
stands, so a script written for elastic training runs.
"""

from __future__ import annotations

import copy
import functools
import queue
from collections.abc import Callable, Iterable
from typing import Any

from .errors import HorovodInternalError, HostsUpdatedInterrupt, HvdNotYetError


class HostUpdateResult:
    """What has happened to the hosts: bits that are combined."""

    no_update, removed, added = 0, 1, 2
    mixed = removed | added


class State:
    """What training keeps; subclasses say how to save, restore and sync it.

    bcast_object: a function that gives every rank rank 0's object. get_rank: a function that gives this rank's number.
    """

    def __init__(self, bcast_object: Callable[[Any], Any], get_rank: Callable[[], int]) -> None:
        self._bcast_object = bcast_object
        self._rank = get_rank
        self._host_messages: queue.Queue[tuple[float, int]] = queue.Queue()
        self._last_updated_timestamp: float = 0
        self._reset_callbacks: list[Callable[[], None]] = []

    def register_reset_callbacks(self, callbacks: Iterable[Callable[[], None]]) -> None:
        """Functions to be called, in this order, after the ranks have changed."""
        self._reset_callbacks.extend(callbacks)

    def on_reset(self) -> None:
        """The ranks have changed: forget news of hosts, reset, call the callbacks."""
        self._host_messages = queue.Queue()
        self.reset()
        for callback in self._reset_callbacks:
            callback()

    def on_hosts_updated(self, timestamp: float, update_res: int = HostUpdateResult.mixed) -> None:
        """Hosts were added or removed at that time. May be called from any thread."""
        self._host_messages.put((timestamp, update_res))

    def commit(self) -> None:
        """save, then check_host_updates. All ranks have to call it."""
        self.save()
        self.check_host_updates()

    def check_host_updates(self) -> None:
        """Raises HostsUpdatedInterrupt on all ranks if rank 0 has heard that hosts have changed."""
        before = latest = self._last_updated_timestamp
        what = HostUpdateResult.no_update
        while not self._host_messages.empty():
            timestamp, update = self._host_messages.get()
            if timestamp > latest:
                latest = timestamp
                what |= update
        before, self._last_updated_timestamp, what = self._bcast_object((before, latest, what))
        if self._last_updated_timestamp > before:
            raise HostsUpdatedInterrupt(what == HostUpdateResult.removed)

    def save(self) -> None:
        """Keep a copy of the state in memory."""
        raise NotImplementedError

    def restore(self) -> None:
        """Go back to what was saved last."""
        raise NotImplementedError

    def sync(self) -> None:
        """Give every rank rank 0's state."""
        raise NotImplementedError

    def reset(self) -> None:
        """Adapt to changed ranks; nothing by default."""


class ObjectState(State):
    """Python objects, given as keywords and kept as attributes: `state.epoch += 1`."""

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
        self._set_attrs()

    def sync(self) -> None:
        """Set the attributes as rank 0 has saved them."""
        if self._saved_state:
            self._saved_state = self._bcast_object(self._saved_state)
            self._set_attrs()

    def _set_attrs(self) -> None:
        for name, value in self._saved_state.items():
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
        skip_sync = False
        while True:
            cause: Exception
            try:
                if not skip_sync:
                    state.sync()
                return func(state, *args, **kwargs)
            except HorovodInternalError as error:
                cause, skip_sync = error, False
            except HostsUpdatedInterrupt as interrupt:
                cause, skip_sync = interrupt, interrupt.skip_sync
            if isinstance(cause, HorovodInternalError):
                state.restore()
            try:
                reset()
            except HvdNotYetError as refusal:
                raise refusal from cause
            state.on_reset()

    return wrapper


def reset_not_yet() -> None:
    """Gathering the ranks anew. Raises HvdNotYetError."""
    raise HvdNotYetError(
        "going on with other ranks comes with a later version of hvdlite: start the job again from its "
        "last checkpoint; the exception above says what happened. [HVD246]"
    )


def run(func: Callable[..., Any]) -> Callable[..., Any]:
    """Decorator of a training function whose first argument is a State: synchronizes the state, then calls it.

    Where a rank is lost the state is restored and HvdNotYetError raised from the lost peer's error; other exceptions
    pass.
    """
    return run_fn(func, reset_not_yet)
