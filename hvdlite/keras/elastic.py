"""Elastic training with Keras: the state of a model and its optimizer, and callbacks that keep it up to date.

    @hvd.elastic.run
    def train(state):
        state.model.fit(..., epochs=epochs - state.epoch, callbacks=[
            hvd.elastic.UpdateEpochStateCallback(state), hvd.elastic.CommitStateCallback(state)])

    train(hvd.elastic.KerasState(model, epoch=0))

The optimizer's variables are made when the state is, so that all ranks have the same ones to send. States of random
seeds are saved and restored, but not sent: ranks drop out different units.

Ranks come and go in jobs that hvdlite-run --min-np has started (see hvdlite.elastic).
"""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import Any

import numpy as np

from .. import _core
from ..elastic import ObjectState, _warn_of_sums
from ..ops.objects import broadcast_object
from .accumulation_state import ATTRIBUTE
from .backend import backend, broadcast, keras, synced
from .sharded import is_sharded

_Callback: Any = keras.callbacks.Callback


def run(func: Callable[..., Any]) -> Callable[..., Any]:
    """Decorate a training function so that it survives lost ranks and uses new ones. See ``hvdlite.elastic.run``.

    Args:
        func (callable): the training function, ``func(state, *args, **kwargs)``. All ranks must call it.

    Returns:
        callable: a function with the arguments and the result of ``func``.

    Raises:
        HvdMismatchError: when called, the states of the ranks have different attributes or parts.
        HvdNotYetError: when called, a rank was lost in a job that is not elastic. When decorating, Keras runs on a
            backend other than TensorFlow, PyTorch and JAX. The other errors are those of ``hvdlite.elastic.run``.

    Example:
        >>> import keras
        >>> @hvd.elastic.run
        ... def train(state):
        ...     while state.epoch < 2:
        ...         state.epoch += 1
        ...         state.commit()
        ...     return state.epoch
        >>> model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)])
        >>> train(hvd.elastic.KerasState(model, epoch=0))
        2
    """
    decorated: Callable[..., Any] = import_module(f"hvdlite.{backend()}.elastic").run(func)
    return decorated


def _built(optimizer: Any, owners: list[Any]) -> None:
    """Makes the optimizer's variables if there are none yet; Keras 2 has an older way as well."""
    if hasattr(optimizer, "_create_all_weights"):
        optimizer._create_all_weights(owners)
    elif hasattr(optimizer, "build") and not getattr(optimizer, "built", getattr(optimizer, "_built", False)):
        optimizer.build(owners)


class KerasState(ObjectState):
    """State of a Keras model, its optimizer and any other objects, which are kept as attributes.

    It creates the optimizer's variables, so that all ranks have the same ones to send. The states of random seeds are
    saved and restored, but not sent. It also keeps the place in an unfinished window of ``backward_passes_per_step``.

    Args:
        model: the model, built.
        optimizer (optional): its optimizer. Default: the one that the model was compiled with.
        kwargs: more objects, by the name of the attribute.

    Raises:
        ValueError: the model is not built.

    Example:
        >>> import keras
        >>> model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1, kernel_initializer="zeros")])
        >>> state = hvd.elastic.KerasState(model, epoch=0)
        >>> state.epoch = 3
        >>> model.set_weights([np.ones((1, 1)), np.ones(1)])
        >>> state.restore()
        >>> state.epoch, model.get_weights()[0].tolist()
        (0, [[0.0]])
    """

    def __init__(self, model: Any, optimizer: Any = None, **kwargs: Any) -> None:
        if not getattr(model, "built", True):
            raise ValueError("Model must be built first. Run `model.build(input_shape)`. [HVD239]")
        self.model = model
        self.optimizer = optimizer if optimizer is not None else getattr(model, "optimizer", None)
        if is_sharded(self.optimizer):
            raise ValueError(
                "KerasState cannot hold a sharded optimizer, of which each rank has a share: leave out shard=True, or "
                "save the model after optimizer.gather_state() [HVD200]"
            )
        if self.optimizer is not None:
            _built(self.optimizer, list(model.trainable_variables))
        self._saved_model, self._saved_window = self._copies()
        super().__init__(bcast_object=broadcast_object, get_rank=_core.rank, **kwargs)

    def save(self) -> None:
        """Keep a copy of everything in memory."""
        copies = self._copies()
        super().save()
        self._saved_model, self._saved_window = copies

    def restore(self) -> None:
        """Go back to the copy that was saved last. Gradients that PyTorch keeps are dropped."""
        synced(self.model)
        for variable, value in self._saved_model:
            variable.assign(value)
        self._go_on(self._saved_window)
        self._drop_gradients()
        super().restore()

    def sync(self) -> None:
        """Give every rank the state of rank 0. All ranks must call it.

        Raises:
            HvdMismatchError: the ranks have different variables.
            HvdPeerLostError: a rank has left or died. The copies stay as they were.
        """
        synced(self.model)
        broadcast(_once([*self.model.weights, *self._of_optimizer()]), 0)
        if self._window() is not None:
            kept = broadcast_object(self._window().kept(), 0)
            self._go_on(kept)
            if self._window().position():
                _warn_of_sums()
        self._drop_gradients()
        copies = self._copies()
        super().sync()
        self._saved_model, self._saved_window = copies  # now that all has arrived: until then there is a way back

    def _form(self) -> dict[str, str]:
        variables = f"{len(self._saved_model)} variables"
        return {**super()._form(), "model": variables, "optimizer": type(self.optimizer).__name__}

    def state_dict(self) -> dict[str, Any]:
        """Return what was saved last.

        Returns:
            dict: ``{"objects": {name: value}, "model": [array], "window": place in a window of passes or None}``.
        """
        values = [value for _, value in self._saved_model]
        return {**super().state_dict(), "model": values, "window": self._saved_window}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go back to a state that ``state_dict`` has returned.

        Args:
            state_dict (dict): the value of ``state_dict``, from this job or another one.

        Raises:
            HvdStateError: the names of the attributes differ.
            ValueError: the variables have other shapes.
        """
        variables, values = [variable for variable, _ in self._saved_model], state_dict["model"]
        shapes = [tuple(value.shape) for value in values]
        if [tuple(variable.shape) for variable in variables] != shapes:
            raise ValueError(f"the shapes of its variables differ from those of the model: {shapes} [HVD425]")
        self._saved_model, self._saved_window = list(zip(variables, values)), state_dict["window"]
        super().load_state_dict(state_dict)
        self.restore()

    def _of_optimizer(self) -> list[Any]:
        found, rate = getattr(self.optimizer, "variables", []), getattr(self.optimizer, "learning_rate", None)
        # Keras 2 does not count the rate among them, and what lowers it does so on ranks that were there
        return [*(found() if callable(found) else found), *([rate] if hasattr(rate, "assign") else [])]

    def _copies(self) -> tuple[list[tuple[Any, Any]], Any]:
        """Of each variable its value, and the place in a window of several passes."""
        synced(self.model)
        kept = _once([*self.model.variables, *self._of_optimizer()])
        values = [(variable, np.array(variable.numpy())) for variable in kept]
        return values, None if self._window() is None else self._window().kept()

    def _window(self) -> Any:
        """Several passes of which only some may have been made; None: a step is one pass."""
        inner = getattr(self.optimizer, "inner_optimizer", None)
        return getattr(self.optimizer, ATTRIBUTE, None) or getattr(inner, ATTRIBUTE, None)

    def _drop_gradients(self) -> None:
        for variable in self.model.trainable_variables if backend() == "torch" else ():
            variable.value.grad = None

    def _go_on(self, kept: Any) -> None:
        if kept is not None:
            self._window().take(kept, agreed=True)


def _once(variables: list[Any]) -> list[Any]:
    """Each of them once, in order."""
    return list({id(variable): variable for variable in variables}.values())


class CommitStateCallback(_Callback):
    """Callback that commits a state after every few batches and after each epoch. Put it last.

    All ranks must fit the same number of batches.

    Args:
        state (State): the state.
        batches_per_commit (int): the number of batches between two commits. Default: 1.

    Example:
        >>> import keras
        >>> model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1, kernel_initializer="zeros")])
        >>> model.compile(hvd.DistributedOptimizer(keras.optimizers.SGD(0.1)), "mse")
        >>> state = hvd.elastic.KerasState(model, epoch=0)
        >>> callbacks = [hvd.elastic.UpdateEpochStateCallback(state), hvd.elastic.CommitStateCallback(state)]
        >>> history = model.fit(np.zeros((2, 1)), np.zeros((2, 1)), epochs=2, callbacks=callbacks, verbose=0)
        >>> state.restore()
        >>> state.epoch
        2
    """

    def __init__(self, state: Any, batches_per_commit: int = 1) -> None:
        super().__init__()
        self.state, self.batches_per_commit = state, batches_per_commit
        self.batches_remaining = batches_per_commit

    def on_train_begin(self, logs: Any = None) -> None:
        """Counts from the beginning, as all ranks do."""
        self.batches_remaining = self.batches_per_commit

    def on_batch_end(self, batch: int, logs: Any = None) -> None:
        """Commits if it is time."""
        self.batches_remaining -= 1
        if self.batches_remaining == 0:
            self.state.commit()
            self.batches_remaining = self.batches_per_commit

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        """Commits."""
        self.state.commit()


class UpdateBatchStateCallback(_Callback):
    """Callback that keeps ``state.batch``, the number of the last finished batch of the epoch. It is 0 between epochs.

    After an interruption, ``fit`` runs the remaining batches of the epoch.

    Args:
        state (State): a state with the attribute ``batch``.

    Example:
        >>> state = hvd.elastic.ObjectState(hvd.broadcast_object, hvd.rank, batch=0)
        >>> hvd.elastic.UpdateBatchStateCallback(state).on_batch_end(5)
        >>> state.batch
        5
    """

    def __init__(self, state: Any) -> None:
        super().__init__()
        self.state = state
        self.steps_per_epoch: int | None = None

    def on_train_begin(self, logs: Any = None) -> None:
        """The number of batches is read anew."""
        self.steps_per_epoch = None

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        """Of an epoch that was interrupted only the rest is left."""
        params = self.params or {}
        if params.get("steps"):
            if self.steps_per_epoch is None:
                self.steps_per_epoch = params["steps"]
            params["steps"] = self.steps_per_epoch - self.state.batch

    def on_batch_end(self, batch: int, logs: Any = None) -> None:
        """Notes the batch."""
        self.state.batch = batch

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        """The next epoch begins with its first batch."""
        self.state.batch = 0


class UpdateEpochStateCallback(_Callback):
    """Callback that keeps ``state.epoch``, the number of finished epochs, including those of earlier calls of ``fit``.

    Args:
        state (State): a state with the attribute ``epoch``.

    Example:
        >>> state = hvd.elastic.ObjectState(hvd.broadcast_object, hvd.rank, epoch=3)
        >>> hvd.elastic.UpdateEpochStateCallback(state).on_epoch_end(0)
        >>> state.epoch
        4
    """

    def __init__(self, state: Any) -> None:
        super().__init__()
        self.state = state
        self.initial_epoch = state.epoch

    def on_train_begin(self, logs: Any = None) -> None:
        """Keras counts from 0 again."""
        self.initial_epoch = self.state.epoch

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        """Counts it."""
        self.state.epoch = self.initial_epoch + epoch + 1


__all__ = [
    "CommitStateCallback",
    "KerasState",
    "UpdateBatchStateCallback",
    "UpdateEpochStateCallback",
    "run",
]
