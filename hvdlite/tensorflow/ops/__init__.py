"""The collectives with Horovod's arguments, on tensors, variables and IndexedSlices, eager and in tf.function.

    topology     rank, size and the like, answered when a graph runs
    run          many collectives of one kind, in either mode
    order        in what order a graph runs those of one name
    kernels      the library of ops for graphs
    timeouts     what becomes of a call whose time is over
    gradients    what backward sends
    quantized    what travels in 8 or 4 bits
    rooted       what has a root, or is between two ranks

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
from ...errors import HvdArgumentError, HvdSparseError
from ...ops import Average, Sum, Terms
from ...ops.arguments import NoneCompressor, Quantized, compress, reduction
from ...ops.tensors import group_of
from ...process_sets.process_set import ProcessSet, global_process_set
from ..errors import tensor_from, translated
from .gradients import differentiable
from .kernels import beside, library
from .quantized import single
from .rooted import gather, recv, reduce, scatter, send
from .run import refuse_xla
from .timeouts import finished, seconds_of
from .topology import local_rank_op, local_size_op, process_set_included_op, rank_op, size_op


def _sparse_allreduce(slices: tf.IndexedSlices, name: str | None, terms: Terms, compression: Any) -> tf.IndexedSlices:
    """Every rank's rows and their indices; those of one index add up when they are applied."""
    if terms.op == _everybodys.Adasum:
        raise HvdSparseError(
            "The Adasum reduction does not currently support sparse tensors: give sparse_as_dense=True [HVD207]"
        )
    if terms.op not in (Average, Sum):
        raise HvdSparseError(
            f"op={_core.op_name(terms.op)} is not supported for tf.IndexedSlices: use Average or Sum [HVD207]"
        )
    if terms.timeout is not None:
        raise HvdArgumentError("timeout is not supported for tf.IndexedSlices, which are two collectives [HVD207]")
    if terms.prescale != 1 or terms.postscale != 1:
        raise HvdSparseError("prescale_factor and postscale_factor are not supported for tf.IndexedSlices [HVD207]")
    values, ctx = compress(NoneCompressor if isinstance(compression, Quantized) else compression, slices.values)
    parts = Terms(terms.process_set)
    names = [None, None] if name is None else [f"{name}.values", f"{name}.indices"]
    (values,) = differentiable("allgather", [values], names[:1], parts).results
    (indices,) = differentiable("allgather", [slices.indices], names[1:], parts).results
    values = values if isinstance(compression, Quantized) else compression.decompress(values, ctx)
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
    """Reduce a tensor over all ranks and return the result on every rank.

    All ranks of the set must call it, eagerly or in a ``tf.function``. It blocks until all have; without ``timeout``
    there is no limit but ``HVDLITE_COLLECTIVE_TIMEOUT``. Average and Sum have their exact gradient, which is one more
    allreduce. The other ops have no gradient. A ``tf.IndexedSlices`` stays sparse: its rows are gathered, and only
    Average and Sum are allowed. Tensors on GPUs travel through host memory.

    Eager errors have two base classes. An ``HvdMismatchError`` is also a ``tf.errors.FailedPreconditionError``, an
    ``HvdArgumentError`` an ``InvalidArgumentError``, an ``HvdTimeoutError`` a ``DeadlineExceededError``, an
    ``HvdNotYetError`` an ``UnimplementedError``, and an ``HvdPeerLostError`` an ``UnknownError``. In a graph only the
    TensorFlow class is raised. This holds for every collective of this module.

    Args:
        tensor (tf.Tensor): a tensor, variable, array or ``tf.IndexedSlices``. Shape and dtype are the same on all
            ranks.
        op (int, optional): ``hvd.Average`` (default), ``Sum``, ``Adasum``, ``Min``, ``Max`` or ``Product``.
        name (str, optional): the same on all ranks. Calls without a name are matched by their order.
        process_set (ProcessSet, optional): the ranks that take part. Default: all.
        timeout (float or datetime.timedelta, optional): seconds until ``HvdTimeoutError``. None: no limit. Eager calls
            only, and not for ``IndexedSlices``. The collective goes on, and ``hvd.synchronize(error.handle)`` waits for
            it again and returns the result. The collective of the gradient has no limit.
        compression (Compressor): the form in which the tensor travels, such as ``hvd.Compression.fp16``. ``int8`` and
            ``int4`` round between hosts, and have no gradient. Default: none.
        prescale_factor (float): multiplies the tensor before the reduction. Default: 1.0.
        postscale_factor (float): multiplies the result. Default: 1.0.
        average (bool, optional): Horovod's old form of ``op``. True is Average, False is Sum. Do not give both.
        device_dense, device_sparse (str): accepted for Horovod, without effect.
        ignore_name_scope (bool): accepted for Horovod, without effect.

    Returns:
        tf.Tensor or tf.IndexedSlices: shape and dtype of ``tensor``.

    Raises:
        HvdArgumentError: the dtype or the op is not supported for this tensor. For ``IndexedSlices`` it is also a
            ``NotImplementedError``.
        HvdMismatchError: the ranks disagree about shape, dtype, op or scale. All ranks raise it.
        HvdNotYetError: ``timeout`` in a graph.
        HvdPeerLostError: a rank has left or died.
        HvdTimeoutError: ``timeout`` has passed. The text names the ranks that are missing.
        TypeError: ``tensor`` cannot be made a tensor, or ``compression`` is not a compressor.
        ValueError: ``op`` is unknown, or both ``op`` and ``average`` are given.

    Example:
        >>> x = tf.constant([1.0, 2.0]) * (hvd.rank() + 1)
        >>> hvd.allreduce(x).numpy().tolist()
        [1.5, 3.0]
    """
    seconds = seconds_of("allreduce", name, timeout)
    with translated("allreduce", name):
        terms = reduction(average, op, prescale_factor, postscale_factor, process_set, seconds)
        if isinstance(tensor, tf.IndexedSlices):
            return _sparse_allreduce(tensor, name, terms, compression)
    if isinstance(compression, Quantized):
        found = single("allreduce", [tensor], name, terms, compression)
        if found is not None:
            return found[0]
        compression = NoneCompressor
    small, ctx = compress(compression, tensor_from("allreduce", name, tensor))
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
    """Reduce several tensors as one group and return the results.

    None is reduced before all ranks have given all of them. ``IndexedSlices`` are gathered one by one. See
    ``allreduce``.

    Args:
        tensors (list of tf.Tensor): as many on all ranks.
        op (int, optional): as in ``allreduce``.
        name (str, optional): the name of the group.
        process_set (ProcessSet, optional): the ranks that take part. Default: all.
        timeout (float or datetime.timedelta, optional): as in ``allreduce``, for the whole group.
        compression (Compressor): as in ``allreduce``.
        prescale_factor, postscale_factor (float): as in ``allreduce``.
        average (bool, optional): Horovod's old form of ``op``.
        device_dense, device_sparse (str): accepted for Horovod, without effect.
        ignore_name_scope (bool): accepted for Horovod, without effect.

    Returns:
        list of tf.Tensor: the results in the order of ``tensors``.

    Raises:
        HvdMismatchError: the ranks give different tensors. The other errors are those of ``allreduce``.

    Example:
        >>> pair = [tf.constant([1]), tf.constant([10]) * (hvd.rank() + 1)]
        >>> [each.numpy().tolist() for each in hvd.grouped_allreduce(pair, op=hvd.Sum)]
        [[2], [30]]
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
    if dense and isinstance(compression, Quantized):
        found = single("grouped_allreduce", [members[i] for i in dense], name, terms, compression)
        for i, result in zip(dense, found or ()):
            results[i] = result
        dense, compression = [] if found is not None else dense, NoneCompressor
    if dense:
        small = [compress(compression, tensor_from("grouped_allreduce", name, members[i])) for i in dense]

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
    """Concatenate the tensors of all ranks along the first dimension and return the result on every rank.

    All ranks of the set must call it. The first dimension may differ between ranks and may be 0. The gradient is
    Horovod's: each rank gets its rows of the average of all ranks' gradients, where the exact gradient has the sum.

    Args:
        tensor (tf.Tensor): at least one dimension. The other dimensions and the dtype are the same on all ranks.
        name (str, optional): the same on all ranks. Calls without a name are matched by their order.
        process_set (ProcessSet, optional): the ranks that take part. Default: all.
        timeout (float or datetime.timedelta, optional): seconds, as in ``allreduce``.
        ignore_name_scope (bool): accepted for Horovod, without effect.

    Returns:
        tf.Tensor: all rows, in rank order.

    Raises:
        HvdArgumentError: the tensor has no dimensions.
        HvdMismatchError: dtype or the other dimensions differ. The other errors are those of ``allreduce``.

    Example:
        >>> hvd.allgather(tf.fill([hvd.rank() + 1], hvd.rank())).numpy().tolist()
        [0, 1, 1]
    """
    terms = Terms(process_set, timeout=seconds_of("allgather", name, timeout))
    return finished(_first, differentiable, "allgather", [tensor], [name], terms)


@_as_it_is
def grouped_allgather(
    tensors: Sequence[Any], name: str | None = None, ignore_name_scope: bool = False,
    process_set: ProcessSet = global_process_set, *,
    timeout: Any = None
) -> list[tf.Tensor]:  # fmt: skip
    """Gather several tensors as one group. See ``allgather`` for shapes and gradient.

    Args:
        tensors (list of tf.Tensor): as many on all ranks.
        name (str, optional): the name of the group.
        process_set (ProcessSet, optional): the ranks that take part. Default: all.
        timeout (float or datetime.timedelta, optional): seconds for the whole group, as in ``allreduce``.
        ignore_name_scope (bool): accepted for Horovod, without effect.

    Returns:
        list of tf.Tensor: the gathered tensors in the order of ``tensors``.

    Raises:
        HvdMismatchError: the ranks give different tensors. The other errors are those of ``allgather``.

    Example:
        >>> both = hvd.grouped_allgather([tf.constant([hvd.rank()]), tf.constant([2.5])])
        >>> [each.numpy().tolist() for each in both]
        [[0, 1], [2.5, 2.5]]
    """
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
    """Return the tensor of one rank on every rank.

    All ranks of the set must call it. The gradient is Horovod's: the root gets the average of all ranks' gradients,
    where the exact gradient is their sum. The other ranks get zeros. To assign to variables, use
    ``broadcast_variables``.

    Args:
        tensor (tf.Tensor): shape and dtype are the same on all ranks. The values matter on the root only.
        root_rank (int): the global rank of the root, a member of the set.
        name (str, optional): the same on all ranks. Calls without a name are matched by their order.
        process_set (ProcessSet, optional): the ranks that take part. Default: all.
        timeout (float or datetime.timedelta, optional): seconds, as in ``allreduce``.
        ignore_name_scope (bool): accepted for Horovod, without effect.

    Returns:
        tf.Tensor: the root's values.

    Raises:
        HvdMismatchError: shape, dtype or root differ. The other errors are those of ``allreduce``.
        ValueError: ``root_rank`` is not a member of the set.

    Example:
        >>> hvd.broadcast(tf.constant([hvd.rank(), 7]), root_rank=1).numpy().tolist()
        [1, 7]
    """
    terms = Terms(process_set, root_rank=root_rank, timeout=seconds_of("broadcast", name, timeout))
    return finished(_first, differentiable, "broadcast", [tensor], [name], terms)


@_as_it_is
def alltoall(
    tensor: Any, splits: Any = None, name: str | None = None, ignore_name_scope: bool = False,
    process_set: ProcessSet = global_process_set, *,
    timeout: Any = None
) -> Any:  # fmt: skip
    """Send each rank its part of the rows, and return the rows that the ranks have sent to this one.

    All ranks of the set must call it. The gradient is exact: the gradients travel back.

    Args:
        tensor (tf.Tensor): at least one dimension. The rows for each rank, one part after the other in rank order.
        splits (list or tf.Tensor of int32, optional): the number of rows for each rank. None: equal parts.
        name (str, optional): the same on all ranks. Calls without a name are matched by their order.
        process_set (ProcessSet, optional): the ranks that take part. Default: all.
        timeout (float or datetime.timedelta, optional): seconds, as in ``allreduce``.
        ignore_name_scope (bool): accepted for Horovod, without effect.

    Returns:
        tf.Tensor or (tf.Tensor, tf.Tensor): the received rows in rank order. With ``splits`` also the number of rows
        from each rank, int32.

    Raises:
        HvdArgumentError: the tensor has no dimensions, or ``splits`` does not fit the tensor or the number of ranks.
        HvdMismatchError: dtype or the other dimensions differ. The other errors are those of ``allreduce``.

    Example:
        >>> hvd.alltoall(tf.constant([0, 1]) + 10 * hvd.rank()).numpy().tolist()
        [0, 10]  # rank 0
        [1, 11]  # rank 1
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
    """Reduce a tensor over all ranks and return this rank's rows of the result.

    All ranks of the set must call it. Rows are divided evenly in rank order; of the rest, the first ranks get one row
    each. Average and Sum have Horovod's gradient: the exact one times the number of ranks.

    Args:
        tensor (tf.Tensor): at least one dimension. Shape and dtype are the same on all ranks.
        op (int): ``hvd.Average`` (default), ``Sum``, ``Min``, ``Max`` or ``Product``.
        name (str, optional): the same on all ranks. Calls without a name are matched by their order.
        process_set (ProcessSet, optional): the ranks that take part. Default: all.
        timeout (float or datetime.timedelta, optional): seconds, as in ``allreduce``.
        compression (Compressor): as in ``allreduce``.
        prescale_factor, postscale_factor (float): as in ``allreduce``.
        device_dense (str): accepted for Horovod, without effect.
        ignore_name_scope (bool): accepted for Horovod, without effect.

    Returns:
        tf.Tensor: this rank's rows.

    Raises:
        HvdArgumentError: the tensor has no dimensions, or the op is not supported.
        HvdMismatchError: the ranks disagree about the tensor. The other errors are those of ``allreduce``.

    Example:
        >>> x = tf.constant([1, 2]) * (hvd.rank() + 1)
        >>> hvd.reducescatter(x, op=hvd.Sum).numpy().tolist()
        [3]  # rank 0
        [6]  # rank 1
    """
    seconds = seconds_of("reducescatter", name, timeout)
    with translated("reducescatter", name):
        terms = reduction(None, op, prescale_factor, postscale_factor, process_set, seconds)
    small, ctx = compress(compression, tensor_from("reducescatter", name, tensor))
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
    """Reduce several tensors as one group and return this rank's rows of each. See ``reducescatter``.

    Args:
        tensors (list of tf.Tensor): as many on all ranks.
        op (int): as in ``reducescatter``.
        name (str, optional): the name of the group.
        process_set (ProcessSet, optional): the ranks that take part. Default: all.
        timeout (float or datetime.timedelta, optional): seconds for the whole group, as in ``allreduce``.
        compression (Compressor): as in ``allreduce``.
        prescale_factor, postscale_factor (float): as in ``allreduce``.
        device_dense (str): accepted for Horovod, without effect.

    Returns:
        list of tf.Tensor: this rank's rows in the order of ``tensors``.

    Raises:
        HvdMismatchError: the ranks give different tensors. The other errors are those of ``reducescatter``.

    Example:
        >>> parts = hvd.grouped_reducescatter([tf.constant([1, 2]), tf.constant([3, 4])], op=hvd.Sum)
        >>> [each.numpy().tolist() for each in parts]
        [[2], [6]]  # rank 0
        [[4], [8]]  # rank 1
    """
    members, seconds = group_of(tensors), seconds_of("grouped_reducescatter", name, timeout)
    if not members:
        return []
    with translated("grouped_reducescatter", name):
        terms = reduction(None, op, prescale_factor, postscale_factor, process_set, seconds)
    small = [compress(compression, tensor_from("grouped_reducescatter", name, member)) for member in members]
    return finished(
        lambda outcome: [compression.decompress(result, ctx) for result, (_, ctx) in zip(outcome.results, small)],
        differentiable, "reducescatter", [each for each, _ in small], [name], terms, grouped=True,
    )  # fmt: skip


@_as_it_is
def join() -> Any:
    """Report that this rank has no more data, and wait until all ranks have joined.

    Meanwhile the other ranks continue, and this rank counts as zeros in their sums. Use it where ranks have different
    numbers of batches. It also works in a graph, but not in one that XLA compiles.

    Returns:
        tf.Tensor: int32, the rank that joined last.

    Raises:
        HvdPeerLostError: a rank has left or died.
        HvdTimeoutError: ``HVDLITE_COLLECTIVE_TIMEOUT`` has passed while no rank makes progress.

    Example:
        >>> for _ in range(1 + hvd.rank()):
        ...     total = hvd.allreduce(tf.constant([1.0]), op=hvd.Sum)
        >>> int(hvd.join()), total.numpy().tolist()
        (1, [2.0])  # rank 0
        (1, [1.0])  # rank 1
    """
    if tf.executing_eagerly():
        with translated():
            return tf.constant(_everybodys.join(), tf.int32)
    refuse_xla("hvd.join")
    handle, _ = library().ops.hvd_start(
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
