"""The backend of this Keras, and the adapter that reduces its tensors: TensorFlow, PyTorch or JAX, one per process.

What this package needs to know of Keras is here: which module it is (Keras 3, or tf_keras where
TF_USE_LEGACY_KERAS selects it), which backend it runs on, and what of hvdlite serves that. The adapter is imported
when it is known which: nothing here loads TensorFlow for a model on PyTorch, nor the other way round.

On JAX a step is compiled whole, and an exchange of gradients is a part of it. Within an epoch the values of variables
are then in the trainer. Callbacks get a model whose variables have them; others call `synced`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from importlib import import_module
from typing import Any

import numpy as np

from .. import config
from ..errors import HvdNotYetError
from ..numpy import allreduce
from ..ops import Max, Terms
from ..process_sets.process_set import global_process_set
from .initial_check import StartCheck
from .list_check import SAME_VARIABLES, Listed, compare
from .naming import everywhere
from .order_check import VariableOrder


def legacy() -> bool:
    """Whether tf.keras is Keras 2."""
    return config.environ().get("TF_USE_LEGACY_KERAS", "").lower() in ("1", "true")


def _imported() -> Any:
    if not legacy():
        return import_module("keras")
    try:
        return import_module("tf_keras")
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            "TF_USE_LEGACY_KERAS asks for Keras 2, which is the package tf_keras, and it is not installed: "
            "pip install tf_keras, or unset TF_USE_LEGACY_KERAS [HVD807]"
        ) from error


keras: Any = _imported()
_REDUCERS = {
    "tensorflow": "hvdlite.tensorflow.reducer", "torch": "hvdlite.keras.torch_reducer",
    "jax": "hvdlite.jax.keras_reducer",
}  # fmt: skip


def backend() -> str:
    """ "tensorflow", "torch" or "jax". HvdNotYetError on another one."""
    if legacy():
        return "tensorflow"
    name = str(keras.backend.backend())
    if name not in _REDUCERS:
        raise HvdNotYetError(
            f"Keras runs on {name}, for which hvdlite cannot reduce gradients: set KERAS_BACKEND=tensorflow, "
            "KERAS_BACKEND=torch or KERAS_BACKEND=jax before you import keras [HVD246]"
        )
    return name


def reducer(*terms: Any, **more: Any) -> Any:
    """What averages lists of gradients of the backend's kind."""
    return import_module(_REDUCERS[backend()]).Reducer(*terms, **more)


def refuse(optimizer: Any, passes: int, shard: bool) -> None:
    """HvdNotYetError for a distributed optimizer that the backend does not support."""
    if backend() == "jax":
        import_module(_REDUCERS["jax"]).refuse(optimizer, passes, shard)


def synced(model: Any) -> Any:
    """The model. On JAX its variables get the values that they have in the step of `fit` that was last."""
    if hasattr(model, "jax_state_sync"):
        model.jax_state_sync()
    return model


def branch(pred: Any, then: Callable[[], Any], otherwise: Callable[[], Any]) -> Any:
    """keras.ops.cond of what communicates: in the order of the program, in a graph of TensorFlow too."""
    if backend() != "tensorflow":
        return keras.ops.cond(pred, then, otherwise)
    return import_module("hvdlite.tensorflow.ops.order").branch(pred, then, otherwise)


def start_check(text: str) -> StartCheck:
    """What compares variables of the backend on all ranks, and the text for one that differs."""
    name = backend()
    found = import_module("hvdlite.tensorflow.initial_check" if name == "tensorflow" else _REDUCERS[name])
    return StartCheck(global_process_set, found._sum_of_bits, found._sums_of, text)


def key_of(variable: Any) -> Any:
    """By what a variable is recognized. On TensorFlow, Keras's and the tf.Variable inside it are one."""
    return import_module("hvdlite.tensorflow.reducer").key_of(variable) if backend() == "tensorflow" else id(variable)


def outside_graph() -> Any:
    """Where variables can be made at any time: a function of TensorFlow takes new ones in its first call only."""
    return import_module("tensorflow").init_scope() if backend() == "tensorflow" else contextlib.nullcontext()


def functions() -> list[Callable[[Any], Any]]:
    """What makes a function run as steps may: as it is, and in TensorFlow as a graph, whose bits may differ."""
    as_it_is: Callable[[Any], Any] = lambda function: function  # noqa: E731
    return [as_it_is] if backend() != "tensorflow" else [as_it_is, import_module("tensorflow").function]


def ops() -> Any:
    """hvdlite's module for tensors of the backend."""
    return import_module(f"hvdlite.{backend()}")


def compression() -> Any:
    """The compressors of the backend."""
    return import_module(_REDUCERS["jax"]).Compression if backend() == "jax" else ops().Compression


def collectives(
    kind: str, tensors: Sequence[Any], names: Sequence[str], process_set: Any, **how: Any
) -> tuple[list[Any], list[Any]]:
    """The "allgather" or "reducescatter" of each tensor, all started before the first is waited for. On TensorFlow also
    what is there once they are. how: of `Terms`."""
    if backend() == "tensorflow":
        outcome = import_module("hvdlite.tensorflow.ops.run").run(kind, tensors, names, Terms(process_set, **how))
        return outcome.results, outcome.rows
    more = {f"{key}_factor" if "scale" in key else key: value for key, value in how.items()}
    start = getattr(import_module("hvdlite.torch.ops").plain, f"{kind}_async")
    handles = [start(each.detach(), name=name, process_set=process_set, **more) for each, name in zip(tensors, names)]
    return [handle.wait() for handle in handles], []


def broadcast(variables: Sequence[Any], root_rank: int) -> None:
    """Assigns the root's values to variables of Keras on all ranks."""
    if backend() == "tensorflow":
        ops().broadcast_variables(variables, root_rank)
        return
    count = len(variables)
    shapes = [f"{variable.dtype}{list(variable.shape)}" for variable in variables]
    shown = [f"{everywhere(variable)} {shape}" for variable, shape in zip(variables, shapes)]
    compare(Listed("broadcast_variables", count, "variables", shapes, shown, SAME_VARIABLES))
    order = VariableOrder("broadcast_variables", variables, shapes)
    most = allreduce(np.array(order.of_names), op=Max, name=f"{order.what}.names")
    compare(order.listed if most[0] == -most[1] else order.listed._replace(compared=()))
    if backend() == "jax":
        values = [variable.value for variable in variables]
        for variable, value in zip(variables, ops().broadcast(values, root_rank, "broadcast_variables")):
            variable.assign(value)
        return
    with import_module("torch").no_grad():
        handles = [
            ops().broadcast_async(variable.value.detach(), root_rank, f"broadcast_variables.{i}of{count}")
            for i, variable in enumerate(variables)
        ]
        for variable, handle in zip(variables, handles):
            variable.assign(handle.wait())
