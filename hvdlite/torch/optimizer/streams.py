"""CUDA streams of gradients: the one that wrote a gradient, and what must follow it when the gradient is sent.

Autograd adds to a gradient on the stream that its part of forward ran on, and the gradient is sent later, by the hook
of another parameter, whose stream may be another one. An event on that one does not cover the first: the collective
would read what is not written yet. (Autograd lets the caller's stream wait for all of them, but only when backward is
over.)

So the hook of a parameter on a GPU notes the current stream, 0.3 us of its time, and where the sending hook has another
one, the gradient is sent from the stream it was written on: its ready event is recorded there, and what is computed
of it to travel (a compressed copy) is computed there. No stream of the user's waits for another by that. Only
gradients that become one tensor, in a group or in the bucket of a comm hook, must have come together: the current
stream waits for theirs. When no pass is open any more, all of this is autograd's business, and what was noted is
forgotten.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch

try:
    _address: Callable[[int], int] = torch._C._cuda_getCurrentRawStream
except AttributeError:  # a PyTorch without CUDA, or one that has given it up

    def _address(device: int) -> int:
        return torch.cuda.current_stream(torch.device("cuda", device)).cuda_stream


class Writers:
    """The streams on which gradients were written in the open passes."""

    def __init__(self) -> None:
        self._written: dict[int, tuple[int, torch.cuda.Stream]] = {}  # by parameter: its device, the stream
        self._known: dict[tuple[int, int], tuple[int, torch.cuda.Stream]] = {}

    def noter(self, parameter: torch.Tensor, number: int) -> Callable[[], None] | None:
        """What notes the current stream for this parameter; None if it lies on no GPU."""
        if not parameter.is_cuda:
            return None
        device, written, known = parameter.get_device(), self._written, self._known

        def note() -> None:
            key = device, _address(device)
            writer = known.get(key)
            if writer is None:
                writer = known[key] = device, torch.cuda.current_stream(torch.device("cuda", device))
            written[number] = writer

        return note

    def elsewhere(self, number: int) -> torch.cuda.Stream | None:
        """The stream on which this gradient was written, if it is not the current one."""
        if number not in self._written:
            return None
        device, stream = self._written[number]
        return None if stream.cuda_stream == _address(device) else stream

    def join(self, numbers: Iterable[int]) -> None:
        """Let the current stream wait until these gradients are written."""
        others = {id(stream): stream for stream in map(self.elsewhere, numbers) if stream is not None}
        for stream in others.values():
            torch.cuda.current_stream(stream.device).wait_stream(stream)

    def forget(self) -> None:
        """No pass is open: the caller's stream has waited for all of them."""
        self._written.clear()
