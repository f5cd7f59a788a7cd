"""State offload: the state of a rank's pieces under a cap of memory, the rest in a file.

Pieces are grouped in chunks of a quarter of the cap at most. A step walks the chunks: it makes room, reads the next one
and steps on its pieces. What goes out is the chunk that is used furthest in the future (L. Belady, A Study of
Replacement Algorithms, 1966). Steps walk the chunks in one order, so the future is known: it is mostly the chunk just
used, and the least recently used one would be the worst choice. Chunks of state are the idea of PatrickStar (J. Fang et
al., arXiv 2108.05818).

The file has no name and is this process's alone. So nothing of it is left when the process ends, in any way.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from ... import _core

if TYPE_CHECKING:
    from .shards import Shards

PIECES_OF_CAP = 32
CHUNKS_OF_CAP = 4
LEAST_CAP = 16 << 10  # bytes; pieces of less are too many


class _Outside(NamedTuple):
    """A tensor that is in the file."""

    made: torch.Tensor
    key: str
    offset: int
    like: torch.Tensor  # of its shape, dtype and device; without memory


class _Chunk:
    def __init__(self) -> None:
        self.pieces: list[torch.Tensor] = []
        self.estimate = 0  # bytes of its state
        self.held = 0  # bytes that are in memory
        self.outside: list[_Outside] = []
        self.region = (0, 0)  # of the file: offset, bytes


class StateFile:
    """Where chunks of the state go that memory has no room for. folder: on a disk of this host. cap: bytes."""

    def __init__(self, folder: str, cap: int) -> None:
        self.folder, self.cap = folder, cap
        os.makedirs(folder, exist_ok=True)
        self._file = tempfile.TemporaryFile(dir=folder, buffering=0)
        self._end = self._at = 0
        self.chunks: list[_Chunk] = []
        self.chunk_of: dict[torch.Tensor, int] = {}
        self.held = self.peak = self.evictions = 0

    def elements(self, bytes_of_state: int) -> int:
        """The most of a piece, whose elements have so many bytes of state each."""
        return max(1, self.cap // (PIECES_OF_CAP * max(1, bytes_of_state)))

    def add(self, pieces: Iterable[tuple[torch.Tensor, int]]) -> None:
        """More pieces, in the order of a step, and the bytes of the state that each will have."""
        open_ = False
        for made, size in pieces:
            if not open_ or self.chunks[-1].estimate + size > self.cap // CHUNKS_OF_CAP:
                self.chunks.append(_Chunk())
                open_ = True
            self.chunks[-1].pieces.append(made)
            self.chunks[-1].estimate += size
            self.chunk_of[made] = len(self.chunks) - 1

    def step(self, shards: Shards, step: Callable[[], None]) -> None:
        """`step` on the pieces of each chunk, one after the other."""
        groups = shards.inner.param_groups
        whole = [group["params"] for group in groups]
        group_of = {made: at for at, params in enumerate(whole) for made in params}
        try:
            for number, chunk in enumerate(self.chunks):
                if all(made.grad is None for made in chunk.pieces):
                    continue
                self.bring(shards, number)
                for at, group in enumerate(groups):
                    group["params"] = [made for made in chunk.pieces if group_of[made] == at]
                step()
                self.grown(shards, number)
        finally:
            for group, params in zip(groups, whole):
                group["params"] = params

    def bring(self, shards: Shards, number: int) -> None:
        """A chunk's state is in memory afterwards, with room for what a step adds to it."""
        chunk, self._at = self.chunks[number], number
        self._make_room(shards, max(chunk.estimate, chunk.region[1]) - chunk.held)
        for made, key, offset, like in chunk.outside:
            value = torch.empty(like.shape, dtype=like.dtype)
            if os.preadv(self._file.fileno(), [_bytes(value)], offset) != value.numel() * value.element_size():
                raise OSError(
                    f"rank {_core.rank()}: the file of the optimizer's state in {self.folder} was cut [HVD200]"
                )
            shards.inner.state[made][key] = value.to(like.device)
        chunk.outside = []
        self._count(shards, number)

    def grown(self, shards: Shards, number: int) -> None:
        """A chunk was stepped on, or its state set. It may go out."""
        self._at = number
        self._count(shards, number)
        self._make_room(shards, 0, may_go=True)

    def _count(self, shards: Shards, number: int) -> None:
        chunk = self.chunks[number]
        size = sum(value.numel() * value.element_size() for _, _, value in self._tensors(shards, chunk))
        self.held, chunk.held = self.held + size - chunk.held, size
        chunk.estimate = max(chunk.estimate, size)
        self._make_room(shards, 0)
        self.peak = max(self.peak, self.held)

    def forget(self) -> None:
        """The state was dropped."""
        for chunk in self.chunks:
            chunk.outside, chunk.held = [], 0
        self.held = 0

    def _tensors(self, shards: Shards, chunk: _Chunk) -> list[tuple[torch.Tensor, str, torch.Tensor]]:
        return [
            (made, key, value)
            for made in chunk.pieces
            for key, value in shards.inner.state.get(made, {}).items()
            if isinstance(value, torch.Tensor) and shards.is_cut(key, value, made.shape)
        ]

    def _make_room(self, shards: Shards, size: int, may_go: bool = False) -> None:
        """For so many bytes more. may_go: the chunk in use, too."""
        while self.held + size > self.cap:
            inside = [at for at, chunk in enumerate(self.chunks) if chunk.held and (may_go or at != self._at)]
            if not inside:
                return  # a chunk is a quarter of the cap, so this one alone fits
            self._out(shards, max(inside, key=lambda at: (at - self._at - 1) % len(self.chunks)))

    def _out(self, shards: Shards, number: int) -> None:
        """Write a chunk, then drop it from memory."""
        chunk = self.chunks[number]
        tensors = self._tensors(shards, chunk)
        if chunk.held > chunk.region[1]:
            chunk.region, self._end = (self._end, chunk.held), self._end + chunk.held
        offset, outside = chunk.region[0], []
        for made, key, value in tensors:
            self._write(_bytes(value.detach().cpu().contiguous()), offset)
            outside.append(_Outside(made, key, offset, torch.empty(0, dtype=value.dtype, device=value.device)))
            outside[-1] = outside[-1]._replace(like=outside[-1].like.new_empty(()).expand(value.shape))
            offset += value.numel() * value.element_size()
        for made, key, _ in tensors:
            del shards.inner.state[made][key]
        self.held, chunk.held, chunk.outside = self.held - chunk.held, 0, outside
        self.evictions += 1

    def _write(self, data: memoryview, offset: int) -> None:
        done = 0
        try:
            while done < len(data):
                done += os.pwrite(self._file.fileno(), data[done:], offset + done)
        except OSError as error:
            raise OSError(
                f"rank {_core.rank()}: {len(data)} bytes of the optimizer's state cannot be written to a file in "
                f"{self.folder}: {error.strerror}. Parameters may be a mixture of two steps: load a checkpoint, and "
                "use another offload folder or a larger memory_cap [HVD200]"
            ) from error


def _bytes(value: torch.Tensor) -> memoryview:
    flat: Any = value.view(-1).view(torch.uint8) if value.numel() else torch.empty(0, dtype=torch.uint8)
    return memoryview(flat.numpy())


def bytes_of(cap: Any) -> int:
    """Of `memory_cap`: a number, or a text such as "512M". ValueError for others."""
    units = {"K": 1 << 10, "M": 1 << 20, "G": 1 << 30, "T": 1 << 40}
    try:
        text = str(cap).strip().upper().removesuffix("B")
        number = float(text[:-1]) * units[text[-1]] if text[-1:] in units else float(text)
        if isinstance(cap, (int, float, str)) and not isinstance(cap, bool) and LEAST_CAP <= number < 1 << 62:
            return int(number)
    except ValueError:
        pass
    raise ValueError(
        f'memory_cap={cap!r} must be 16K or more bytes: a number, or a text such as "512M" or "2G" [HVD200]'
    )
