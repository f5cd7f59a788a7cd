"""PyTorch's tensors on GPUs: where they lie, when they are ready, and which NCCL is PyTorch's.

A collective may touch a tensor once the current stream of its device has got to where it was submitted: an event shows
it. That one event stands for what was written before, and for what still reads memory that is about to be written. When
it was waited for, the collective lies on a stream of the core's, and the current stream waits for it there: no thread
waits for a device. So does the stream that was current when the collective was submitted, if that is another one:
PyTorch's allocator gives the memory of copies that are dropped now to any allocation on the stream that it was made
for, and the collective may still be reading it.

Nothing here is imported or asked before the first tensor on a GPU comes.
"""

from __future__ import annotations

import functools
from typing import Any

import torch

from .. import _core
from .._core import gpu_discovery, nan_guard
from ..errors import HvdError


class CudaDevice:
    """A device of CUDA."""

    def __init__(self, index: int) -> None:
        self.number = index + 1
        self._device = torch.device("cuda", index)

    def _refuse_captures(self, ready: Any = None) -> None:
        with torch.cuda.device(self._device):  # the current stream is another one on each device
            captured = torch.cuda.is_current_stream_capturing()
            current = torch.cuda.current_stream(self._device)
        if ready is not None and not captured and ready[1][1].cuda_stream != current.cuda_stream:
            with torch.cuda.stream(ready[1][1]):
                if torch.cuda.is_current_stream_capturing():
                    raise HvdError(
                        "the stream of this collective is being captured into a CUDA graph, and would wait for the "
                        "collective: synchronize before or after the capture [HVD234]"
                    )
        if captured:
            raise HvdError(
                "a CUDA graph is being captured, and a graph cannot contain a collective. Capture forward and "
                "backward (with a DistributedOptimizer under its no_sync()). Call the collective (and its "
                "synchronize) or optimizer.step() outside the capture [HVD234]"
            )

    def ready(self) -> tuple[int, Any]:
        """An event after all that was begun on this device's current stream: its handle, and what keeps it alive, with
        that stream. Raises HvdError if a CUDA graph is being captured there."""
        self._refuse_captures()
        stream = torch.cuda.current_stream(self._device)
        event = torch.cuda.Event()
        event.record(stream)  # which makes it, on the stream's device
        return event.cuda_event, (event, stream)

    def follow(self, native: int, ready: Any) -> None:
        """The current stream waits for a collective, and the one that `ready` is of; this thread does not. Raises
        HvdPeerLostError, and HvdError as `ready`, and where the other one is being captured."""
        self._refuse_captures(ready)
        stream = torch.cuda.current_stream(self._device)
        _core.behind(native, stream.cuda_stream)
        self._behind(native, ready, stream)

    def fetch(self, native: int, target: int, ready: Any) -> None:
        """The current stream waits for a collective and copies its result. Otherwise as `follow`."""
        self._refuse_captures(ready)
        stream = torch.cuda.current_stream(self._device)
        _core.fetch(native, target, stream.cuda_stream)
        self._behind(native, ready, stream)

    def _behind(self, native: int, ready: Any, current: torch.cuda.Stream) -> None:
        made_on = ready[1][1]
        if made_on.cuda_stream != current.cuda_stream:
            _core.behind(native, made_on.cuda_stream)

    def completed(self, ready: Any) -> torch.cuda.Event:
        """An event after `follow`, `fetch` and what the current stream was given since. The stream that `ready` is of
        waits for it: copies that were made there may be read until then."""
        stream, made_on = torch.cuda.current_stream(self._device), ready[1][1]
        event = stream.record_event()
        if made_on.cuda_stream != stream.cuda_stream:
            made_on.wait_event(event)
        return event

    def behind(self, event: torch.cuda.Event) -> None:
        """The current stream waits for such an event. Raises HvdError as `ready`."""
        self._refuse_captures()
        torch.cuda.current_stream(self._device).wait_event(event)

    def found(self) -> int:
        """Nothing: no caller needs it."""
        return 0

    def near(self, tensor: torch.Tensor) -> torch.Tensor:
        """A contiguous copy of a tensor in the CPU's memory."""
        return tensor.detach().cpu().contiguous()

    def far(self, tensor: torch.Tensor) -> torch.Tensor:
        """A copy on this device of one in the CPU's memory."""
        return tensor.to(self._device)


class GuardedDevice(CudaDevice):
    """A device as one tensor sees it that is to be looked at. Looking waits for the device."""

    def __init__(self, index: int, tensor: torch.Tensor) -> None:
        super().__init__(index)
        self._tensor = tensor

    def found(self) -> int:
        """Elements that are NaN, times 2^32, plus infinite ones."""
        tensor, most = self._tensor.detach(), 0xFFFFFFFF
        if not tensor.is_floating_point() or bool(torch.isfinite(tensor).all()):
            return 0
        return min(int(tensor.isnan().sum()), most) << 32 | min(int(tensor.isinf().sum()), most)


def settled() -> None:
    """Returns when the current GPU has done what it was given, with all ranks. Raises the job's error if it has failed
    by then, for a collective that was on its way there may have left anything. Without GPUs it does nothing."""
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        torch.cuda.synchronize()
        _core.raise_failure()


def device_of(tensor: torch.Tensor) -> CudaDevice:
    """The device of a tensor on a GPU."""
    device = _device(tensor.get_device())
    return device if not nan_guard.looks() else GuardedDevice(device.number - 1, tensor)


def current() -> CudaDevice:
    """The device that new tensors on a GPU come to in this thread."""
    return _device(torch.cuda.current_device())


@functools.cache
def _device(index: int) -> CudaDevice:
    gpu_discovery.find()
    return CudaDevice(index)
