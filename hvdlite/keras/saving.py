"""How is a saved model opened so that its optimizer is distributed again, with its state?

Saving needs nothing: a distributed optimizer is written as the one that it was made of. `load_model` opens the file as
Keras does and puts the optimizer, state and all, into a distributed one.

All ranks open the same file, or rank 0 does and the others begin alike by BroadcastGlobalVariablesCallback.
"""

from __future__ import annotations

from typing import Any

from ..ops.terms import NoneCompressor
from .backend import keras
from .optimizer import Distributed, DistributedOptimizer, Legacy


def load_model(
    filepath: Any, custom_optimizers: Any = None, custom_objects: Any = None, compression: Any = NoneCompressor,
    legacy_opts: bool = False, **terms: Any
) -> Any:  # fmt: skip
    """keras.models.load_model, with the model's optimizer made distributed; a training goes on where it was saved.

    custom_optimizers: classes of optimizers that Keras does not know. `terms`: as for DistributedOptimizer. A model
    that was saved without an optimizer comes without one.
    """
    known = {optimizer.__name__: optimizer for optimizer in custom_optimizers or ()}
    model = keras.models.load_model(filepath, custom_objects={**known, **(custom_objects or {})})
    optimizer = getattr(model, "optimizer", None)
    if optimizer is not None and not isinstance(optimizer, (Distributed, Legacy)):
        model.optimizer = DistributedOptimizer(optimizer, compression=compression, **terms)
    return model
