"""Names of parameters that agree on all ranks. An optimizer's state_dict knows parameters by their index alone, and
ranks may have made theirs in another order.

A name comes from the model, if that is given, else from `named_parameters` of hvd.DistributedOptimizer or of the
optimizer itself. Where no rank has such names, those count that broadcast_parameters was given before for the same
memory, if all ranks know one for each parameter. Where there is none, the place in the parameter group stands for it.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef

_broadcast_names: dict[Any, tuple[StorageWeakRef, int, str]] = {}  # by location in a storage: call, name
_calls = itertools.count()


def labels_of(optimizer: torch.optim.Optimizer, models: Sequence[Any] = ()) -> tuple[list[str], list[str] | None]:
    """A label of each parameter, such as "group 0 parameter fc.weight", in the order of the optimizer's state_dict; and
    labels for the case that all ranks have them here and none has names of its own, else None.

    models: Modules or state_dicts; of a parameter with several names the first of the alphabet counts.
    """
    known: dict[Any, str] = {}
    for number, model in enumerate(models):
        prefix = f"model {number} " if len(models) > 1 else ""
        for name, tensor in sorted(_named(model), key=lambda pair: pair[0]):
            key = id(tensor) if isinstance(model, torch.nn.Module) else _memory(tensor)
            known.setdefault(key, prefix + name)
    wrapped: Mapping[Any, str] = getattr(optimizer, "_hvd_names", {})

    def name_of(parameter: torch.Tensor) -> str | None:
        return known.get(id(parameter)) or known.get(_memory(parameter)) or wrapped.get(parameter)

    named = any(name_of(parameter) for group in optimizer.param_groups for parameter in group["params"])
    named = named or any(group.get("param_names") for group in optimizer.param_groups)
    return _labelled(optimizer, name_of), None if named else _broadcast_labels(optimizer)


def _labelled(optimizer: torch.optim.Optimizer, name_of: Callable[[torch.Tensor], str | None]) -> list[str]:
    ordered = isinstance(optimizer, torch.optim.LBFGS)  # one state of all parameters, one after the other
    labels = []
    for i, group in enumerate(optimizer.param_groups):
        own = group.get("param_names") or [None] * len(group["params"])
        for j, (parameter, its_name) in enumerate(zip(group["params"], own)):
            name = name_of(parameter) or its_name
            position = f"{j} " if ordered and name else ""
            labels.append(f"group {i} parameter {position}{name or j}")
    return labels


def remember(named: Iterable[tuple[Any, torch.Tensor]]) -> None:
    """Remember the names that broadcast_parameters was given, as long as the tensors' memory exists."""
    for location in [location for location, (storage, _, _) in list(_broadcast_names.items()) if storage.expired()]:
        _broadcast_names.pop(location, None)
    call = next(_calls)
    new: dict[Any, tuple[StorageWeakRef, int, str]] = {}
    for name, tensor in sorted(named, key=lambda pair: str(pair[0])):
        location = _location(tensor)
        if location is not None:
            new.setdefault(location, (StorageWeakRef(tensor.untyped_storage()), call, str(name)))
    _broadcast_names.update(new)


def _broadcast_labels(optimizer: torch.optim.Optimizer) -> list[str] | None:
    """None unless there is a name for each parameter. Two models may have the same names: the order of the calls, which
    is the same on all ranks, distinguishes them."""
    names = {}
    for parameter in itertools.chain.from_iterable(group["params"] for group in optimizer.param_groups):
        storage, call, name = _broadcast_names.get(_location(parameter), (None, 0, ""))
        if storage is None or storage.expired():
            return None
        names[parameter] = call, name
    calls = sorted({call for call, _ in names.values()})
    prefix = {call: f"model {number} " if len(calls) > 1 else "" for number, call in enumerate(calls)}
    return _labelled(optimizer, lambda parameter: prefix[names[parameter][0]] + names[parameter][1])


def _location(tensor: torch.Tensor) -> Any:
    """Where it lies in which storage; None for a wrapper of other tensors. A weak reference keeps the storage's number
    from being used again."""
    try:
        return tensor.untyped_storage()._cdata, tensor.storage_offset(), tuple(tensor.shape)
    except (RuntimeError, NotImplementedError):
        return None


def moved(state: dict[str, Any], theirs: list[str], mine: list[str]) -> dict[str, Any]:
    """The state_dict of an optimizer whose parameters have the labels `theirs`, for one that has them as `mine`."""
    if theirs == mine:
        return state
    index = {label: number for number, label in enumerate(mine)}
    to = {number: index[label] for number, label in enumerate(theirs)}
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
