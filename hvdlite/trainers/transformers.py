"""transformers: a callback passes the numbers of steps to what a Trainer reports to.

    trainer = Trainer(model, arguments, train_dataset=rows)
    trainer.add_callback(StepLoggerCallback(trainer.log))

The Trainer reports on rank 0 alone; all ranks have the callback, because they exchange when they came.
The import of this file is that of transformers.
"""

from __future__ import annotations

from typing import Any

from ..metrics import StepLogger

try:
    from transformers import TrainerCallback
except ModuleNotFoundError as error:
    raise ModuleNotFoundError(
        f"{__name__} needs transformers: pip install transformers accelerate (or hvdlite[trainers]) [HVD807]",
        name=error.name,
    ) from None


class StepLoggerCallback(TrainerCallback):
    """Callback that gives the numbers of ``hvd.StepLogger`` to the ``log`` of a transformers ``Trainer``.

    All ranks must have it, because they exchange their numbers. The Trainer reports them on rank 0 only::

        trainer = Trainer(model, arguments, train_dataset=rows)
        trainer.add_callback(StepLoggerCallback(trainer.log))

    Args:
        log (callable, optional): a function of a dict of numbers, usually ``trainer.log``. As in ``hvd.StepLogger``.
        every (int): the number of steps of the optimizer between two points. Default: 10.

    Raises:
        HvdNotInitializedError: when training starts, this process is not a rank.
        ModuleNotFoundError: transformers is not installed.
    """

    def __init__(self, log: Any = None, every: int = 10) -> None:
        self._arguments = log, every

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """From here on steps count. Raises HvdNotInitializedError where nothing has made this process a rank."""
        self._logger = StepLogger(*self._arguments)

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """A step of the optimizer is over."""
        self._logger.step(state.global_step)
