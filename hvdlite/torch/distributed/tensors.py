"""How does a tensor of torch.distributed become memory that the core reads, and how does what came become a tensor?

The core takes contiguous memory of its own dtypes. What is only moved goes as bytes where it has no such dtype; complex
numbers are reduced as pairs of real ones; a tensor that is not contiguous goes as a copy, which `land` brings back.

A tensor on another device is refused: a group of this backend is one of CPU tensors.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import torch

from ... import _bytes, _core
from ..adapter import DTYPES, TorchAdapter
from ..memory import empty

_ADAPTER = TorchAdapter()
_PLAIN = (torch.Tensor, torch.nn.Parameter)


class Part(NamedTuple):
    """One tensor of a collective. target: the address of the result; 0: the core allocates it. shape: as the core
    compares it. room: bytes at the target, where only the core learns how many come (allgather, alltoall)."""

    source: torch.Tensor
    target: int
    shape: Sequence[int]
    room: int = 0


def read(tensor: torch.Tensor) -> torch.Tensor:
    """Contiguous, real, on the CPU: the tensor itself where it is so. Raises ValueError for what cannot be."""
    if not tensor.is_cpu or tensor.layout is not torch.strided or tensor.__class__ not in _PLAIN:
        tensor = _ADAPTER.accept(tensor)
        if not tensor.is_cpu:
            raise ValueError(
                f"a tensor on device {tensor.device} is not supported: backend hvdlite is one of CPU tensors. Move it "
                "with .cpu(), or give the group backend nccl [HVD203]"
            )
        _ADAPTER.view(tensor)
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor.resolve_conj())
    if tensor.is_contiguous() and not tensor.is_neg():
        return tensor
    return tensor.detach().resolve_neg().contiguous()


def moved(tensor: torch.Tensor) -> torch.Tensor:
    """In one dimension, for what is only moved: as bytes where the core has no such dtype."""
    flat = read(tensor).detach().reshape(-1)
    return flat if flat.dtype in DTYPES else flat.view(torch.uint8)


def dtype_of(tensor: torch.Tensor) -> int:
    """The core's number. Raises ValueError for a dtype that cannot be reduced."""
    found = DTYPES.get(tensor.dtype)
    return found if found is not None else _ADAPTER.view(tensor).dtype  # which raises


def land(source: torch.Tensor, target: torch.Tensor) -> None:
    """What came to a copy goes to the caller's tensor."""
    if source is target:
        return
    with torch.no_grad():
        if source.dtype == target.dtype:
            target.copy_(source.view(target.shape))
            return
        real = torch.view_as_real(target) if target.is_complex() else target
        real.copy_(source.view(real.dtype).view(real.shape))


def fresh(target: torch.Tensor) -> torch.Tensor:
    """Where a result may come to: the tensor itself, or one for `land` where it is not contiguous."""
    if not target.is_cpu or target.layout is not torch.strided:
        read(target)  # which raises
    if target.is_contiguous() and not target.is_neg() and not target.is_conj():
        return target
    return torch.empty_like(target, memory_format=torch.contiguous_format)


def fill(targets: Sequence[torch.Tensor], order: Iterable[int], gathered: _core.Gathered) -> None:
    """Copies each piece that came, in the order of the set, to its tensor, in the order of the group. Raises ValueError
    where a piece has another size than its tensor."""
    starts, at = [], 0
    total = sum(gathered.rows_of)
    row = gathered.bytes // total if total else 0
    for rows in gathered.rows_of:
        starts.append((at, rows * row))
        at += rows * row
    base = _bytes.place_of(gathered.address)
    for target, place in zip(targets, order):
        start, count = starts[place]
        room = target.numel() * target.element_size()
        if count != room:
            raise ValueError(
                f"a tensor of shape {list(target.shape)} ({room} bytes) cannot take the {count} bytes that came for "
                "it: give the shape that was sent [HVD201]"
            )
        whole = fresh(target)
        _bytes.move(whole.data_ptr(), base + start, count)
        land(whole, target)


def joined(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """One after the other; no copy where they lie so already."""
    flat = [moved(each) for each in tensors]
    end = flat[0].data_ptr()
    for each in flat:
        if each.data_ptr() != end or each.untyped_storage().data_ptr() != flat[0].untyped_storage().data_ptr():
            return torch.cat(flat)
        end += each.numel() * each.element_size()
    return flat[0].as_strided((sum(each.numel() for each in flat),), (1,))


class Pool:
    """Plane memory for FSDP2, which asks anew for each collective; the first touch of a shared page costs more than a
    copy of it. So a block comes back when nobody holds it: the count of its storage tells."""

    def __init__(self) -> None:
        self._blocks: dict[int, list[tuple[torch.Tensor, int]]] = {}  # with the count of an idle one

    def tensor(self, size: int, dtype: torch.dtype) -> torch.Tensor:
        """`size` elements in one dimension, contents undefined."""
        count = max(size * torch.empty(0, dtype=dtype).element_size(), 1)
        rounded = 1 << (count - 1).bit_length() if count < 1 << 20 else -(-count >> 20) << 20
        blocks = self._blocks.setdefault(rounded, [])
        block = next((each for each, idle in blocks if self._users(each) == idle), None)
        if block is None:
            block = empty((rounded,), torch.uint8)
            blocks.append((block, self._users(block)))
        return block[:count].view(dtype)[:size]

    def clear(self) -> None:
        """At the end of a job: its plane memory is no plane memory of the next one."""
        self._blocks.clear()

    @staticmethod
    def _users(block: torch.Tensor) -> Any:
        return torch._C._storage_Use_Count(block.untyped_storage()._cdata)  # type: ignore[attr-defined]


POOL = Pool()
