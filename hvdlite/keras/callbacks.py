"""Callbacks for model.fit on several ranks.

    hvd.callbacks.BroadcastGlobalVariablesCallback(0)        all ranks begin as the root
    hvd.callbacks.MetricAverageCallback()                    what is logged is of all ranks
    hvd.callbacks.CheckConsistencyCallback(every=100)        an error when the ranks' weights drift apart
    hvd.callbacks.LearningRateWarmupCallback(initial_lr=...) from the rate of one rank to that of all
    hvd.callbacks.StatsCallback()                            what steps cost, for the TensorBoard callback after it
    hvd.callbacks.DiLoCoCallback(sync_every=100)             steps of each rank's own, see local_steps.py

They work on every backend that hvdlite.keras works on. Those of elastic training come with elastic training.
Put MetricAverageCallback before callbacks that read the logs (ReduceLROnPlateau, EarlyStopping, ModelCheckpoint).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from .. import _core, metrics
from ..errors.user_warning import warn
from ..metrics.tensorboard import scalars
from ..ops.objects import allgather_object
from .arguments import check_number
from .backend import backend, broadcast, keras, key_of
from .consistency import check_consistency
from .local_steps import DiLoCoCallback, LocalSGDCallback
from .undistributed import Alone, averaged, warn_without_batch

_Callback: Any = keras.callbacks.Callback


def reducers(model: Any) -> list[Any]:
    """Those of the model's optimizer, which may be inside a loss scale."""
    optimizer = getattr(model, "optimizer", None)
    found = (getattr(each, "_hvd", None) for each in (optimizer, getattr(optimizer, "inner_optimizer", None)))
    return [each for each in found if each is not None]


class BroadcastGlobalVariablesCallback(_Callback):
    """Callback that gives all ranks the root's weights and optimizer state after the first batch of ``fit``.

    It waits for the first batch because that batch creates all variables. With ``steps_per_execution`` above 1 the
    first batches are several steps from each rank's own weights. In that case broadcast ``model.variables`` before
    ``fit``. The states of random seeds are not sent, so ranks drop out different units. Nothing is sent where a
    ``DiLoCoCallback`` has sent the weights before.

    A model without a ``DistributedOptimizer`` may have gradients that nothing averages. Its ranks compare the trainable
    weights after the second batch and, if they differ, 16 batches later. If they still differ and no batch has called a
    collective, one rank issues a warning (HVD302). ``HVDLITE_CHECK_START`` makes it an error or turns it off. If a rank
    has no batch in an epoch, it issues a warning (HVD240): the other ranks wait for it.

    Args:
        root_rank (int): the rank whose variables are sent.
        device (str): accepted for Horovod, without effect.
        local_variables (list, optional): variables that are not sent.

    Example:
        >>> import keras
        >>> model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)])
        >>> model.compile(keras.optimizers.SGD(0.1), "mse")
        >>> callback = hvd.callbacks.BroadcastGlobalVariablesCallback(0)
        >>> history = model.fit(np.zeros((2, 1)), np.zeros((2, 1)), callbacks=[callback], verbose=0)
        >>> hvd.check_consistency(model)
    """

    def __init__(self, root_rank: int, device: str = "", local_variables: Any = None) -> None:
        super().__init__()
        self.root_rank = root_rank
        self.broadcast_done = False
        self._alone: Alone | None = None
        self._batches = 0  # of this epoch
        self._local = {id(variable): variable for variable in local_variables or ()}

    def register_local_var(self, variable: Any) -> None:
        """Do not send a variable.

        Args:
            variable: a variable of the model.
        """
        self._local[id(variable)] = variable

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        """Counts the batches of the epoch; what callbacks send between epochs averages no gradients."""
        self._batches = 0
        if self._alone is not None:
            self._alone.mark()

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        """Warns if there was no batch."""
        warn_without_batch(self._batches)

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        """Sends once, and looks after the next batches whether ranks train alone."""
        self._batches += 1
        if self.broadcast_done:
            if self._alone is not None:
                self._alone.batch(self._trained())
            return
        own = averaged.get(self.model)  # ranks that have begun alike: the first step of each is not to be lost
        if _core.size() > 1 and (own is None or own.size() < _core.size()):
            optimizer = getattr(self.model, "optimizer", None)
            found = list(self.model.weights)  # not the states of random seeds: ranks drop out different units
            of_optimizer = getattr(optimizer, "variables", [])
            found += of_optimizer() if callable(of_optimizer) else of_optimizer
            seen: set[int] = set(self._local)
            broadcast([v for v in found if not (id(v) in seen or seen.add(id(v)))], self.root_rank)  # type: ignore
            if own is None and not reducers(self.model):
                self._alone = Alone("BroadcastGlobalVariablesCallback")
        self.broadcast_done = True

    def on_train_end(self, logs: Any = None) -> None:
        """Compares what is left to compare: another rank may have had more batches."""
        if self._alone is not None:
            self._alone.end(self._trained())

    def _trained(self) -> list[Any]:
        """The weights that are the same on all ranks after a step."""
        local = {key_of(variable) for variable in self._local.values()}
        local |= {key for each in reducers(self.model) for key in each._local}
        return [each for each in self.model.trainable_weights if key_of(each) not in local]


class MetricAverageCallback(_Callback):
    """Callback that replaces the metrics of an epoch by their averages over all ranks.

    Put it before callbacks that read the metrics, such as ``ReduceLROnPlateau``, ``EarlyStopping`` and
    ``ModelCheckpoint``. All ranks must finish the same number of epochs. A metric that some ranks lack is not averaged;
    a warning names it once.

    Args:
        device (str): accepted for Horovod, without effect.

    Example:
        >>> logs = {"loss": 1.0 + hvd.rank()}
        >>> hvd.callbacks.MetricAverageCallback().on_epoch_end(0, logs)
        >>> logs
        {'loss': 1.5}
    """

    _warned: tuple[str, ...] = ()

    def __init__(self, device: str = "") -> None:
        super().__init__()
        self._batches: int | None = None  # of this epoch; None: they are not counted

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        """Counts the batches of the epoch."""
        self._batches = 0

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        """Counts it."""
        self._batches = (self._batches or 0) + 1

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        """Averages in place what all ranks have. Warns if there was no batch, which other ranks wait for."""
        warn_without_batch(self._batches)
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
            warn(
                f"rank {_core.rank()}: metrics that only some ranks have are not averaged ({owners}). Give all ranks "
                "the same metrics, and validation data to all or none. [HVD307]"
            )  # fmt: skip


class CheckConsistencyCallback(_Callback):
    """Callback that raises ``HvdMismatchError`` on all ranks when their weights or optimizers are no longer the same.

    It compares bits, with ``hvd.check_consistency``. All ranks must fit the same number of batches.

    Args:
        every (int, optional): compare after this many batches. None (default): at the end of each epoch.
        local_variables (list, optional): variables that may differ.

    Raises:
        ValueError: ``every`` is not a positive number or None.

    Example:
        >>> import keras
        >>> model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1, kernel_initializer="zeros")])
        >>> model.compile(hvd.DistributedOptimizer(keras.optimizers.SGD(0.1)), "mse")
        >>> check = hvd.callbacks.CheckConsistencyCallback(every=1)
        >>> history = model.fit(np.ones((2, 1)), np.full((2, 1), hvd.rank()), callbacks=[check], verbose=0)
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
    """Callback that adds the numbers of ``hvd.stats()`` to the metrics of an epoch, such as ``hvdlite/step_ms/mean``.

    Put it before Keras's TensorBoard callback, which writes them. Each rank writes its own numbers. A batch counts as
    one step where no optimizer reports steps: on one rank, or in a compiled graph of TensorFlow.

    Args:
        prefix (str): begins each name. Default: ``hvdlite/``.

    Raises:
        TypeError: ``prefix`` is not a str.

    Example:
        >>> logs = {}
        >>> hvd.callbacks.StatsCallback().on_epoch_end(0, logs)
        >>> all(name.startswith("hvdlite/") for name in logs)
        True
    """

    def __init__(self, prefix: str = "hvdlite/") -> None:
        if not isinstance(prefix, str):
            raise TypeError(f"prefix must be a string, not {prefix!r} [HVD238]")
        super().__init__()
        self.prefix = prefix
        self._steps, self._reported = 0, False

    def on_train_begin(self, logs: Any = None) -> None:
        """Notes how many steps there were, and whether a compiled step of JAX, which is done later, reports itself."""
        self._steps = metrics.steps()
        self._reported = backend() == "jax" and any(not each.alone for each in reducers(self.model))

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        """A step is over, if no optimizer has reported it."""
        if not self._reported and metrics.steps() == self._steps:
            metrics.stats_step()
        self._steps = metrics.steps()

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        """Adds to the logs."""
        if logs is not None:
            logs.update({self.prefix + tag: value for tag, value in scalars(metrics.stats()).items()})


class LearningRateScheduleCallback(_Callback):
    """Callback that sets the learning rate of each epoch to ``initial_lr * multiplier(epoch)``.

    It logs the rate as ``lr``.

    Args:
        initial_lr (float): the learning rate that is multiplied.
        multiplier (float or callable): a factor, or a function of the epoch that returns one.
        start_epoch (int): the first epoch in which the rate is set. Default: 0.
        end_epoch (int, optional): the epoch before which it ends. None: no end.
        staircase (bool): True (default) sets the rate once per epoch. False sets it before each batch, with the epoch
            as a fraction.
        momentum_correction (bool): while the rate changes, scale the momentum for one batch by new rate / old rate
            (Goyal et al., 2017, "Accurate, Large Minibatch SGD"). It matters only where momentum is a variable.
            Default: True.
        steps_per_epoch (int, optional): the number of batches per epoch. Needed only without ``staircase``, where Keras
            does not know it.

    Raises:
        TypeError: an argument is not a number.
        ValueError: ``initial_lr`` is None, or the number of batches is unknown.

    Example:
        >>> import keras
        >>> model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)])
        >>> model.compile(keras.optimizers.SGD(0.5), "mse")
        >>> halve = hvd.callbacks.LearningRateScheduleCallback(0.5, lambda epoch: 0.5**epoch)
        >>> history = model.fit(np.zeros((2, 1)), np.zeros((2, 1)), epochs=2, callbacks=[halve], verbose=0)
        >>> history.history["lr"]
        [0.5, 0.25]
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
    """Callback that raises the learning rate from ``initial_lr / hvd.size()`` to ``initial_lr`` in the first epochs.

    The rate grows batch by batch, in equal steps (Goyal et al., 2017, "Accurate, Large Minibatch SGD"). Give the rate
    for the whole job as ``initial_lr``, usually the rate of one process times ``hvd.size()``.

    Args:
        initial_lr (float): the learning rate after the warm-up.
        warmup_epochs (int): the number of epochs that the warm-up takes. Default: 5.
        momentum_correction (bool): as in ``LearningRateScheduleCallback``.
        steps_per_epoch (int, optional): the number of batches per epoch, where Keras does not know it.
        verbose (int): 1 prints a line when the warm-up is over. Default: 0.

    Raises:
        TypeError: an argument is not a number.
        ValueError: ``warmup_epochs`` is negative, or the number of batches is unknown.

    Example:
        >>> import keras
        >>> model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)])
        >>> model.compile(keras.optimizers.SGD(1.0), "mse")
        >>> warmup = hvd.callbacks.LearningRateWarmupCallback(initial_lr=1.0, warmup_epochs=2)
        >>> history = model.fit(np.zeros((2, 1)), np.zeros((2, 1)), epochs=3, callbacks=[warmup], verbose=0)
        >>> history.history["lr"]
        [0.75, 1.0, 1.0]
    """

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
        """Prints when the warm-up is over."""
        super().on_epoch_end(epoch, logs)
        if epoch == (self.end_epoch or 0) - 1 and self.verbose > 0:
            rate = float(np.asarray(self.model.optimizer.learning_rate))
            print(f"\nEpoch {epoch + 1}: finished gradual learning rate warmup to {rate:g}.")


class BestModelCheckpoint(keras.callbacks.ModelCheckpoint):  # type: ignore[misc]
    """Callback that saves the best model so far. Only rank 0 writes the file.

    Put it after ``MetricAverageCallback``, so that it judges by the metric of all ranks.

    Args:
        filepath (str, optional): the file. Default: ``best.keras``, or ``best.weights.h5`` with ``save_weights_only``.
        monitor (str): the metric. Default: ``val_loss``.
        verbose (int): 1 prints a line for each file. Default: 0.
        save_weights_only (bool): save weights instead of the whole model. Default: False.
        mode (str): ``min``, ``max`` or ``auto`` (default), which derives it from the metric.
        save_freq: ``epoch`` (default), or a number of batches.

    Example:
        >>> checkpoint = hvd.callbacks.BestModelCheckpoint(monitor="loss", filepath="model.keras")
        >>> checkpoint.save_best_only
        True
    """

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
    "DiLoCoCallback",
    "LearningRateScheduleCallback",
    "LearningRateWarmupCallback",
    "LocalSGDCallback",
    "MetricAverageCallback",
    "StatsCallback",
]
