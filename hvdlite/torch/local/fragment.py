"""Fragment of a model: some parameters, their global weights, and the outer optimizer of these.

Global weights are the same on all ranks, and no other optimizer knows them: `zero_grad` of the inner optimizer leaves
their gradients alone, and the reverse. They are float32 where parameters have 16 bits, since an outer step may be
smaller than what 16 bits can show. A fragment has an outer optimizer of its own, because fragments step at different
times.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

_HALVES = (torch.float16, torch.bfloat16)


class Fragment:
    """Some parameters, their global weights and the outer optimizer of these."""

    def __init__(self, trained: list[tuple[str, torch.Tensor]], outer: Callable[[list[Any]], Any]) -> None:
        self.names, self.locals = [name for name, _ in trained], [each for _, each in trained]
        self.globals = [_copied(each) for each in self.locals]
        self.outer: Any = outer(self.globals)
        owned = [id(each) for group in getattr(self.outer, "param_groups", ()) for each in group["params"]]
        if sorted(owned) != sorted(map(id, self.globals)):
            raise ValueError(
                "outer= must return an optimizer of exactly the parameters that it is given, which are copies of the "
                "model's [HVD048]"
            )

    def gradients(self, moved: bool) -> list[torch.Tensor]:
        """The outer gradients, from global weights to local ones; zeros if this rank has not trained."""
        pairs = zip(self.globals, self.locals)
        return [each.detach() - mine if moved else torch.zeros_like(each) for each, mine in pairs]

    def step(self, sums: list[torch.Tensor], weight: float) -> None:
        """The outer step with the average of the outer gradients."""
        for each, total in zip(self.globals, sums):
            each.grad = total.to(each.device, each.dtype).div_(weight)
        self.outer.step()
        self.outer.zero_grad(set_to_none=True)

    def publish(self, alpha: float = 1.0) -> None:
        """Local weights become global ones, or a mixture with so much of these."""
        for mine, each in zip(self.locals, self.globals):
            if alpha == 1.0:
                mine.copy_(each)
            else:
                mine.lerp_(each.to(mine.dtype), alpha)

    def load(self, weights: list[torch.Tensor], outer: Any) -> None:
        """Go on from global weights and the state of the outer optimizer."""
        self.outer.load_state_dict(outer)  # it may raise
        with torch.no_grad():
            for each, value in zip(self.globals, weights):
                each.copy_(value)


def _copied(parameter: torch.Tensor) -> torch.nn.Parameter:
    dtype = torch.float32 if parameter.dtype in _HALVES else parameter.dtype  # small outer steps must not be lost
    return torch.nn.Parameter(parameter.detach().to(dtype, copy=True))
