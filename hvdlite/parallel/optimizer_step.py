"""Update of a stage, once the gradients of a mini-batch are complete.

In this order: weights that several stages share get the sum of their gradients; gradients are averaged over the data
axis, in one grouped exchange; a GradScaler's factor is taken out, and all stages agree whether to skip the step; the
norm of the whole model's gradient is clipped; the optimizer steps, and the learning-rate scheduler after it. Gradients
were divided by the number of micro-batches where the loss was made, and nowhere else. All ranks exchange in this
order. A weight that has no gradient on any of them has none afterwards.

The norm counts what is cut over tensor-parallel ranks on each of them, what is replicated once, and what is shared
between stages on its first stage only.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import torch

import hvdlite.torch as hvd


class Tie(NamedTuple):
    """A weight that stages share. names: its name on each of them, by stage, and `own` here; group: their ranks of
    this line."""

    name: str
    names: Mapping[int, str]
    own: str
    group: hvd.ProcessSet


def ties_of(
    module: torch.nn.Module, mesh: hvd.Mesh, axis: str, tied: Iterable[tuple[str, Mapping[int, str]]]
) -> list[Tie]:
    """Those of this stage. A call of all ranks of the mesh: it opens the sets. ValueError for a stage or a name
    that is not there."""
    stage, found = mesh.coordinate(axis), []
    for name, names in tied:
        if len(names) < 2 or not set(names) <= set(range(mesh.shape[axis])):
            raise ValueError(
                f"tied weight {name!r} names the stages {sorted(names)}, but must name two or more of "
                f"{mesh.shape[axis]} stages [HVD011]"
            )
        group = mesh.some(axis, names)
        if group is not None:
            try:
                module.get_parameter(names[stage])
            except AttributeError:
                has = ", ".join(known for known, _ in module.named_parameters())
                raise ValueError(
                    f"stage {stage} has no parameter {names[stage]!r} to tie as {name!r}; it has {has} [HVD011]"
                ) from None
            found.append(Tie(name, names, names[stage], group))
    return found


def digests(module: torch.nn.Module, ties: Iterable[Tie]) -> dict[str, str]:
    """What copies of one weight have in common."""
    return {tie.name: hashlib.sha256(_bits(module.get_parameter(tie.own))).hexdigest() for tie in ties}


def _bits(t: torch.Tensor) -> bytes:
    return t.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes()


class StageUpdate:
    """The update of one stage. data: the set over which gradients are averaged, or None; model: the sets over which
    this model lies in parts, the pipeline's line first. clip: the largest norm of a gradient; None: any."""

    def __init__(
        self, module: torch.nn.Module, optimizer: Any, stage: int, data: hvd.ProcessSet | None,
        model: list[hvd.ProcessSet], ties: list[Tie], name: str, lr_scheduler: Any = None, scaler: Any = None,
        clip: float | None = None, timeout: float | None = None
    ) -> None:  # fmt: skip
        self.timeout = timeout
        self.module, self.optimizer, self.stage, self.name = module, optimizer, stage, name
        self.data, self.model, self.ties = data, model, ties
        self.lr_scheduler, self.scaler, self.clip = lr_scheduler, scaler, clip
        self.norm: float | None = None  # of the last gradient, before it was clipped
        self._blank = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.0)  # for a stage without gradients

    def exchange(self) -> None:
        """Gradients are those of the whole mini-batch, on all ranks that hold a copy of this stage. ValueError for one
        that no other copy would get."""
        own = {id(p) for p in self.module.parameters()}
        for group in self.optimizer.param_groups if self.optimizer is not None else ():
            for p in group["params"]:
                if p.grad is not None and id(p) not in own:
                    raise ValueError(
                        f"the optimizer of stage {self.stage} has a parameter of shape {list(p.shape)} that learns, "
                        "but is not of the stage (is it the loss's?): make it part of the last layer [HVD011]"
                    )
        for tie in self.ties:
            weight, name = self.module.get_parameter(tie.own), f"{self.name}.tied.{tie.name}"
            learns = torch.tensor([float(weight.requires_grad), float(weight.grad is not None)])
            learning, used = self.added(learns, f"{name}.used", tie.group).tolist()
            if learning not in (0, tie.group.size()):
                frozen = "is not" if weight.requires_grad else "is"
                raise ValueError(
                    f"the tied weight {tie.name!r} {frozen} frozen on stage {self.stage}, but otherwise on another of "
                    f"the stages {sorted(tie.names)}: set requires_grad alike on all of them [HVD022]"
                )
            if used:
                weight.grad = torch.zeros_like(weight) if weight.grad is None else weight.grad
                self.added(weight.grad, name, tie.group)
        if self.data is None:
            return
        trained = {name: p for name, p in self.module.named_parameters() if p.requires_grad}
        params = list(trained.values())
        for name, p in trained.items():
            if p.grad is not None and p.grad.layout != torch.strided:
                raise ValueError(
                    f"the gradient of {name!r} is sparse, and copies of a stage cannot average it: make the layer with "
                    "sparse=False [HVD203]"
                )
        used = torch.tensor([float(p.grad is not None) for p in params])  # a branch may run on some ranks only
        used_anywhere = hvd.allreduce_async(used, op=hvd.Max, name=f"{self.name}.used", process_set=self.data)
        grads = [torch.zeros_like(p) if p.grad is None else p.grad for p in params]
        if grads:
            handle = hvd.grouped_allreduce_async_(grads, name=f"{self.name}.grads", process_set=self.data)
            hvd.synchronize(handle, timeout=self.timeout)
        for p, grad, anywhere in zip(params, grads, hvd.synchronize(used_anywhere, timeout=self.timeout).tolist()):
            p.grad = grad if anywhere else None

    def added(self, t: torch.Tensor, name: str, group: hvd.ProcessSet, op: Any = hvd.Sum) -> torch.Tensor:
        """In place, over a group."""
        return hvd.synchronize(hvd.allreduce_async_(t, op=op, name=name, process_set=group), timeout=self.timeout)

    def step(self, factor: float = 1.0) -> None:
        """The optimizer's step, with learning rates times factor. Skipped on all stages where a scaled gradient is not
        finite on one."""
        optimizer = self._unscaled() if self.scaler else self.optimizer
        if self.clip is not None:
            self._clip()
        if optimizer is not None:
            rates = [(group, group["lr"], group["lr"] * factor) for group in optimizer.param_groups]
            for group, _, scaled in rates if factor != 1.0 else ():
                group["lr"] = scaled
            if self.scaler:
                self.scaler.step(optimizer)
                self.scaler.update()
            else:
                optimizer.step()
            for group, rate, scaled in rates if factor != 1.0 else ():  # a step may set a rate of its own
                group["lr"] = rate if group["lr"] is scaled else group["lr"] / factor
        for p in self.module.parameters():
            p.grad = None
        if self.lr_scheduler is not None:
            self.lr_scheduler.step()

    def _unscaled(self) -> Any:
        """The optimizer whose gradients the scaler has brought to their true size: one that is not finite on any rank
        of the model is not finite here, so that all skip the step and halve the scale."""
        optimizer = self.optimizer
        groups = optimizer.param_groups if optimizer is not None else []
        grads = [p.grad for group in groups for p in group["params"] if p.grad is not None]
        if not grads:
            optimizer = self._blank
            optimizer.param_groups[0]["params"][0].grad = torch.zeros(1)
            grads = [optimizer.param_groups[0]["params"][0].grad]
        infinite = torch.tensor([float(not all(bool(torch.isfinite(grad).all()) for grad in grads))])
        for i, group in enumerate(self.model):
            self.added(infinite, f"{self.name}.infinite.{i}", group, hvd.Max)
        if infinite.item():
            grads[0].fill_(float("inf"))
        self.scaler.scale(torch.zeros(1, device=grads[0].device))  # a stage that has no loss has never called it
        self.scaler.unscale_(optimizer)
        return optimizer

    def _clip(self) -> None:
        assert self.clip is not None
        square = torch.zeros(1, dtype=torch.float64)
        again = {id(self.module.get_parameter(tie.own)) for tie in self.ties if self.stage != min(tie.names)}
        first = all(group.rank() == 0 for group in self.model[1:])
        for p in self.module.parameters():
            if p.grad is not None and id(p) not in again and (first or getattr(p, "cut", None) is not None):
                square += p.grad.double().pow(2).sum().cpu()
        for i, group in enumerate(self.model):
            self.added(square, f"{self.name}.norm.{i}", group)
        self.norm = float(square.sqrt())
        if self.norm > self.clip:
            for p in self.module.parameters():
                if p.grad is not None:
                    p.grad.mul_(self.clip / (self.norm + 1e-6))
