"""What is a copy of a distributed optimizer, or of a model with one? One that was told the same.

Copies would be plain, and train without a word on each rank alone: Keras copies (copy.copy, copy.deepcopy and pickle;
models, too) by way of its files, which hold the plain optimizer on purpose. So what Keras makes of the optimizer that
ours was made of is made distributed again. As with Keras, a copied optimizer has the arguments of the original and not
its state, unless it is a model's; a window of several passes begins anew.

Keras 2 does not copy its optimizers deeply, and its copied models come with the plain one: DistributedOptimizer then.

`from_config` likewise: type(optimizer).from_config makes a distributed one. optimizer.__class__ is the plain class, for
files; a config knows by itself that it is a distributed optimizer's, as long as it is the very object of `get_config`.

Variables that stay local are known in copies that copy.copy and copy.deepcopy make, not in what pickle makes, where
they are other objects; nor are groups given as lists of variables, which change no result.
"""

from __future__ import annotations

import copy
from importlib import import_module
from typing import Any

from . import backend
from .backend import keras


class Config(dict):  # type: ignore[type-arg]
    """The config of a distributed optimizer. Pickled, or written to a file, it is a plain dict."""

    def __init__(self, config: Any, terms: dict[str, Any]) -> None:
        super().__init__(config)
        self.terms = terms

    def __reduce__(self) -> Any:
        return dict, (dict(self),)


class Copied:
    """The methods of a distributed optimizer that make others like it."""

    _hvd_terms: dict[str, Any]  # of the class: what DistributedOptimizer was told

    @classmethod
    def from_config(cls, config: dict[str, Any], *args: Any, **more: Any) -> Any:
        """A distributed optimizer of a config, told what the one was whose method this is."""
        base: Any = cls.__bases__[1]
        return _of_config(base.from_config(dict(config), *args, **more), cls._hvd_terms)

    def _hvd_copied(self, plain: Any) -> Any:
        made, ours = distributed(plain, self._hvd_terms), self.__dict__["_hvd"]
        made._hvd._local = dict(ours._local)
        return made

    def __copy__(self) -> Any:
        return self._hvd_copied(copy.copy(plain_of(self)))

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        made = self._hvd_copied(copy.deepcopy(plain_of(self), memo))
        memo[id(self)] = made
        return made

    def __reduce__(self) -> Any:
        return distributed, (plain_of(self), portable(self._hvd_terms))

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.__reduce__()


def plain_of(optimizer: Any) -> Any:
    """The optimizer that a distributed one was made of: its state, its class."""
    base: Any = type(optimizer).__bases__[1]
    plain: Any = object.__new__(base)
    plain.__dict__.update({name: value for name, value in vars(optimizer).items() if not name.startswith("_hvd")})
    return plain


def distributed(plain: Any, terms: dict[str, Any]) -> Any:
    """DistributedOptimizer, told these terms."""
    return import_module("hvdlite.keras.optimizer").DistributedOptimizer(plain, **terms)


def _of_config(plain: Any, terms: dict[str, Any]) -> Any:
    made = distributed(plain, terms)
    made.__dict__["_hvd_of_config"] = True  # scripts give it to DistributedOptimizer again, which then takes new terms
    return made


def portable(terms: dict[str, Any]) -> dict[str, Any]:
    """The terms without what means nothing in another process."""
    return {**terms, "groups": terms["groups"] if isinstance(terms["groups"], int) else None}


def _with_terms(again: tuple[Any, ...], terms: dict[str, Any]) -> Any:
    made = again[0](*again[1])
    if not isinstance(made, keras.Model):
        return distributed(made, terms)
    made.optimizer = distributed(made.optimizer, terms)
    if backend.backend() == "tensorflow":
        made.jit_compile = False
    return made


def _copy(kind: Any) -> None:
    """Makes a class of Keras whose objects may have a distributed optimizer inside copy it as one."""
    local = kind.__reduce__
    if hasattr(local, "_hvd_local"):
        return

    def reduced(self: Any) -> Any:
        optimizer = getattr(self, "optimizer", self)
        inner = getattr(optimizer, "inner_optimizer", None)
        terms = getattr(type(optimizer), "_hvd_terms", None) or getattr(type(inner), "_hvd_terms", None)
        again = local(self)
        return again if terms is None else (_with_terms, (again, portable(terms)))

    reduced._hvd_local = local  # type: ignore[attr-defined]
    kind.__reduce__ = reduced


def teach() -> None:
    """Makes Keras 3 copy distributed optimizers, and models with one, as such."""
    if backend.legacy() or hasattr(keras.optimizers.Optimizer.from_config, "_hvd_local"):
        return
    local = keras.optimizers.Optimizer.from_config.__func__

    def from_config(cls: Any, config: dict[str, Any], *args: Any, **more: Any) -> Any:
        if isinstance(config, Config):
            return _of_config(local(cls, dict(config), *args, **more), config.terms)
        return local(cls, config, *args, **more)

    from_config._hvd_local = local  # type: ignore[attr-defined]
    keras.optimizers.Optimizer.from_config = classmethod(from_config)
    for kind in (keras.Model, getattr(keras.optimizers, "LossScaleOptimizer", None)):
        if kind is not None:
            _copy(kind)
