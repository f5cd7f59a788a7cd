"""Copies of a distributed optimizer, or of a model that has one, with the same arguments.

Copies would be plain, and train without a word on each rank alone: Keras copies (copy.copy, copy.deepcopy and pickle;
models, too) by way of its files, which hold the plain optimizer on purpose. So what Keras makes of the optimizer that
ours was made of is made distributed again. As with Keras, a copied optimizer has the arguments of the original and not
its state, unless it is a model's: then even a window of several passes goes on where it was (Keras 3 only).

`from_config` likewise: type(optimizer).from_config makes a distributed one. optimizer.__class__ is the plain class, for
files; a config knows by itself that it is a distributed optimizer's, or that of a loss scale around one, as long as it
is the very object of `get_config`.

Variables that stay local are known in copies that copy.copy and copy.deepcopy make, not in what pickle makes, where
they are other objects; nor are groups given as lists of variables, which change no result.
"""

from __future__ import annotations

import copy
from importlib import import_module
from typing import Any

from . import backend
from .accumulation_state import ATTRIBUTE, saved
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

    _hvd_terms: dict[str, Any]  # of the class: the arguments of DistributedOptimizer

    def get_config(self) -> dict[str, Any]:
        """The arguments of the optimizer's own class. What from_config makes of this very dict is distributed."""
        inherited: Any = super()
        return Config(inherited.get_config(), self._hvd_terms)

    @classmethod
    def from_config(cls, config: dict[str, Any], *args: Any, **more: Any) -> Any:
        """A distributed optimizer of a config, with the terms of the one that this is a method of."""
        base: Any = cls.__bases__[-1]
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
    base: Any = type(optimizer).__bases__[-1]
    plain: Any = object.__new__(base)
    plain.__dict__.update({name: value for name, value in vars(optimizer).items() if not name.startswith("_hvd")})
    return plain


def distributed(plain: Any, terms: dict[str, Any]) -> Any:
    """DistributedOptimizer with these terms."""
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
    _reopened(made, terms, again[1][0])
    return made


def _reopened(model: Any, terms: dict[str, Any], file: Any = None) -> None:
    """Makes the optimizer of a model that Keras has made of a file distributed, and goes on in its window."""
    model.optimizer = put_around(model.optimizer, terms, None if backend.legacy() else saved(file))
    if not backend.legacy() and backend.backend() == "tensorflow":  # what Keras has chosen for the plain optimizer
        model.jit_compile = False


def put_around(optimizer: Any, terms: dict[str, Any], window: tuple[str, dict[str, Any]] | None) -> Any:
    """A distributed optimizer around a plain one that comes from a file, or inside its loss scale if it was there when
    `window` was saved, with which it goes on."""
    owner, kept = window or ("", {})
    inside = owner.endswith("inner_optimizer") and hasattr(optimizer, "inner_optimizer") and not backend.legacy()
    made = distributed(optimizer.inner_optimizer if inside else optimizer, terms)
    going_on = getattr(made, ATTRIBUTE, None) or getattr(getattr(made, "inner_optimizer", None), ATTRIBUTE, None)
    if going_on is not None and kept:
        going_on.take(kept)
    if not inside:
        return made
    optimizer.inner_optimizer = made
    return optimizer


def _terms_of(optimizer: Any) -> dict[str, Any] | None:
    """The arguments of DistributedOptimizer, of one that may be inside a loss scale."""
    inner = getattr(optimizer, "inner_optimizer", None)
    terms = getattr(type(optimizer), "_hvd_terms", None) or getattr(type(inner), "_hvd_terms", None)
    return None if terms is None else portable(terms)


def _copy(kind: Any) -> None:
    """Makes a class of Keras whose objects may have a distributed optimizer inside copy it as one."""
    local = kind.__reduce__

    def reduced(self: Any) -> Any:
        again, terms = local(self), _terms_of(getattr(self, "optimizer", self))
        return again if terms is None else (_with_terms, (again, terms))

    kind.__reduce__ = reduced


def _copy_deeply(kind: Any) -> None:
    """The same for Keras 2's models, which do not ask `__reduce__`."""
    local = kind.__deepcopy__

    def deepcopied(self: Any, memo: dict[int, Any]) -> Any:
        made, terms = local(self, memo), _terms_of(getattr(self, "optimizer", None))
        if terms is not None and not hasattr(type(made.optimizer), "_hvd_terms"):
            _reopened(made, terms)
        return made

    kind.__deepcopy__ = deepcopied


def _configure(kind: Any) -> None:
    """Makes from_config of a class of optimizers, and get_config of a loss scale, know what is distributed."""
    made_of, config_of = kind.from_config.__func__, kind.get_config

    def from_config(cls: Any, config: dict[str, Any], *args: Any, **more: Any) -> Any:
        if isinstance(config, Config):
            return _of_config(made_of(cls, dict(config), *args, **more), config.terms)
        return made_of(cls, config, *args, **more)

    def get_config(self: Any) -> dict[str, Any]:
        config, terms = config_of(self), _terms_of(self)
        return config if terms is None or isinstance(self, Copied) else Config(config, terms)

    kind.from_config = classmethod(from_config)
    if hasattr(kind, "inner_optimizer") or kind.__name__.startswith("LossScale"):
        kind.get_config = get_config


_taught: list[Any] = []


def teach() -> None:
    """Makes Keras copy distributed optimizers, and models with one, as such."""
    if _taught:
        return
    _taught.append(keras)
    if backend.legacy():
        scales = keras.mixed_precision.LossScaleOptimizer.__subclasses__()
        for kind in (keras.optimizers.Optimizer, keras.optimizers.legacy.Optimizer, keras.optimizers.legacy.Adagrad):
            _configure(kind)
        _copy_deeply(keras.Model)
    else:
        scales = [getattr(keras.optimizers, "LossScaleOptimizer", None)]
        _configure(keras.optimizers.Optimizer)
        if scales[0] is not None:
            _copy(scales[0])
    for kind in scales:
        if kind is not None:
            _configure(kind)
    _copy(keras.Model)
