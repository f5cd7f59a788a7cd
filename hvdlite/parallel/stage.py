"""Which part of the model is this rank's? A model as a list of layers, and `split`, which takes a stage out of it.

Layers keep their number in the whole list as their name, on every stage: so the names of parameters, and with them a
checkpoint, do not depend on the cut. A layer may return a tuple; the next one gets it as arguments, also over the
border of two stages: so skips, masks and positions travel along.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Union
from weakref import WeakKeyDictionary

from torch import nn

from ..mesh import Mesh

Layer = Union[nn.Module, Callable[[], nn.Module]]

# By stage, what a Pipeline has in flight: a checkpoint must not come in between.
in_flight: WeakKeyDictionary[nn.Module, dict[int, Any]] = WeakKeyDictionary()


class Stage(nn.Sequential):
    """Layers one after the other; what one returns are the arguments of the next."""

    def forward(self, *values: Any) -> Any:
        for layer in self:
            values = as_arguments(layer(*values))
        return values if len(values) != 1 else values[0]


def as_arguments(value: Any) -> tuple[Any, ...]:
    return value if isinstance(value, tuple) else (value,)


def made(layer: Layer, number: int) -> nn.Module:
    """The layer itself, or what its function makes. A module can be called, too, so its type decides."""
    module = layer if isinstance(layer, nn.Module) else layer()
    if not isinstance(module, nn.Module):
        raise ValueError(
            f"layer {number} is {type(module).__name__}: pass a module, or a function that returns one [HVD013]"
        )
    return module


def split(layers: Sequence[Layer], mesh: Mesh, balance: Sequence[int], axis: str = "pp") -> Stage:
    """This rank's stage of a model.

    layers: modules, or functions without arguments that make one. Only the functions of this stage are called: so a
    model that fits in no process can be cut. They draw from the random numbers as they are: for the same weights
    on every layout, a function sets the seed itself, e.g. to the layer's number.
    balance: how many layers each stage along the axis gets, as `partition` returns it.
    """
    stage, stages = mesh.coordinate(axis), mesh.shape[axis]
    if len(balance) != stages or min(balance) < 1 or sum(balance) != len(layers):
        raise ValueError(
            f"balance {list(balance)} must give each of {stages} stages at least one of {len(layers)} layers [HVD013]"
        )
    first = sum(balance[:stage])
    mine = Stage()
    for number in range(first, first + balance[stage]):
        mine.add_module(str(number), made(layers[number], number))
    return mine
