"""Source of training steps: which of several optimizers counts, or the script itself.

Used by autotune and hvd.stats, each with its own state. Only one thing is a step: the first optimizer that steps is the
one whose steps count, as long as it steps (a script with two would be measured in halves), unless the script reports
steps itself. Optimizers are not kept alive by it.
"""

from __future__ import annotations

import weakref
from typing import Any

IDLE_MAX = 50  # steps of other optimizers after which the one that counts is taken to have stopped


class Whose:
    """Gets every step of every optimizer, and decides which of them count."""

    def __init__(self) -> None:
        self.anew = False  # the last step is the first of the optimizer that counts now
        self.by_script = False
        self._of_others = 0  # steps of other optimizers since the last one of it
        self._optimizer: Any = lambda: None  # the optimizer that counts

    def forget(self) -> None:
        """The next optimizer that steps is the first."""
        self._optimizer, self._of_others = (lambda: None), 0

    def counts(self, source: Any) -> bool:
        """Whether this step counts. source: the optimizer that made it; None: the script reports it itself."""
        self.anew = False
        if source is None:
            self.anew, self.by_script = not self.by_script, True
            return True
        if self.by_script:
            return False
        counted = self._optimizer()
        if counted is source:
            self._of_others = 0
            return True
        self._of_others += 1
        if counted is None or self._of_others > IDLE_MAX:
            self._optimizer, self.anew, self._of_others = weakref.ref(source), True, 0
            return True
        return False
