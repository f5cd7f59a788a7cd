"""Tensors of torch.distributed as memory for the core, and results as tensors.

The core takes contiguous memory of its own dtypes. What is only moved goes as bytes where it has no such dtype; complex
numbers are reduced as pairs of real ones; a tensor that is not contiguous goes as a copy, which `copy_back` copies
back.

All tensors of a call lie in the CPU's memory or on one GPU. There `fetch` brings a ragged result, and all copies are
put on the current stream, behind the collective.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import torch

from ... import _core
from ..._core import byte_exchange
from ...ops.tensors import placed
from ..adapter import DTYPES, TorchAdapter
from ..device import CudaDevice, device_of
from ..memory import empty

_ADAPTER = TorchAdapter()
_PLAIN = (torch.Tensor, torch.nn.Parameter)


class Part(NamedTuple):
    """One tensor of a collective. target: where the result comes to; None: the core allocates it. shape: as the core
    compares it. room: bytes at the target, where only the core learns how many come (allgather, alltoall)."""

    source: torch.Tensor
    target: torch.Tensor | None
    shape: Sequence[int]
    room: int = 0


def gpu_of(tensors: Sequence[torch.Tensor]) -> CudaDevice | None:
    """The GPU on which all of these lie; None: they lie in the CPU's memory. Raises ValueError where some lie
    elsewhere: the core would take the address of one for that of the other."""
    for each in tensors:
        if not each.is_cpu:
            break
    else:
        return None
    places = sorted({str(each.device) for each in tensors})
    if len(places) > 1:
        raise ValueError(f"one call has tensors on {' and '.join(places)}: move all to one device [HVD203]")
    return device_of(tensors[0])


def device_terms(source: torch.Tensor) -> dict[str, Any]:
    """What the core has to know of a tensor on a GPU that is about to be submitted."""
    return placed(_ADAPTER.view(source))


def read(tensor: torch.Tensor) -> torch.Tensor:
    """Contiguous and real: the tensor itself where it is so. Raises ValueError for what cannot be."""
    somewhere = tensor.is_cpu or tensor.is_cuda
    if not somewhere or tensor.layout is not torch.strided or tensor.__class__ not in _PLAIN:
        _ADAPTER.view(_ADAPTER.accept(tensor))
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


def copy_back(source: torch.Tensor, target: torch.Tensor) -> None:
    """Copies a result from a copy to the caller's tensor."""
    if source is target:
        return
    with torch.no_grad():
        if target.is_complex() and not source.is_complex():
            real = torch.view_as_real(torch.empty(0, dtype=target.dtype)).dtype
            source = torch.view_as_complex(source.view(real).view(*target.shape, 2))
        target.copy_(source.view(target.dtype).view(target.shape))


def fresh(target: torch.Tensor) -> torch.Tensor:
    """Where a result may come to: the tensor itself, or one for `copy_back` where it is not contiguous."""
    if target.layout is not torch.strided:
        read(target)  # which raises
    if target.is_contiguous() and not target.is_neg() and not target.is_conj():
        return target
    return torch.empty_like(target, memory_format=torch.contiguous_format)


def apart(source: torch.Tensor, target: torch.Tensor) -> bool:
    """Whether two contiguous tensors do not overlap."""
    start, into = source.data_ptr(), target.data_ptr()
    return start + source.nbytes <= into or into + target.nbytes <= start


def fetch(target: torch.Tensor, pending: _core.Pending) -> None:
    """What a ragged collective brought comes to a contiguous tensor that has room for just this."""
    device = gpu_of([target])
    if device is not None:
        device.fetch(pending.native, target.data_ptr(), pending.ready)
    else:
        gathered = pending.gathered()
        byte_exchange.copy(target.data_ptr(), gathered.address, gathered.bytes)


def fill(
    targets: Sequence[torch.Tensor], order: Iterable[int], pending: _core.Pending, whole: torch.Tensor | None = None
) -> None:
    """Copies each piece that came, in the order of the set, to its tensor, in the order of the group. whole: contiguous
    memory of which the targets are pieces in the order of the set, for what lies on a device. Raises ValueError where a
    piece has another size than its tensor."""
    gathered = pending.gathered()
    starts, at = [], 0
    total = sum(gathered.rows_of)
    row = gathered.bytes // total if total else 0
    for rows in gathered.rows_of:
        starts.append((at, rows * row))
        at += rows * row
    base, flat = byte_exchange.pointer_address(gathered.address), None
    if pending.ready is not None and targets:  # on a device
        if whole is None or whole.numel() * whole.element_size() != gathered.bytes:
            whole = torch.empty(gathered.bytes, dtype=torch.uint8, device=targets[0].device)
        fetch(whole, pending)
        base, flat = whole.data_ptr(), whole.view(-1).view(torch.uint8)
    for target, position in zip(targets, order):
        start, count = starts[position]
        room = target.numel() * target.element_size()
        if count != room:
            raise ValueError(
                f"a tensor of shape {list(target.shape)} ({room} bytes) cannot hold the {count} received bytes: pass "
                "the shape that was sent [HVD201]"
            )
        if target.data_ptr() == base + start:
            continue  # it came there
        into = fresh(target)
        if flat is None:
            byte_exchange.move(into.data_ptr(), base + start, count)
        else:
            copy_back(flat[start : start + count], into)
        copy_back(into, target)


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
    copy of it. So a block comes back when nobody holds it: the count of its storage shows it."""

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
