"""Futures of collectives, and the thread that completes them.

Those that hooks of DistributedDataParallel ask for, in a callback at the end of this backward, which comes before the
one in which DDP waits for them: so no thread waits, and spins, while backward computes, and what failed leaves
backward() as the exception that it is. All others, on a thread, as well as those that a hook itself waits for (after
PATIENCE_S): a static graph's first iteration starts its buckets among the callbacks.

Those of one group complete in the order of the calls that made them, which is the same on all ranks; one of a send or
a receive holds up no other. What runs in callbacks may start collectives, as PowerSGD's do, while the main thread
starts others: those have names of their own, since the order of two threads is not known (`inside` distinguishes them).
"""

from __future__ import annotations

import atexit
import math
import os
import queue
import threading
import time
import weakref
from collections import deque
from typing import TYPE_CHECKING, Any

import torch
from torch.futures import Future

if TYPE_CHECKING:
    from .work import HvdWork

PATIENCE_S = 0.3

_local = threading.local()
_backwards: dict[
    int, list[FutureQueue]
] = {}  # backward passes with our callback at their end, and the queues that it completes


class FutureQueue:
    """Futures that complete one after the other: those of a group's collectives, or one alone. What one waits for
    holds up no other."""

    def __init__(self) -> None:
        self._waiting: deque[tuple[float, HvdWork, Future[Any]]] = deque()  # with the time at which the thread takes it
        self._turn = threading.RLock()
        self._pid = 0
        self._bell: queue.SimpleQueue[float | None]
        self._thread: threading.Thread

    def complete(self, work: HvdWork, began: Future[Any], last: bool = False) -> None:
        """Sets `began` when the work is over. last: nothing will follow in this line."""
        due = 0.0
        if in_backward():
            task, due = torch._C._current_graph_task_id(), time.monotonic() + PATIENCE_S
            if task not in _backwards:
                _backwards[task] = []
                torch.autograd.Variable._execution_engine.queue_callback(lambda: _at_end_of_backward(task))
            if self not in _backwards[task]:
                _backwards[task].append(self)
        self._waiting.append((due, work, began))
        if self._pid != os.getpid():
            self._pid, self._bell = os.getpid(), queue.SimpleQueue()
            self._thread = threading.Thread(target=self._run, args=(self._bell,), name="hvdlite-futures", daemon=True)
            self._thread.start()
            _lines.add(self)
        self._bell.put(due)
        if last:
            self._bell.put(None)

    def settle(self, by: float = math.inf) -> BaseException | None:
        """Completes what is due by then; why the first failed."""
        first = None
        with self._turn:
            _local.inside = True
            try:
                while self._is_due(by):
                    _, work, began = self._waiting.popleft()
                    error = work.settle()
                    first = first or error
                    began.set_result(None)
            finally:
                _local.inside = False
        return first

    def _is_due(self, by: float) -> bool:
        try:
            return self._waiting[0][0] <= by
        except IndexError:
            return False

    def _run(self, bell: queue.SimpleQueue[float | None]) -> None:
        while (due := bell.get()) is not None:
            while self._is_due(due):
                if (pause := due - time.monotonic()) > 0:
                    time.sleep(min(pause, 0.02))
                else:
                    self.settle(due)

    def end(self) -> None:
        """What is in the line completes, and its thread ends then."""
        if self._pid == os.getpid():
            self._pid = 0
            self._bell.put(None)

    def join(self) -> None:
        """At exit: a thread that is in C++ when the interpreter ends would end the process by SIGABRT."""
        if self._pid == os.getpid():
            self.end()
            self._thread.join(1)


_lines = weakref.WeakSet[FutureQueue]()


@atexit.register
def _join_all() -> None:
    for line in list(_lines):
        line.join()


def inside() -> bool:
    """Whether a callback of a future runs on this thread."""
    return getattr(_local, "inside", False)


def in_backward() -> bool:
    """Whether a hook of backward runs on this thread."""
    return torch._C._current_autograd_node() is not None  # type: ignore[attr-defined]


def _at_end_of_backward(task: int) -> None:
    errors = [line.settle() for line in _backwards.pop(task)]
    error = next((each for each in errors if each is not None), None)
    if error is not None:
        raise error
