"""Who completes the futures of collectives, and when?

Those that hooks of DistributedDataParallel ask for, in a callback at the end of this backward, which comes before the
one in which DDP waits for them: so no thread waits, and spins, while backward computes, and what failed leaves
backward() as the exception that it is. All others, on a thread, as well as those that a hook itself waits for (after
PATIENCE_S): a static graph's first iteration starts its buckets among the callbacks.

Always in the order in which they were asked for, which is the same on all ranks. What runs in their callbacks may start
collectives, as PowerSGD's do, while the main thread starts others: those have names of their own, since
nobody knows the order of two threads (`inside` tells).
"""

from __future__ import annotations

import atexit
import math
import os
import queue
import threading
import time
from collections import deque
from typing import TYPE_CHECKING, Any

import torch
from torch.futures import Future

if TYPE_CHECKING:
    from .work import HvdWork

PATIENCE_S = 0.3

_line: deque[tuple[float, HvdWork, Future[Any]]] = deque()  # with the time at which the thread takes it
_turn, _local = threading.RLock(), threading.local()
_backwards = set[int]()  # those whose end has our callback


class _Thread:
    """The thread of this process, made when it is asked for."""

    pid = 0
    bell: queue.SimpleQueue[float | None]
    thread: threading.Thread

    def ring(self, due: float) -> None:
        """Something in the line is due then."""
        if self.pid != os.getpid():
            self.pid, self.bell = os.getpid(), queue.SimpleQueue()
            self.thread = threading.Thread(target=self._run, args=(self.bell,), name="hvdlite-futures", daemon=True)
            self.thread.start()
        self.bell.put(due)

    def _run(self, bell: queue.SimpleQueue[float | None]) -> None:
        while (due := bell.get()) is not None:
            while _is_due(due):
                if (pause := due - time.monotonic()) > 0:
                    time.sleep(min(pause, 0.02))
                else:
                    _settle(due)

    def end(self) -> None:
        """A daemon thread that is in C++ when the interpreter ends would end the process by SIGABRT."""
        if self.pid == os.getpid():
            self.pid = 0
            self.bell.put(None)
            self.thread.join(1)


_thread = _Thread()
atexit.register(_thread.end)


def inside() -> bool:
    """Whether a callback of a future runs on this thread."""
    return getattr(_local, "inside", False)


def in_backward() -> bool:
    """Whether a hook of backward runs on this thread."""
    return torch._C._current_autograd_node() is not None  # type: ignore[attr-defined]


def complete(work: HvdWork, began: Future[Any]) -> None:
    """Sets `began` when the work is over."""
    due = 0.0
    if in_backward():
        task, due = torch._C._current_graph_task_id(), time.monotonic() + PATIENCE_S
        if task not in _backwards:
            _backwards.add(task)
            torch.autograd.Variable._execution_engine.queue_callback(_at_end_of_backward)
    _line.append((due, work, began))
    _thread.ring(due)


def _is_due(by: float) -> bool:
    try:
        return _line[0][0] <= by
    except IndexError:
        return False


def _settle(by: float) -> BaseException | None:
    """Completes what is due by then; why the first failed."""
    first = None
    with _turn:
        _local.inside = True
        try:
            while _is_due(by):
                _, work, began = _line.popleft()
                error = work.settle()
                first = first or error
                began.set_result(None)
        finally:
            _local.inside = False
    return first


def _at_end_of_backward() -> None:
    _backwards.clear()
    error = _settle(math.inf)
    if error is not None:
        raise error
