"""check_consistency for PyTorch: what of a model and its optimizer is compared, and where the bits of a tensor lie.

The comparison itself is every adapter's (../training/consistency.py). Tensors of devices are copied to the CPU one by
one; sparse ones are compared by their coalesced indices and values, since the order of duplicates means nothing. What
is no tensor (a learning rate in an optimizer's state, an array) is read there, but for generators of random numbers.
"""

from __future__ import annotations

from typing import Any

import torch

from ..process_sets.process_set import ProcessSet, global_process_set
from ..training.consistency import Bits, Leaf, compare, leaves_of, named_leaves
from . import storage_check
from .compressed.residuals import without
from .state_broadcast import module_tensors


def check_consistency(model: Any, optimizer: Any = None, process_set: ProcessSet = global_process_set) -> None:
    """Compare a model and its optimizer over all ranks, and raise an error on all ranks if any bit differs.

    All ranks of ``process_set`` must call it. It compares bits: 0.0 and -0.0 differ, and NaN equals NaN of the same
    bits. Tensors on devices are copied to the CPU one by one. Sparse tensors are compared by their coalesced values.

    Args:
        model (torch.nn.Module, dict, or list of tensors or of (str, tensor)): what to compare: of a Module, its
            parameters and buffers. Nested dicts and lists, arrays, numbers, strings and other objects are compared as
            well.
        optimizer (torch.optim.Optimizer, optional): its state is compared as well.
        process_set (ProcessSet): ranks to compare. Default: all ranks.

    Raises:
        HvdMismatchError: if a rank differs. The text is the same on all ranks and names the first difference and the
            ranks that differ from the first rank of the set.
        HvdPeerLostError: if a rank dies or leaves the job.
        HvdNotInitializedError: before ``init``.
        ValueError: on all ranks, if one rank has a value that cannot be compared, such as a meta tensor, or a name
            twice.
        TypeError: on all ranks, if reading the values raises it on one rank.

    Example:
        >>> try:
        ...     hvd.check_consistency({"weight": torch.tensor([1.0, 2.0 + hvd.rank()])})
        ... except hvd.HvdMismatchError as error:
        ...     print(error.ranks)
        (1,)
    """
    compare(lambda: _leaves(model, optimizer), bits, process_set)


def _leaves(model: Any, optimizer: Any) -> list[Leaf]:
    if isinstance(model, torch.Tensor):
        model = [model]
    leaves = named_leaves(module_tensors(model) if isinstance(model, torch.nn.Module) else model)
    if hasattr(optimizer, "_hvd_shards"):  # no two ranks have the same state
        options = [{key: each[key] for key in each if key != "params"} for each in optimizer.param_groups]
        leaves += leaves_of(options, "optimizer", "of optimizer")
    elif optimizer is not None:
        leaves += leaves_of(without(optimizer.state_dict()), "optimizer", "of optimizer")
    for leaf in leaves:
        if isinstance(leaf.value, torch.Tensor):
            _check(leaf.name, leaf.value)
    return leaves


def _check(name: str, tensor: torch.Tensor) -> None:
    """ValueError for what has no bits, or not all of them."""
    why = storage_check.wrapped(tensor)
    if why is None and tensor.is_meta:
        why = "a meta tensor: it has no bits"
    if why is not None:
        raise ValueError(f"check_consistency: {name!r} is {why} [HVD237]")
    tensor = storage_check.bare(tensor)
    if tensor.layout is torch.strided:
        try:
            storage_check.address_of(tensor)
        except ValueError as error:
            raise ValueError(f"check_consistency: {name!r}: {error}") from None


def bits(value: Any) -> Bits | None:
    """The bits of a tensor, or of a generator's state; None of what is neither."""
    if isinstance(value, torch.Generator):
        return Bits((), f"generator {value.device}", [_block(value.get_state())])
    if not isinstance(value, torch.Tensor):
        return None
    value = storage_check.bare(value).detach()
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
