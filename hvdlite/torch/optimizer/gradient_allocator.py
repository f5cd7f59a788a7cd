"""Gradients that autograd allocates anew in each step: how they come to lie in shared memory.

`zero_grad()` drops gradients by default, and the next backward pass allocates new ones. PyTorch's CPU allocator is
replaced by one that serves exactly those allocations from shared memory (csrc/torch/gradient_allocator.c), so they are
reduced without a copy. A user sees no difference: p.grad is None after zero_grad, and then the tensor of autograd.

PyTorch has a function for it, c10::SetCPUAllocator, but not for other languages than C++. So this works with versions
of PyTorch that the tests have run with, and only if no other library has set an allocator. The first slab is tried:
tensors must be allocated in it and return to it. Otherwise gradients stay where PyTorch allocates them.
HVDLITE_GRADIENT_ALLOCATOR=0 turns it off.
"""

from __future__ import annotations

import ctypes
import os
import weakref
from collections import Counter
from collections.abc import Container, Sequence
from operator import attrgetter
from typing import Any

import torch

from ... import config
from ..._core import ffi, lib
from . import backward_pass as passes

_TESTED = ("2.13", "2.14")
_SPARE_BYTES = 65536  # a smaller size has one block more than gradients: for another tensor of that size
_AUTOGRAD = (
    "_ZN5torch8autograd25get_current_graph_task_idEv",
    "_ZN5torch8autograd37get_current_graph_task_nodes_in_graphEv",
    "_ZN5torch8autograd32get_current_graph_task_exec_infoEv",
)
_trainable = attrgetter("requires_grad")
_state: dict[str, bool] = {}  # "installed": whether the allocator is; absent: not tried yet. "tried": a slab was


class _C10:
    """The functions of libc10 that get and set the CPU allocator."""

    def __init__(self, folder: str) -> None:
        c10 = ctypes.CDLL(os.path.join(folder, "libc10.so"), mode=os.RTLD_NOLOAD)
        self.current, self.default = c10["_ZN3c1015GetCPUAllocatorEv"], c10["_ZN3c1022GetDefaultCPUAllocatorEv"]
        self.current.restype = self.default.restype = ctypes.c_void_p
        self.set = c10["_ZN3c1015SetCPUAllocatorEPNS_9AllocatorEh"]
        self.set.argtypes, self.set.restype = (ctypes.c_void_p, ctypes.c_uint8), None


def _install() -> bool:
    if ".".join(torch.__version__.split(".")[:2]) not in _TESTED or not config.load().values["gradient_allocator"]:
        return False
    folder = os.path.join(os.path.dirname(torch.__file__), "lib")
    try:
        c10 = _C10(folder)
        autograd = ctypes.CDLL(os.path.join(folder, "libtorch_cpu.so"), mode=os.RTLD_NOLOAD)
        functions = [ctypes.cast(autograd[name], ctypes.c_void_p).value for name in _AUTOGRAD]
    except (OSError, AttributeError):
        return False
    default = c10.default()
    allocator = lib.hvd_grad_alloc_open(default, *functions) if c10.current() == default else 0
    if allocator:
        c10.set(allocator, 0)
    return bool(allocator)


def _serves(size: int, count: int) -> bool:
    """Whether tensors of this size are allocated in a slab, one after the other, more of them than it has blocks."""
    for _ in range(count + 2):
        sample = torch.empty(size, dtype=torch.uint8, device="cpu")
        if not lib.hvd_grad_alloc_has(sample.data_ptr()):
            return False
        del sample
    return True


def _accumulator(parameter: torch.Tensor) -> Any:
    """The node that adds to the gradient of this parameter: the same one as long as somebody has it."""
    with torch.enable_grad():
        node: Any = parameter.expand_as(parameter).grad_fn
    return node.next_functions[0][0]


def _address(node: Any) -> int:
    """Of the node in C++: the first word of its object in Python."""
    return ctypes.c_void_p.from_address(id(node) + object.__basicsize__).value or 0


class GradientAllocator:
    """Shared memory for the gradients that backward passes of one optimizer will allocate."""

    def __init__(self) -> None:
        self._served: tuple[int, int] | None = None  # number of trainable parameters, and the job
        self._nodes: list[Any] = []
        self._end: weakref.finalize[..., Any] | None = None

    def serve(self, parameters: Sequence[torch.Tensor], sparse: Container[int], incarnation: int) -> None:
        """From now on; call it in a backward pass of these parameters. The numbers in `sparse` have no dense gradient.

        Nothing changes until the number of trainable parameters does, or the job.
        """
        served = sum(map(_trainable, parameters)), incarnation
        if served == self._served or passes.task_number() < 0:
            return
        self.give_up()
        self._served = served
        if "installed" not in _state:
            _state["installed"] = _install()
        if not _state["installed"]:
            return
        members = [
            parameter
            for number, parameter in enumerate(parameters)
            if parameter.requires_grad and parameter.is_cpu and parameter.numel() and number not in sparse
        ]
        rows = sorted(Counter(parameter.numel() * parameter.element_size() for parameter in members).items())
        self._nodes = list(map(_accumulator, members))
        slab = lib.hvd_grad_alloc_give(
            ffi.new("uint64_t[]", [size for size, _ in rows]),
            ffi.new("uint32_t[]", [count + (size < _SPARE_BYTES) for size, count in rows]),
            len(rows),
            ffi.new("uintptr_t[]", list(map(_address, self._nodes))),
            len(self._nodes),
        )
        if slab >= 0:
            self._end = weakref.finalize(self, lib.hvd_grad_alloc_end, slab)
            self._end.atexit = False
            if "tried" not in _state:
                _state["tried"] = _state["installed"] = _serves(*rows[0])
            if not _state["tried"]:
                self.give_up()

    def give_up(self) -> None:
        """Serve no more. Gradients keep their memory."""
        self._served, self._nodes = None, []
        if self._end is not None:
            self._end()
            self._end = None
