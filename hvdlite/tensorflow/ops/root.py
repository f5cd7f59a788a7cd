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

import numpy as np
import tensorflow as tf

from ... import _core
from ...errors import HvdArgumentError
from ...ops import Terms
from ...ops.terms import reduction
from ...process_set import ProcessSet, global_process_set, rank_in
from ..errors import translated
from .gradients import differentiable
from .kernels import library
from .run import between, eager

_as_it_is = tf.autograph.experimental.do_not_convert


@_as_it_is
def reduce(
    tensor: Any, root_rank: int, op: int | None = None, name: str | None = None, prescale_factor: float = 1.0,
    postscale_factor: float = 1.0, process_set: ProcessSet = global_process_set
) -> tf.Tensor:  # fmt: skip
    """The reduced tensor on the root, a tensor of no elements on the other ranks. root_rank is a global rank."""
    with translated("reduce", name):
        terms = reduction(None, op, prescale_factor, postscale_factor, process_set)
        rank_in(process_set, root_rank)
    (result,) = differentiable("allreduce", [tensor], [_named("reduce", name)], terms).results
    mine = _core.rank() == root_rank
    kept = tf.reshape(result, [-1])[: None if mine else 0]
    return tf.reshape(kept, tf.shape(result) if mine else [0])


@_as_it_is
def gather(
    tensor: Any, root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set
) -> tf.Tensor:
    """Every rank's rows on the root, in rank order; no rows on the other ranks. root_rank is a global rank."""
    mine = _rows("gather", tensor, name)
    with translated("gather", name):
        root = rank_in(process_set, root_rank)
    splits = tf.one_hot(root, process_set.size(), dtype=tf.int64) * tf.shape(mine, tf.int64)[0]
    terms = Terms(process_set, splits=splits)
    return differentiable("alltoall", [mine], [_named("gather", name)], terms).results[0]


@_as_it_is
def scatter(
    tensor: Any, root_rank: int, splits: Any = None, name: str | None = None,
    process_set: ProcessSet = global_process_set
) -> tf.Tensor:  # fmt: skip
    """This rank's rows of the root's tensor: `splits` as in alltoall, or equal parts. root_rank is a global rank.

    The others give a tensor of the root's dtype and dimensions but the first, such as tf.zeros([0, 4]).
    """
    mine = _rows("scatter", tensor, name)
    with translated("scatter", name):
        rank_in(process_set, root_rank)
    is_root = _core.rank() == root_rank
    mine = mine[: None if is_root else 0]
    if not is_root:
        splits = tf.zeros([process_set.size()], tf.int64)
    terms = Terms(process_set, splits=splits)
    return differentiable("alltoall", [mine], [_named("scatter", name)], terms).results[0]


@_as_it_is
def send(tensor: Any, dst: int, name: str | None = None, process_set: ProcessSet = global_process_set) -> None:
    """Sends a tensor to one rank, which calls recv with one of the same shape and dtype. dst is a global rank.

    In a graph, too, nothing that comes after it begins before it has been received.
    """
    with translated("send", name):
        given = tf.convert_to_tensor(tensor)
        if tf.executing_eagerly():
            eager.send(given, dst, name, process_set)
            return
        sent = between(given, name, process_set, *_pair(_core.rank(), dst))
        with tf.control_dependencies([sent]):
            library().ops.hvd_ask(what=0)  # stateful: the graph is not over before it, nor before what it comes after


@_as_it_is
def recv(tensor: Any, src: int, name: str | None = None, process_set: ProcessSet = global_process_set) -> tf.Tensor:
    """What rank src sends, of the shape and dtype of `tensor`, which is not changed. src is a global rank."""
    with translated("recv", name):
        given = tf.convert_to_tensor(tensor)
        if not tf.executing_eagerly():
            return between(given, name, process_set, *_pair(src, _core.rank()))
        like = np.asarray(given)
        return tf.convert_to_tensor(eager.recv(eager.adapter.like(like, like.shape), src, name, process_set))


def _pair(sender: int, receiver: int) -> tuple[int, int]:
    if sender == receiver:
        raise ValueError(f"rank {sender} cannot send to itself, nor receive from itself")
    return sender, receiver


def _named(kind: str, name: str | None) -> str | None:
    return None if name is None else f"{kind}.{name}"


def _rows(kind: str, tensor: Any, name: str | None) -> tf.Tensor:
    with translated(kind, name):
        mine = tf.convert_to_tensor(tensor)
        if mine.shape.rank == 0:
            raise HvdArgumentError(f"{kind} needs a tensor of at least one dimension: a scalar can be reshaped to (1,)")
        return mine
