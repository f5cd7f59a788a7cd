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
from ..elastic import ObjectState
from ..objects import broadcast_object
from .backend import backend, broadcast, keras
from .window import ATTRIBUTE

_Callback: Any = keras.callbacks.Callback


def run(func: Callable[..., Any]) -> Callable[..., Any]:
    """Decorator of a training function whose first argument is a State: see hvdlite.elastic.run."""
    decorated: Callable[..., Any] = import_module(f"hvdlite.{backend()}.elastic").run(func)
    return decorated


def _built(optimizer: Any, owners: list[Any]) -> None:
    """Makes the optimizer's variables if there are none yet; Keras 2 has an older way as well."""
    if hasattr(optimizer, "_create_all_weights"):
        optimizer._create_all_weights(owners)
    elif hasattr(optimizer, "build") and not getattr(optimizer, "built", getattr(optimizer, "_built", False)):
        optimizer.build(owners)


class KerasState(ObjectState):
    """A model, its optimizer (by default the one it was compiled with) and whatever is given by name as attributes.

    ValueError if the model has no weights yet.
    """

    def __init__(self, model: Any, optimizer: Any = None, **kwargs: Any) -> None:
        if not getattr(model, "built", True):
            raise ValueError("Model must be built first. Run `model.build(input_shape)`. [HVD239]")
        self.model = model
        self.optimizer = optimizer if optimizer is not None else getattr(model, "optimizer", None)
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
        """Go back to what was saved last."""
        for variable, value in self._saved_model:
            variable.assign(value)
        self._go_on(self._saved_window)
        super().restore()

    def sync(self) -> None:
        """Give every rank rank 0's state."""
        broadcast(_once([*self.model.weights, *self._of_optimizer()]), 0)
        if self._window() is not None:
            self._go_on(broadcast_object(self._window().kept(), 0))
        copies = self._copies()
        super().sync()
        self._saved_model, self._saved_window = copies  # now that all has arrived: until then there is a way back

    def _form(self) -> dict[str, str]:
        variables = f"{len(self._saved_model)} variables"
        return {**super()._form(), "model": variables, "optimizer": type(self.optimizer).__name__}

    def state_dict(self) -> dict[str, Any]:
        """What was saved last: values of variables, in order, below "model"; the place in a window below "window"."""
        values = [value for _, value in self._saved_model]
        return {**super().state_dict(), "model": values, "window": self._saved_window}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go back to what `state_dict` has given. ValueError for variables of other shapes."""
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
        kept = _once([*self.model.variables, *self._of_optimizer()])
        values = [(variable, np.array(variable.numpy())) for variable in kept]
        return values, None if self._window() is None else self._window().kept()

    def _window(self) -> Any:
        """Several passes of which only some may have been made; None: a step is one pass."""
        inner = getattr(self.optimizer, "inner_optimizer", None)
        return getattr(self.optimizer, ATTRIBUTE, None) or getattr(inner, ATTRIBUTE, None)

    def _go_on(self, kept: Any) -> None:
        if kept is not None:
            self._window().take(kept, agreed=True)


def _once(variables: list[Any]) -> list[Any]:
    """Each of them once, in order."""
    return list({id(variable): variable for variable in variables}.values())


class CommitStateCallback(_Callback):
    """Commits the state after every `batches_per_commit` batches, and after each epoch."""

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
    """Keeps `state.batch`: the last batch of the epoch that is done, 0 between epochs."""

    def __init__(self, state: Any) -> None:
        super().__init__()
        self.state = state
        self.steps_per_epoch: int | None = None

    def on_train_begin(self, logs: Any = None) -> None:
        """The number of batches is asked anew."""
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
    """Keeps `state.epoch`: how many epochs are done, those of earlier calls of fit included."""

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
