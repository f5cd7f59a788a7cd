"""check_consistency for TensorFlow: which variables of a model and an optimizer are compared, and their bits.

The comparison itself is every adapter's (../training/consistency.py). Variables are matched by their places in the
list, as they are when they are sent: what a rank has loaded from a file may be called otherwise there. It is made
eagerly: in a graph there are no values yet.
"""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from ..process_sets.process_set import ProcessSet, global_process_set
from ..training.consistency import Bits, Leaf, compare, step_of
from .adapter import array_of

REMEDY = "Start all ranks from one state with hvd.broadcast_variables; change it on all alike."


@tf.autograph.experimental.do_not_convert
def check_consistency(variables: Any, optimizer: Any = None, process_set: ProcessSet = global_process_set) -> None:
    """Check that all ranks have the same bits in all variables.

    All ranks of the set must call it, eagerly, between steps. It costs one allgather of a digest of 16 bytes per
    rank. The values 0.0 and -0.0 differ, and two NaNs are equal if their bits are. The states of random seeds are not
    compared.

    Args:
        variables: a model (its weights), a ``tf.Module``, a variable, or a dict or list of variables, tensors, arrays
            and None. Variables are matched by their place, or by key in a dict.
        optimizer (optional): an optimizer, whose variables are compared too.
        process_set (ProcessSet, optional): the ranks that are compared. Default: all.

    Raises:
        HvdMismatchError: on all ranks, with the first variable that differs and the ranks that differ from the first
            one.
        RuntimeError: inside a ``tf.function``.
        ValueError: on all ranks, if one of them passes something else.

    Example:
        >>> hvd.check_consistency([tf.Variable([1.0, 2.0])])
        >>> hvd.check_consistency([tf.Variable([float(hvd.rank())])])
        Traceback (most recent call last):
            ...
        hvdlite.errors.HvdMismatchError: ...
    """
    if not tf.executing_eagerly():
        raise RuntimeError(
            "check_consistency compares values: call it eagerly, between steps, not inside tf.function [HVD247]"
        )
    compare(lambda: _of_both(variables, optimizer), bits, process_set, REMEDY)


def _of_both(variables: Any, optimizer: Any) -> list[Leaf]:
    leaves = leaves_of(variables, "variable")
    if optimizer is not None:
        leaves += leaves_of(_of_optimizer(optimizer), "optimizer's variable")
    return leaves


def _of_optimizer(optimizer: Any) -> Any:
    found = getattr(optimizer, "variables", None)
    if found is None:
        raise ValueError(
            f"check_consistency: {type(optimizer).__name__} is not an optimizer: it has no variables [HVD237]"
        )
    return list(found() if callable(found) else found)


def leaves_of(variables: Any, what: str) -> list[Leaf]:
    """Variables by their places, named as this rank calls them; of a dict by their keys. ValueError: it has none."""
    if isinstance(variables, dict):
        return [Leaf(f"{what} {step_of(key)}", str(key), value) for key, value in variables.items()]
    if isinstance(variables, (list, tuple)):
        found = list(variables)
    elif hasattr(variables, "weights"):  # of a model: not the states of random seeds, which may differ between ranks
        found = list(variables.weights)
    elif isinstance(variables, tf.Module):
        found = list(variables.variables)
    elif hasattr(variables, "dtype") and hasattr(variables, "shape"):
        found = [variables]
    else:
        raise ValueError(
            f"check_consistency: expected a model or a list of variables, not {type(variables).__name__} [HVD237]"
        )
    return [Leaf(f"{what} {i}", _name(value, f"{what} {i}"), value) for i, value in enumerate(found)]


def _name(value: Any, otherwise: str) -> str:
    """The name of a variable as its framework shows it; an eager tensor has none."""
    if isinstance(value, tf.Variable) or hasattr(value, "path"):
        return str(getattr(value, "path", None) or value.name).removesuffix(":0")
    return otherwise


def bits(value: Any) -> Bits | None:
    """The bits of a variable or tensor; None of what is none."""
    if isinstance(value, tf.IndexedSlices):
        return _together("sliced", value.values, value.indices)
    if isinstance(value, tf.SparseTensor):
        return _together("sparse", value.values, value.indices, value.dense_shape)
    if not (hasattr(value, "dtype") and hasattr(value, "shape")):
        return None
    if not (tf.is_tensor(value) or hasattr(value, "path")):  # an array, another framework's tensor: read for all alike
        return None
    array = array_of(tf.convert_to_tensor(value))
    if array.dtype.hasobject:  # texts
        return Bits(array.shape, "string", [repr(array.tolist()).encode()])
    return Bits(array.shape, str(array.dtype), [array.tobytes()])


def _together(form: str, values: Any, *more: Any) -> Bits:
    """Of a tensor that is several: in this order, which the ranks must have in common."""
    parts = [bits(tf.convert_to_tensor(part)) for part in (values, *more)]
    found = [part for part in parts if part is not None]
    return Bits(found[0].shape, f"{found[0].dtype} {form}", [block for part in found for block in part.blocks])


__all__ = ["REMEDY", "bits", "check_consistency", "leaves_of"]
