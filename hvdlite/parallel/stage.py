"""Stages of a model: a list of layers, and `split`, which takes this rank's stage out of it.

Layers keep their number in the whole list as their name, on every stage: so the names of parameters, and with them a
checkpoint, do not depend on the cut. A layer may return a tuple; the next one gets it as arguments, also over the
border of two stages: so skips, masks and positions travel along.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Union
from weakref import WeakKeyDictionary, WeakSet

from torch import nn

from ..process_sets.mesh import Mesh

Layer = Union[nn.Module, Callable[[], nn.Module]]

# By stage, the chunks of all its pipelines: a checkpoint, or a step of another one, must not come in between what is in
# flight there.
chunks_on: WeakKeyDictionary[nn.Module, WeakSet[Any]] = WeakKeyDictionary()


class Stage(nn.Sequential):
    """Layers one after the other; what one returns are the arguments of the next. lengths: of its chunks, between which
    lie the layers of other stages."""

    lengths: tuple[int, ...] = ()

    def forward(self, *values: Any, chunk: int | None = None) -> Any:
        first = sum(self.lengths[:chunk]) if chunk else 0
        for layer in list(self)[first : None if chunk is None else first + self.lengths[chunk]]:
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
    """Return this rank's stage of a model.

    Layers keep their number in the whole list as their name, so names in a checkpoint do not depend on the cut. A layer
    may return a tuple; its values are the arguments of the next layer.

    Args:
        layers (list): modules, or functions without arguments that make one. Only the functions of this stage are
            called, so a model may be too large for one process.
        mesh (Mesh): the layout of the ranks.
        balance (list of int): the number of layers of each stage, as ``partition`` returns it. With 2 or more numbers
            for each stage, a stage has so many chunks, for the schedule ``"interleaved"``. For example, stage 0 of 2
            has the layers of the first and the third number.
        axis (str): the axis of the stages. Default: ``"pp"``.

    Returns:
        torch.nn.Sequential: the layers of this stage.

    Raises:
        ValueError: ``balance`` does not fit the layers or the axis.

    Example:
        >>> from hvdlite import parallel
        >>> stage = parallel.split([torch.nn.Linear(1, 1), torch.nn.ReLU()], hvd.Mesh(pp=2), [1, 1])
        >>> stage
        Stage( (0): Linear(in_features=1, out_features=1, bias=True) )  # rank 0
        Stage( (1): ReLU() )  # rank 1
    """
    stage, stages = mesh.coordinate(axis), mesh.shape[axis]
    if not balance or len(balance) % stages or min(balance) < 1 or sum(balance) != len(layers):
        raise ValueError(
            f"balance {list(balance)} must give each of {stages} stages at least one of {len(layers)} layers [HVD013]"
        )
    mine = Stage()
    mine.lengths = tuple(balance[stage::stages])
    for at in range(stage, len(balance), stages):
        first = sum(balance[:at])
        for number in range(first, first + balance[at]):
            mine.add_module(str(number), made(layers[number], number))
    return mine
