"""How do ranks train together that have different numbers of batches?

Within `uneven_inputs` a rank that leaves its loop joins: the engine answers the others' reductions with zeros for it,
and averages count the ranks that still have data. When all have left, everything is taken over from the rank that
left last, which has made every step: parameters, optimizer state, and the model's buffers if the model is given.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from ...ops import Average, Sum, join
from ..state import broadcast_optimizer_state, broadcast_parameters
from .delta import Delta
from .methods import Distributed


@contextmanager
def uneven_inputs(optimizer: Any, *others: Any, model: Any = None) -> Iterator[None]:
    """Within, ranks may run different numbers of steps with these DistributedOptimizers; none waits for others' data.

        with hvd.uneven_inputs(optimizer):
            for batch in loader:
                optimizer.zero_grad()
                loss_of(model, batch).backward()
                optimizer.step()

    Gradients are averaged over the ranks that still have batches. A rank that has run out contributes nothing and waits
    at the end of the block; other allreduces of the loop may go on, too (its contribution is zero, and their averages
    divide by all ranks). Afterwards all ranks have the parameters and the optimizer state of the rank that came last;
    `model`: and its buffers. Gradients that were not stepped with are dropped.

    TypeError for what is no DistributedOptimizer; ValueError for an op that zeros would spoil (Min, Max, Product), for
    a comm hook, and for a process set of some ranks only. An exception in the block goes on, without waiting.
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
        raise ValueError(
            "uneven_inputs needs op=hvd.Average, hvd.Sum or hvd.WeightedAverage: zeros would spoil others [HVD229]"
        )
    if hasattr(holds.carrier, "hook"):
        raise ValueError("uneven_inputs does not know how a comm hook counts ranks: leave one of them out [HVD229]")
