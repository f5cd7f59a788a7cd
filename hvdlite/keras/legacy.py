"""Optimizers of Keras 2 (tf_keras, where TF_USE_LEGACY_KERAS=1 asks for it), distributed.

Keras 2 has a place for what we do: `aggregate_gradients`, which `apply_gradients` calls first, and which a loss scale
calls before it asks whether the gradients are finite. So averages are what it looks at, and since a number that is not
finite on one rank makes the averages of all ranks so, all skip a step or none does. Optimizers of
`keras.optimizers.legacy` have it with an underscore.

`_compute_gradients` is private to Keras, and Horovod averages there: libraries that call it take what it returns for
averages. Here, too (`_hvd_take`), and `aggregate_gradients` returns these as they are. What was made of them (clipped,
say) is averaged again: that changes no average, and is refused for what it would change. Keras's own calls get this
rank's. Gradients that `apply_gradients` shall not average, and that no caller has taken from here, are the
caller's own averages: ranks compare them in their first steps (initial_check.py).

With several passes per step `apply_gradients` adds up, unless `_hvd_take` has done so, and only the last pass goes on
to the inherited one, with all variables that have a sum by then. The others count in `iterations` nevertheless, as in
Horovod: schedules are about batches.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from importlib import import_module
from typing import Any

from ..errors import HvdArgumentError
from ..ops import Average
from .backend import keras
from .initial_check import NOT_AVERAGED
from .optimizer_copies import Copied

Pairs = Iterable[tuple[Any, Any]]
AGGREGATE = "experimental_aggregate_gradients"  # all optimizers of Keras 2 take it
SKIP = "skip_gradients_aggregation"  # those of keras.optimizers.legacy do not
_TWICE = (
    f"_compute_gradients has already reduced these gradients: apply modified gradients with {AGGREGATE}=False [HVD224]"
)


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
    _hvd_taken: tuple[Any, ...] = ()  # what _hvd_take has returned, until something is applied
    _hvd_is_taken: Any = None  # a variable, since a function of TensorFlow takes without calling Python
    _hvd_average_check: Any = None  # compares gradients that the caller says are averages
    _agg_helper = property(lambda self: self._hvd_passes)  # Horovod's name of it; None for one pass

    def register_local_var(self, variable: Any) -> None:
        """The gradient of this variable is not averaged."""
        self._hvd.register_local(variable)

    def aggregate_gradients(self, grads_and_vars: Pairs) -> list[tuple[Any, Any]]:
        """The pairs with averaged gradients."""
        pairs = list(grads_and_vars)
        before = self._hvd_close()
        if before is not None and _same(before, pairs):
            return pairs
        if before is not None and (self._hvd.op != Average or self._hvd._local):
            raise HvdArgumentError(_TWICE)
        return list(zip(self._allreduce_grads(*_apart(pairs)), _apart(pairs)[1]))

    _aggregate_gradients = aggregate_gradients

    def _allreduce_grads(self, grads: Iterable[Any], vars: Iterable[Any]) -> list[Any]:
        """Horovod's name of a reduction that nothing follows: the averages."""
        averages: list[Any] = self._hvd(grads, vars)
        return averages

    def _allreduce(self, grads: Iterable[Any], vars: Iterable[Any]) -> list[Any]:
        """Horovod's name of what _compute_gradients does to gradients."""
        return _apart(self._hvd_take(list(zip(grads, vars))))[0]

    def _compute_gradients(self, loss: Any, var_list: Any, grad_loss: Any = None, tape: Any = None) -> Any:
        """The pairs with averaged gradients; with several passes per step, with sums so far until the last pass."""
        inherited: Any = super()
        if hasattr(inherited, "_compute_gradients"):
            pairs = inherited._compute_gradients(loss, var_list, grad_loss, tape=tape)
        else:
            pairs = inherited.compute_gradients(loss, var_list, tape)
        return self._hvd_keras_takes(pairs) if _called_by_keras() else self._hvd_take(pairs)

    def compute_gradients(self, loss: Any, var_list: Any, tape: Any = None) -> Any:
        """The same; optimizers of keras.optimizers.legacy have none."""
        pairs = super().compute_gradients(loss, var_list, tape)  # type: ignore[misc]
        return self._hvd_keras_takes(pairs) if _called_by_keras() else self._hvd_take(pairs)

    def get_gradients(self, loss: Any, params: Any) -> Any:
        """The averaged gradients alone; only optimizers of keras.optimizers.legacy have it, and only in graphs."""
        gradients, params = super().get_gradients(loss, params), import_module("tensorflow").nest.flatten(params)  # type: ignore[misc]
        return gradients if _called_by_keras() else self._allreduce(gradients, params)

    def _hvd_keras_takes(self, pairs: Any) -> Any:
        self._hvd_close()
        return pairs

    def _hvd_take(self, pairs: list[tuple[Any, Any]]) -> list[tuple[Any, Any]]:
        """Averages for a caller that will pass them to apply_gradients."""
        gradients, owners = _apart(pairs)
        if self._hvd_passes is None:
            pairs = list(zip(self._hvd(gradients, owners), owners))
        else:
            pairs = self._hvd_passes.add([self._hvd.made_dense(each) for each in gradients], owners, self._hvd)
        self.__dict__["_hvd_taken"] = tuple(_apart(pairs)[0])
        tf = import_module("tensorflow")
        if tf.compat.v1.executing_eagerly_outside_functions():
            if self._hvd_is_taken is None:
                with tf.init_scope():
                    self.__dict__["_hvd_is_taken"] = tf.Variable(False, trainable=False, name="hvd_is_taken")
            self._hvd_is_taken.assign(True)
        return pairs

    def _hvd_close(self) -> tuple[Any, ...] | None:
        """What was taken and not applied yet, once; None: nothing. A graph is made for what is so when it is made:
        TensorFlow may make one twice, so what was taken outside is read from the variable, which changes when it runs.
        """
        before, self.__dict__["_hvd_taken"] = self._hvd_taken, ()
        if self._hvd_is_taken is None:
            return before or None
        tf = import_module("tensorflow")
        in_graph = not tf.executing_eagerly()
        with tf.init_scope():
            is_taken = bool(self._hvd_is_taken) or (in_graph and bool(before))
        self._hvd_is_taken.assign(False)
        return before if is_taken else None

    def apply_gradients(self, grads_and_vars: Pairs, name: Any = None, *flag: Any, **more: Any) -> Any:
        """Averages the gradients unless Keras's argument states that they are, then applies them."""
        inherited: Any = super()
        if flag:
            more[AGGREGATE if isinstance(self, keras.optimizers.legacy.Optimizer) else SKIP] = flag[0]
        pairs = list(grads_and_vars)
        averaged = more.get(SKIP, False) or not more.get(AGGREGATE, True)
        if self._hvd_passes is None:
            looked = self._hvd_look(pairs) if averaged and self._hvd_close() is None else []
            with import_module("tensorflow").control_dependencies(looked):
                return inherited.apply_gradients(pairs, name=name, **more)
        before = self._hvd_close()
        if before is None:
            looked = self._hvd_look(pairs) if averaged else []
            gradients, owners = _apart(pairs)
            if not averaged:
                self._hvd.refuse_sums(gradients)
            with import_module("tensorflow").control_dependencies(looked):
                sums = self._hvd_passes.add(
                    [self._hvd.made_dense(each) for each in gradients], owners,
                    lambda found, owners: found if averaged else self._hvd(found, owners),
                )  # fmt: skip
        elif averaged or _same(before, pairs):
            sums = pairs
        else:
            raise HvdArgumentError(_TWICE)

        def apply() -> Any:
            return inherited.apply_gradients(sums, name=name, **{AGGREGATE: False})

        def count() -> Any:
            return self.iterations.assign_add(1)  # type: ignore[attr-defined]

        return self._hvd_passes.at_end(sums, apply, count)

    def _hvd_look(self, pairs: list[tuple[Any, Any]]) -> list[Any]:
        """Compares what the caller says are averages. What is returned comes before they are applied."""
        if self._hvd.alone:
            return []
        if self._hvd_average_check is None:
            start = import_module("hvdlite.tensorflow.initial_check").start
            self.__dict__["_hvd_average_check"] = start(self._hvd.process_set, NOT_AVERAGED)
        pairs = [pair for pair in pairs if self._hvd._travels(*pair)]
        looked: list[Any] = self._hvd_average_check(f"{self._hvd.prefix}.given", _apart(pairs)[1], _apart(pairs)[0])
        return looked


def _apart(pairs: list[tuple[Any, Any]]) -> tuple[list[Any], list[Any]]:
    return [gradient for gradient, _ in pairs], [variable for _, variable in pairs]


def _same(before: tuple[Any, ...], pairs: list[tuple[Any, Any]]) -> bool:
    return len(before) == len(pairs) and all(mine is its for mine, (its, _) in zip(before, pairs))


def _called_by_keras() -> bool:
    """Whether the caller of _compute_gradients is Keras: minimize, or a loss scale, which aggregate later."""
    frame = sys._getframe(2)
    while frame.f_back is not None and str(frame.f_globals.get("__name__")).startswith("tensorflow.python.autograph"):
        frame = frame.f_back
    return str(frame.f_globals.get("__name__")).partition(".")[0] in ("tf_keras", "keras")
