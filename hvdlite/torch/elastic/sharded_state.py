"""Sharded state: how `TorchState` keeps an optimizer with shard=True, of which no rank has the whole state.

A commit is a copy of the rank's own share and, in an elastic job, a copy of another rank's, whose *keeper* it is. The
keeper is the next rank on another host, or the next rank where there is one host. So a rank or a host may be lost. In
the sync that follows, all ranks lay out the shares anew for the ranks that there are, and each share of the commit is
sent by a rank that holds it. Where both holders are lost, all ranks raise an error that names them.

Rank 0 has the oldest commit of the survivors (`hvdlite.elastic`), and all go on from it. So the last two are kept. The
copy that a sync makes is of the same state as the commit before it, in another layout, and either may be used.
"""

from __future__ import annotations

import os
import pickle
from typing import Any, NamedTuple

import torch

from ... import _core
from ...errors import HvdStateError
from ...lifecycle.init import incarnations
from ...ops.objects import allgather_object, broadcast_object
from ...process_sets.process_set import global_process_set
from ...rendezvous import elastic_member
from ..ops import plain
from ..optimizer.shard_state import broadcast_whole
from ..optimizer.sharded import lay_out
from ..optimizer.shards import Shards
from .state import StateHandler


class _Entry(NamedTuple):
    """Of the state of some elements. cut: the value has one number for each of them. beside: it is on their device."""

    cut: bool
    beside: bool
    value: Any


class _Part(NamedTuple):
    """Of a parameter's state: elements from begin to end."""

    number: int
    begin: int
    end: int
    entries: dict[str, _Entry]


class _Commit(NamedTuple):
    """token: the same on all ranks that made it together. state: the token of the first one of the same state."""

    token: bytes
    state: bytes
    incarnation: int  # of the layout, as this process counts
    options: list[dict[str, Any]]  # of the parameter groups
    rank: int
    mine: list[_Part]
    keepers: list[int]  # of each rank's share
    kept: dict[int, bytes]  # shares of other ranks


class _Held(NamedTuple):
    """What a rank says of a commit: the former ranks whose shares it holds."""

    token: bytes
    state: bytes
    shares: list[int]
    keepers: list[int]


class ShardedStateHandler(StateHandler):
    """Handler of a ``DistributedOptimizer`` with ``shard=True``. In an elastic job all ranks must save together."""

    def __init__(self, value: Any) -> None:
        super().__init__(value)
        if self._shards.offload is not None:
            raise HvdStateError(
                "TorchState keeps copies of the optimizer's state in memory, which offload= has no room for: use "
                "hvd.save_sharded, or leave out offload= [HVD425]"
            )
        self._copies: list[_Commit] = []  # the last two
        self._state: bytes | None = None  # of which the next copy is, if it was taken from a commit
        self.save()

    @property
    def _shards(self) -> Shards:
        shards: Shards = self.value._hvd_shards
        return shards

    def save(self) -> None:
        shards, token, keepers, kept = self._shards, b"", list[int](), dict[int, bytes]()
        if elastic_member.is_elastic() and not shards.is_of_this_job():
            return  # before the first sync no rank has a share
        shards.require_job()
        mine = _parts(shards)
        if elastic_member.is_elastic():  # who has passed this knows that all have made the copy before
            everyone = allgather_object((_core.cross_rank(), os.urandom(8)), "optimizer.hosts")
            token = everyone[0][1]
            if shards.ranks > 1:
                keepers = keepers_of([host for host, _ in everyone])
                kept = _exchanged(mine, keepers)
        made = _Commit(
            token, self._state or token, incarnations(), _options(self.value), _core.rank(), mine, keepers, kept
        )
        self._copies, self._state = [*self._copies[-1:], made], None

    def restore(self) -> None:
        """Back to this rank's share. Where the ranks have changed since, the sync that follows does it."""
        last = self._copies[-1] if self._copies else None
        if last is not None and last.incarnation == incarnations() and self._shards.is_of_this_job():
            _set_options(self.value, last.options)
            self._shards.inner.state.clear()
            _take(self._shards, last.mine)
        self._shards.drop()

    def sync(self) -> None:
        shards = self._shards
        held = [
            _Held(each.token, each.state, sorted({each.rank, *each.kept}), each.keepers)
            for each in self._copies
            if each.incarnation != incarnations()
        ]
        everyone: list[tuple[list[_Held], bool]] = allgather_object((held, shards.is_of_this_job()), "optimizer.held")
        if not everyone[0][0]:  # no commit, or the ranks are those of the last one
            if not all(ready for _, ready in everyone):
                self._lay_out()
            loaded = shards.loaded
            broadcast_whole(self.value, 0, global_process_set)
            shards.loaded = loaded  # until a step is taken: a rank may be lost before all have saved
            return
        chosen, senders = _senders([held for held, _ in everyone])
        commit = next((each for each in self._copies if each.token == chosen.token), None)
        self._lay_out()
        for old, sender in enumerate(senders):
            mine = self._share(commit, old) if commit is not None and sender == _core.rank() else None
            _take(shards, broadcast_object(mine, sender, "optimizer.share"))
        options = _options(self.value) if commit is None else commit.options
        _set_options(self.value, broadcast_object(options, 0, "optimizer.options"))
        self._copies, self._state = [] if commit is None else [commit], chosen.state
        self.value._hvd.levelled()

    def _lay_out(self) -> None:
        self._shards.assign()
        lay_out(self.value, range(len(self.value._hvd.wire.parameters)))

    def _share(self, commit: _Commit, old: int) -> list[_Part]:
        if old == commit.rank:
            return commit.mine
        found: list[_Part] = pickle.loads(commit.kept[old])  # of a rank of this job, over its links
        return found

    def saved(self) -> Any:
        raise HvdStateError(
            "State.save_to writes what rank 0 has, and of an optimizer with shard=True each rank has a share only: use "
            "hvd.save_sharded, or leave out shard=True [HVD425]"
        )


def _senders(everyone: list[list[_Held]]) -> tuple[_Held, list[int]]:
    """The commit to go on from, and the rank that sends the share of each former rank. HvdStateError: one is lost."""
    state, lost = everyone[0][-1].state, ""
    for mine in reversed([each for each in everyone[0] if each.state == state]):
        holders = [next((each.shares for each in held if each.token == mine.token), []) for held in everyone]
        senders = [
            next((rank for rank, shares in enumerate(holders) if old in shares), None)
            for old in range(max(1, len(mine.keepers)))
        ]
        if None not in senders:
            return mine, [sender for sender in senders if sender is not None]
        old = senders.index(None)
        lost = f"that of former rank {old}, whose copy was on former rank {mine.keepers[old]}"
    raise HvdStateError(
        f"a share of the optimizer's state is lost: {lost}. Both ranks are gone, so the last commit is incomplete. "
        "Start again from a checkpoint of hvd.save_sharded [HVD425]"
    )


def keepers_of(hosts: list[int]) -> list[int]:
    """The rank that keeps a copy of each rank's share: the next one on another host, else the next one."""
    size = len(hosts)
    ahead = [[(rank + step) % size for step in range(1, size)] for rank in range(size)]
    return [next((each for each in later if hosts[each] != hosts[rank]), later[0]) for rank, later in enumerate(ahead)]


def _exchanged(mine: list[_Part], keepers: list[int]) -> dict[int, bytes]:
    """The shares that this rank is the keeper of, by rank."""
    me, packed = _core.rank(), pickle.dumps(mine, protocol=pickle.HIGHEST_PROTOCOL)
    source = torch.frombuffer(bytearray(packed), dtype=torch.uint8)
    splits = [len(packed) if rank == keepers[me] else 0 for rank in range(len(keepers))]
    received, sizes = plain.alltoall(source, splits, name="optimizer.kept")
    parts = received.split([int(size) for size in sizes])
    return {rank: parts[rank].numpy().tobytes() for rank, keeper in enumerate(keepers) if keeper == me}


def _options(optimizer: Any) -> list[dict[str, Any]]:
    return [{key: value for key, value in group.items() if key != "params"} for group in optimizer.param_groups]


def _set_options(optimizer: Any, options: list[dict[str, Any]]) -> None:
    for group, each in zip(optimizer.param_groups, options):
        group.update(each)


def _parts(shards: Shards) -> list[_Part]:
    """Copies of this rank's state."""
    found = []
    for (_, piece), made in shards.pieces.items():
        entries = {key: _copied(key, value, made, shards) for key, value in shards.inner.state.get(made, {}).items()}
        if entries:
            found.append(_Part(piece.number, piece.begin, piece.end, entries))
    return found


def _copied(key: str, value: Any, made: torch.Tensor, shards: Shards) -> _Entry:
    if not isinstance(value, torch.Tensor):
        return _Entry(False, False, value)
    return _Entry(
        shards.is_cut(key, value, made.shape), value.device == made.device, value.detach().to("cpu", copy=True)
    )


def _take(shards: Shards, parts: list[_Part]) -> None:
    """Add what they have of this rank's pieces to its state."""
    found: dict[int, list[_Part]] = {}
    for part in parts:
        found.setdefault(part.number, []).append(part)
    for (_, piece), made in shards.pieces.items():
        for part in found.get(piece.number, ()):
            low, high = max(part.begin, piece.begin), min(part.end, piece.end)
            if low < high:
                entries = shards.inner.state[made]
                for key, (cut, beside, value) in part.entries.items():
                    if not cut:
                        moved = isinstance(value, torch.Tensor)
                        entries[key] = value.to(made.device if beside else "cpu", copy=True) if moved else value
                        continue
                    if key not in entries:
                        entries[key] = torch.zeros(made.shape, dtype=value.dtype, device=made.device)
                    here = entries[key][low - piece.begin : high - piece.begin]
                    here.copy_(value[low - part.begin : high - part.begin])
