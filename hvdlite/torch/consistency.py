"""check_consistency for PyTorch: what of a model and its optimizer is compared, and where the bits of a tensor lie.

The comparison itself is every adapter's (../consistency.py). Tensors of devices are copied to the CPU one by one;
sparse ones are compared by their coalesced indices and values, since the order of duplicates means nothing. What is no
tensor (a learning rate in an optimizer's state, an array) is read there, but for generators of random numbers.
"""

from __future__ import annotations

from typing import Any

import torch

from ..consistency import Bits, Leaf, compare, leaves_of, named_leaves
from ..process_set import ProcessSet, global_process_set
from . import owned
from .state import module_tensors


def check_consistency(model: Any, optimizer: Any = None, process_set: ProcessSet = global_process_set) -> None:
    """Returns when all ranks have the same bits in all tensors, else raises HvdMismatchError, the same on all ranks,
    naming the first tensor that differs and the ranks that differ from the first rank of the set.

    model: a Module (parameters and buffers), a state_dict, or a list of tensors or of (name, tensor), sparse ones and
    None among them; dicts and lists in them, arrays, numbers, texts and other objects are compared, too. optimizer: its
    state is compared. ValueError on all ranks for what is none of these on one, for meta tensors, and for an object of
    which it cannot be told; whatever else reading them raises on one, ValueError or TypeError on the others.
    """
    compare(lambda: _leaves(model, optimizer), bits, process_set)


def _leaves(model: Any, optimizer: Any) -> list[Leaf]:
    if isinstance(model, torch.Tensor):
        model = [model]
    leaves = named_leaves(module_tensors(model) if isinstance(model, torch.nn.Module) else model)
    if optimizer is not None:
        leaves += leaves_of(optimizer.state_dict(), "optimizer", "of optimizer")
    for leaf in leaves:
        if isinstance(leaf.value, torch.Tensor):
            _check(leaf.name, leaf.value)
    return leaves


def _check(name: str, tensor: torch.Tensor) -> None:
    """ValueError for what has no bits, or not all of them."""
    why = owned.wrapped(tensor)
    if why is None and tensor.is_meta:
        why = "a meta tensor: it has no bits"
    if why is not None:
        raise ValueError(f"check_consistency: {name!r} is {why} [HVD237]")
    tensor = owned.bare(tensor)
    if tensor.layout is torch.strided:
        try:
            owned.address_of(tensor)
        except ValueError as error:
            raise ValueError(f"check_consistency: {name!r}: {error}") from None


def bits(value: Any) -> Bits | None:
    """The bits of a tensor, or of a generator's state; None of what is neither."""
    if isinstance(value, torch.Generator):
        return Bits((), f"generator {value.device}", [_block(value.get_state())])
    if not isinstance(value, torch.Tensor):
        return None
    value = owned.bare(value).detach()
    dtype = str(value.dtype).removeprefix("torch.")
    if value.layout is torch.strided:
        return Bits(tuple(value.shape), dtype, [_block(value)])
    if value.layout is not torch.sparse_coo:
        value = value.to_sparse_coo()
    value = value.coalesce()
    return Bits(tuple(value.shape), f"{dtype} sparse", [_block(value.indices()), _block(value.values())])


def _block(tensor: torch.Tensor) -> Any:
    if tensor.is_quantized:
        tensor = tensor.int_repr()
    tensor = tensor.resolve_conj().resolve_neg().cpu().contiguous().view(-1)
    return tensor.view(torch.uint8).numpy().data if tensor.numel() else b""
