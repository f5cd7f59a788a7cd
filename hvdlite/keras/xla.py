"""Keep a model with a distributed optimizer out of XLA, which has no collective of hvdlite.

Where Keras would choose XLA by itself (jit_compile="auto" does on a GPU), such a model runs without; jit_compile=True
is an error that says so. Whether a model has such an optimizer is not always known when it is compiled: a model of
several optimizers puts its own in place after Keras has chosen. So what was chosen is looked at again before the first
step, when all optimizers are attributes of the model, or in lists or dicts that are.
"""

from __future__ import annotations

from typing import Any

from . import backend
from .backend import keras


def reduces(value: Any) -> bool:
    """Whether this is a distributed optimizer, perhaps inside a loss scale."""
    if not isinstance(value, keras.optimizers.Optimizer):
        return False
    return any(hasattr(type(each), "_hvd_terms") for each in (value, getattr(value, "inner_optimizer", None)))


def _any_reduces(model: Any) -> bool:
    """Whether a distributed optimizer is an attribute of the model, or in a list or dict that is."""
    for value in list(vars(model).values()):
        inside = value.values() if isinstance(value, dict) else value if isinstance(value, (list, tuple)) else [value]
        if any(map(reduces, list(inside))):
            return True
    return False


def stay_out_of_xla() -> None:
    """Makes jit_compile="auto" of a model with a distributed optimizer mean False on TensorFlow."""
    chosen = getattr(keras.Model, "_resolve_auto_jit_compile", None)
    made: Any = getattr(keras.Model, "make_train_function", None)
    if chosen is None or made is None or hasattr(chosen, "_hvd_local"):
        return

    def resolve(self: Any) -> Any:
        if backend.backend() != "tensorflow":
            return chosen(self)
        choice = not reduces(getattr(self, "optimizer", None)) and chosen(self)
        self.__dict__["_hvd_chosen"] = choice
        return choice

    def make_train_function(self: Any, *args: Any, **more: Any) -> Any:
        if self.__dict__.get("_hvd_chosen", False) and _any_reduces(self):
            self.jit_compile = False
        return made(self, *args, **more)

    resolve._hvd_local = chosen  # type: ignore[attr-defined]
    keras.Model._resolve_auto_jit_compile = resolve
    keras.Model.make_train_function = make_train_function
