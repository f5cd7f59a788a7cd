"""Check that a tensor has memory of its own, and as much of it as its shape needs.

The core reads and writes at an address. Much that Python shows as a tensor has none: a wrapper (DTensor, MaskedTensor,
a quantized weight, a fake tensor) keeps its numbers in other tensors, what vmap or grad hands to a function stands for
another tensor, and a storage may be shrunk under its tensors, as FSDP does. Each is refused, with what to use in its
place. A subclass that is only a class, as Parameter is, has memory like any tensor; but what it reports of itself may
be of its own making (`__torch_function__`, a property), so it is looked at as what it is to torch (`bare`).

What is refused here would be read at address 0, or beyond its end.
"""

from __future__ import annotations

from typing import Any

import torch

_BASE: Any = torch.Tensor.__base__  # its name has changed
PLAIN = frozenset((torch.Tensor, torch.nn.Parameter))
_NO_DISPATCH = torch._C._disabled_torch_dispatch_impl
_REMEDIES = {
    "DTensor": "each rank has a part of its numbers: use hvd collectives on its local tensor, tensor.to_local(), with "
    "the process set of the ranks that hold the same part; FSDP2 and tensor parallelism reduce their parameters' "
    "gradients themselves, over their device mesh: use the optimizer without hvd.DistributedOptimizer",
    "MaskedTensor": "use its parts, tensor.get_data() and tensor.get_mask(), or tensor.to_tensor(value)",
    "FakeTensor": "it has a shape and no numbers: give the real tensor",
    "NestedTensor": "use tensor.values() and tensor.offsets(), or tensor.to_padded_tensor(value)",
}


def bare(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor that is no wrapper, without its class: the same memory."""
    if tensor.__class__ in PLAIN:
        return tensor
    with torch._C.DisableTorchFunctionSubclass(), torch._C._DisableTorchDispatch():
        alone: torch.Tensor = _BASE.detach(tensor)
        return alone


def wrapped(tensor: torch.Tensor) -> str | None:
    """What to do with a tensor that is a wrapper of others; None: it is none."""
    if tensor.__class__ in PLAIN and not tensor.is_nested:
        return None
    with torch._C.DisableTorchFunctionSubclass():
        return _wrapped(tensor, type(tensor))


def _wrapped(tensor: torch.Tensor, kind: Any) -> str | None:
    if _BASE.is_nested.__get__(tensor):
        return f"a nested tensor: {_REMEDIES['NestedTensor']}"
    if kind.__torch_dispatch__ is _NO_DISPATCH:
        return None
    remedy = next((_REMEDIES[each.__name__] for each in kind.__mro__ if each.__name__ in _REMEDIES), None)
    if remedy is None:
        if not hasattr(kind, "__tensor_flatten__") and _begins(tensor):
            return None  # a class with memory that looks at what is done with it
        remedy = "use the tensors that it is made of (or tensor.dequantize() of a quantized one)"
    return f"a {kind.__name__}, which wraps other tensors and has no memory of its own: {remedy}"


def address_of(tensor: torch.Tensor) -> int:
    """Where the elements of a dense tensor begin. ValueError with the remedy if they are not all there."""
    address = _begins(tensor)
    if fits(tensor, address):
        return address
    if _stands_for_another(tensor):
        raise ValueError(
            "a tensor inside torch.func (vmap, grad, functionalize) has no memory of its own: call the collective "
            "outside the transformed function [HVD203]"
        )
    raise ValueError(
        f"the tensor of shape {list(tensor.shape)} needs more memory than its storage has "
        f"({tensor.untyped_storage().nbytes()} bytes): the storage was resized, as FSDP does between uses, or never "
        "filled. Use the tensor while its memory is there, or pass a tensor.clone() from that time [HVD203]"
    )


def fits(tensor: torch.Tensor, address: int) -> bool:
    """Whether all elements of a dense tensor that begins at this address lie in its storage."""
    last = tensor.numel()
    if last == 0:
        return True
    if address == 0:
        return False
    if not tensor.is_contiguous():
        last = 1 + sum((extent - 1) * stride for extent, stride in zip(tensor.shape, tensor.stride()))
    return (tensor.storage_offset() + last) * tensor.element_size() <= tensor.untyped_storage().nbytes()


def overlaps(tensor: torch.Tensor) -> bool:
    """Whether elements of a dense tensor share memory, as those of an expanded one, so that it cannot be written."""
    if tensor.layout is not torch.strided or tensor.is_contiguous():
        return False
    return any(stride == 0 and extent > 1 for extent, stride in zip(tensor.shape, tensor.stride()))


def _begins(tensor: torch.Tensor) -> int:
    try:
        address: int = _BASE.data_ptr(tensor)
        return address
    except (RuntimeError, NotImplementedError):  # it has no storage at all
        return 0


def _stands_for_another(tensor: torch.Tensor) -> bool:
    try:
        tensor.untyped_storage()
        return torch._is_functional_tensor(tensor)
    except (RuntimeError, NotImplementedError):
        return True
