"""Several collectives of one kind, started together and finished together, on eager tensors or in a graph.

`run` is where every collective of hvdlite.tensorflow goes through, gradients' and optimizers' included: a list of
tensors in, an `Outcome` out. Eager it is hvdlite.ops on the tensors' memory. In a graph it makes nodes:
all Starts first, in the order given, which is the order in which every rank will submit; then the Finishes.

What a name is: eager collectives without one are matched by their order, as in all of hvdlite. A node needs a key that
is the same on every rank, also when one rank alone has traced the function again (the last batch is smaller, say). So
it is not the node's name but that of the function it is in, and how many collectives the function has called before it
in the same process set: what only some ranks call counts for them alone.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf

from ... import _core
from ...errors import HvdArgumentError, HvdNotYetError
from ...keras.list_check import Listed, compare
from ...ops import Collectives, Sum, Terms
from ...ops.tensors import full_name
from ...process_sets.process_set import ProcessSet, number_of, rank_in
from ..adapter import TensorflowAdapter, check_dtype, tensor_of
from ..errors import as_tensorflow, translated
from .kernels import beside, bits, library, signed
from .order import order_here, started
from .timeouts import Late, wait

_KINDS = {
    "allreduce": _core.ALLREDUCE,
    "allgather": _core.ALLGATHER,
    "broadcast": _core.BROADCAST,
    "alltoall": _core.ALLTOALL,
    "reducescatter": _core.REDUCESCATTER,
}
_NEED_ROWS = {"allgather", "alltoall", "reducescatter"}
_WITHIN = re.compile(r"Cond|While|Case")  # graphs of branches and loop bodies belong to the function around them


class Outcome(NamedTuple):
    """Of each tensor the result, and of a ragged collective how many rows came from each rank: numbers or a tensor."""

    results: list[Any]
    rows: list[Any]


eager: Collectives[Any] = Collectives(TensorflowAdapter())


def run(kind: str, tensors: Sequence[Any], names: Sequence[str | None], terms: Terms, grouped: bool = False) -> Outcome:
    """The collective of each tensor. `grouped`: all become ready as one, and the first name is the group's.

    Raises what `hvdlite.ops` raises, as errors of tf.errors, too; from a graph when it runs.
    """
    if not tensors:
        return Outcome([], [])
    with translated(kind, names[0]):
        if tf.executing_eagerly():
            return _eagerly(kind, tensors, names, terms, grouped)
        return _in_graph(kind, tensors, names, terms, grouped)


def _eagerly(
    kind: str, tensors: Sequence[Any], names: Sequence[str | None], terms: Terms, grouped: bool
) -> Outcome:  # fmt: skip
    if grouped:
        handles = [getattr(eager, f"_grouped_{kind}")(list(tensors), names[0], terms, True)]
    else:
        if terms.splits is not None:
            terms = terms._replace(splits=np.asarray(_splits_of(terms.splits, terms.process_set.size())))
        start, alone = getattr(eager, f"_{kind}"), len(tensors) == 1
        handles = []
        for tensor, name in zip(tensors, names):
            with translated(kind, name):
                handles.append(start(tensor, name, terms, alone))

    def outcome() -> Outcome:
        if grouped:
            return Outcome([tensor_of(result) for result in handles[0].wait()], handles[0].brought)
        results = [handle.wait() for handle in handles]
        if kind == "alltoall":  # the second is received_splits
            results = [result for result, _ in results]
        rows = [handle.brought[0] for handle in handles] if kind in ("allgather", "alltoall") else []
        return Outcome([tensor_of(result) for result in results], rows)

    if terms.timeout is not None:
        (handle,) = handles  # of one call of the user's
        wait(handle, terms.timeout, Late(handle, (kind, names[0]), outcome))
    return outcome()


def _traced(among: str) -> str:
    """The name of a collective that has none: the function it is traced in, and how many came before it there.

    among: which ranks call it, "" for all; each has a count of its own.
    """
    graph = tf.compat.v1.get_default_graph()
    while _WITHIN.search(type(graph).__name__) and getattr(graph, "outer_graph", None) is not None:
        graph = graph.outer_graph
    counts = {among: 0, **getattr(graph, "_hvdlite_calls", {})}
    count = counts[among]
    graph._hvdlite_calls = {**counts, among: count + 1}
    function = re.sub(r"^__(inference|forward)_|(_\d+)+$", "", getattr(graph, "name", None) or "graph")
    return f"{function}.{among}{'.' if among else ''}{count}"


def name_in_graph(name: str | None, number: int) -> str:
    """The name of a collective in a graph, among the ranks of the process set of this number."""
    return name or _traced(f"set{number}" if number else "")


def _splits_of(splits: Any, size: int) -> tf.Tensor:
    """The splits of an alltoall as int64; none: empty. HvdArgumentError for what can be seen to be wrong by now."""
    if splits is None:
        return tf.zeros([0], tf.int64)
    tensor = tf.convert_to_tensor(splits)
    if tensor.dtype not in (tf.int32, tf.int64):
        raise HvdArgumentError("alltoall expects splits to contain 32-bit integer elements (or 64-bit ones) [HVD209]")
    if tensor.shape.rank not in (None, 1):
        raise HvdArgumentError(
            f"alltoall expects a 1D splits tensor, not one of {tensor.shape.rank} dimensions [HVD209]"
        )
    if tensor.shape.rank == 1 and tensor.shape[0] not in (None, size):
        raise HvdArgumentError(
            f"Number of entries in splits ({tensor.shape[0]}) does not equal number of workers ({size}). [HVD209]"
        )
    return tf.cast(tensor, tf.int64)


def _in_graph(
    kind: str, tensors: Sequence[Any], names: Sequence[str | None], terms: Terms, grouped: bool
) -> Outcome:  # fmt: skip
    refuse_xla()
    _core.require_job(_KINDS[kind])
    number, count, size = number_of(terms.process_set), len(tensors), terms.process_set.size()
    for tensor, name in zip(tensors, [names[0]] * count if grouped else names):
        with translated(kind, name):
            check_dtype(tensor.dtype)
            if kind in _NEED_ROWS and tensor.shape.rank == 0:
                raise HvdArgumentError(
                    f"{kind} needs a tensor of at least one dimension: reshape a scalar to (1,) [HVD210]"
                )
    group, among = 0, f"set{number}" if number else ""
    if grouped:
        base = full_name(f"grouped_{kind}.", names[0] or _traced(among))
        keys = [f"{base}_{i}of{count}" for i in range(1, count + 1)]
        group = signed(_core.group_number(base, number))
    else:
        keys = [full_name(f"{kind}.", name or _traced(among)) or "" for name in names]
    root = rank_in(terms.process_set, terms.root_rank) if kind == "broadcast" else 0
    attributes = {
        "kind": _KINDS[kind], "op": terms.op if "reduce" in kind else 0, "root": root, "process_set": number,
        "prescale": bits(terms.prescale), "postscale": bits(terms.postscale), "group": group,
        "members": count if grouped else 0, "place": rank_in(terms.process_set, _core.rank()), "places": size,
        "order": order_here(kind, names[0]),
    }  # fmt: skip
    opened = library()
    ops = opened.ops
    splits = _splits_of(terms.splits, size)
    handles = [started(x=tensor, splits=splits, key=key, **attributes) for tensor, key in zip(tensors, keys)]
    # A group is started whole, also if a session wants one result only; an op with a waiting thread starts all first.
    before = handles if count > 1 and (grouped or not opened.asynchronous) else []
    outcome = Outcome([], [])
    for tensor, handle in zip(tensors, handles):
        with tf.control_dependencies(before), beside(handle):
            result, rows = ops.hvd_finish(handle=handle, T=tensor.dtype)
        result.set_shape(_unknown_rows(tensor) if kind in _NEED_ROWS else tensor.shape)
        rows.set_shape([size] if kind in ("allgather", "alltoall") else [1])
        outcome.results.append(result)
        outcome.rows.append(rows)
    return outcome


def between(tensor: tf.Tensor, name: str | None, process_set: ProcessSet, sender: int, receiver: int) -> tf.Tensor:
    """In a graph: a tensor from one rank of the set to another, by global ranks. On both, once it is there, it."""
    refuse_xla()
    _core.require_job(_core.SEND)
    number, place = number_of(process_set), rank_in(process_set, _core.rank())
    check_dtype(tensor.dtype)
    ops, among = library().ops, f"set{number}.from{sender}to{receiver}"
    handle = started(
        x=tensor, splits=tf.zeros([0], tf.int64), key=full_name("send.", name or _traced(among)), kind=_core.SEND,
        root=rank_in(process_set, sender), peer=rank_in(process_set, receiver), process_set=number,
        prescale=bits(1.0), postscale=bits(1.0), place=place, places=process_set.size(),
        order=order_here("send", name),
    )  # fmt: skip
    with beside(handle):
        result, _ = ops.hvd_finish(handle=handle, T=tensor.dtype)
    return tf.ensure_shape(result, tensor.shape)


def agree(listed: Listed, process_set: ProcessSet, matters: tf.Tensor | None = None) -> list[tf.Tensor]:
    """HvdMismatchError if ranks have different lists; from a graph when it runs: what follows comes after these.

    matters: False, on all ranks, where what is in the lists is to be left out of account, but not how long they are.
    """
    if process_set.included() and process_set.size() == 1:
        return []
    with translated():
        if tf.executing_eagerly():
            compare(listed if matters is None or matters else listed._replace(compared=()), process_set)
            return []
        refuse_xla()
        number, place = number_of(process_set), rank_in(process_set, _core.rank())
        ops = library().ops
        shape = listed.shape if matters is None else tf.where(matters, listed.shape, listed._replace(compared=()).shape)
        handle = started(
            x=tf.zeros(shape), splits=tf.zeros([0], tf.int64), key=listed.name, kind=_core.ALLREDUCE, op=Sum,
            prescale=bits(1.0), postscale=bits(1.0), process_set=number, place=place, places=process_set.size(),
            order=order_here("list", listed.what), list=f"{listed.remedy}\n{listed.text()}",
        )  # fmt: skip
        with beside(handle):
            result, _ = ops.hvd_gate(handle=handle, T=tf.float32)
        return [result]


def refuse_xla(what: str = "collectives", more: str = "") -> None:
    """HvdNotYetError while a function is traced for XLA, which knows no op of ours."""
    graph = tf.compat.v1.get_default_graph()
    while graph is not None:
        around = getattr(graph, "_get_control_flow_context", lambda: None)()
        while around is not None:
            if type(around).__name__ == "XLAControlFlowContext":
                raise as_tensorflow(
                    HvdNotYetError(
                        f"rank {_core.rank()}: {what} cannot be compiled by XLA yet: pass jit_compile=False to "
                        f"model.compile or tf.function{(', ' if more else '')}{more} [HVD248]"
                    )
                )
            around = around.outer_context
        graph = getattr(graph, "outer_graph", None)


def _unknown_rows(tensor: tf.Tensor) -> tf.TensorShape:
    """The shape but for the first dimension."""
    if tensor.shape.rank is None:
        return tf.TensorShape(None)
    return tf.TensorShape([None, *tensor.shape[1:]])
