"""Load a saved model so that its optimizer is distributed again and keeps its state.

Saving needs nothing: a distributed optimizer is written as the one that it was made of. `load_model` opens the file as
Keras does and puts the optimizer, state and all, into a distributed one. A function that makes the optimizer from its
arguments, as Horovod's users give, is called; Keras itself takes a class there. And what Keras 3 writes into
an HDF5 file of an optimizer's state, but does not read, is read here.

All ranks open the same file, or rank 0 does and the others begin alike by BroadcastGlobalVariablesCallback.
"""

from __future__ import annotations

import json
import os
import types
import zipfile
from collections.abc import Callable
from typing import Any

from .. import _core
from ..errors.user_warning import warn
from ..ops.arguments import NoneCompressor
from .accumulation_state import saved, terms_of
from .backend import backend, keras, legacy, ops
from .optimizer import Distributed, Legacy
from .optimizer_copies import put_around


def load_model(
    filepath: Any, custom_optimizers: Any = None, custom_objects: Any = None, compression: Any = NoneCompressor,
    legacy_opts: bool = False, **terms: Any
) -> Any:  # fmt: skip
    """Load a model with ``keras.models.load_model`` and make its optimizer distributed, with its saved state.

    It calls no collective. All ranks load the same file, or rank 0 does and ``BroadcastGlobalVariablesCallback`` sends
    its weights. A model saved without an optimizer stays without one.

    A file has only ``backward_passes_per_step`` and ``average_aggregated_gradients`` of the distributed optimizer, and
    only in the ``.keras`` format. With Keras 3 such a file also has the sums of an unfinished window of passes. Other
    files have neither: save them when a window has ended, and give the arguments again. A warning reports a missing
    number of passes.

    Args:
        filepath (str or path): the file of the model.
        custom_optimizers (list of classes, optional): optimizer classes that Keras does not know.
        custom_objects (dict, optional): as in Keras. Under the name of the optimizer's class it may also have a
            function of the optimizer's arguments that returns an optimizer.
        compression (Compressor): as in ``DistributedOptimizer``. No file has the residuals of ``int8`` and ``int4``:
            feedback begins at zero after a load. Default: none.
        legacy_opts (bool): accepted for Horovod, without effect.
        terms: other arguments of ``DistributedOptimizer``.

    Returns:
        keras.Model: the model, compiled if it was saved so.

    Raises:
        HvdNotInitializedError: ``hvd.init()`` has not been called.
        ValueError: the optimizer state in an HDF5 file does not fit the model, or Keras cannot open the file.

    Example:
        >>> import keras, os, tempfile
        >>> model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)])
        >>> model.compile(hvd.DistributedOptimizer(keras.optimizers.SGD(0.1)), "mse")
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     model.save(os.path.join(folder, "model.keras"))
        ...     model = hvd.load_model(os.path.join(folder, "model.keras"))
        >>> type(model.optimizer)
        <class 'hvdlite.keras.SGD'>
    """
    known = {optimizer.__name__: optimizer for optimizer in custom_optimizers or ()}
    if legacy() or backend() == "tensorflow":
        known["SyncBatchNormalization"] = ops().SyncBatchNormalization
    known.update(custom_objects or {})
    if any(isinstance(value, types.FunctionType) for value in known.values()):
        name = _optimizer_in(str(filepath))
        if isinstance(known.get(name), types.FunctionType):
            known[name] = _class_of(name, known[name])
    model = keras.models.load_model(filepath, custom_objects=known)
    if not legacy() and str(filepath).endswith((".h5", ".hdf5")) and getattr(model, "optimizer", None) is not None:
        _restore_optimizer(str(filepath), model)
    optimizer = getattr(model, "optimizer", None)
    inner = getattr(optimizer, "inner_optimizer", optimizer)
    if inner is not None and not isinstance(inner, (Distributed, Legacy)):
        window = saved(filepath)
        silent = _why_no_passes(filepath, inner)
        if silent and "backward_passes_per_step" not in terms:
            warn(
                f"rank {_core.rank()}: load_model: {silent}; hvdlite uses 1. Pass backward_passes_per_step to "
                "load_model, also if 1 is correct [HVD243]"
            )
        passed = terms if window is None or "backward_passes_per_step" in terms else {**terms_of(window[1]), **terms}
        model.optimizer = put_around(optimizer, {"compression": compression, **passed}, window)
        if not legacy() and backend() == "tensorflow":  # what Keras has chosen for the plain optimizer
            model.jit_compile = False
    return model


def _why_no_passes(file: Any, optimizer: Any) -> str:
    """Why the file does not hold the passes per step of the optimizer; empty: it does."""
    if legacy() and isinstance(optimizer, keras.optimizers.legacy.Optimizer):
        return (
            "no file says how many passes per step an optimizer of keras.optimizers.legacy was told (nor has a .keras "
            "file its state)"
        )
    opened = isinstance(file, (str, os.PathLike)) and os.path.isfile(os.path.join(file, "config.json"))
    if opened or zipfile.is_zipfile(file):
        return ""
    return f"only a .keras file records the passes per step of an optimizer, and {file} is not one"


def _optimizer_in(path: str) -> str:
    """The name of the optimizer's class in a file of a model; empty: there is none, or this is no such file."""
    if zipfile.is_zipfile(path):
        with zipfile.ZipFile(path) as archive:
            config = (json.loads(archive.read("config.json")).get("compile_config") or {}).get("optimizer")
    elif path.endswith((".h5", ".hdf5")):
        import h5py

        with h5py.File(path) as file:
            config = json.loads(file.attrs.get("training_config", "{}")).get("optimizer_config")
    else:
        return ""
    return str(config.get("class_name", "")) if isinstance(config, dict) else ""


def _restore_optimizer(path: str, model: Any) -> None:
    """Keras 3 forgets the state of an optimizer in an HDF5 file, except where the model has no layers: what is there is
    put in place."""
    import h5py

    with h5py.File(path) as file:
        group = file.get("optimizer_weights")
        if group is None:
            return
        parts = [part for part in ("weight_names", *(f"weight_names{i}" for i in range(1000))) if part in group.attrs]
        names = [name if isinstance(name, str) else name.decode() for part in parts for name in group.attrs[part]]
        values = [group[name][()] for name in names]
    before = model.optimizer
    if len(values) == len(before.variables):
        return
    optimizer = before.from_config(before.get_config())
    optimizer.build(model.trainable_variables)
    if [tuple(each.shape) for each in optimizer.variables] != [value.shape for value in values]:
        raise ValueError(f"the optimizer state in {path} does not match the model in this file [HVD239]")
    for variable, value in zip(optimizer.variables, values):
        variable.assign(value)
    model.optimizer = optimizer


def _class_of(name: str, make: Callable[..., Any]) -> type:
    """What Keras takes for a class: it makes an optimizer from a config by calling the function."""

    def from_config(config: dict[str, Any], custom_objects: Any = None) -> Any:
        return make(**config)

    return type(name, (), {"from_config": staticmethod(from_config)})
