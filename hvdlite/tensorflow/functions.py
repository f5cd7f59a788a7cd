"""State from rank to rank: variables and Python objects.

Variables are sent all at once, by their places in the list, and assigned when they have come; in tf.function the
assignments are nodes. How many there are, and of what shapes, is compared first (../keras/list_check.py): places in
lists of other lengths are never matched. So is the order of their names, where ranks have the same names
(../keras/order_check.py): what a rank has loaded from a file may be called otherwise there.

Objects travel as in all of hvdlite. What needs a session of TensorFlow 1 works on the variables of a graph or says so.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import tensorflow as tf

from ..keras.arguments import check_process_set
from ..keras.list_check import SAME_VARIABLES, Listed
from ..keras.naming import everywhere
from ..keras.order_check import VariableOrder
from ..ops import Max, Terms, objects
from ..process_sets.process_set import ProcessSet, global_process_set
from .ops.order import once_more
from .ops.run import agree, run

_SAME_BITS = {tf.uint32: tf.int32, tf.uint64: tf.int64}


@tf.autograph.experimental.do_not_convert
def broadcast_variables(
    variables: Iterable[Any], root_rank: int, process_set: ProcessSet = global_process_set, inplace: bool = False
) -> Any:
    """Assign the root's values to variables on every rank.

    All ranks of the set must call it, usually once before training. The ranks first compare the number of variables,
    their shapes and dtypes, and the order of their names if they have the same names. So different models raise an
    error and nothing is assigned. In a ``tf.function`` the assignments become part of the graph.

    Args:
        variables (list): ``tf.Variable`` or Keras variables, in the same order on all ranks, such as
            ``model.variables``.
        root_rank (int): the global rank of the root, a member of the set.
        process_set (ProcessSet, optional): the ranks that take part. Default: all.
        inplace (bool): accepted for Horovod, without effect.

    Returns:
        None, or the operation that assigns in a graph of TensorFlow 1.

    Raises:
        HvdMismatchError: the ranks have different variables. All ranks raise it.
        HvdPeerLostError: a rank has left or died.
        TypeError: ``variables`` is not a list of variables.
        ValueError: ``root_rank`` is not a member of the set.

    Example:
        >>> weights = tf.Variable([1.0, 2.0]) if hvd.rank() == 0 else tf.Variable([0.0, 0.0])
        >>> hvd.broadcast_variables([weights], root_rank=0)
        >>> weights.numpy().tolist()
        [1.0, 2.0]
    """
    listed = _listed("broadcast_variables", variables, process_set)
    assigned, compared = _assigned(listed, root_rank, "broadcast_variables", process_set)
    if tf.executing_eagerly() or tf.inside_function():
        return None
    return tf.group(*[each for each in assigned if each is not None], *compared)


@tf.autograph.experimental.do_not_convert
def broadcast_(
    variables: Iterable[Any], root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set
) -> list[Any]:
    """Assign the root's values to variables on every rank, and return the variables.

    Args:
        variables (list): as in ``broadcast_variables``.
        root_rank (int): the global rank of the root, a member of the set.
        name (str, optional): the same on all ranks. Default: ``broadcast_``.
        process_set (ProcessSet, optional): the ranks that take part. Default: all.

    Returns:
        list: the variables, or in a graph of TensorFlow 1 their values once assigned.

    Raises:
        HvdMismatchError: the ranks have different variables. The other errors are those of ``broadcast_variables``.

    Example:
        >>> (weights,) = hvd.broadcast_([tf.Variable([float(hvd.rank())])], root_rank=1)
        >>> weights.numpy().tolist()
        [1.0]
    """
    listed = _listed("broadcast_", variables, process_set)
    assigned, _ = _assigned(listed, root_rank, name or "broadcast_", process_set)
    return listed if tf.executing_eagerly() or tf.inside_function() else assigned


def _listed(what: str, variables: Any, process_set: Any) -> list[Any]:
    """The variables as a list. TypeError for anything else, before a rank waits for this one."""
    check_process_set(process_set)
    kind = type(variables).__name__
    if _variable(variables) or tf.is_tensor(variables):  # most of them are iterable, too: by their rows
        raise TypeError(f"{what}: expected a list of variables, not one {kind}: put it into a list [HVD235]")
    if not hasattr(variables, "__iter__"):
        raise TypeError(
            f"{what}: expected a list of variables, not {kind}: pass model.variables (or model.weights) or "
            "optimizer.variables [HVD235]"
        )
    listed = list(variables)
    for i, each in enumerate(listed):
        if not _variable(each):
            raise TypeError(
                f"{what}: entry {i} of the list is not a variable but {type(each).__name__}: pass tf.Variables or "
                "Keras variables (model.variables). Send tensors with hvd.broadcast, and other objects with "
                "hvd.broadcast_object [HVD235]"
            )
    return listed


def _variable(value: Any) -> bool:
    """Whether this is a variable, TensorFlow's or Keras's. An optimizer of Keras has `assign`, too."""
    return hasattr(value, "assign") and hasattr(value, "dtype")


def _assigned(
    variables: list[Any], root_rank: int, prefix: str, process_set: ProcessSet
) -> tuple[list[Any], list[Any]]:
    """What the assignments return, and in a graph the comparison of lists, which no assignment follows if there is
    nothing to assign."""
    tensors = [tf.convert_to_tensor(variable) for variable in variables]
    values = [_movable(value) for value in tensors]
    prefix, count = once_more(prefix), len(variables)
    names = [f"{prefix}.{i}of{count}" for i in range(count)]  # a rank may have loaded its model from a file
    shapes = [_shape_of(variable, value) for variable, value in zip(variables, tensors)]
    shown = [f"{everywhere(variable)} {shape}" for variable, shape in zip(variables, shapes)]
    listed = Listed(prefix, count, "variables", shapes, shown, SAME_VARIABLES)
    compared = agree(listed, process_set)
    if not variables:
        return [], compared
    compared += _in_order(VariableOrder(prefix, variables, shapes), compared, process_set)
    with tf.control_dependencies(compared):
        results = run("broadcast", values, names, Terms(process_set, root_rank=root_rank)).results
    assigned = [
        variable.assign(result if result.dtype == value.dtype else tf.bitcast(result, value.dtype))
        for variable, value, result in zip(variables, tensors, results)
    ]
    return assigned, compared


def _in_order(order: VariableOrder, after: list[tf.Tensor], process_set: ProcessSet) -> list[tf.Tensor]:
    """HvdMismatchError if ranks have the same names in other orders; in a graph as `agree`."""
    if not process_set.included() or process_set.size() == 1:
        return []
    with tf.control_dependencies(after):
        mine = tf.constant(order.of_names, tf.int64)
        (most,) = run("allreduce", [mine], [f"{order.what}.names"], Terms(process_set, op=Max)).results
    return agree(order.listed, process_set, tf.equal(most[0], -most[1]))


def _shape_of(variable: Any, value: tf.Tensor) -> str:
    """As far as it is known without looking at the value, so that it is the same eagerly and in a graph."""
    shape = tf.TensorShape(getattr(variable, "shape", value.shape))
    dims = "?" if shape.rank is None else ", ".join("?" if each is None else str(each) for each in shape)
    return f"{value.dtype.base_dtype.name}[{dims}]"


def _movable(value: tf.Tensor) -> tf.Tensor:
    """The bits of what the core has no dtype for, such as the states of random seeds."""
    return tf.bitcast(value, _SAME_BITS[value.dtype]) if value.dtype in _SAME_BITS else value


def broadcast_object(
    obj: Any = None, root_rank: int = 0, session: Any = None, name: str | None = None,
    process_set: ProcessSet = global_process_set
) -> Any:  # fmt: skip
    """Return the object of one rank on every rank. The root gets its own object back.

    All ranks of the set must call it. The object travels as a pickle, made by cloudpickle.

    Args:
        obj: any object that can be pickled. It matters on the root only.
        root_rank (int): the global rank of the root, a member of the set. Default: 0.
        session: accepted for Horovod, without effect.
        name (str, optional): the same on all ranks.
        process_set (ProcessSet, optional): the ranks that take part. Default: all.

    Returns:
        The root's object.

    Raises:
        HvdMismatchError: the ranks name different roots.
        HvdPeerLostError: a rank has left or died, or the object was not sent by the root.
        ValueError: ``root_rank`` is not a member of the set.

    Example:
        >>> hvd.broadcast_object({"epoch": hvd.rank()}, root_rank=1)
        {'epoch': 1}
    """
    return objects.broadcast_object(obj, root_rank, name, process_set)


def broadcast_object_fn(
    root_rank: int = 0, session: Any = None, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Callable[[Any], Any]:
    """Return a function that does ``broadcast_object`` of its argument.

    Args:
        root_rank (int): the global rank of the root, a member of the set. Default: 0.
        session: accepted for Horovod, without effect.
        name (str, optional): the same on all ranks.
        process_set (ProcessSet, optional): the ranks that take part. Default: all.

    Returns:
        callable: a function of an object that returns the root's object. All ranks of the set must call it.

    Raises:
        HvdMismatchError: as ``broadcast_object``. The returned function raises it, and the other errors listed there.

    Example:
        >>> send = hvd.broadcast_object_fn(root_rank=0)
        >>> send(["from", hvd.rank()])
        ['from', 0]
    """

    def send(obj: Any = None) -> Any:
        return objects.broadcast_object(obj, root_rank, name, process_set)

    return send


def allgather_object(
    obj: Any, session: Any = None, name: str | None = None, process_set: ProcessSet = global_process_set
) -> list[Any]:
    """Return the objects of all ranks as a list, on every rank.

    All ranks of the set must call it. Objects travel as pickles, made by cloudpickle.

    Args:
        obj: any object that can be pickled.
        session: accepted for Horovod, without effect.
        name (str, optional): the same on all ranks.
        process_set (ProcessSet, optional): the ranks that take part. Default: all.

    Returns:
        list: the objects in rank order.

    Raises:
        HvdPeerLostError: a rank has left or died.

    Example:
        >>> hvd.allgather_object({"rank": hvd.rank()})
        [{'rank': 0}, {'rank': 1}]
    """
    return objects.allgather_object(obj, name, process_set)


def broadcast_global_variables(root_rank: int) -> Any:
    """Make the operation that assigns the root's values to all variables of a TensorFlow 1 graph.

    Args:
        root_rank (int): the global rank of the root.

    Returns:
        tf.Operation: all ranks must run it in a session.

    Raises:
        RuntimeError: in eager mode, where there is no such collection. Use ``broadcast_variables``.

    Example:
        >>> with tf.Graph().as_default(), tf.compat.v1.Session() as session:
        ...     weight = tf.compat.v1.get_variable("weight", initializer=float(hvd.rank()))
        ...     send = hvd.broadcast_global_variables(root_rank=1)
        ...     session.run(tf.compat.v1.global_variables_initializer())
        ...     session.run(send)
        ...     print(float(session.run(weight)))
        1.0
    """
    if tf.executing_eagerly():
        raise RuntimeError(
            "hvd.broadcast_global_variables() does not support eager execution. Please use "
            "`hvd.broadcast_variables(<model/optimizer variables>)` instead. [HVD247]"
        )
    return broadcast_variables(tf.compat.v1.global_variables(), root_rank)
