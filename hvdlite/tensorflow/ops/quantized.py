"""Tensors of TensorFlow in 8 or 4 bits, eagerly and in a graph: single calls, and lists of gradients.

A sum in 8 or 4 bits is a chain of collectives that Python drives (../../ops/quantized_sum.py), so in a graph it is a
call of Python, which has its turn among the nodes that communicate. It waits there, and holds a thread of TensorFlow's
meanwhile. What it raises becomes an InvalidArgumentError, if it is a ValueError like HvdMismatchError, or an
UnknownError, a lost rank among them; the text says what it was.

Rounding has no gradient: who asks for one gets an error. A graph of an elastic job may live to see the job on one host,
and on several again; so there the call itself finds out whether to round.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from ...errors import HvdNotYetError
from ...keras.quantized_lists import Entry, QuantizedLists
from ...numpy import aligned
from ...ops import Terms
from ...ops.arguments import Quantized
from ...ops.quantized import check_call, reduced
from ...process_sets.levels import why_plain
from ...process_sets.process_set import number_of
from ...rendezvous import elastic_member
from ..adapter import array_of, check_dtype, tensor_of
from ..errors import tensor_from, translated
from .order import NAMED, in_turn, order_here
from .run import eager, name_in_graph, refuse_xla

_Arrays = list[Any]  # of NumPy, bfloat16 included


def single(
    kind: str, tensors: Sequence[Any], name: str | None, terms: Terms, compression: Quantized
) -> list[tf.Tensor] | None:  # fmt: skip
    """The results of a call of the user's, the allreduce of a tensor or of a group. None: they travel as they are.

    Raises what `hvdlite.ops` raises, as errors of tf.errors, too; from a graph when it runs.
    """
    given = [tensor_from(kind, name, tensor) for tensor in tensors]
    with translated(kind, name):
        check_call(compression, [check_dtype(tensor.dtype) for tensor in given], name, terms)
        number = number_of(terms.process_set)
        in_graph = not tf.executing_eagerly()
        if why_plain(terms.process_set) is not None and not (in_graph and elastic_member.is_elastic()):
            return None
        called = name_in_graph(name, number) if in_graph else name

    def arrays_of(*arrays: Any) -> _Arrays:
        with translated(kind, name):
            found = reduced(eager.adapter, compression, arrays, called, terms)
            if found is not None:
                return found
            if kind == "grouped_allreduce":
                return list(eager._grouped_allreduce(list(arrays), called, terms, True).wait())
            return [eager._allreduce(arrays[0], called, terms, True).wait()]

    return _called(arrays_of, given, f"{kind} of {name or 'a tensor without a name'}", compression)[0]


def of_list(
    lists: QuantizedLists, prefix: str, tensors: Sequence[tf.Tensor], owners: Sequence[Any], names: Sequence[str],
    terms: Terms
) -> tuple[list[tf.Tensor], list[tf.Tensor]]:  # fmt: skip
    """Of gradients of a list, the sums or averages, and in a graph what is there once they are.

    names: under which each travels as it is, should the ranks be on one host by then.
    """
    known = [_inside(owner) for owner in owners]

    def arrays_of(*arrays: Any) -> _Arrays:
        with translated("allreduce", prefix):
            if why_plain(lists.process_set) is not None:
                handles = [eager._allreduce(array, name, terms) for array, name in zip(arrays, names)]
                return [handle.wait() for handle in handles]
            sources = [np.ascontiguousarray(array, np.float32).reshape(np.shape(array)) for array in arrays]
            targets = [aligned(source.shape, np.float32) for source in sources]
            entries = [
                Entry(owner, source.shape, source.ctypes.data, target.ctypes.data)
                for owner, source, target in zip(known, sources, targets)
            ]
            lists.total(prefix, entries, (sources, targets))
            return [_as(target, array.dtype) for target, array in zip(targets, arrays)]

    return _called(arrays_of, tensors, f"list of {prefix}", lists.compression)


def _inside(owner: Any) -> Any:
    """The tf.Variable, of Keras's, too. None for a tensor: the next one of its kind is another one."""
    inner = getattr(owner, "value", None)
    variable = inner if isinstance(inner, tf.Variable) else owner
    return variable if isinstance(variable, tf.Variable) else None


def _as(array: np.ndarray, dtype: Any) -> np.ndarray:
    if array.dtype == dtype:
        return array
    cast = aligned(array.shape, dtype)
    cast[...] = array
    return cast


def _called(
    arrays_of: Callable[..., _Arrays], tensors: Sequence[tf.Tensor], what: str, compression: Quantized
) -> tuple[list[tf.Tensor], list[tf.Tensor]]:  # fmt: skip
    """What the function makes of the tensors' arrays: as many, of their shapes and dtypes. In a graph also one of them
    that does not pass the node for all that tf.custom_gradient makes."""
    first: list[tf.Tensor] = []

    def call(inputs: Sequence[tf.Tensor]) -> list[tf.Tensor]:
        if tf.executing_eagerly():
            return [tensor_of(result) for result in arrays_of(*map(array_of, inputs))]
        refuse_xla()
        if order_here(what, None) == NAMED:
            raise HvdNotYetError(
                f"{what}: compression={compression!r} in a loop of a graph of TensorFlow 1, whose iterations overtake "
                "each other: use tf.function, or another compression [HVD208]"
            )
        dtypes = [tensor.dtype for tensor in inputs]

        def python(*arrays: Any) -> _Arrays:
            return arrays_of(*map(np.asarray, arrays))

        made = in_turn(lambda: list(tf.numpy_function(python, inputs, dtypes)))
        first.append(made[0])
        for result, tensor in zip(made, inputs):
            result.set_shape(tensor.shape)
        return made

    @tf.custom_gradient
    def differentiable(*inputs: tf.Tensor) -> Any:
        def backward(*_: Any) -> Any:
            raise NotImplementedError(
                f"{what}: compression={compression!r} has no gradient: leave it out, or use tf.stop_gradient [HVD208]"
            )

        return call(inputs), backward

    return list(differentiable(*tensors)), first


__all__ = ["of_list", "single"]
