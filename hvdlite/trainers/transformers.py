"""How do the numbers of steps reach what a transformers Trainer reports to? By a callback, which is given its `log`.

    trainer = Trainer(model, arguments, train_dataset=rows)
    trainer.add_callback(StepLoggerCallback(trainer.log))

The Trainer reports on rank 0 alone; all ranks have the callback, because they exchange when they came.
The import of this file is that of transformers.
"""

from __future__ import annotations

from typing import Any

from ..measured import StepLogger

try:
    from transformers import TrainerCallback
except ModuleNotFoundError as error:
    raise ModuleNotFoundError(
        f"{__name__} needs transformers: pip install transformers accelerate (or hvdlite[trainers]) [HVD807]",
        name=error.name,
    ) from None


class StepLoggerCallback(TrainerCallback):
    """`hvd.StepLogger` for a Trainer, with its arguments."""

    def __init__(self, log: Any = None, every: int = 10) -> None:
        self._given = log, every

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """From here on steps count. Raises HvdNotInitializedError where nothing has made this process a rank."""
        self._logger = StepLogger(*self._given)

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """A step of the optimizer is over."""
        self._logger.step(state.global_step)
