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
from ...ops.terms import reduction
from ...process_set import ProcessSet, global_process_set, rank_in
from ..adapter import tensor_of
from ..errors import tensor_given, translated
from .gradients import differentiable
from .kernels import library
from .late import Late, finished, seconds_of, wait
from .run import between, eager

_as_it_is = tf.autograph.experimental.do_not_convert


@_as_it_is
def reduce(
    tensor: Any, root_rank: int, op: int | None = None, name: str | None = None, prescale_factor: float = 1.0,
    postscale_factor: float = 1.0, process_set: ProcessSet = global_process_set, *,
    timeout: Any = None
) -> tf.Tensor:  # fmt: skip
    """The reduced tensor on the root, a tensor of no elements on the other ranks. root_rank is a global rank."""
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
    """Every rank's rows on the root, in rank order; no rows on the other ranks. root_rank is a global rank."""
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
    """This rank's rows of the root's tensor: `splits` as in alltoall, or equal parts. root_rank is a global rank.

    The others give a tensor of the root's dtype and dimensions but the first, such as tf.zeros([0, 4]).
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
    """Sends a tensor to one rank, which calls recv with one of the same shape and dtype. dst is a global rank.

    In a graph, too, nothing that comes after it begins before it has been received.
    """
    seconds = seconds_of("send", name, timeout)
    with translated("send", name):
        given = tensor_given("send", name, tensor)
        if tf.executing_eagerly():
            handle = eager._between(given, name, process_set, dst, True, True)
            wait(handle, seconds, Late(handle, ("send", name), lambda: None))
            return
        sent = between(given, name, process_set, *_pair(_core.rank(), dst))
        with tf.control_dependencies([sent]):
            library().ops.hvd_ask(what=0)  # stateful: the graph is not over before it, nor before what it comes after


@_as_it_is
def recv(
    tensor: Any, src: int, name: str | None = None, process_set: ProcessSet = global_process_set, *,
    timeout: Any = None
) -> tf.Tensor:  # fmt: skip
    """What rank src sends, of the shape and dtype of `tensor`, which is not changed. src is a global rank."""
    seconds = seconds_of("recv", name, timeout)
    with translated("recv", name):
        given = tensor_given("recv", name, tensor)
        if not tf.executing_eagerly():
            return between(given, name, process_set, *_pair(src, _core.rank()))
        like = eager.adapter.accept(given)
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
        mine = tensor_given(kind, name, tensor)
        if mine.shape.rank == 0:
            raise HvdArgumentError(
                f"{kind} needs a tensor of at least one dimension: reshape a scalar to (1,) [HVD210]"
            )
        return mine
