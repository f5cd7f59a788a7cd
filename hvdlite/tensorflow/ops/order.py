"""Order of collectives of one name in a graph: the control dependencies of a new node.

Within tf.function automatic control dependencies run them in the order of the program, iterations of loops included, so
a name that is started again is the next of its kind, on every rank. A graph of a session has no such order: a node runs
once in it (Horovod's rule, too), but in a loop iterations overtake each other, differently on every rank, so there each
iteration has a name of its own. Branches (tf.cond) have no order even in tf.function, so those that hold collectives of
ours are tied to what came before them (`branch`), and what comes later to them. What TensorFlow calls for several
elements of a dataset at a time has neither order nor numbers, and is refused.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

import tensorflow as tf

from ... import _core
from ...errors import HvdArgumentError
from .kernels import library

ORDERED, ONCE, NAMED = 0, 1, 2  # csrc/tensorflow/tensorflow.h


def order_here(kind: str, name: str | None) -> int:
    """The order of nodes that are made now. HvdArgumentError, naming the tensor, where there cannot be any."""
    parallel = _parallel_dataset()
    if parallel is not None:
        raise HvdArgumentError(
            f"rank {_core.rank()}: {kind} of {name or 'a tensor without a name'} in a function that {parallel} calls "
            "for several elements in parallel, in a different order on every rank: leave out num_parallel_calls, or "
            "call it in the loop over the dataset [HVD249]"
        )
    ordered, loop = True, False
    graph: Any = tf.compat.v1.get_default_graph()
    eager_outside = tf.compat.v1.executing_eagerly_outside_functions()
    while graph is not None:
        outer = getattr(graph, "outer_graph", None)
        if outer is not None or not eager_outside:  # else the default graph, which is no part of what runs
            ordered = ordered and graph._add_control_dependencies
            loop = loop or "While" in type(graph).__name__ or _in_old_loop(graph)
        graph = outer
    return ORDERED if ordered else NAMED if loop else ONCE


def once_more(prefix: str) -> str:
    """The prefix of names of a list; of the second such list in a graph without order another one, and so on."""
    if tf.executing_eagerly():
        return prefix
    graph: Any = tf.compat.v1.get_default_graph()
    if order_here("list", prefix) == ORDERED:
        return prefix
    while getattr(graph, "outer_graph", None) is not None:
        graph = graph.outer_graph
    counts = {prefix: 0, **getattr(graph, "_hvdlite_lists", {})}
    counts[prefix] += 1
    graph._hvdlite_lists = counts
    return prefix if counts[prefix] == 1 else f"{prefix}#{counts[prefix]}"


def branch(pred: Any, then: Callable[[], Any], otherwise: Callable[[], Any], look: bool = False) -> Any:
    """tf.cond of what communicates, after what communicates before it in the function.

    look: it compares what ranks have (../initial_check.py), which blocks. Other branches wait for it, and starts do
    not.
    """
    past, graph = _past(), tf.compat.v1.get_default_graph()
    if past is None:
        return tf.cond(pred, then, otherwise)
    known = len(graph.get_operations())
    with tf.control_dependencies([*past["looks"], *past["branches"], *([] if look else past["starts"])]):
        made = tf.cond(pred, then, otherwise)
    past["looks" if look else "branches"] = [op for op in graph.get_operations()[known:] if op.type == "If"]
    return made


def started(**attributes: Any) -> tf.Tensor:
    """The handle of a collective that starts, after the branches before it; later branches come after it."""
    (handle,) = in_turn(lambda: [library().ops.hvd_start(**attributes).handle])
    handle.set_shape([2])
    return handle


def in_turn(make: Callable[[], list[tf.Tensor]]) -> list[tf.Tensor]:
    """The outputs of a stateful node that communicates, after the branches before it and before later ones."""
    past = _past()
    with tf.control_dependencies([] if past is None else past["branches"]):
        made = make()
    if past is not None:
        past["starts"] = [made[0].op]
    return made


def _past() -> dict[str, list[tf.Operation]] | None:
    """The last nodes that communicate in the function that is traced now. None where there is no order to keep."""
    graph: Any = tf.compat.v1.get_default_graph()
    if tf.executing_eagerly() or not getattr(graph, "_add_control_dependencies", False):
        return None
    if graph._get_control_flow_context() is not None:
        return None
    if not hasattr(graph, "_hvdlite_past"):
        graph._hvdlite_past = {"looks": [], "branches": [], "starts": []}
    past: dict[str, list[tf.Operation]] = graph._hvdlite_past
    return past


def _in_old_loop(graph: Any) -> bool:
    around = graph._get_control_flow_context()
    while around is not None:
        if around.IsWhileContext():
            return True
        around = around.outer_context
    return False


def _parallel_dataset() -> str | None:
    """The dataset whose function is being traced, if it calls it in parallel."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if frame.f_globals.get("__name__") == "tensorflow.python.data.ops.structured_function":
            caller = frame.f_back
            made = type(caller.f_locals.get("self")).__name__ if caller is not None else ""
            if "Parallel" in made:
                return str(frame.f_locals.get("transformation_name", made))
        frame = frame.f_back
    return None
