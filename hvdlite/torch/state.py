"""How do all ranks start from the same weights and the same optimizer state?

`broadcast_parameters` overwrites tensors in place. `broadcast_optimizer_state` sends the root's state_dict: an object
with a placeholder for each tensor, then the tensors; the others load it. No step is taken to create state
that is not there yet, so parameters are never touched, and every optimizer works that has a state_dict.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import torch

from .. import _core
from ..errors import HvdMismatchError
from ..objects import allgather_object, broadcast_object
from ..ops import Handle
from .ops import plain


class _Placeholder(NamedTuple):
    """Stands for a tensor in the structure that travels first."""

    number: int
    shape: tuple[int, ...]
    dtype: str


def broadcast_parameters(
    params: Mapping[str, torch.Tensor] | Iterable[torch.Tensor | tuple[str, torch.Tensor]], root_rank: int
) -> None:
    """Overwrite tensors with the root's: a state_dict, or a list of tensors or of (name, tensor).

    All ranks must give the same names, shapes and dtypes, else all raise HvdMismatchError saying what differs.
    ValueError for what holds other things than tensors.
    """
    named = _named(params)
    mine = [(name, tuple(tensor.shape), str(tensor.dtype)) for name, tensor in named]
    _require_same(mine)
    handles: list[Handle] = []
    for name, tensor in named:
        handles.append(plain.broadcast_async_(tensor, root_rank, name=f"broadcast_parameters.{name}"))
    _wait(handles)


def _named(params: Any) -> list[tuple[str, torch.Tensor]]:
    if isinstance(params, Mapping):
        named = list(params.items())
    elif isinstance(params, Iterable) and not isinstance(params, (str, bytes, torch.Tensor)):
        named = [item if isinstance(item, tuple) else (str(i), item) for i, item in enumerate(params)]
    else:
        raise ValueError(f"invalid params of type {type(params).__name__}: expected a state_dict or a list of tensors")
    for pair in named:
        if len(pair) != 2 or not isinstance(pair[1], torch.Tensor):
            raise ValueError(f"invalid params: {pair[0]!r} is no tensor; send other things with hvd.broadcast_object")
    names = [name for name, _ in named]
    twice = sorted({name for name in names if names.count(name) > 1}) if len(set(names)) < len(names) else []
    if twice:
        raise ValueError(f"invalid params: these names are not unique: {', '.join(twice)}")
    return named


def _require_same(mine: list[Any]) -> None:
    everyone = allgather_object(mine)
    first = everyone[0]
    for rank, theirs in enumerate(everyone):
        if theirs == first:
            continue
        only_first = [entry for entry in first if entry not in theirs]
        only_theirs = [entry for entry in theirs if entry not in first]
        said = [f"rank 0 has {_shown(only_first)}"] if only_first else []
        said += [f"rank {rank} has {_shown(only_theirs)}"] if only_theirs else []
        raise HvdMismatchError(
            "broadcast_parameters: the ranks' parameters differ: "
            + ("; ".join(said) or f"rank {rank} has them in another order than rank 0")
            + ". Build the same model on every rank."
        )


def _shown(entries: list[Any]) -> str:
    shown = ", ".join(f"{name} {list(shape)} {dtype.removeprefix('torch.')}" for name, shape, dtype in entries[:3])
    return shown + (f" and {len(entries) - 3} more" if len(entries) > 3 else "")


def _wait(handles: list[Handle]) -> None:
    failure: Exception | None = None
    for handle in handles:
        try:
            handle.wait()
        except Exception as error:
            failure = failure or error
    if failure is not None:
        raise failure


def broadcast_optimizer_state(optimizer: torch.optim.Optimizer, root_rank: int, model: Any = None) -> None:
    """Give every rank the root's optimizer state and hyperparameters. Parameters are not touched.

    State that the root has not yet (before the first step) is none afterwards anywhere. `model` is Horovod's, and not
    needed here. ValueError from torch when the optimizers have different parameter groups.
    """
    is_root = _core.rank() == root_rank
    tensors: list[torch.Tensor] = []
    structure = _outline(optimizer.state_dict(), tensors) if is_root else None
    structure = broadcast_object(structure, root_rank)
    if not is_root:
        tensors = _blanks(structure)
    _wait([plain.broadcast_async_(tensor, root_rank) for tensor in tensors])
    if not is_root:
        optimizer.load_state_dict(_filled(structure, tensors))


def _outline(part: Any, tensors: list[torch.Tensor]) -> Any:
    """The structure with placeholders; its tensors are appended, on the CPU and contiguous."""
    if isinstance(part, torch.Tensor):
        tensors.append(part.detach().cpu().contiguous())
        return _Placeholder(len(tensors) - 1, tuple(part.shape), str(part.dtype).removeprefix("torch."))
    if isinstance(part, dict):
        return {key: _outline(value, tensors) for key, value in part.items()}
    if isinstance(part, (list, tuple)) and not hasattr(part, "_fields"):
        return type(part)(_outline(value, tensors) for value in part)
    return part


def _walk(part: Any, visit: Any) -> Any:
    """The structure with every placeholder replaced by what `visit` makes of it."""
    if isinstance(part, _Placeholder):
        return visit(part)
    if isinstance(part, dict):
        return {key: _walk(value, visit) for key, value in part.items()}
    if isinstance(part, (list, tuple)) and not hasattr(part, "_fields"):
        return type(part)(_walk(value, visit) for value in part)
    return part


def _blanks(structure: Any) -> list[torch.Tensor]:
    found: list[torch.Tensor] = []
    _walk(structure, lambda place: found.append(torch.empty(place.shape, dtype=getattr(torch, place.dtype))))
    return found


def _filled(structure: Any, tensors: list[torch.Tensor]) -> Any:
    return _walk(structure, lambda place: tensors[place.number])
