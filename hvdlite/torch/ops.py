"""The collectives on tensors, and their gradients.

A tensor that requires grad keeps its history through the forms that return a new tensor at once (allreduce,
grouped_allreduce, allgather, broadcast). As in Horovod, backward of a sum is a sum, of an average an average, of
allgather each rank's rows of the averaged gradient, of broadcast the average for the root and zero for the others
(where one process would sum in the last two: scripts written for Horovod rely on the average).
In-place and asynchronous forms have no gradient. Backward passes communicate, so every rank must run them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from .. import _core
from ..ops import Average, Collectives, Sum, op_of
from ..process_set import ProcessSet, global_process_set
from .adapter import TorchAdapter


def _tracked(tensor: Any) -> bool:
    return isinstance(tensor, torch.Tensor) and tensor.requires_grad and torch.is_grad_enabled()


def _backward_name(name: str | None) -> str | None:
    return None if name is None else name + ".backward"


class _Allreduce(torch.autograd.Function):
    """Of one tensor or of a group, which is how many tensors follow the settings."""

    @staticmethod
    def forward(ctx: Any, grouped: bool, name: str | None, settings: dict[str, Any], *tensors: torch.Tensor) -> Any:
        ctx.grouped, ctx.name, ctx.settings = grouped, name, settings
        if grouped:
            return tuple(plain.grouped_allreduce(list(tensors), name=name, **settings))
        return plain.allreduce(tensors[0], name=name, **settings)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        if ctx.settings["op"] not in (Average, Sum):
            raise NotImplementedError(f"allreduce with op {_core.op_name(ctx.settings['op'])} has no gradient")
        name = _backward_name(ctx.name)
        if ctx.grouped:
            return (None, None, None, *plain.grouped_allreduce(list(gradients), name=name, **ctx.settings))
        return None, None, None, plain.allreduce(gradients[0], name=name, **ctx.settings)


class _Allgather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, name: str | None, process_set: ProcessSet) -> torch.Tensor:
        ctx.name, ctx.process_set = name, process_set
        handle = plain.allgather_async(tensor, name, process_set)
        result = handle.wait()
        mine = torch.tensor([len(tensor)])
        rows = plain.allgather(mine, None if name is None else name + ".rows", process_set).tolist()
        ctx.rows = rows
        return result

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        name = _backward_name(ctx.name)
        mean = plain.allreduce(gradient, name=name, op=Average, process_set=ctx.process_set)
        return mean.split(ctx.rows)[ctx.process_set.rank()], None, None


class _Broadcast(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, root_rank: int, name: str | None, process_set: ProcessSet) -> Any:
        ctx.root_rank, ctx.name, ctx.process_set = root_rank, name, process_set
        return plain.broadcast(tensor, root_rank, name, process_set)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        name = _backward_name(ctx.name)
        mean = plain.allreduce(gradient, name=name, op=Average, process_set=ctx.process_set)
        return (mean if _core.rank() == ctx.root_rank else torch.zeros_like(mean)), None, None, None


class TorchCollectives(Collectives[torch.Tensor]):
    """The collectives, with gradients where a tensor asks for one."""

    def allreduce(
        self, tensor: Any, average: bool | None = None, name: str | None = None, *, op: int | None = None,
        prescale_factor: float = 1.0, postscale_factor: float = 1.0, process_set: ProcessSet = global_process_set
    ) -> torch.Tensor:  # fmt: skip
        """As Collectives.allreduce; differentiable for Average and Sum."""
        settings = _settings(average, op, prescale_factor, postscale_factor, process_set)
        if _tracked(tensor):
            return _Allreduce.apply(False, name, settings, tensor)
        return super().allreduce(tensor, name=name, **settings)

    def grouped_allreduce(
        self, tensors: Sequence[Any], average: bool | None = None, name: str | None = None, *, op: int | None = None,
        prescale_factor: float = 1.0, postscale_factor: float = 1.0, process_set: ProcessSet = global_process_set
    ) -> list[torch.Tensor]:  # fmt: skip
        """As Collectives.grouped_allreduce; differentiable for Average and Sum."""
        settings = _settings(average, op, prescale_factor, postscale_factor, process_set)
        if isinstance(tensors, Sequence) and any(_tracked(tensor) for tensor in tensors):
            return list(_Allreduce.apply(True, name, settings, *tensors))
        return super().grouped_allreduce(tensors, name=name, **settings)

    def allgather(
        self, tensor: Any, name: str | None = None, process_set: ProcessSet = global_process_set
    ) -> torch.Tensor:
        """As Collectives.allgather; differentiable."""
        if _tracked(tensor):
            return _Allgather.apply(tensor, name, process_set)
        return super().allgather(tensor, name, process_set)

    def broadcast(
        self, tensor: Any, root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set
    ) -> torch.Tensor:
        """As Collectives.broadcast; differentiable."""
        if _tracked(tensor):
            return _Broadcast.apply(tensor, root_rank, name, process_set)
        return super().broadcast(tensor, root_rank, name, process_set)


def _settings(
    average: bool | None, op: int | None, prescale_factor: float, postscale_factor: float, process_set: ProcessSet
) -> dict[str, Any]:
    return {
        "op": op_of(average, op),
        "prescale_factor": prescale_factor,
        "postscale_factor": postscale_factor,
        "process_set": process_set,
    }


plain: Collectives[torch.Tensor] = Collectives(TorchAdapter())
collectives = TorchCollectives(plain.adapter)
