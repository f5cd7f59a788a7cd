"""check_consistency for Keras, on each backend: which variables of a model and its optimizer should be the same.

All weights of the model and all variables of the optimizer that it was compiled with, but for what is meant to differ:
the states of random seeds (ranks drop out different units), and variables that `register_local_var` or
`local_variables` keep each rank's own, with the optimizer's variables for them. Variables are matched by their places:
Keras numbers layers in the order in which a process makes them, so names may differ where nothing else does.
"""

from __future__ import annotations

from collections.abc import Iterable
from importlib import import_module
from typing import Any

from ..process_sets.process_set import ProcessSet, global_process_set
from ..training.consistency import Bits, Leaf, compare
from . import backend

REMEDY = (
    "Start all ranks from one state with hvd.callbacks.BroadcastGlobalVariablesCallback; change it on all alike "
    "(learning rates, too); a variable that is to be each rank's own is given to register_local_var."
)


def check_consistency(
    model: Any, optimizer: Any = None, process_set: ProcessSet = global_process_set, local_variables: Any = None
) -> None:
    """Check that all ranks have the same bits in all variables of a model and its optimizer.

    All ranks of the set must call it. It costs one allgather of a digest of 16 bytes per rank. The
    states of random seeds are not compared, nor are variables that the optimizer keeps local.
    ``CheckConsistencyCallback`` calls it during ``fit``.

    Args:
        model: a model (with the optimizer that it was compiled with), a layer, or a list of variables.
        optimizer (optional): another optimizer.
        process_set (ProcessSet, optional): the ranks that are compared. Default: all.
        local_variables (list, optional): variables that may differ, together with the optimizer's variables for them.

    Raises:
        HvdMismatchError: on all ranks, with the first variable that differs and the ranks that differ from the first
            one.
        ValueError: on all ranks, if one of them passes something without variables.

    Example:
        >>> import keras
        >>> model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1, kernel_initializer="ones")])
        >>> hvd.check_consistency(model)
    """
    compare(lambda: _of_both(model, optimizer, local_variables), _bits, process_set, REMEDY)


def _of_both(model: Any, optimizer: Any, local_variables: Any) -> list[Leaf]:
    optimizer = optimizer if optimizer is not None else getattr(model, "optimizer", None)
    local = [*(local_variables or ()), *_local(optimizer)]
    backend.synced(model)
    leaves = _leaves(_variables(model, "weights"), "weight", local)
    if optimizer is not None:
        leaves += _leaves(_variables(optimizer, "variables"), "optimizer's variable", local)
    return leaves


def state_of(optimizer: Any) -> list[Any]:
    """The variables of an optimizer that should be the same on all ranks; Keras 2 keeps the learning rate apart."""
    if optimizer is None:
        return []
    leaves = _leaves(_variables(optimizer, "variables"), "optimizer's variable", list(_local(optimizer)))
    rate = getattr(optimizer, "learning_rate", None) if backend.legacy() else None
    return [*(leaf.value for leaf in leaves if leaf.value is not None), *([rate] if hasattr(rate, "assign") else [])]


def _variables(owner: Any, attribute: str) -> list[Any]:
    found = owner if isinstance(owner, (list, tuple)) else getattr(owner, attribute, None)
    if found is None:
        raise ValueError(
            f"check_consistency: expected a model or a list of variables, not {type(owner).__name__} [HVD237]"
        )
    return list(found() if callable(found) else found)


def _local(optimizer: Any) -> Iterable[Any]:
    """The variables that a distributed optimizer, which may be inside a loss scale, keeps local."""
    for each in (optimizer, getattr(optimizer, "inner_optimizer", None)):
        yield from getattr(getattr(each, "_hvd", None), "_local", {}).values()


def _path(variable: Any) -> str:
    return str(getattr(variable, "path", None) or getattr(variable, "name", "")).removesuffix(":0")


def _leaves(variables: list[Any], what: str, local: list[Any]) -> list[Leaf]:
    """What is compared, matched by its place among all. Keras calls an optimizer's variable after the one it is for."""
    keys = {backend.key_of(each) for each in local if each is not None}
    marks = [mark for each in local for mark in (_path(each), _path(each).replace("/", "_")) if mark]
    leaves = []
    for i, variable in enumerate(variables):
        if variable is not None and backend.key_of(variable) in keys:
            continue
        path = _path(variable)
        if what != "weight" and any(mark in path for mark in marks):
            continue
        leaves.append(Leaf(f"{what} {i}", path or f"{what} {i}", variable))
    return leaves


def _bits(variable: Any) -> Bits | None:
    name = backend.backend()
    of_backend: Any = import_module(f"hvdlite.{name}." + ("keras_reducer" if name == "jax" else "consistency"))
    return of_backend.bits(getattr(variable, "value", variable) if name == "torch" else variable)
