"""Rank, size and the like, read when a graph runs: after another init() the same graph has other answers.

What is about the whole job is a node of ours. Process sets are known to Python alone, so about them TensorFlow calls
Python; a set that does not exist when the graph runs is a tf.errors.InvalidArgumentError, and without init() every
question is a tf.errors.FailedPreconditionError.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import tensorflow as tf

from ...process_sets.process_set import ProcessSet, process_set_by_id
from .kernels import library
from .run import refuse_xla

_as_it_is = tf.autograph.experimental.do_not_convert


def _query(what: int, name: str | None) -> tf.Tensor:
    if not tf.executing_eagerly():
        refuse_xla("hvd.rank_op, size_op and the like", "or take the numbers: hvd.rank(), hvd.size()")
    return tf.ensure_shape(library().ops.hvd_ask(what=what, name=name), [])


def _query_set(process_set_id: int, question: Callable[[ProcessSet], int], name: str | None) -> tf.Tensor:
    def answer(_: np.ndarray) -> np.int32:
        return np.int32(question(process_set_by_id(process_set_id)))

    return tf.ensure_shape(tf.numpy_function(answer, [_query(0, None)], tf.int32, name=name), [])


@_as_it_is
def rank_op(name: str | None = None) -> tf.Tensor:
    """Return ``hvd.rank()`` as a tensor that is evaluated when the graph runs.

    A graph made once gives the right answer after another ``hvd.init()``, too. A plain ``hvd.rank()`` becomes a
    constant.

    Args:
        name (str, optional): the name of the node.

    Returns:
        tf.Tensor: int32 scalar.

    Raises:
        HvdNotYetError: in a function that XLA compiles.
        ImportError: the ops for graphs are not compiled, or do not fit this TensorFlow.
        tf.errors.FailedPreconditionError: when it runs, ``hvd.init()`` has not been called.

    Example:
        >>> int(hvd.rank_op())
        0  # rank 0
        1  # rank 1
    """
    return _query(0, name)


@_as_it_is
def size_op(process_set_id: int = 0, name: str | None = None) -> tf.Tensor:
    """Return ``hvd.size()``, or the size of a process set, as a tensor that is evaluated when the graph runs.

    Args:
        process_set_id (int): ``process_set_id`` of a process set. 0 (default): all ranks.
        name (str, optional): the name of the node.

    Returns:
        tf.Tensor: int32 scalar.

    Raises:
        HvdNotYetError: in a function that XLA compiles.
        ImportError: as ``rank_op``.
        tf.errors.FailedPreconditionError: when it runs, ``hvd.init()`` has not been called.
        tf.errors.InvalidArgumentError: when it runs, there is no such process set.

    Example:
        >>> int(hvd.size_op())
        2
    """
    if process_set_id == 0:
        return _query(1, name)
    return _query_set(process_set_id, lambda process_set: process_set.size(), name)


@_as_it_is
def local_rank_op(name: str | None = None) -> tf.Tensor:
    """Return ``hvd.local_rank()`` as a tensor that is evaluated when the graph runs.

    Args:
        name (str, optional): the name of the node.

    Returns:
        tf.Tensor: int32 scalar.

    Raises:
        HvdNotYetError: in a function that XLA compiles.
        ImportError: as ``rank_op``.
        tf.errors.FailedPreconditionError: when it runs, ``hvd.init()`` has not been called.

    Example:
        >>> int(hvd.local_rank_op()) == hvd.local_rank()
        True
    """
    return _query(2, name)


@_as_it_is
def local_size_op(name: str | None = None) -> tf.Tensor:
    """Return ``hvd.local_size()`` as a tensor that is evaluated when the graph runs.

    Args:
        name (str, optional): the name of the node.

    Returns:
        tf.Tensor: int32 scalar.

    Raises:
        HvdNotYetError: in a function that XLA compiles.
        ImportError: as ``rank_op``.
        tf.errors.FailedPreconditionError: when it runs, ``hvd.init()`` has not been called.

    Example:
        >>> int(hvd.local_size_op()) == hvd.local_size()
        True
    """
    return _query(3, name)


@_as_it_is
def process_set_included_op(process_set_id: int = 0, name: str | None = None) -> tf.Tensor:
    """Return whether this rank belongs to a process set, as a tensor that is evaluated when the graph runs.

    Args:
        process_set_id (int): ``process_set_id`` of a process set. 0 (default): all ranks.
        name (str, optional): the name of the node.

    Returns:
        tf.Tensor: int32 scalar, 1 for a member, else 0.

    Raises:
        HvdNotYetError: in a function that XLA compiles.
        ImportError: as ``rank_op``.
        tf.errors.FailedPreconditionError: when it runs, ``hvd.init()`` has not been called.
        tf.errors.InvalidArgumentError: when it runs, there is no such process set.

    Example:
        >>> int(hvd.process_set_included_op(hvd.global_process_set.process_set_id))
        1
    """
    return _query_set(process_set_id, lambda process_set: process_set.included(), name)
