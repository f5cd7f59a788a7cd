"""The gradient book: when is a parameter's gradient complete, so that it may travel? Knows no framework.

Parameters are numbers. A backward pass that reaches a parameter is counted; after `passes_per_step` passes the gradient
is due, and the optimizer's hook sends it while backward goes on with the rest. What was not sent by the time of
`synchronize` is sent then, complete or not, so that ranks that took different branches never wait for each other:
every rank sends every parameter once per step.

Gradients of several passes are summed, as in Horovod, because that is what backward does; who wants their mean divides
the loss.
"""

from __future__ import annotations


class GradientBook:
    """Counts passes since the last step. Not thread-safe: backward hooks of one model run in one thread at a time."""

    def __init__(self, passes_per_step: int = 1) -> None:
        self._per_step = 1
        self._passes: list[int] = []
        self._sent: set[int] = set()
        self.passes_per_step = passes_per_step

    @property
    def passes_per_step(self) -> int:
        """Backward passes after which a gradient is due. Setting it: ValueError below 1."""
        return self._per_step

    @passes_per_step.setter
    def passes_per_step(self, passes: int) -> None:
        if isinstance(passes, bool) or not isinstance(passes, int) or passes < 1:
            raise ValueError(f"backward_passes_per_step={passes!r}: must be a whole number of at least 1")
        self._per_step = passes

    def add(self) -> int:
        """The number of a new parameter."""
        self._passes.append(0)
        return len(self._passes) - 1

    def passed(self, parameter: int) -> bool:
        """Count a pass; True if the gradient is due now. A gradient that was sent must be `recall`ed before."""
        if parameter in self._sent:
            raise AssertionError("a gradient that is under way was counted again")
        self._passes[parameter] += 1
        return self._passes[parameter] >= self._per_step

    def sent(self, parameter: int) -> None:
        """The gradient is under way."""
        self._sent.add(parameter)

    def is_sent(self, parameter: int) -> bool:
        """Whether it has been sent since the last step."""
        return parameter in self._sent

    def recall(self, parameter: int) -> None:
        """What was sent no longer counts: its passes begin anew."""
        self._sent.discard(parameter)
        self._passes[parameter] = 0

    def unsent(self) -> list[int]:
        """Parameters that have yet to travel in this step."""
        return [parameter for parameter in range(len(self._passes)) if parameter not in self._sent]

    def whole(self) -> bool:
        """Whether something was sent and no parameter is between two of its passes: a step could be taken."""
        return bool(self._sent) and not any(0 < passes < self._per_step for passes in self._passes)

    def reset(self) -> None:
        """A step is over: nothing is sent, nothing is counted."""
        self._sent.clear()
        self._passes = [0] * len(self._passes)
