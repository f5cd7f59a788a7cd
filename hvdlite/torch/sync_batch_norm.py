"""Batch normalization over the batches of all ranks: as if one process had seen them in one batch.

Forward needs the mean and variance of all rows. Each rank takes its own by torch (two passes, no cancellation) and
sends, per channel, n*mean and n*(variance + mean^2), and its number of rows n, in float64, in one allreduce: ranks may
have different numbers of rows, also none. Putting the parts together cancels where means are large, by 1e-16 times
(mean / deviation)^2: far below what float32 inputs of such a mean have lost already. Backward sends two sums per
channel in one allreduce, and none if the input needs no gradient.

The gradients of weight and bias are this rank's part, as for any layer: the distributed optimizer reduces them. Every
rank has to run forward and backward equally often; statistics are the same bits on all ranks.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.autograd.function import once_differentiable
from torch.nn import functional
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.parameter import is_lazy

from ..ops import Sum
from ..process_sets.process_set import ProcessSet, global_process_set
from .ops import plain


class SyncBatchNorm(_BatchNorm):
    """Batch normalization with the statistics of the batches of all ranks together.

    It takes inputs of shape (N, C) or (N, C, ...); N may differ between ranks, and may be 0. All ranks of
    ``process_set`` must run forward and backward equally often. Each takes one allreduce in float64; backward takes
    none if the input needs no gradient. The gradients of weight and bias are this rank's part; ``DistributedOptimizer``
    reduces them. In eval mode it does not communicate.

    Args:
        num_features (int): number of channels C.
        eps (float): added to the variance. Default: 1e-5.
        momentum (float, optional): share of the new batch in running statistics. None: plain mean of all batches.
            Default: 0.1.
        affine (bool): False has no weight and bias. Default: True.
        track_running_stats (bool): False has no running statistics. Default: True.
        process_set (ProcessSet): ranks that take part. Default: all ranks.
        device (torch.device, optional): device of the parameters. Default: PyTorch's.
        dtype (torch.dtype, optional): dtype of the parameters. Default: PyTorch's.

    Raises:
        ValueError: in forward, for a wrong input shape, and if all ranks together have less than two values per
            channel.
        HvdPeerLostError: in forward and backward, if a rank dies or leaves the job.

    Example:
        >>> layer = hvd.SyncBatchNorm(1, momentum=None)
        >>> _ = layer(torch.tensor([[1.0], [3.0]]) + 4 * hvd.rank())
        >>> layer.running_mean.tolist()
        [4.0]
    """

    def __init__(
        self,
        num_features: int,
        eps: float = 1e-5,
        momentum: float | None = 0.1,
        affine: bool = True,
        track_running_stats: bool = True,
        process_set: ProcessSet = global_process_set,
        device: Any = None,
        dtype: Any = None,
    ) -> None:
        super().__init__(num_features, eps, momentum, affine, track_running_stats, device=device, dtype=dtype)
        self.process_set = process_set

    def _check_input_dim(self, input: torch.Tensor) -> None:
        if input.dim() < 2:
            raise ValueError(f"expected at least 2D input (got {input.dim()}D input) [HVD236]")
        if input.size(1) != self.num_features:
            raise ValueError(f"expected {self.num_features} channels in dimension 1, got {list(input.shape)} [HVD236]")

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """Normalized input, of its shape and dtype. ValueError if all ranks together have one value per channel."""
        self._check_input_dim(input)
        factor = self._factor()
        if not self.training or self.process_set.size() == 1:
            running = not self.training or self.track_running_stats
            of_batch = self.training or (self.running_mean is None and self.running_var is None)
            mean, variance = (self.running_mean, self.running_var) if running else (None, None)
            return functional.batch_norm(input, mean, variance, self.weight, self.bias, of_batch, factor, self.eps)
        output, mean, variance, count = _Normalize.apply(input, self.weight, self.bias, self.eps, self.process_set)
        if self.training and self.track_running_stats:
            self._track(mean, variance * (count / (count - 1)), factor)
        return output

    def _factor(self) -> float:
        """How much of the running statistics this batch replaces; counts the batch."""
        if not self.training or not self.track_running_stats or self.num_batches_tracked is None:
            return 0.0 if self.momentum is None else self.momentum
        self.num_batches_tracked.add_(1)
        return 1.0 / float(self.num_batches_tracked) if self.momentum is None else self.momentum

    @torch.no_grad()
    def _track(self, mean: torch.Tensor, variance: torch.Tensor, factor: float) -> None:
        for running, value in ((self.running_mean, mean), (self.running_var, variance)):
            if running is not None:
                running.lerp_(value.to(running.dtype), factor)


class _Normalize(torch.autograd.Function):
    """(output, mean, biased variance, rows); mean and variance per channel in the dtype that is computed in."""

    @staticmethod
    def forward(
        ctx: Any, input: torch.Tensor, weight: Any, bias: Any, eps: float, process_set: ProcessSet
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, int]:
        rows = input.to(torch.float64 if input.dtype is torch.float64 else torch.float32)
        dims = [dim for dim in range(input.dim()) if dim != 1]
        mean, variance, count = _statistics(rows, dims, process_set)
        if count < 2:
            raise ValueError(
                f"expected more than 1 value per channel on all ranks together, got input {input.shape} [HVD236]"
            )
        mean, variance = mean.to(rows.device, rows.dtype), variance.to(rows.device, rows.dtype)
        inverse = torch.rsqrt(variance + eps)
        shape = [1, -1] + [1] * (input.dim() - 2)
        scale = inverse if weight is None else inverse * weight.to(rows.dtype)
        output = (rows - mean.view(shape)).mul_(scale.view(shape))
        if bias is not None:
            output.add_(bias.to(rows.dtype).view(shape))
        ctx.save_for_backward(input, weight, mean, inverse)
        ctx.count, ctx.dims, ctx.shape, ctx.process_set = count, dims, shape, process_set
        ctx.dtypes = None if weight is None else weight.dtype, None if bias is None else bias.dtype
        ctx.mark_non_differentiable(mean, variance)
        return output.to(input.dtype), mean, variance, count

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor, *_: Any) -> Any:
        input, weight, mean, inverse = ctx.saved_tensors
        shape = ctx.shape
        gradient = gradient.to(mean.dtype)
        normal = (input.to(mean.dtype) - mean.view(shape)).mul_(inverse.view(shape))
        sums = torch.stack([gradient.sum(ctx.dims), (gradient * normal).sum(ctx.dims)])
        of_input = None
        if ctx.needs_input_grad[0]:
            channels = mean.numel()
            name = f"sync_batch_norm.{channels}.backward"
            total = plain.allreduce(sums.cpu().double(), name=name, op=Sum, process_set=ctx.process_set)
            of_all, with_normal = (total / ctx.count).to(mean.device, mean.dtype)
            scale = inverse if weight is None else inverse * weight.to(mean.dtype)
            of_input = (
                (gradient - of_all.view(shape)).sub_(normal.mul_(with_normal.view(shape))).mul_(scale.view(shape))
            )
            of_input = of_input.to(input.dtype)
        of_weight = sums[1].to(ctx.dtypes[0]) if ctx.needs_input_grad[1] else None
        of_bias = sums[0].to(ctx.dtypes[1]) if ctx.needs_input_grad[2] else None
        return of_input, of_weight, of_bias, None, None


def _statistics(rows: torch.Tensor, dims: list[int], process_set: ProcessSet) -> tuple[torch.Tensor, torch.Tensor, int]:
    """Mean, biased variance (per channel, on the CPU) and number of values per channel, of all ranks."""
    channels = rows.size(1)
    mine = rows.numel() // max(channels, 1)
    packed = torch.zeros(2 * channels + 1, dtype=torch.float64)
    if mine:
        variance, mean = torch.stack(torch.var_mean(rows, dims, correction=0)).cpu().double()
        packed[0] = mine
        packed[1 : channels + 1] = mean * mine
        packed[channels + 1 :] = (variance + mean * mean) * mine
    total = plain.allreduce(packed, name=f"sync_batch_norm.{channels}.forward", op=Sum, process_set=process_set)
    count = int(total[0])
    mean = total[1 : channels + 1] / max(count, 1)
    variance = (total[channels + 1 :] / max(count, 1) - mean * mean).clamp_(min=0)
    return mean, variance, count


def convert_sync_batchnorm(module: torch.nn.Module, process_set: ProcessSet = global_process_set) -> torch.nn.Module:
    """Replace every BatchNorm layer in a module by ``SyncBatchNorm``.

    Parameters and buffers stay the same objects, so an optimizer that was made before stays valid. It does not
    communicate.

    Args:
        module (torch.nn.Module): the module, which is changed in place.
        process_set (ProcessSet): ranks that the layers normalize over. Default: all ranks.

    Returns:
        torch.nn.Module: ``module``; if it is a BatchNorm layer itself, its replacement.

    Raises:
        ValueError: for a lazy layer that has not run yet.
        TypeError: if ``module`` is not a ``torch.nn.Module``.

    Example:
        >>> model = torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.BatchNorm1d(3))
        >>> type(hvd.convert_sync_batchnorm(model)[1]).__name__
        'SyncBatchNorm'
    """
    if not isinstance(module, torch.nn.Module):
        raise TypeError(f"convert_sync_batchnorm expects a torch.nn.Module, not {type(module).__name__} [HVD236]")
    return _converted(module, process_set, {})


def _converted(
    module: torch.nn.Module, process_set: ProcessSet, done: dict[torch.nn.Module, torch.nn.Module]
) -> torch.nn.Module:
    if module in done:  # one layer in two places stays one
        return done[module]
    result = done[module] = _synchronized(module, process_set) if _is_convertible(module) else module
    for name, child in list(module._modules.items()):
        if child is not None:
            result._modules[name] = _converted(child, process_set, done)
    return result


def _is_convertible(module: torch.nn.Module) -> bool:
    return isinstance(module, _BatchNorm) and not isinstance(module, SyncBatchNorm)


def _synchronized(layer: Any, process_set: ProcessSet) -> SyncBatchNorm:
    if any(is_lazy(tensor) for tensor in (layer.weight, layer.running_mean)):
        raise ValueError(f"{layer} has an unknown number of features: run one batch before you convert it [HVD236]")
    result = SyncBatchNorm(
        layer.num_features, layer.eps, layer.momentum, False, layer.track_running_stats, process_set, device="meta"
    )
    result.affine = layer.affine
    result.weight, result.bias = layer.weight, layer.bias
    for name in ("running_mean", "running_var", "num_batches_tracked"):
        result._buffers[name] = layer._buffers.get(name)
    return result.train(layer.training)
