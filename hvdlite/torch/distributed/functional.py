"""Kernels in Python for the functional collectives of torch that do not reach a Python group.

C++ asks the base class of a group for all_gather_single and for coalescing, which torch's trampoline does not forward.
The kernels serve groups of hvdlite; for all others they call torch's kernel, which is found before these are set. This
needs `get_kernel` (torch 2.9); under earlier versions torch's own kernels stay.
"""

from __future__ import annotations

from typing import Any

import torch
from torch._C._distributed_c10d import _resolve_process_group  # type: ignore[attr-defined]

_OURS = torch.library.Library("_c10d_functional", "IMPL")
_functional = torch.ops._c10d_functional


def _all_gather_into_tensor_out(group: Any, input: Any, size: int, name: str, *, out: torch.Tensor) -> torch.Tensor:
    work = group.all_gather_single(out, input)
    torch._C._distributed_c10d._register_work(out, work)  # type: ignore[attr-defined]
    return out


def _batch_p2p_ops(group: Any, kinds: Any, peers: Any, tags: Any, tensors: Any, name: str) -> list[torch.Tensor]:
    return [getattr(_functional, kind)(*each, name) for kind, *each in zip(kinds, tensors, peers, tags)]


def serve(kind: type[Any]) -> None:
    """Sets the kernels for groups of this class. Once, before the first group is made."""
    for own in (_all_gather_into_tensor_out, _batch_p2p_ops):
        name = own.__name__[1:]
        if not hasattr(_functional, name) or not hasattr(torch.library, "get_kernel"):
            continue
        for device in ("CPU", "CUDA"):
            _OURS.impl(name, _kernel(kind, own, f"_c10d_functional::{name}", device), device, with_keyset=True)


def _kernel(kind: type[Any], own: Any, name: str, device: str) -> Any:
    theirs = torch.library.get_kernel(name, device)

    def kernel(keys: Any, *args: Any, **more: Any) -> Any:
        label: Any = next(each for each in reversed(args) if isinstance(each, str))
        group = _resolve_process_group(label)
        return own(group, *args, **more) if isinstance(group, kind) else theirs.call_boxed(keys, *args, **more)

    return kernel
