"""The whole state of a sharded optimizer: gathered on one rank, and taken in by all.

Entries of a parameter's shape are gathered for each bucket and key, into CPU memory of the first rank; so no rank needs
memory for more than one of them beside the result. Other entries, such as the number of steps, are equal for all pieces
of a parameter, and come with the outline.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch

from ...errors import HvdMismatchError
from ...errors.codes import uncoded
from ...ops.objects import allgather_object
from ...training.shard_layout import Piece
from ..ops import plain
from ..state_broadcast import broadcast_structure
from .cut_trial import is_cut
from .gradient_memory import gathered

if TYPE_CHECKING:
    from .shards import Shards


def whole_state(shards: Shards) -> dict[int, dict[str, Any]] | None:
    """On the first rank, the state of each parameter, by number, on the CPU; None elsewhere. All ranks must call it."""
    root = shards.process_set.ranks[0]
    if root != shards.carrier.exchange.wire.process_set.ranks[0]:
        return None  # every group has the whole state
    what = f"state_dict() of a sharded optimizer gathers every rank's share, so all ranks must call it. Rank {root} "
    meet(shards, torch.uint8, what + "gets the state, the others get None. Another rank went on with its training loop")
    outlines = allgather_object(_outline(shards), "optimizer.outline", shards.process_set)
    state: dict[int, dict[str, Any]] = {}
    for pieces in outlines:
        for _, piece, entries in pieces:
            state.setdefault(piece.number, {}).update((key, value) for key, (cut, value) in entries.items() if not cut)
    keys = sorted({
        (index, key, value)
        for pieces in outlines
        for index, _, entries in pieces
        for key, (cut, value) in entries.items()
        if cut
    })  # fmt: skip
    for index, key, dtype in keys:
        whole = _gather(shards, index, key, getattr(torch, dtype), root)
        parts = [piece for pieces in outlines for at, piece, entries in pieces if at == index and key in entries]
        for piece, part in zip(
            parts, whole.split([piece.end - piece.begin for piece in parts]) if whole.numel() else ()
        ):
            shape = shards.carrier.exchange.wire.parameters[piece.number].shape
            entries = state[piece.number]
            if key not in entries:
                entries[key] = torch.empty(shape, dtype=part.dtype)
            entries[key].view(-1)[piece.begin : piece.end] = part
    return state if shards.me == 0 else None


def meet(shards: Shards, marker: torch.dtype, what: str) -> None:
    """HvdMismatchError that begins with `what`, unless all ranks come here with this marker, which stands for a call.

    It has the name of the first bucket, so that a rank that trains on meanwhile disagrees at once.
    """
    shards.require_job()
    try:
        gathered(torch.zeros(1, dtype=marker), shards.carrier.name(0), shards.process_set).wait()
    except HvdMismatchError as error:
        raise HvdMismatchError(f"{what}: {uncoded(str(error))} [HVD310]") from None


def _outline(shards: Shards) -> list[tuple[int, Piece, dict[str, tuple[bool, Any]]]]:
    """Of each piece: its bucket, and its entries: (True, dtype) for those of its shape, else (False, value)."""
    return [
        (index, piece, {key: _entry(key, value, made, shards) for key, value in shards.state_of(made).items()})
        for (index, piece), made in shards.pieces.items()
        if made in shards.inner.state
    ]


def _entry(key: str, value: Any, made: torch.Tensor, shards: Shards) -> tuple[bool, Any]:
    if not isinstance(value, torch.Tensor):
        return False, value
    cut = is_cut(key, value, made.shape, shards.verdict)
    return (True, str(value.dtype).removeprefix("torch.")) if cut else (False, value.cpu())


def _gather(shards: Shards, index: int, key: str, dtype: torch.dtype, root: int) -> torch.Tensor:
    mine = [
        entries[key].reshape(-1)
        for (at, _), made in shards.pieces.items()
        if at == index and key in (entries := shards.state_of(made))
    ]
    part = torch.cat(mine).cpu() if mine else torch.empty(0, dtype=dtype)
    name = f"optimizer.state.{index}.{key}"
    return plain.gather(part, root, name=name, process_set=shards.process_set)


def take_whole(shards: Shards, state: Mapping[Any, dict[str, Any]]) -> None:
    """Replace the state by this rank's share of a whole one, by parameter."""
    shards.drop_state()
    for (_, piece), made in shards.pieces.items():
        entries = state.get(shards.carrier.exchange.wire.parameters[piece.number])
        if entries:
            shards.set_state(made, {key: _share(key, value, piece, shards) for key, value in entries.items()})


def _share(key: str, value: Any, piece: Piece, shards: Shards) -> Any:
    if not isinstance(value, torch.Tensor):
        return value
    if shards.is_cut(key, value, shards.carrier.exchange.wire.parameters[piece.number].shape):
        value = value.reshape(-1)[piece.begin : piece.end]
    return value.detach().clone()


def broadcast_whole(optimizer: Any, root_rank: int, process_set: Any) -> None:
    """Give every rank its share of what the root has loaded since its last step, and the root's options."""
    shards = optimizer._hvd_shards
    options = [{key: value for key, value in group.items() if key != "params"} for group in optimizer.param_groups]
    caller = "broadcast_optimizer_state"
    loaded, options = broadcast_structure(lambda: (shards.loaded, options), root_rank, caller, process_set)
    if loaded is not None:
        optimizer.load_state_dict(loaded)
    for group, theirs in zip(optimizer.param_groups, options):
        group.update(theirs)
    shards.loaded = None
    optimizer._hvd.levelled()
