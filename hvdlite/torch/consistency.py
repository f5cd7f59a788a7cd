"""Have all ranks still the same weights? They should, since all start from the root's and make the same steps; when a
rank seeds, clips, freezes or loads by itself they drift apart, and nothing but the result says so.

Compared are the bits, by digests: 16 bytes a rank while all is well. Only where they differ do names and digests of all
tensors travel, to say which tensor is the first, and on which ranks. Equal values of other bits (0.0 and -0.0) differ.
"""

from __future__ import annotations

import hashlib
from typing import Any

import torch

from ..errors import HvdMismatchError
from ..objects import allgather_object
from ..process_set import ProcessSet, global_process_set
from .state import module_tensors, named_tensors, require_same


def check_consistency(model: Any, optimizer: Any = None, process_set: ProcessSet = global_process_set) -> None:
    """Returns when all ranks have the same bits in all tensors, else raises HvdMismatchError, the same on all ranks,
    naming the first tensor that differs and the ranks that differ from the first rank of the set.

    model: a Module (parameters and buffers), a state_dict, or a list of tensors. optimizer: its state is compared, too.
    """
    named = list(module_tensors(model).items()) if isinstance(model, torch.nn.Module) else named_tensors(model)
    require_same("check_consistency", named, process_set)
    if optimizer is not None:
        named += _tensors_of(optimizer.state_dict(), "optimizer")
    mine = [(str(name), _digest(value)) for name, value in named]
    total = hashlib.blake2b(repr(mine).encode(), digest_size=16).digest()
    if len(set(allgather_object(total, None, process_set))) == 1:
        return
    raise HvdMismatchError(_difference(allgather_object(mine, None, process_set), process_set.ranks))


def _tensors_of(part: Any, path: str) -> list[tuple[str, Any]]:
    """Every leaf of a nested structure with its path."""
    if isinstance(part, dict):
        return [leaf for key, value in part.items() for leaf in _tensors_of(value, f"{path}.{key}")]
    if isinstance(part, (list, tuple)):
        return [leaf for i, value in enumerate(part) for leaf in _tensors_of(value, f"{path}.{i}")]
    return [(path, part)]


def _digest(value: Any) -> str:
    """Of bits, shape and dtype; of what is no tensor, of how it shows."""
    digest = hashlib.blake2b(digest_size=16)
    if isinstance(value, torch.Tensor):
        digest.update(f"{tuple(value.shape)} {value.dtype} ".encode())
        if value.numel():
            digest.update(value.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().data)
    else:
        digest.update(repr(value).encode())
    return digest.hexdigest()


def _difference(everyone: list[list[tuple[str, str]]], ranks: list[int]) -> str:
    tables = [dict(theirs) for theirs in everyone]
    names = list(dict.fromkeys(name for theirs in everyone for name, _ in theirs))
    differing = [name for name in names if len({table.get(name) for table in tables}) > 1]
    if not differing:
        return f"check_consistency: the ranks {ranks} have the same tensors in different orders. Build the same model."
    first = differing[0]
    others = [str(rank) for rank, table in zip(ranks, tables) if table.get(first) != tables[0].get(first)]
    more = f" It is the first of {len(differing)} that differ." if len(differing) > 1 else ""
    return (
        f"check_consistency: {first!r} on rank{'s' * (len(others) > 1)} {', '.join(others)} is not what rank "
        f"{ranks[0]} has.{more} Start all ranks from one state with hvd.broadcast_state; change it on all alike."
    )
