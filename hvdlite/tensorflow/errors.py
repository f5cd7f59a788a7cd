"""Classes of tf.errors for the errors of hvdlite, chosen by TensorFlow in tf.function and here in eager calls.

An error of an eager call is of both families: `except tf.errors.FailedPreconditionError` catches it, as scripts written
for Horovod do, and so does `except hvd.HvdMismatchError`. An error out of a graph is TensorFlow's alone, since it
travels as a code and a text; the classes are the same ones (csrc/tensorflow/kernel.c), and the text names rank and
tensor in both.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from typing import Any

import tensorflow as tf

from .. import _core
from ..errors import (
    HorovodInternalError,
    HvdArgumentError,
    HvdError,
    HvdMismatchError,
    HvdNotFiniteError,
    HvdNotInitializedError,
    HvdNotYetError,
    HvdOptionError,
    HvdSparseError,
    HvdTimeoutError,
)
from ..errors.codes import coded

_CLASSES: tuple[tuple[type[Exception], type[tf.errors.OpError]], ...] = (
    (HvdMismatchError, tf.errors.FailedPreconditionError),
    (HvdNotInitializedError, tf.errors.FailedPreconditionError),
    (HvdTimeoutError, tf.errors.DeadlineExceededError),
    (HorovodInternalError, tf.errors.UnknownError),
    (HvdArgumentError, tf.errors.InvalidArgumentError),
    (HvdNotFiniteError, tf.errors.InvalidArgumentError),
    (HvdOptionError, tf.errors.InvalidArgumentError),
    (HvdNotYetError, tf.errors.UnimplementedError),
)


@functools.cache
def _both(ours: Any, theirs: Any) -> type[Exception]:
    def begin(self: Exception, node_def: Any, op: Any, message: str, *args: Any) -> None:
        theirs.__init__(self, node_def, op, message)  # with the names by which autograph knows how to make it again

    def pickled(self: Exception) -> tuple[object, ...]:
        return _again, (ours, str(getattr(self, "message", self)))

    return type(
        ours.__name__, (ours, theirs), {"__init__": begin, "__reduce__": pickled, "__module__": ours.__module__}
    )


def _again(ours: type[Exception], text: str) -> Exception:
    return as_tensorflow(ours(text))


def as_tensorflow(error: Exception) -> Exception:
    """The error as one of TensorFlow's, too; itself if it is none that a collective raises."""
    if isinstance(error, tf.errors.OpError):
        return error
    for ours, theirs in _CLASSES:
        if isinstance(error, ours):
            if "another rank has joined" in str(error):  # as in Horovod; inflight.c likewise
                theirs = tf.errors.FailedPreconditionError
            both = _both(type(error), theirs)(None, None, str(error))  # type: ignore
            if isinstance(error, HvdError):
                both.rank = error.rank  # type: ignore[attr-defined]
            if isinstance(error, HvdMismatchError):
                both.ranks = error.ranks  # type: ignore[attr-defined]
            if isinstance(error, HvdTimeoutError):
                both.handle = error.handle  # type: ignore[attr-defined]
            return both
    return error


@contextlib.contextmanager
def translated(kind: str = "", name: Any = None) -> Iterator[None]:
    """Errors of collectives raised inside become TensorFlow's, too.

    A plain ValueError becomes an HvdArgumentError; both tell rank and tensor: a `kind`, and its name if it has one.
    """
    try:
        yield
    except HvdError as error:
        if kind and type(error) in (HvdArgumentError, HvdSparseError) and "rank " not in str(error):
            error = type(error)(coded("HVD203", f"{_where(kind, name)}: {error}"))
        raise as_tensorflow(error) from error.__cause__
    except ValueError as error:
        if not kind or isinstance(error, tf.errors.OpError):
            raise
        raise as_tensorflow(HvdArgumentError(coded("HVD203", f"{_where(kind, name)}: {error}"))) from error


def _where(kind: str, name: Any) -> str:
    of = f"tensor '{kind}.{name}'" if name is not None else f"{kind} of a tensor without a name"
    return f"rank {_core.rank()}, {of}"


def tensor_from(kind: str, name: Any, value: Any) -> tf.Tensor:
    """The tensor that the argument of a collective stands for. TypeError for what is none and becomes none."""
    if isinstance(value, tf.Tensor):
        return value
    try:
        return tf.convert_to_tensor(value)
    except (TypeError, ValueError) as error:
        of = type(value)
        if isinstance(value, tf.RaggedTensor):
            rest = ": gather its flat_values and its row_lengths() apart"
        elif isinstance(value, tf.SparseTensor):
            rest = ": give tf.sparse.to_dense of it, or its values and indices as tf.IndexedSlices"
        else:
            rest = f" of which TensorFlow makes none ({str(error)[:200]})" if isinstance(value, (list, tuple)) else ""
        raise TypeError(
            f"{_where(kind, name)}: expected a tensor, not {of.__module__}.{of.__qualname__}{rest} [HVD201]"
        ) from error
