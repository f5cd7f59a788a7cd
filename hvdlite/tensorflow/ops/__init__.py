"""The collectives with Horovod's arguments, on tensors, variables and IndexedSlices, eager and in tf.function.

    asked        rank, size and the like, answered when a graph runs
    run          many collectives of one kind, in either mode
    order        in what order a graph runs those of one name
    kernels      the library of ops for graphs
    late         what becomes of a call whose time is over
    gradients    what backward sends
    root         what has a root, or is between two ranks

Here are Horovod's words.

`device_dense`, `device_sparse` and `ignore_name_scope` are taken and mean nothing: tensors are reduced where they lie,
and a name is what the caller gave.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from ... import _core
from ... import ops as _everybodys
from ...errors import HvdArgumentError
from ...ops import Average, Sum, Terms
from ...ops.tensors import group_of
from ...ops.terms import NoneCompressor, compress, reduction
from ...process_set import ProcessSet, global_process_set
from ..errors import tensor_given, translated
from .asked import local_rank_op, local_size_op, process_set_included_op, rank_op, size_op
from .gradients import differentiable
from .kernels import beside, library
from .late import finished, seconds_of
from .root import gather, recv, reduce, scatter, send
from .run import refuse_xla


def _sparse_allreduce(slices: tf.IndexedSlices, name: str | None, terms: Terms, compression: Any) -> tf.IndexedSlices:
    """Every rank's rows and their indices; those of one index add up when they are applied."""
    if terms.op not in (Average, Sum):
        if terms.op == _everybodys.Adasum:
            raise NotImplementedError(
                "The Adasum reduction does not currently support sparse tensors: give sparse_as_dense=True [HVD207]"
            )
        raise HvdArgumentError(
            f"op={_core.op_name(terms.op)} is not supported for tf.IndexedSlices: use Average or Sum [HVD207]"
        )
    if terms.timeout is not None:
        raise HvdArgumentError("timeout is not supported for tf.IndexedSlices, which are two collectives [HVD207]")
    if terms.prescale != 1 or terms.postscale != 1:
        raise HvdArgumentError("prescale_factor and postscale_factor are not supported for tf.IndexedSlices [HVD207]")
    values, ctx = compress(compression, slices.values)
    parts = Terms(terms.process_set)
    names = [None, None] if name is None else [f"{name}.values", f"{name}.indices"]
    (values,) = differentiable("allgather", [values], names[:1], parts).results
    (indices,) = differentiable("allgather", [slices.indices], names[1:], parts).results
    values = compression.decompress(values, ctx)
    if terms.op == Average:
        values = values / tf.cast(terms.process_set.size(), values.dtype)
    return tf.IndexedSlices(values, indices, dense_shape=slices.dense_shape)


def _first(outcome: Any) -> Any:
    return outcome.results[0]


def _all(outcome: Any) -> Any:
    return outcome.results


_as_it_is = tf.autograph.experimental.do_not_convert  # autograph would rewrite our Python, to no end


@_as_it_is
def allreduce(
    tensor: Any, average: bool | None = None, device_dense: str = "", device_sparse: str = "",
    compression: Any = NoneCompressor, op: int | None = None, prescale_factor: float = 1.0,
    postscale_factor: float = 1.0, name: str | None = None, process_set: ProcessSet = global_process_set,
    ignore_name_scope: bool = False, *,
    timeout: Any = None
) -> Any:  # fmt: skip
    """Reduce a tensor of the same shape and dtype over all ranks: a new tensor, with a gradient for Average and Sum.

    op is Average (default), Sum, Adasum, Min, Max or Product. A tf.IndexedSlices is gathered, not densified, and takes
    Average and Sum only. Raises tf.errors.FailedPreconditionError when ranks disagree about the tensor,
    tf.errors.InvalidArgumentError and ValueError for what cannot be reduced, tf.errors.UnknownError for a lost rank.

    timeout: seconds, a datetime.timedelta, or None, without a limit of the call's own; in eager mode only. After that
    time tf.errors.DeadlineExceededError (an hvd.HvdTimeoutError, too) names the tensor and the ranks that are missing.
    The job goes on, and so does the collective: hvd.synchronize(error.handle) waits for it again and returns the
    result, with a gradient if the tape still records; until it has ended its memory and its name are in use. The limit
    is of the forward pass alone: the gradient's own collective waits without one. In a graph timeout is an error,
    tf.errors.UnimplementedError (HVDLITE_COLLECTIVE_TIMEOUT holds there); IndexedSlices take none. All this goes for
    every collective here.
    """
    seconds = seconds_of("allreduce", name, timeout)
    with translated("allreduce", name):
        terms = reduction(average, op, prescale_factor, postscale_factor, process_set, seconds)
        if isinstance(tensor, tf.IndexedSlices):
            return _sparse_allreduce(tensor, name, terms, compression)
    small, ctx = compress(compression, tensor_given("allreduce", name, tensor))
    return finished(
        lambda outcome: compression.decompress(outcome.results[0], ctx),
        differentiable, "allreduce", [small], [name], terms,
    )  # fmt: skip


@_as_it_is
def grouped_allreduce(
    tensors: Sequence[Any], average: bool | None = None, device_dense: str = "", device_sparse: str = "",
    compression: Any = NoneCompressor, op: int | None = None, prescale_factor: float = 1.0,
    postscale_factor: float = 1.0, process_set: ProcessSet = global_process_set, ignore_name_scope: bool = False,
    name: str | None = None, *,
    timeout: Any = None
) -> list[Any]:  # fmt: skip
    """allreduce of several tensors that become ready as one: none is reduced before all ranks have given all of them.

    IndexedSlices among them are gathered one by one.
    """
    members, seconds = group_of(tensors), seconds_of("grouped_allreduce", name, timeout)
    if not members:
        return []
    with translated("grouped_allreduce", name):
        terms = reduction(average, op, prescale_factor, postscale_factor, process_set, seconds)
    results: list[Any] = [None] * len(members)
    dense = [i for i, member in enumerate(members) if not isinstance(member, tf.IndexedSlices)]
    for i in set(range(len(members))) - set(dense):
        called = None if name is None else f"{name}_{i}"
        with translated("grouped_allreduce", called):
            results[i] = _sparse_allreduce(members[i], called, terms, compression)
    if dense:
        small = [compress(compression, tensor_given("grouped_allreduce", name, members[i])) for i in dense]

        def finish(outcome: Any) -> list[Any]:
            for i, result, (_, ctx) in zip(dense, outcome.results, small):
                results[i] = compression.decompress(result, ctx)
            return results

        finished(finish, differentiable, "allreduce", [each for each, _ in small], [name], terms, grouped=True)
    return results


@_as_it_is
def allgather(
    tensor: Any, name: str | None = None, ignore_name_scope: bool = False,
    process_set: ProcessSet = global_process_set, *,
    timeout: Any = None
) -> tf.Tensor:  # fmt: skip
    """Every rank's rows, concatenated in rank order along the first dimension, which may differ between ranks."""
    terms = Terms(process_set, timeout=seconds_of("allgather", name, timeout))
    return finished(_first, differentiable, "allgather", [tensor], [name], terms)


@_as_it_is
def grouped_allgather(
    tensors: Sequence[Any], name: str | None = None, ignore_name_scope: bool = False,
    process_set: ProcessSet = global_process_set, *,
    timeout: Any = None
) -> list[tf.Tensor]:  # fmt: skip
    """allgather of several tensors that become ready as one."""
    members = group_of(tensors)
    terms = Terms(process_set, op=0, timeout=seconds_of("grouped_allgather", name, timeout))
    if not members:
        return []
    return finished(_all, differentiable, "allgather", members, [name], terms, grouped=True)


@_as_it_is
def broadcast(
    tensor: Any, root_rank: int, name: str | None = None, ignore_name_scope: bool = False,
    process_set: ProcessSet = global_process_set, *,
    timeout: Any = None
) -> tf.Tensor:  # fmt: skip
    """The root's tensor on every rank; shape and dtype must be the same on all. root_rank is a global rank."""
    terms = Terms(process_set, root_rank=root_rank, timeout=seconds_of("broadcast", name, timeout))
    return finished(_first, differentiable, "broadcast", [tensor], [name], terms)


@_as_it_is
def alltoall(
    tensor: Any, splits: Any = None, name: str | None = None, ignore_name_scope: bool = False,
    process_set: ProcessSet = global_process_set, *,
    timeout: Any = None
) -> Any:  # fmt: skip
    """Rows for every rank, one part after the other; the rows that came, and with `splits` how many from each rank.

    splits: a list or 1-D tensor of int32, rows for each rank; None: equal parts.
    """

    def finish(outcome: Any) -> Any:
        return outcome.results[0] if splits is None else (outcome.results[0], tf.cast(outcome.rows[0], tf.int32))

    terms = Terms(process_set, splits=splits, timeout=seconds_of("alltoall", name, timeout))
    return finished(finish, differentiable, "alltoall", [tensor], [name], terms)


@_as_it_is
def reducescatter(
    tensor: Any, device_dense: str = "", compression: Any = NoneCompressor, op: int = Average, name: str | None = None,
    process_set: ProcessSet = global_process_set, ignore_name_scope: bool = False, prescale_factor: float = 1.0,
    postscale_factor: float = 1.0, *,
    timeout: Any = None
) -> tf.Tensor:  # fmt: skip
    """This rank's rows of the reduced tensor; of rows left over, the first ranks get one each."""
    seconds = seconds_of("reducescatter", name, timeout)
    with translated("reducescatter", name):
        terms = reduction(None, op, prescale_factor, postscale_factor, process_set, seconds)
    small, ctx = compress(compression, tensor_given("reducescatter", name, tensor))
    return finished(
        lambda outcome: compression.decompress(outcome.results[0], ctx),
        differentiable, "reducescatter", [small], [name], terms,
    )  # fmt: skip


@_as_it_is
def grouped_reducescatter(
    tensors: Sequence[Any], device_dense: str = "", compression: Any = NoneCompressor, op: int = Average,
    process_set: ProcessSet = global_process_set, prescale_factor: float = 1.0, postscale_factor: float = 1.0,
    name: str | None = None, *,
    timeout: Any = None
) -> list[tf.Tensor]:  # fmt: skip
    """reducescatter of several tensors that become ready as one."""
    members, seconds = group_of(tensors), seconds_of("grouped_reducescatter", name, timeout)
    if not members:
        return []
    with translated("grouped_reducescatter", name):
        terms = reduction(None, op, prescale_factor, postscale_factor, process_set, seconds)
    small = [compress(compression, tensor_given("grouped_reducescatter", name, member)) for member in members]
    return finished(
        lambda outcome: [compression.decompress(result, ctx) for result, (_, ctx) in zip(outcome.results, small)],
        differentiable, "reducescatter", [each for each, _ in small], [name], terms, grouped=True,
    )  # fmt: skip


@_as_it_is
def join() -> Any:
    """This rank has no more tensors: the others go on without it. Returns the rank that joined last."""
    if tf.executing_eagerly():
        with translated():
            return tf.constant(_everybodys.join(), tf.int32)
    refuse_xla("hvd.join")
    handle = library().ops.hvd_start(
        x=tf.zeros([0]), splits=tf.zeros([0], tf.int64), key="", kind=_core.JOIN, prescale=0, postscale=0
    )
    with beside(handle):
        _, last = library().ops.hvd_finish(handle=handle, T=tf.float32)
    return tf.cast(last[0], tf.int32)


__all__ = [
    "allgather",
    "allreduce",
    "alltoall",
    "broadcast",
    "gather",
    "grouped_allgather",
    "grouped_allreduce",
    "grouped_reducescatter",
    "join",
    "local_rank_op",
    "local_size_op",
    "process_set_included_op",
    "rank_op",
    "recv",
    "reduce",
    "reducescatter",
    "scatter",
    "send",
    "size_op",
]
