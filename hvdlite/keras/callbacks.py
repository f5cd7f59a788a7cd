"""Callbacks for model.fit on several ranks.

    hvd.callbacks.BroadcastGlobalVariablesCallback(0)        all ranks begin as the root
    hvd.callbacks.MetricAverageCallback()                    what is logged is of all ranks
    hvd.callbacks.CheckConsistencyCallback(every=100)        an error when the ranks' weights drift apart
    hvd.callbacks.LearningRateWarmupCallback(initial_lr=...) from the rate of one rank to that of all
    hvd.callbacks.StatsCallback()                            what steps cost, for the TensorBoard callback after it

They work on every backend that hvdlite.keras works on. Those of elastic training come with elastic training.
Put MetricAverageCallback before callbacks that read the logs (ReduceLROnPlateau, EarlyStopping, ModelCheckpoint).
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import numpy as np

from .. import _core, measured
from ..measured.scalars import scalars
from ..objects import allgather_object
from .backend import broadcast, keras
from .checked import check_number
from .consistency import check_consistency

_Callback: Any = keras.callbacks.Callback


class BroadcastGlobalVariablesCallback(_Callback):
    """Gives all ranks the root's weights and optimizer state, when the first batch has made them all.

    Variables given to `register_local_var` or `local_variables` stay each rank's own. With steps_per_execution above 1
    the first batches are several steps, from each rank's own weights: broadcast model.variables before fit there.
    """

    def __init__(self, root_rank: int, device: str = "", local_variables: Any = None) -> None:
        super().__init__()
        self.root_rank = root_rank
        self.broadcast_done = False
        self._local = {id(variable): variable for variable in local_variables or ()}

    def register_local_var(self, variable: Any) -> None:
        """This variable is not sent."""
        self._local[id(variable)] = variable

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        """Sends once."""
        if self.broadcast_done:
            return
        if _core.size() > 1:
            optimizer = getattr(self.model, "optimizer", None)
            found = list(self.model.weights)  # not the states of random seeds: ranks drop out different units
            of_optimizer = getattr(optimizer, "variables", [])
            found += of_optimizer() if callable(of_optimizer) else of_optimizer
            seen: set[int] = set(self._local)
            broadcast([v for v in found if not (id(v) in seen or seen.add(id(v)))], self.root_rank)  # type: ignore
        self.broadcast_done = True


class MetricAverageCallback(_Callback):
    """Replaces the metrics of an epoch by their averages over all ranks.

    A metric that some ranks do not have, as where one alone validates, stays each rank's own; a warning says so once.
    """

    _warned: tuple[str, ...] = ()

    def __init__(self, device: str = "") -> None:
        super().__init__()

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        """Averages in place what all ranks have."""
        if _core.size() == 1:
            return
        numbers = {name: float(each) for name, each in (logs or {}).items() if each is not None and np.ndim(each) == 0}
        of_all = allgather_object(numbers, "MetricAverageCallback")  # names travel, too: one name for all lists
        partial = sorted({name for rank in of_all for name in rank if not all(name in each for each in of_all)})
        for name in numbers:
            if name not in partial:
                logs[name] = float(np.mean([rank[name] for rank in of_all]))
        if partial and tuple(partial) != self._warned:
            self._warned = tuple(partial)
            has = {name: [rank for rank, each in enumerate(of_all) if name in each] for name in partial}
            owners = "; ".join(f"{name}: only ranks {ranks}" for name, ranks in has.items())
            warnings.warn(
                f"rank {_core.rank()}: metrics that only some ranks have are not averaged ({owners}). Give all ranks "
                "the same metrics, and validation data to all or none. [HVD307]", stacklevel=2
            )  # fmt: skip


class CheckConsistencyCallback(_Callback):
    """Raises HvdMismatchError on all ranks when their weights or optimizers are no longer the same, bit by bit.

    every: after so many batches; None: at the end of each epoch. All ranks must fit the same number of batches.
    `local_variables` may differ, and what `register_local_var` was given (see hvd.check_consistency).
    """

    def __init__(self, every: int | None = None, local_variables: Any = None) -> None:
        super().__init__()
        if every is not None and (isinstance(every, bool) or not isinstance(every, int) or every < 1):
            raise ValueError(
                f"CheckConsistencyCallback: every must be a number of batches or None, not {every!r} [HVD238]"
            )
        self.every, self.local_variables = every, local_variables
        self._batches = 0

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        """Looks, if it is time."""
        self._batches += 1
        if self.every is not None and self._batches % self.every == 0:
            check_consistency(self.model, local_variables=self.local_variables)

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        """Looks, unless it counts batches."""
        if self.every is None:
            check_consistency(self.model, local_variables=self.local_variables)


class StatsCallback(_Callback):
    """Puts the numbers of hvd.stats() into the logs of an epoch, as hvdlite/step_ms/mean and so on.

    Put it before Keras's TensorBoard callback, which writes what is in the logs, on each rank its own. Where no
    optimizer tells of steps (on one rank, in a compiled graph of TensorFlow) each batch is one.
    """

    def __init__(self, prefix: str = "hvdlite/") -> None:
        if not isinstance(prefix, str):
            raise TypeError(f"prefix must be a text, not {prefix!r} [HVD238]")
        super().__init__()
        self.prefix = prefix
        self._steps = 0

    def on_train_begin(self, logs: Any = None) -> None:
        """Notes how many steps there were."""
        self._steps = measured.steps()

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        """Where nobody else has said so, a step is over."""
        if measured.steps() == self._steps:
            measured.stats_step()
        self._steps = measured.steps()

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        """Adds to the logs."""
        if logs is not None:
            logs.update({self.prefix + tag: value for tag, value in scalars(measured.stats()).items()})


class LearningRateScheduleCallback(_Callback):
    """The learning rate of an epoch is initial_lr times multiplier(epoch), from start_epoch to before end_epoch.

    staircase: it changes between epochs only; else with every batch, and the epoch is a fraction. steps_per_epoch:
    where Keras does not know it. momentum_correction is Horovod's: it matters where momentum is a variable.
    """

    def __init__(
        self, initial_lr: float, multiplier: float | Callable[[float], float], start_epoch: int = 0,
        end_epoch: int | None = None, staircase: bool = True, momentum_correction: bool = True,
        steps_per_epoch: int | None = None
    ) -> None:  # fmt: skip
        super().__init__()
        if initial_lr is None:
            raise ValueError("Parameter `initial_lr` is required [HVD238]")
        check_number(self, "initial_lr", initial_lr)
        if not callable(multiplier):
            check_number(self, "multiplier", multiplier, otherwise=" or a function of the epoch")
        check_number(self, "start_epoch", start_epoch)
        if end_epoch is not None:
            check_number(self, "end_epoch", end_epoch, otherwise=" or None")
        if steps_per_epoch is not None:
            check_number(self, "steps_per_epoch", steps_per_epoch, 0, " or None")
        self.initial_lr, self.start_epoch, self.end_epoch = initial_lr, start_epoch, end_epoch
        self.staircase = staircase if callable(multiplier) else True
        self.multiplier = multiplier if callable(multiplier) else (lambda epoch: float(multiplier))
        self.momentum_correction, self.steps_per_epoch = momentum_correction, steps_per_epoch
        self.current_epoch = 0
        self._momentum: Any = None

    def on_train_begin(self, logs: Any = None) -> None:
        """Looks up the number of batches. ValueError if Keras does not know it and it matters."""
        if not self.staircase and not self.steps_per_epoch:
            self.steps_per_epoch = (self.params or {}).get("steps")
            if not self.steps_per_epoch:
                raise ValueError(
                    "Could not autodetect the number of steps per epoch. Please specify the steps_per_epoch parameter "
                    f"to the {type(self).__name__}() or upgrade to the latest version of Keras. [HVD238]"
                )

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        """Notes the epoch."""
        self.current_epoch = epoch

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        """Sets the rate."""
        begun = self.current_epoch >= self.start_epoch
        if not begun or (self.end_epoch is not None and self.current_epoch >= self.end_epoch):
            return
        if self.staircase and batch == 0:
            self._set(self.current_epoch)
        elif not self.staircase:
            self._set(self.current_epoch + batch / float(self.steps_per_epoch or 1))

    def _set(self, epoch: float) -> None:
        optimizer: Any = self.model.optimizer
        before, now = float(np.asarray(optimizer.learning_rate)), self.initial_lr * self.multiplier(epoch)
        optimizer.learning_rate = now
        momentum: Any = getattr(optimizer, "momentum", None)
        if self.momentum_correction and before > 0 and hasattr(momentum, "assign"):
            self._momentum = float(np.asarray(momentum))
            momentum.assign(self._momentum * now / before)

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        """The momentum is corrected for one batch."""
        if self._momentum is not None:
            self.model.optimizer.momentum.assign(self._momentum)
            self._momentum = None

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        """Logs the rate as `lr`."""
        if logs is not None:
            logs["lr"] = float(np.asarray(self.model.optimizer.learning_rate))


class LearningRateWarmupCallback(LearningRateScheduleCallback):
    """Raises the learning rate in the first warmup_epochs from initial_lr / size to initial_lr, batch by batch."""

    def __init__(
        self, initial_lr: float, warmup_epochs: int = 5, momentum_correction: bool = True,
        steps_per_epoch: int | None = None, verbose: int = 0
    ) -> None:  # fmt: skip
        check_number(self, "warmup_epochs", warmup_epochs, 0)
        check_number(self, "verbose", int(verbose) if isinstance(verbose, bool) else verbose)

        def multiplier(epoch: float) -> float:
            epoch += 1.0 / float(self.steps_per_epoch or 1)  # so that the last batch of the warm-up has the full rate
            return 1.0 / _core.size() * (epoch * (_core.size() - 1) / warmup_epochs + 1)

        super().__init__(initial_lr, multiplier, 0, warmup_epochs, False, momentum_correction, steps_per_epoch)
        self.verbose = verbose

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        """Says when the warm-up is over."""
        super().on_epoch_end(epoch, logs)
        if epoch == (self.end_epoch or 0) - 1 and self.verbose > 0:
            rate = float(np.asarray(self.model.optimizer.learning_rate))
            print(f"\nEpoch {epoch + 1}: finished gradual learning rate warmup to {rate:g}.")


class BestModelCheckpoint(keras.callbacks.ModelCheckpoint):  # type: ignore[misc]
    """Keeps the best model by a metric of all ranks, written by rank 0 alone; set `filepath` before training."""

    def __init__(
        self, monitor: str = "val_loss", verbose: int = 0, save_weights_only: bool = False, mode: str = "auto",
        save_freq: Any = "epoch", filepath: str | None = None
    ) -> None:  # fmt: skip
        ending = ".weights.h5" if save_weights_only else ".keras"
        super().__init__(
            filepath or "best" + ending, monitor=monitor, verbose=verbose, save_best_only=True,
            save_weights_only=save_weights_only, mode=mode, save_freq=save_freq,
        )  # fmt: skip

    def _save_model(self, *args: Any, **more: Any) -> None:
        if _core.rank() == 0:
            super()._save_model(*args, **more)


__all__ = [
    "BestModelCheckpoint",
    "BroadcastGlobalVariablesCallback",
    "CheckConsistencyCallback",
    "LearningRateScheduleCallback",
    "LearningRateWarmupCallback",
    "MetricAverageCallback",
    "StatsCallback",
]
