"""What is each parameter of an optimizer called on every rank? Its state_dict knows parameters by their places alone,
and ranks may have made theirs in another order.

A name comes from the model, if that is given, else from `named_parameters` of hvd.DistributedOptimizer or of the
optimizer itself. Where there is none, the place in the parameter group stands for it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch


def labels_of(optimizer: torch.optim.Optimizer, models: Sequence[Any] = ()) -> list[str]:
    """A label of each parameter, such as "group 0 parameter fc.weight", in the order of the optimizer's state_dict.

    models: Modules or state_dicts; of a parameter with several names the first of the alphabet counts.
    """
    known: dict[Any, str] = {}
    for number, model in enumerate(models):
        prefix = f"model {number} " if len(models) > 1 else ""
        for name, tensor in sorted(_named(model), key=lambda pair: pair[0]):
            key = id(tensor) if isinstance(model, torch.nn.Module) else _memory(tensor)
            known.setdefault(key, prefix + name)
    wrapped: Mapping[Any, str] = getattr(optimizer, "_hvd_names", {})
    ordered = isinstance(optimizer, torch.optim.LBFGS)  # one state of all parameters, one after the other
    labels = []
    for i, group in enumerate(optimizer.param_groups):
        own = group.get("param_names") or [None] * len(group["params"])
        for j, (parameter, its_name) in enumerate(zip(group["params"], own)):
            name = known.get(id(parameter)) or known.get(_memory(parameter)) or wrapped.get(parameter) or its_name
            place = f"{j} " if ordered and name else ""
            labels.append(f"group {i} parameter {place}{name or j}")
    return labels


def moved(state: dict[str, Any], theirs: list[str], mine: list[str]) -> dict[str, Any]:
    """The state_dict of an optimizer whose parameters have the labels `theirs`, for one that has them as `mine`."""
    if theirs == mine:
        return state
    place = {label: number for number, label in enumerate(mine)}
    to = {number: place[label] for number, label in enumerate(theirs)}
    groups = []
    for group in state["param_groups"]:
        kept = {key: value for key, value in group.items() if key != "param_names"}  # the optimizer has its own
        groups.append({**kept, "params": sorted(to[number] for number in group["params"])})
    return {
        **state,
        "state": {to.get(key, key): value for key, value in state["state"].items()},
        "param_groups": groups,
    }


def _named(model: Any) -> Iterable[tuple[str, torch.Tensor]]:
    if isinstance(model, torch.nn.Module):
        return model.named_parameters(remove_duplicate=False)
    if isinstance(model, Mapping):
        return [(str(name), value) for name, value in model.items() if isinstance(value, torch.Tensor)]
    return []


def _memory(tensor: torch.Tensor) -> Any:
    """What a parameter and its entry in a state_dict have in common."""
    try:
        address = tensor.data_ptr()
    except (RuntimeError, NotImplementedError):  # a wrapper of other tensors
        address = 0
    return (address, tuple(tensor.shape)) if address else id(tensor)
