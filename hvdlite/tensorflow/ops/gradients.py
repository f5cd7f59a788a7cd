"""Gradients of the collectives: the rules of hvdlite.torch for TensorFlow.

A rule gets what is known of the call (`Past`) and the gradients of its results, and returns those of its inputs. The
collectives that it makes are differentiable themselves. Allreduce and alltoall have their exact gradients; those of
allgather and broadcast average where the exact ones sum, and that of reducescatter is the exact one times the number of
ranks, as in Horovod. Min, Max, Product and Adasum have none.

`differentiable` ties results to inputs by tf.custom_gradient, which works in both modes. Integers have no gradient, and
calls on them are left alone.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import tensorflow as tf

from ... import _core
from ...errors import HvdTimeoutError
from ...ops import Average, Sum, Terms
from ..errors import tensor_from
from .run import Outcome, run
from .timeouts import Late


class Past(NamedTuple):
    """A call that is over, or traced."""

    kind: str
    names: list[str | None]
    terms: Terms
    grouped: bool
    rows: list[Any]
    inputs: list[tf.Tensor]

    def again(self, kind: str, tensors: Sequence[Any], **more: Any) -> list[Any]:
        """A collective of gradients, in the same process set."""
        names = [None if name is None else f"{name}.backward" for name in self.names]
        terms = Terms(self.terms.process_set, **more)
        return differentiable(kind, tensors, names, terms, self.grouped and kind != "alltoall").results


def differentiable(
    kind: str, tensors: Sequence[Any], names: Sequence[str | None], terms: Terms, grouped: bool = False
) -> Outcome:
    """`run`, whose results have a gradient."""
    converted = [tensor_from(kind, names[0], tensor) for tensor in tensors]
    if not any(tensor.dtype.is_floating for tensor in converted):
        return run(kind, converted, names, terms, grouped)

    def tied(arrive: Callable[[Sequence[tf.Tensor]], Outcome]) -> Outcome:
        rows: list[Any] = []

        @tf.custom_gradient
        def call(*inputs: tf.Tensor) -> Any:
            outcome = arrive(inputs)
            rows.extend(outcome.rows)
            past = Past(kind, list(names), terms, grouped, outcome.rows, list(inputs))

            def backward(*gradients: Any) -> list[Any]:
                return _RULES[kind](past, [tf.convert_to_tensor(gradient) for gradient in gradients])

            return outcome.results, backward

        return Outcome(list(call(*converted)), rows)

    try:
        return tied(lambda inputs: run(kind, inputs, names, terms, grouped))
    except HvdTimeoutError as error:
        if isinstance(error.handle, Late):
            error.handle.then(lambda outcome: tied(lambda _: outcome))
        raise


def _allreduce(past: Past, gradients: list[tf.Tensor]) -> list[tf.Tensor]:
    terms = past.terms
    if terms.op not in (Average, Sum):
        raise NotImplementedError(
            f"allreduce with op {_core.op_name(terms.op)} has no gradient: use hvd.Average or hvd.Sum, or "
            "tf.stop_gradient [HVD207]"
        )
    return past.again("allreduce", gradients, op=terms.op, prescale=terms.prescale, postscale=terms.postscale)


def _allgather(past: Past, gradients: list[tf.Tensor]) -> list[tf.Tensor]:
    totals = past.again("allreduce", gradients, op=Average)
    position, own = past.terms.process_set.rank(), []
    for total, rows in zip(totals, past.rows):
        start = tf.reduce_sum(tf.cast(rows[:position], tf.int64)) if position else tf.constant(0, tf.int64)
        own.append(total[start : start + tf.cast(rows[position], tf.int64)])
    return own


def _broadcast(past: Past, gradients: list[tf.Tensor]) -> list[tf.Tensor]:
    totals = past.again("allreduce", gradients, op=Average)
    mine = tf.constant(_core.rank() == past.terms.root_rank)  # the same operations everywhere: see rooted.py
    return [tf.where(mine, total, tf.zeros_like(total)) for total in totals]


def _reducescatter(past: Past, gradients: list[tf.Tensor]) -> list[tf.Tensor]:
    terms = past.terms
    if terms.op not in (Average, Sum):
        raise NotImplementedError(
            f"reducescatter with op {_core.op_name(terms.op)} has no gradient: use Average or Sum [HVD207]"
        )
    factor = (terms.process_set.size() if terms.op == Sum else 1) * terms.prescale * terms.postscale
    if factor != 1:
        gradients = [gradient * tf.cast(factor, gradient.dtype) for gradient in gradients]
    return past.again("allgather", gradients)


def _alltoall(past: Past, gradients: list[tf.Tensor]) -> list[tf.Tensor]:
    """The way back. Rows that were sent to no rank have a gradient of zero."""
    backs = []
    for gradient, rows, sent in zip(gradients, past.rows, past.inputs):
        (back,) = past.again("alltoall", [gradient], splits=tf.cast(rows, tf.int64))
        missing = tf.shape(sent)[0] - tf.shape(back)[0]
        backs.append(tf.concat([back, tf.zeros(tf.concat([[missing], tf.shape(sent)[1:]], 0), back.dtype)], 0))
    return backs


_RULES: dict[str, Callable[[Past, list[tf.Tensor]], list[tf.Tensor]]] = {
    "allreduce": _allreduce,
    "allgather": _allgather,
    "broadcast": _broadcast,
    "reducescatter": _reducescatter,
    "alltoall": _alltoall,
}
