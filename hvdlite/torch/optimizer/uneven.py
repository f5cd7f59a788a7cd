"""Uneven inputs: ranks train together that have different numbers of batches.

Within `uneven_inputs` a rank that leaves its loop joins: the engine answers the others' reductions with zeros for it,
and averages count the ranks that still have data. When all have left, everything is taken over from the rank that
left last, which has made every step: parameters, optimizer state, and the model's buffers if the model is given.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from ...ops import Average, Sum, join
from ..state_broadcast import broadcast_optimizer_state, broadcast_parameters
from .adasum import Delta
from .methods import Distributed


@contextmanager
def uneven_inputs(optimizer: Any, *others: Any, model: Any = None) -> Iterator[None]:
    """Let ranks run different numbers of steps inside a ``with`` block.

    A rank that has no more batches leaves the block and waits at its end. It contributes nothing, and gradients are
    averaged over the ranks that still have batches. The average of any other allreduce of the loop divides by all
    ranks. Afterwards all ranks have the parameters and the optimizer state of the rank that came last. Gradients that
    were not stepped with are dropped. An exception in the block is raised without waiting.

    Args:
        optimizer (DistributedOptimizer): the optimizer of the loop, of all ranks of the job.
        others (DistributedOptimizer): more optimizers of the loop.
        model (torch.nn.Module, optional): its buffers are taken over as well.

    Yields:
        None: the block runs with no value.

    Raises:
        HvdPeerLostError: at the end of the block, if a rank dies or leaves the job.
        ValueError: for the ops ``Min``, ``Max`` and ``Product``, for a comm hook, and for a process set of some ranks
            only.
        TypeError: if an optimizer is not a ``DistributedOptimizer``.

    Example:
        >>> weight = torch.nn.Parameter(torch.tensor([0.0]))
        >>> optimizer = hvd.DistributedOptimizer(torch.optim.SGD([weight], lr=1.0), [("weight", weight)])
        >>> with hvd.uneven_inputs(optimizer):
        ...     for batch in range(hvd.rank() + 1):
        ...         optimizer.zero_grad()
        ...         weight.sum().backward()
        ...         optimizer.step()
        >>> weight.tolist()
        [-2.0]
    """
    optimizers = (optimizer, *others)
    for each in optimizers:
        _check(each)
    exchanges = [each._hvd for each in optimizers if getattr(each, "_hvd", None) is not None]
    for exchange in exchanges:
        exchange.restart()
        exchange.wire.count_active(True)
    try:
        yield
        for exchange in exchanges:
            exchange.behind = None  # all ranks get the weights of one
            exchange.restart()
    finally:
        for exchange in exchanges:
            exchange.wire.count_active(False)
    last = join()
    for each in optimizers:
        parameters = [parameter for group in each.param_groups for parameter in group["params"]]
        broadcast_parameters(parameters, last)
        broadcast_optimizer_state(each, last)
    if model is not None:
        broadcast_parameters(model.state_dict(), last)


def _check(optimizer: Any) -> None:
    if not isinstance(optimizer, (Distributed, Delta)):
        raise TypeError(f"uneven_inputs expects DistributedOptimizers, not {type(optimizer).__name__} [HVD229]")
    holds: Any = optimizer._hvd_delta if isinstance(optimizer, Delta) else optimizer._hvd
    if holds is None:
        return
    wire = holds if isinstance(optimizer, Delta) else holds.wire
    if wire.process_set.process_set_id != 0:
        raise ValueError(
            "uneven_inputs needs an optimizer of all ranks: leave process_set at hvd.global_process_set [HVD229]"
        )
    if isinstance(optimizer, Delta):
        return
    if wire.weights is None and wire.op not in (Average, Sum):
        raise ValueError("uneven_inputs adds zeros, and needs op=hvd.Average, hvd.Sum or hvd.WeightedAverage [HVD229]")
    if hasattr(holds.carrier, "hook"):
        raise ValueError("uneven_inputs does not support a comm hook: leave out one of them [HVD229]")
