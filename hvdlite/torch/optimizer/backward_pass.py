"""Backward passes: which one a gradient belongs to, and when that one ends.

A hook of a parameter learns from autograd only the number of the graph task it runs in. Usually that task is the
backward pass that the user started, and a callback queued in it runs when everything is accumulated and before
`backward()` returns. That is where averaged gradients are waited for, so that clipping in a plain loop sees them.

A backward pass may start others: re-entrant checkpointing calls `backward` for each segment inside the backward of a
node. A hook in such a nested task must not take its end for the end of all. The nodes whose backward is running stand
on the Python stack of the same thread (autograd stays in it); the outermost of them belongs to the pass that the user
started. Its successors run in that pass, later: a hook that stands ready before them queues the callback there.

All distributed optimizers that one pass has reached share one callback: first each sends what it has left, then each
waits. One after the other, two ranks that met them in different orders would wait for each other. A pass that fails
before it has reached all of them is over for those, too, that were reached with them in every pass before.

Compiled autograd (`torch._dynamo.config.compiled_autograd`) runs a backward pass as a program of its own: autograd runs
no node, only an empty task whose callbacks it drops. Nothing would show when gradients are complete, so the first hook
that finds itself in such a program refuses it.

An exception in backward drops the task together with its callbacks: the callback's end without a call shows it. Where
the outermost task was never known, the record is found to be stale when the same thread begins another pass, or when an
optimizer begins a step (`left_by`), whichever comes first.
"""

from __future__ import annotations

import itertools
import sys
import threading
import weakref
from typing import TYPE_CHECKING, Any

import torch
from torch._compile import _disable_dynamo
from torch.autograd.function import BackwardCFunction

from ...errors import OUTCOMES, HvdError

if TYPE_CHECKING:
    from .reducer import Exchange

_serials = itertools.count()
_of_task: dict[int, Backward] = {}
_of_thread: dict[int, Backward] = {}
_together: weakref.WeakKeyDictionary[Exchange, weakref.WeakSet[Exchange]]  # in every pass of the one, so far
_together = weakref.WeakKeyDictionary()

task_number = torch._C._current_graph_task_id  # -1 outside of autograd's engine
_running_node: Any = getattr(torch._C, "_current_autograd_node", lambda: True)


def only_captures(parameter: torch.Tensor) -> bool:
    """Whether this is torch.autograd.grad, which runs a tensor's hooks, too, but adds nothing to its gradient."""
    with torch.enable_grad():
        node: Any = parameter.expand_as(parameter).grad_fn
    try:
        torch._C._will_engine_execute_node(node.next_functions[0][0])
    except RuntimeError:  # its error for a leaf that is captured
        return True
    return False


def uncompiled(function: Any) -> Any:
    """The function, never to be looked into by torch.compile, nor what it calls.

    Hooks run in whatever calls backward, also in a function that torch.compile works on. The public way costs more per
    call than a hook does all in all.
    """
    try:
        from torch._C._dynamo.eval_frame import _FrameAction, _FrameExecStrategy, set_code_exec_strategy

        set_code_exec_strategy(function.__code__, _FrameExecStrategy(_FrameAction.SKIP, _FrameAction.SKIP))
        return function
    except (ImportError, TypeError):  # an older torch
        return _disable_dynamo(function)


class Backward:
    """One pass that a user started, with everything nested in it."""

    def __init__(self) -> None:
        self.serial = next(_serials)
        self.outer: int | None = None  # its task, once known
        self.tasks: list[int] = []
        self.participants: list[Exchange] = []
        self.scouts: list[Any] = []
        self.thread = threading.get_ident()
        self.over = False  # it has ended well

    def is_nested(self, task: int) -> bool:
        """Whether this task is a part of the pass that another task started."""
        return task != self.outer

    def _queue(self, task: int) -> None:
        """Called in the outermost task: be called when it ends."""
        if self.outer is None:
            self.outer = task
            self.own(task)
            torch.autograd.Variable._execution_engine.queue_callback(_Ending(self))

    def own(self, task: int) -> None:
        """The task is a part of this pass."""
        self.tasks.append(task)
        _of_task[task] = self

    def _scout(self, node: Any) -> None:
        """Called in a nested task: queue the callback as soon as the outermost task runs on after this node."""

        def arrived(*_: Any) -> None:
            self._queue(task_number())

        if self.outer is None and not self.scouts:
            self.scouts = [follower.register_prehook(arrived) for follower, _ in node.next_functions if follower]

    def forget(self) -> None:
        """Take it off the records."""
        for scout in self.scouts:
            scout.remove()
        self.scouts = []
        for task in self.tasks:
            _of_task.pop(task, None)
        if _of_thread.get(self.thread) is self:
            del _of_thread[self.thread]

    def dropped(self) -> None:
        """It ended with an exception."""
        reached = self.participants
        for participant in reached:
            participant.abandoned(self)
        if any(participant.failed for participant in reached):
            together = {each for one in reached for each in (one, *_together.get(one, ()))}
            for participant in sorted(together, key=lambda one: one.serial):
                if participant.falls(self):
                    participant.fail(reached)
            reached += together.difference(reached)
        self.forget()

    @uncompiled
    def end(self) -> None:
        """It has added everything to the gradients, and is about to return to the user."""
        self.over = True
        try:
            self.forget()
            failure = self._complete()
        except BaseException:
            for participant in self.participants:
                participant.interrupted(self)
            raise
        if failure is not None:
            raise failure

    def _complete(self) -> Exception | None:
        """All that waits in backward is sent, then waited for. The first failure, after all have ended."""
        for each in self.participants:
            known = _together.get(each)
            if known is None:
                _together[each] = weakref.WeakSet(self.participants)
            elif not known.issubset(self.participants):
                known.intersection_update(self.participants)
        waiting = [each for each in sorted(self.participants, key=lambda one: one.serial) if each.left(self)]
        failure: Exception | None = None
        for participant in waiting[:]:
            try:
                participant.send_rest()
            except OUTCOMES as error:
                participant.interrupted(self)
                waiting.remove(participant)
                failure = failure or error
        for participant in waiting:
            completed = participant.complete_round()
            failure = failure or completed
        return failure


class _Ending:
    """What autograd calls at the end of a task, or drops if it fails."""

    def __init__(self, backward: Backward) -> None:
        self.backward = backward

    @uncompiled
    def __call__(self) -> None:
        self.backward.end()

    def __del__(self) -> None:
        if not self.backward.over:
            self.backward.dropped()


def running(task: int) -> Backward:
    """The pass that this task is a part of. Call it in a hook, in the thread that runs the task."""
    found = _of_task.get(task)
    if found is None:
        refuse_compiled(task)
        node, thread = _outermost_node(), threading.get_ident()
        found = _of_thread.get(thread)
        if found is not None and _is_stale(found, task, node is not None):
            found.dropped()
            found = None
        if found is None:
            found = _of_thread[thread] = Backward()
        if node is None:
            found._queue(task)
        else:
            found.own(task)
            found._scout(node)
    return found


def refuse_compiled(task: int) -> None:
    """Raises HvdError if the hook that runs in this task is called by compiled autograd. Before PyTorch 2.5 that has no
    task at all, as any other caller of a hook."""
    compiler = sys.modules.get("torch._dynamo.compiled_autograd")
    compiled = getattr(compiler, "compiled_autograd_enabled", False) if task < 0 else _running_node() is None
    if compiled or getattr(compiler, "in_compiled_autograd_region", False):
        raise HvdError(
            "PyTorch's compiled autograd runs this backward pass and does not report when gradients are complete, so "
            "hvdlite cannot average them before backward returns: set torch._dynamo.config.compiled_autograd = False "
            "on all ranks, and do not use the context managers of torch._dynamo.compiled_autograd. torch.compile of "
            "the model and of the step still works [HVD810]"
        )


def left_by(participant: Exchange) -> None:
    """The optimizer is at another point of its script: what it takes part in has ended, if with an exception."""
    for backward in list(_of_thread.values()):
        if participant in backward.participants and backward.thread == threading.get_ident():
            backward.participants.remove(participant)
            participant.abandoned(backward)
            if not backward.participants:
                backward.forget()


def _is_stale(backward: Backward, task: int, nested: bool) -> bool:
    if nested:
        return False  # taken to be of the pass that is known: nothing shows otherwise
    if backward.outer is not None or not backward.tasks:  # none: an exception came when it was made
        return True
    return min(backward.tasks) < task  # an enclosing task began before those it encloses


def _outermost_node() -> Any:
    """The outermost node whose backward is running Python code in this thread, None if there is none."""
    frame, node = sys._getframe(2), None
    while frame is not None:
        if frame.f_code.co_name == "apply":
            owner = frame.f_locals.get("self")
            if isinstance(owner, BackwardCFunction):
                node = owner
        frame = frame.f_back  # type: ignore[assignment]
    return node
