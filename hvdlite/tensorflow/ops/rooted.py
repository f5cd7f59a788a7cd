"""Collectives with a root, and between two ranks: reduce, gather, scatter, send and recv on TensorFlow.

Those with a root are made of collectives that graphs have: reduce is an allreduce of which all but the root forget the
result, gather and scatter are alltoalls in which every rank gives to the root, or the root alone gives. So they work in
both modes and have exact gradients. In a scatter every rank gives a tensor, since an alltoall needs to know dtype and
the dimensions after the first; the rows of all but the root are ignored and may be none.

What is done to tensors is the same operations on root and others, with other numbers: eager gradients are computed in
an order that follows from the operations, and ranks that backward leads to two collectives in two orders wait for ever.

send and recv have no gradient.
"""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from ... import _core
from ...errors import HvdArgumentError
from ...ops import Terms
from ...ops.arguments import reduction
from ...process_sets.process_set import ProcessSet, global_process_set, rank_in
from ..adapter import tensor_of
from ..errors import tensor_from, translated
from .gradients import differentiable
from .kernels import library
from .run import between, eager
from .timeouts import Late, finished, seconds_of, wait

_as_it_is = tf.autograph.experimental.do_not_convert


@_as_it_is
def reduce(
    tensor: Any, root_rank: int, op: int | None = None, name: str | None = None, prescale_factor: float = 1.0,
    postscale_factor: float = 1.0, process_set: ProcessSet = global_process_set, *,
    timeout: Any = None
) -> tf.Tensor:  # fmt: skip
    """Reduce a tensor over all ranks and return the result on the root.

    All ranks of the set must call it. It costs as much as ``allreduce``, of which it is made. Average and Sum have
    their exact gradient.

    Args:
        tensor (tf.Tensor): shape and dtype are the same on all ranks.
        root_rank (int): the global rank of the root, a member of the set.
        op (int, optional): as in ``allreduce``.
        name (str, optional): the same on all ranks. Calls without a name are matched by their order.
        prescale_factor, postscale_factor (float): as in ``allreduce``.
        process_set (ProcessSet, optional): the ranks that take part. Default: all.
        timeout (float or datetime.timedelta, optional): seconds, as in ``allreduce``.

    Returns:
        tf.Tensor: the result on the root, a tensor of shape (0,) on the other ranks.

    Raises:
        HvdMismatchError: the ranks disagree about the tensor. The other errors are those of ``allreduce``.
        ValueError: ``root_rank`` is not a member of the set.

    Example:
        >>> hvd.reduce(tf.constant([1.0]) * (hvd.rank() + 1), root_rank=0, op=hvd.Sum).numpy().tolist()
        [3.0]  # rank 0
        []  # rank 1
    """
    seconds = seconds_of("reduce", name, timeout)
    with translated("reduce", name):
        terms = reduction(None, op, prescale_factor, postscale_factor, process_set, seconds)
        rank_in(process_set, root_rank)
    mine = _core.rank() == root_rank

    def finish(outcome: Any) -> tf.Tensor:
        (result,) = outcome.results
        kept = tf.reshape(result, [-1])[: None if mine else 0]
        return tf.reshape(kept, tf.shape(result) if mine else [0])

    return finished(finish, differentiable, "allreduce", [tensor], [_named("reduce", name)], terms)


@_as_it_is
def gather(
    tensor: Any, root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set, *,
    timeout: Any = None
) -> tf.Tensor:  # fmt: skip
    """Concatenate the tensors of all ranks along the first dimension and return the result on the root.

    All ranks of the set must call it. The gradient is exact.

    Args:
        tensor (tf.Tensor): at least one dimension, of which the first may differ between ranks.
        root_rank (int): the global rank of the root, a member of the set.
        name (str, optional): the same on all ranks. Calls without a name are matched by their order.
        process_set (ProcessSet, optional): the ranks that take part. Default: all.
        timeout (float or datetime.timedelta, optional): seconds, as in ``allreduce``.

    Returns:
        tf.Tensor: all rows in rank order on the root, no rows on the other ranks.

    Raises:
        HvdArgumentError: the tensor has no dimensions.
        HvdMismatchError: dtype or the other dimensions differ. The other errors are those of ``allreduce``.
        ValueError: ``root_rank`` is not a member of the set.

    Example:
        >>> hvd.gather(tf.constant([hvd.rank()]), root_rank=0).numpy().tolist()
        [0, 1]  # rank 0
        []  # rank 1
    """
    seconds = seconds_of("gather", name, timeout)
    mine = _rows("gather", tensor, name)
    with translated("gather", name):
        root = rank_in(process_set, root_rank)
    splits = tf.one_hot(root, process_set.size(), dtype=tf.int64) * tf.shape(mine, tf.int64)[0]
    terms = Terms(process_set, splits=splits, timeout=seconds)
    return finished(_first, differentiable, "alltoall", [mine], [_named("gather", name)], terms)


@_as_it_is
def scatter(
    tensor: Any, root_rank: int, splits: Any = None, name: str | None = None,
    process_set: ProcessSet = global_process_set, *,
    timeout: Any = None
) -> tf.Tensor:  # fmt: skip
    """Divide the rows of the root's tensor among all ranks and return this rank's rows.

    All ranks of the set must call it. The gradient is exact.

    Args:
        tensor (tf.Tensor): at least one dimension. On the other ranks a tensor with the root's dtype and dimensions
            after the first, such as ``tf.zeros([0, 4])``; its rows are ignored.
        root_rank (int): the global rank of the root, a member of the set.
        splits (list or tf.Tensor of int32, optional): on the root, the number of rows for each rank. None: equal parts.
        name (str, optional): the same on all ranks. Calls without a name are matched by their order.
        process_set (ProcessSet, optional): the ranks that take part. Default: all.
        timeout (float or datetime.timedelta, optional): seconds, as in ``allreduce``.

    Returns:
        tf.Tensor: this rank's rows.

    Raises:
        HvdArgumentError: the tensor has no dimensions, or ``splits`` does not fit.
        HvdMismatchError: dtype or the other dimensions differ. The other errors are those of ``allreduce``.
        ValueError: ``root_rank`` is not a member of the set.

    Example:
        >>> rows = tf.constant([[1, 2], [3, 4]]) if hvd.rank() == 0 else tf.zeros([0, 2], tf.int32)
        >>> hvd.scatter(rows, root_rank=0).numpy().tolist()
        [[1, 2]]  # rank 0
        [[3, 4]]  # rank 1
    """
    seconds = seconds_of("scatter", name, timeout)
    mine = _rows("scatter", tensor, name)
    with translated("scatter", name):
        rank_in(process_set, root_rank)
    is_root = _core.rank() == root_rank
    mine = mine[: None if is_root else 0]
    if not is_root:
        splits = tf.zeros([process_set.size()], tf.int64)
    terms = Terms(process_set, splits=splits, timeout=seconds)
    return finished(_first, differentiable, "alltoall", [mine], [_named("scatter", name)], terms)


@_as_it_is
def send(
    tensor: Any, dst: int, name: str | None = None, process_set: ProcessSet = global_process_set, *,
    timeout: Any = None
) -> None:  # fmt: skip
    """Send a tensor to one rank, which must call ``recv``.

    Only these two ranks call it. It has no gradient. In a graph, nothing that follows it begins before the tensor has
    been received.

    Args:
        tensor (tf.Tensor): the receiver gives the same shape and dtype.
        dst (int): the global rank of the receiver, another member of the set.
        name (str, optional): the same on both ranks. Calls without a name are matched by their order.
        process_set (ProcessSet, optional): a set with both ranks. Default: all ranks.
        timeout (float or datetime.timedelta, optional): seconds, as in ``allreduce``.

    Raises:
        HvdMismatchError: the receiver gave another shape or dtype. The other errors are those of ``allreduce``.
        ValueError: ``dst`` is this rank or not a member of the set.

    Example:
        >>> if hvd.rank() == 0:
        ...     hvd.send(tf.constant([1.0, 2.0]), dst=1)
        ... else:
        ...     print(hvd.recv(tf.zeros([2]), src=0).numpy().tolist())
        [1.0, 2.0]  # rank 1
    """
    seconds = seconds_of("send", name, timeout)
    with translated("send", name):
        value = tensor_from("send", name, tensor)
        if tf.executing_eagerly():
            handle = eager._between(value, name, process_set, dst, True, True)
            wait(handle, seconds, Late(handle, ("send", name), lambda: None))
            return
        sent = between(value, name, process_set, *_pair(_core.rank(), dst))
        with tf.control_dependencies([sent]):
            library().ops.hvd_ask(what=0)  # stateful: the graph is not over before it, nor before what it comes after


@_as_it_is
def recv(
    tensor: Any, src: int, name: str | None = None, process_set: ProcessSet = global_process_set, *,
    timeout: Any = None
) -> tf.Tensor:  # fmt: skip
    """Receive a tensor from one rank, which must call ``send``.

    Args:
        tensor (tf.Tensor): a tensor with the shape and dtype of the one that is sent. It is not changed.
        src (int): the global rank of the sender, another member of the set.
        name (str, optional): the same on both ranks. Calls without a name are matched by their order.
        process_set (ProcessSet, optional): a set with both ranks. Default: all ranks.
        timeout (float or datetime.timedelta, optional): seconds, as in ``allreduce``.

    Returns:
        tf.Tensor: the values that were sent.

    Raises:
        HvdMismatchError: the sender gave another shape or dtype. The other errors are those of ``allreduce``.
        ValueError: ``src`` is this rank or not a member of the set.

    Example:
        >>> if hvd.rank() == 1:
        ...     hvd.send(tf.constant([3]), dst=0, name="number")
        ... else:
        ...     print(hvd.recv(tf.constant([0]), src=1, name="number").numpy().tolist())
        [3]  # rank 0
    """
    seconds = seconds_of("recv", name, timeout)
    with translated("recv", name):
        value = tensor_from("recv", name, tensor)
        if not tf.executing_eagerly():
            return between(value, name, process_set, *_pair(src, _core.rank()))
        like = eager.adapter.accept(value)
        handle = eager._between(eager.adapter.like(like, like.shape), name, process_set, src, False, True)
        late = Late(handle, ("recv", name), lambda: tensor_of(handle.wait()))
        wait(handle, seconds, late)
        return late.wait()


def _first(outcome: Any) -> tf.Tensor:
    return outcome.results[0]


def _pair(sender: int, receiver: int) -> tuple[int, int]:
    if sender == receiver:
        raise ValueError(f"rank {sender} cannot send to itself or receive from itself [HVD217]")
    return sender, receiver


def _named(kind: str, name: str | None) -> str | None:
    return None if name is None else f"{kind}.{name}"


def _rows(kind: str, tensor: Any, name: str | None) -> tf.Tensor:
    with translated(kind, name):
        mine = tensor_from(kind, name, tensor)
        if mine.shape.rank == 0:
            raise HvdArgumentError(
                f"{kind} needs a tensor of at least one dimension: reshape a scalar to (1,) [HVD210]"
            )
        return mine
