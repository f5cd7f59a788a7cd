"""PyTorch's tensors, by address: no copy, and bfloat16 and float8, which NumPy has not, like any other dtype.

Tensors lie in CPU memory or on a GPU of CUDA (device.py); another device is a ValueError. Subclasses of Tensor
(Parameter) are welcome, sparse tensors are not, nor what has no memory of its own (storage_check.py).

A tensor that is dense in another order (channels_last) is not contiguous here and is copied: two ranks may hold one
gradient in two orders, and adding their memory element by element would be wrong without any sign of it.
"""

from __future__ import annotations

from typing import Any

import torch

from .. import _core
from ..ops.adapter import Device, View
from . import storage_check
from .device import current, device_of

DTYPES: dict[torch.dtype, int] = {
    getattr(torch, name): number for name, number in _core.DTYPES.items() if hasattr(torch, name)
}


_STRIDED = torch.strided
_increment_version = torch.autograd.graph.increment_version


def _remedy(tensor: torch.Tensor) -> str:
    """What to do with a tensor of a dtype that the core has not, where that is known."""
    if not str(tensor.dtype).startswith("torch.float8"):
        return ""
    return (
        ". Reduce it as tensor.to(torch.bfloat16); what is only moved (broadcast, allgather) goes as "
        "tensor.view(torch.uint8)"
    )


class TorchAdapter:
    """torch.Tensor."""

    def accept(self, value: Any, writable: bool = False) -> torch.Tensor:
        if not isinstance(value, torch.Tensor):
            raise TypeError(
                f"expected a torch.Tensor, not {type(value).__module__}.{type(value).__qualname__}: "
                "wrap a number or an array in torch.tensor [HVD201]"
            )
        if writable and not storage_check.wrapped(value) and storage_check.overlaps(storage_check.bare(value)):
            raise ValueError(
                f"elements of this tensor of shape {list(value.shape)} share memory, as in an expanded tensor, so it "
                "cannot be overwritten: use the function without the trailing underscore, or tensor.contiguous() "
                "[HVD203]"
            )
        return value

    def view(self, tensor: torch.Tensor) -> View:
        why = storage_check.wrapped(tensor)
        if why is not None:
            raise ValueError(f"the tensor is {why} [HVD203]")
        tensor = storage_check.bare(tensor)
        if tensor.layout is not torch.strided:
            raise ValueError(
                f"a tensor of layout {tensor.layout} is not supported: make it dense with .to_dense(), "
                "or use hvd.sparse_allreduce_async [HVD203]"
            )
        if not (tensor.is_cpu or tensor.is_cuda):
            raise ValueError(f"a tensor on device {tensor.device} is not supported yet: move it with .cpu() [HVD203]")
        dtype = DTYPES.get(tensor.dtype)
        if dtype is None:
            supported = ", ".join(str(known).removeprefix("torch.") for known in DTYPES)
            raise ValueError(
                f"Tensor type {tensor.dtype} is not supported; supported: {supported}{_remedy(tensor)} [HVD202]"
            )
        address = storage_check.address_of(tensor)
        contiguous = tensor.is_contiguous() and not tensor.is_neg()
        return View(address, tensor.shape, dtype, contiguous, None if tensor.is_cpu else device_of(tensor))

    def form(self, tensor: Any) -> Any:
        if (
            tensor.__class__ in storage_check.PLAIN
            and tensor.layout is _STRIDED
            and tensor.is_cpu
            and not tensor.is_nested  # which has no shape
            and tensor.is_contiguous()
            and not tensor.is_neg()
        ):
            return tensor.dtype, tensor.shape
        return None

    def address(self, tensor: torch.Tensor) -> int:
        return storage_check.address_of(tensor)

    def memory(self, tensor: torch.Tensor) -> Any:
        return storage_check.bare(tensor).untyped_storage()  # `tensor.data = other`, as in module.half(), lets go of it

    def twin(self, tensor: torch.Tensor) -> tuple[torch.Tensor, int]:
        made = torch.empty_like(tensor, requires_grad=False, memory_format=torch.contiguous_format)
        return made, made.data_ptr()

    def like(self, tensor: torch.Tensor, shape: tuple[int, ...]) -> torch.Tensor:
        tensor = storage_check.bare(tensor)
        return torch.empty(shape, dtype=tensor.dtype, device=tensor.device)

    def new(self, shape: tuple[int, ...], dtype: str) -> torch.Tensor:
        found = getattr(torch, dtype, None)
        if found is None:
            raise ValueError(f"PyTorch {torch.__version__} has no dtype {dtype} [HVD202]")
        return torch.empty(shape, dtype=found, device="cpu")

    def home(self) -> Device | None:
        return current() if torch.cuda.is_available() else None

    def contiguous(self, tensor: torch.Tensor) -> torch.Tensor:
        return storage_check.bare(tensor).detach().resolve_neg().contiguous()

    def copy(self, into: torch.Tensor, source: torch.Tensor) -> None:
        with torch.no_grad():
            into.copy_(source)

    def written(self, tensor: torch.Tensor) -> None:
        """So that autograd finds out when backward needs what was there before."""
        if not tensor.is_inference():
            _increment_version(tensor)

    def cast(self, tensor: torch.Tensor, dtype: str) -> torch.Tensor:
        return tensor.to(getattr(torch, dtype))
