"""Lightning: `Trainer(callbacks=[StepLoggerCallback()])` passes the numbers of steps to its loggers.

A step is one of the optimizer: of batches whose gradients are accumulated the last one ends it. Lightning's loggers
write on rank 0 alone; all ranks have the callback, because they exchange when they came.
The import of this file is that of Lightning.
"""

from __future__ import annotations

from typing import Any

from ..metrics import StepLogger

try:
    from lightning.pytorch import Callback
except ModuleNotFoundError as error:
    raise ModuleNotFoundError(
        f"{__name__} needs Lightning: pip install lightning (or hvdlite[trainers]) [HVD807]",
        name=error.name,
    ) from None


class StepLoggerCallback(Callback):
    """Callback that writes the numbers of ``hvd.StepLogger`` to the loggers of a Lightning ``Trainer``.

    All ranks must have it, because they exchange their numbers. Lightning writes them on rank 0 only::

        Trainer(callbacks=[StepLoggerCallback(every=10)])

    Args:
        every (int): the number of steps of the optimizer between two points. Default: 10.

    Raises:
        HvdNotInitializedError: when training starts, this process is not a rank.
        ModuleNotFoundError: Lightning is not installed.
    """

    def __init__(self, every: int = 10) -> None:
        self._every = every

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """From here on steps count. Raises HvdNotInitializedError where nothing has made this process a rank."""

        def log(numbers: dict[str, float]) -> None:
            for each in trainer.loggers:
                each.log_metrics(numbers, step=trainer.global_step)

        self._logger, self._steps = StepLogger(log, self._every), trainer.global_step

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        """A step is over, if the optimizer has made one."""
        if trainer.global_step != self._steps:
            self._steps = trainer.global_step
            self._logger.step(self._steps)
