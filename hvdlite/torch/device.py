"""PyTorch's tensors on GPUs: where they lie, when they are ready, and which NCCL is PyTorch's.

A collective may touch a tensor once the current stream of its device has got to where it was submitted; an event tells.
That one event stands for what was written before, and for what still reads memory that is about to be written. When it
was waited for, the collective lies on a stream of the core's, and the current stream waits for it there: no thread
waits for a device.

Nothing here is imported or asked before the first tensor on a GPU comes.
"""

from __future__ import annotations

import functools
from typing import Any

import torch

from .. import _core, gpu
from ..errors import HvdError


class CudaDevice:
    """A device of CUDA."""

    def __init__(self, index: int) -> None:
        self.number = index + 1
        self._device = torch.device("cuda", index)

    def ready(self) -> tuple[int, Any]:
        """An event after all that was begun on this device's current stream: its handle, and what keeps it alive."""
        if torch.cuda.is_current_stream_capturing():
            raise HvdError(
                "a CUDA graph is being captured, and a collective that hvdlite agrees on at run time cannot be part of "
                "one: capture forward and backward, and call the collective or optimizer.step() outside of the capture"
            )
        event = torch.cuda.Event()
        event.record(torch.cuda.current_stream(self._device))
        return event.cuda_event, event

    def follow(self, native: int) -> None:
        """The current stream waits for a collective; this thread does not. Raises HvdPeerLostError."""
        _core.behind(native, torch.cuda.current_stream(self._device).cuda_stream)

    def fetch(self, native: int, target: int) -> None:
        """The current stream waits for a collective and copies its result. Raises as `follow`."""
        _core.fetch(native, target, torch.cuda.current_stream(self._device).cuda_stream)

    def near(self, tensor: torch.Tensor) -> torch.Tensor:
        """A contiguous copy of a tensor in the CPU's memory."""
        return tensor.detach().cpu().contiguous()

    def far(self, tensor: torch.Tensor) -> torch.Tensor:
        """A copy on this device of one in the CPU's memory."""
        return tensor.to(self._device)


def device_of(tensor: torch.Tensor) -> CudaDevice:
    """The device of a tensor on a GPU."""
    return _device(tensor.get_device())


def current() -> CudaDevice:
    """The device that new tensors on a GPU come to in this thread."""
    return _device(torch.cuda.current_device())


@functools.cache
def _device(index: int) -> CudaDevice:
    gpu.find()
    return CudaDevice(index)
