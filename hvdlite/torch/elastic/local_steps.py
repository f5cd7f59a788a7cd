"""Local steps in an elastic job: how `TorchState` keeps a `DiLoCo`, whose ranks have weights of their own.

The global weights are equal on all ranks, so a lost rank takes its own local steps with it and nothing else. The others
do not go back to a commit: `restore` keeps what they have. In the sync that follows all ranks take the counts, global
weights and outer optimizers of rank 0, and keep their own models and inner optimizers, but for rates and other options,
which go with the counts. A rank that has no steps yet begins with the global weights and the inner optimizer of rank 0.
What was in flight is lost on all ranks, and is sent again. Models that no DiLoCo trains go back to the commit as ever.

A rank may have received an exchange that another one has lost. So a rank that is behind rank 0 with a fragment takes
its global weights as well: from weights before that exchange its outer gradient would undo it.
"""

from __future__ import annotations

from typing import Any

import torch

from ...ops.objects import broadcast_object
from ..local import DiLoCo
from .state import StateDictHandler, StateHandler, on_cpu


class LocalStepsHandler(StateDictHandler):
    """Handler of a ``DiLoCo``."""

    value: DiLoCo

    def __init__(self, value: Any) -> None:
        super().__init__(value)
        self._late: list[int] = []  # fragments of which this rank lacks an exchange

    def begun(self) -> bool:
        """Whether this rank has made steps, or has loaded some: it keeps its model."""
        return bool(self.value._fragments)

    def keeps(self, value: Any) -> bool:
        """Whether this rank has local steps of this model or optimizer."""
        its: Any = ()
        if isinstance(value, torch.nn.Module):
            its = value.parameters()
        elif isinstance(value, torch.optim.Optimizer):
            its = (each for group in value.param_groups for each in group["params"])
        return not {id(each) for part in self.value._fragments for each in part.locals}.isdisjoint(map(id, its))

    def sync(self) -> None:
        schedule, begun = self.value._schedule, self.begun()
        moved, arrived = set(schedule.state()["moved"]), schedule.arrived
        self.value.load_state_dict(broadcast_object(on_cpu(self.value.state_dict())))
        self._late = [n for n, count in enumerate(schedule.arrived) if not begun or arrived[n] < count]
        schedule.moved = moved.difference(self._late)

    def catch_up(self) -> None:
        """Take the global weights where this rank is behind; after the models have their values."""
        with torch.no_grad():
            for number in self._late if self.begun() else ():
                self.value._fragments[number].publish()

    @staticmethod
    def put_back(own: list[StateHandler]) -> None:
        """Models and optimizers get back the values that they had before the sync; optimizers keep rank 0's options."""
        for handler in own:
            groups = getattr(handler.value, "param_groups", ())
            options = [{key: value for key, value in group.items() if key != "params"} for group in groups]
            handler.restore()
            for group, each in zip(getattr(handler.value, "param_groups", ()), options):
                group.update(each)
