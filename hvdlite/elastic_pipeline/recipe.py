"""Recipe of a pipeline's stage: how it is made of functions and of kept layers, and how its state is parted by layer.

A kept layer has what Pipeline.state_dict gives by the names of its parameters, and two things that no state_dict has:
which parameters learn, and which modules are in training mode. What has no layer's name is the same on all stages.

Each layer is made under a seed of its own. Weights that are tied get the value of the first name, wherever it is;
within a stage they are one parameter, between stages Pipeline adds their gradients.
"""

from __future__ import annotations

import copy
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch

import hvdlite.torch as hvd

from ..parallel import Pipeline, split
from ..plan import Layout
from .exchange import Layers
from .holdings import stages_of

Made = Callable[[], torch.nn.Module]
_LAYER = re.compile(r"(?:optimizer/|pipeline/lr_scheduler/|pipeline/update/[^/]+/)?(\d+)\.")
_OF_A_PLACE = ("pipeline/random", "pipeline/layout")  # in the mesh, and of no use in another one
_FLAGS = "flags"


def taken_apart(own: Mapping[str, Any], stage: torch.nn.Module | None) -> tuple[dict[str, Any], Layers]:
    """What all stages have alike, and copies of this stage's layers in host memory."""
    shared = {name: value for name, value in own.items() if not _LAYER.match(name) and name not in _OF_A_PLACE}
    layers: Layers = {int(number): {_FLAGS: _flags(each)} for number, each in stage.named_children()} if stage else {}
    for name, value in own.items():
        if found := _LAYER.match(name):
            kept = value.detach().to("cpu", copy=True) if isinstance(value, torch.Tensor) else value
            layers[int(found[1])][name] = kept
    return shared, layers


OPTIMIZER = "pipeline/optimizer"  # its class
SEEDS = "seeds"  # the token of commit 0, where layers are made under their seeds


class Commit(NamedTuple):
    """layers: this rank's, and those that it keeps. shared: what all stages have alike, as the count of steps."""

    token: str
    shared: dict[str, Any]
    layers: Layers


class Recipe:
    """What a user gives to make a pipeline of, in any layout."""

    def __init__(
        self, layers: Sequence[Made], optimizer: Callable[[Any], Any], loss: Callable[[Any, Any], torch.Tensor],
        seed: int, lr_scheduler: Callable[[Any], Any] | None, tied: Sequence[tuple[str, Sequence[str]]],
        settings: dict[str, Any]
    ) -> None:  # fmt: skip
        self.layers, self._optimizer, self._loss, self._seed = list(layers), optimizer, loss, seed
        self._lr_scheduler, self._settings = lr_scheduler, settings
        self._tied = [(name, list(names)) for name, names in tied]
        scaler = settings["scaler"]
        self._checked: list[Made] = []
        self._scaler = None if scaler is None else copy.deepcopy(scaler.state_dict())  # before the first step
        for number, layer in enumerate(self.layers):
            if isinstance(layer, torch.nn.Module) or not callable(layer):
                raise ValueError(
                    f"layer {number} is a {type(layer).__name__}: pass a function that makes it, since ranks make "
                    "layers anew when they change [HVD013]"
                )
        for name, names in self._tied:
            if len(names) < 2 or not all(_number_of(each) < len(self.layers) for each in names):
                raise ValueError(
                    f"tied weight {name!r} names {names}, but must name two or more parameters by their layer, as "
                    "'0.weight' [HVD011]"
                )

    def describe(self) -> str:
        """What must be the same on all ranks."""
        return f"{len(self.layers)} layers, seed {self._seed}, tied {self._tied}"

    def made(
        self, layout: Layout, mesh: hvd.Mesh, kept: tuple[Mapping[str, Any], Layers] | None
    ) -> tuple[torch.nn.Module, Any, Pipeline]:  # fmt: skip
        """This rank's stage, its optimizer and its pipeline. kept: what all stages have alike, and this stage's layers;
        None: the weights are those of the seeds. All ranks of the mesh call it."""
        number, cuts = mesh.coordinate("pp"), stages_of(layout.balance)
        self._require_new(cuts[number][0])
        stage = split([self._seeded(n) for n in range(len(self.layers))], mesh, layout.balance)
        ties = self._share_ties(stage, cuts, number)
        children = list(stage.named_children())
        shared, layers = kept or ({}, {})
        for layer, module in children if kept is not None else ():
            _set_flags(module, layers[int(layer)][_FLAGS])
        parameters = list(stage.parameters())
        optimizer = self._optimizer(parameters) if parameters else None
        name, known = type(optimizer).__name__, shared.get(OPTIMIZER)
        if optimizer is not None and known not in (None, name):
            raise ValueError(f"the commit has the state of {known}, but the optimizer is {name} [HVD018]")
        scheduler = None if self._lr_scheduler is None or optimizer is None else self._lr_scheduler(optimizer)
        if self._scaler is not None:  # the pipelines compare it when they are made
            self._settings["scaler"].load_state_dict(copy.deepcopy(shared.get("pipeline/scaler") or self._scaler))
        loss = self._loss if number == layout.pp - 1 else None
        pipe = Pipeline(
            stage, optimizer, mesh, loss, layout.micro_batches, lr_scheduler=scheduler, tied=ties, **self._settings
        )
        if kept is not None:
            whole = {name: value for layer, _ in children for name, value in layers[int(layer)].items()}
            pipe.load_whole({**shared, **whole})
        return stage, optimizer, pipe

    def _require_new(self, number: int) -> None:
        """ValueError for a function that returns one module again: its weights would not be the first ones."""
        if self.layers[number] not in self._checked:
            if self._seeded(number)() is self._seeded(number)():
                raise ValueError(
                    f"the function of layer {number} returned the same module twice: let it make a new one [HVD013]"
                )
            self._checked.append(self.layers[number])

    def _seeded(self, number: int) -> Made:
        def make() -> torch.nn.Module:
            with torch.random.fork_rng(range(torch.cuda.device_count()) if torch.cuda.is_initialized() else []):
                torch.manual_seed(1_000_003 * self._seed + number)
                return self.layers[number]()

        return make

    def _share_ties(
        self, stage: torch.nn.Module, stages: list[range], own: int
    ) -> list[tuple[str, dict[int, str]]]:  # fmt: skip
        """Those between stages, as Pipeline has them. Within a stage the layers get one parameter."""
        found = []
        for tie, names in self._tied:
            by_stage: dict[int, list[str]] = {}
            for name in names:
                by_stage.setdefault(next(s for s, of in enumerate(stages) if _number_of(name) in of), []).append(name)
            if own in by_stage:
                first, *others = by_stage[own]
                parameter = stage.get_parameter(first)
                if first != names[0]:  # the first name gives the value of all
                    made = self._seeded(_number_of(names[0]))()
                    with torch.no_grad():
                        parameter.copy_(made.get_parameter(names[0].partition(".")[2]))
                for other in others:
                    module, _, attribute = other.rpartition(".")
                    setattr(stage.get_submodule(module), attribute, parameter)
            if len(by_stage) > 1:
                found.append((tie, {at: each[0] for at, each in by_stage.items()}))
        return found


def _number_of(name: str) -> int:
    """Of the layer that a parameter belongs to."""
    number = str(name).partition(".")[0]
    return int(number) if number.isdigit() else sys.maxsize


def _flags(module: torch.nn.Module) -> tuple[dict[str, bool], dict[str, bool]]:
    """Which parameters learn, and which modules are in training mode."""
    learns = {name: p.requires_grad for name, p in module.named_parameters()}
    return learns, {name: each.training for name, each in module.named_modules()}


def _set_flags(module: torch.nn.Module, flags: tuple[dict[str, bool], dict[str, bool]]) -> None:
    learns, trains = flags
    for name, p in module.named_parameters():
        p.requires_grad_(learns.get(name, p.requires_grad))
    for name, each in module.named_modules():
        each.training = trains.get(name, each.training)
