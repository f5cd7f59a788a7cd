"""Optimizers of Keras 2 (tf_keras, where TF_USE_LEGACY_KERAS=1 asks for it), distributed.

Keras 2 has a place for what we do: `aggregate_gradients`, which `apply_gradients` calls first, and which a loss scale
calls before it asks whether the gradients are finite. So averages are what it looks at, and since a number that is not
finite on one rank makes the averages of all ranks so, all skip a step or none does. Optimizers of
`keras.optimizers.legacy` have it with an underscore.

`_compute_gradients` is private to Keras, and Horovod averages there: libraries that call it take what it returns for
averages. Here, too, and `aggregate_gradients` returns these as they are. What was made of them (clipped, say) is
averaged again: that changes no average, and is refused for what it would change. Keras's own calls get this rank's.

With several passes per step `apply_gradients` adds up, and only the last pass goes on to the inherited one, with all
variables that have a sum by then. The others count in `iterations` nevertheless, as in Horovod: schedules are about
batches.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from typing import Any

from ..errors import HvdArgumentError
from ..ops import Average
from .backend import keras
from .copies import Copied

Pairs = Iterable[tuple[Any, Any]]
AGGREGATE = "experimental_aggregate_gradients"  # all optimizers of Keras 2 take it


def of_loss_scale(optimizer: Any) -> Any:
    """The optimizer inside a loss scale; None: this is no loss scale."""
    return getattr(optimizer, "inner_optimizer", None) if isinstance(optimizer, kinds()) else None


def put_inside(loss_scale: Any, optimizer: Any) -> Any:
    """The loss scale, around another optimizer."""
    object.__setattr__(loss_scale, "_optimizer", optimizer)
    if hasattr(loss_scale, "_trackable"):
        object.__setattr__(loss_scale, "_trackable", optimizer)
    return loss_scale


def kinds() -> tuple[type, ...]:
    """The classes of Keras 2's optimizers."""
    return keras.optimizers.Optimizer, keras.optimizers.legacy.Optimizer


class Legacy(Copied):
    """The methods that a distributed optimizer of Keras 2 has before those of its own class."""

    _hvd: Any
    _hvd_passes: Any
    _hvd_averaged: tuple[Any, ...] = ()  # what _compute_gradients has returned, until something is applied
    _agg_helper = property(lambda self: self._hvd_passes)  # Horovod's name of it; None for one pass

    def register_local_var(self, variable: Any) -> None:
        """The gradient of this variable is not averaged."""
        self._hvd.register_local(variable)

    def aggregate_gradients(self, grads_and_vars: Pairs) -> list[tuple[Any, Any]]:
        """The pairs with averaged gradients."""
        pairs = list(grads_and_vars)
        before, self.__dict__["_hvd_averaged"] = self._hvd_averaged, ()
        if before and len(before) == len(pairs) and all(mine is its for mine, (its, _) in zip(before, pairs)):
            return pairs
        if before and (self._hvd.op != Average or self._hvd._local):
            raise HvdArgumentError(
                "_compute_gradients has already reduced these gradients: apply modified gradients with "
                f"{AGGREGATE}=False [HVD224]"
            )
        owners = [variable for _, variable in pairs]
        return list(zip(self._hvd([gradient for gradient, _ in pairs], owners), owners))

    _aggregate_gradients = aggregate_gradients

    def _compute_gradients(self, loss: Any, var_list: Any, grad_loss: Any = None, tape: Any = None) -> Any:
        """The pairs with averaged gradients; with several passes per step, with this rank's."""
        inherited: Any = super()
        if hasattr(inherited, "_compute_gradients"):
            pairs = inherited._compute_gradients(loss, var_list, grad_loss, tape=tape)
        else:
            pairs = inherited.compute_gradients(loss, var_list, tape)
        if self._hvd_passes is None and not _asked_by_keras():
            owners = [variable for _, variable in pairs]
            averages = self._hvd([gradient for gradient, _ in pairs], owners)
            self.__dict__["_hvd_averaged"] = tuple(averages)
            pairs = list(zip(averages, owners))
        return pairs

    def apply_gradients(self, grads_and_vars: Pairs, name: Any = None, **more: Any) -> Any:
        """Averages the gradients unless told that they are, in Keras's words, then applies them."""
        inherited: Any = super()
        if self._hvd_passes is None:
            try:
                return inherited.apply_gradients(grads_and_vars, name=name, **more)
            finally:
                self.__dict__["_hvd_averaged"] = ()
        pairs = list(grads_and_vars)
        averaged = more.get("skip_gradients_aggregation", False) or not more.get(AGGREGATE, True)
        sums = self._hvd_passes.add(
            [self._hvd.made_dense(gradient) for gradient, _ in pairs],
            [variable for _, variable in pairs],
            lambda found, owners: found if averaged else self._hvd(found, owners),
        )

        def apply() -> Any:
            return inherited.apply_gradients(sums, name=name, **{AGGREGATE: False})

        def count() -> Any:
            return self.iterations.assign_add(1)  # type: ignore[attr-defined]

        return self._hvd_passes.at_end(sums, apply, count)


def _asked_by_keras() -> bool:
    """Whether the caller of _compute_gradients is Keras: minimize, or a loss scale, which aggregate later."""
    frame = sys._getframe(2)
    while frame.f_back is not None and str(frame.f_globals.get("__name__")).startswith("tensorflow.python.autograph"):
        frame = frame.f_back
    return str(frame.f_globals.get("__name__")).partition(".")[0] in ("tf_keras", "keras")
