"""Memory of gradients, arranged so that they are reduced without a copy.

Shared memory (hvdlite._core.memory) is reduced in place, in about half the time; other memory is copied in and out. The
question is what it costs to move a gradient there. Measured on two ranks, per gradient in us:

    float32 of                         64 KB   256 KB    1 MB    4 MB   16 MB
    reduced in shared memory              39       79     190     609    2372
    reduced elsewhere                     48       98     309    1085    4140
    copied into shared memory first       28       59     216     825    3464

So copying pays at no size: it costs what the plane's own copies cost, and more. (A zeroed buffer that backward adds to
moves more bytes than a copy does, to fill it and to add; that was not measured.) Hence the rule, which is the same for
all sizes and depends on the mode alone:

  * Where a gradient's memory stays from step to step (zero_grad(set_to_none=False), or no zero_grad at all), it moves
    into shared memory once, when a round has shown it. From then on that costs nothing. Small ones move with the large,
    since tensors in shared memory and others cannot be in one bucket.
  * Where autograd makes a new tensor in each step (zero_grad() as it is by default, whether or not several passes add
    up in it then), it stays where it is made.

The tensor itself moves, and no new one replaces it: a reference to p.grad stays one to the average. A tensor whose
memory may be used otherwise stays where it is: a view, a tensor with views, a part of a larger storage (flat buffers of
the user's), a tensor given to another library or with a graph (create_graph). A user that only keeps its address
(data_ptr()) must ask again. A gradient that the user replaces is reduced where it is then. When most gradients have
left shared memory (the mode has changed), their memory there is freed; after another init(), whose plane has other
memory, gradients move once more. All of one move is one slab, freed with the last tensor in it.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ..._core.memory import block
from ...process_sets.process_set import on_new_incarnation
from .aliasing import is_held, is_shared

_ALIGN, _ASKED = 64, 4
_incarnations: list[None] = []  # jobs that have ended
on_new_incarnation(lambda: _incarnations.append(None))


class GradientMemory:
    """Shared memory for the gradients of one optimizer."""

    def __init__(self) -> None:
        self._place: dict[int, int] = {}  # addresses
        self._incarnation = len(_incarnations)
        self._staying: list[int] = []

    def look(self, parameters: Sequence[torch.Tensor]) -> None:
        """A step's first pass begins: which gradients have stayed since the last one?

        A few are asked: as long as the first of the places is in use, or where there are none, some of the gradients
        do not stay, nothing has changed.
        """
        if self._place and self._incarnation == len(_incarnations):
            first = next(iter(self._place))
            if lies_at(parameters[first].grad, self._place[first]):
                return
        elif not self._place and all(parameters[len(parameters) * i // _ASKED].grad is None for i in range(_ASKED)):
            return
        staying = [number for number, parameter in enumerate(parameters) if parameter.grad is not None]
        if self._place and self._incarnation == len(_incarnations) and 2 * len(staying) >= len(self._place):
            return
        self._place, self._incarnation = {}, len(_incarnations)
        self._staying = staying if 2 * len(staying) >= len(parameters) else []

    def move_in(self, parameters: Sequence[torch.Tensor]) -> None:
        """A round is over, nothing is in flight: gradients that `look` has found to stay get their shared memory."""
        staying, self._staying = self._staying, []
        staying = [number for number in staying if movable(parameters[number])]
        if staying and not self._place:
            self._take(staying, parameters)

    def _take(self, numbers: Sequence[int], parameters: Sequence[torch.Tensor]) -> None:
        sizes = [parameters[number].numel() * parameters[number].element_size() for number in numbers]
        starts, total = [], 0
        for size in sizes:
            starts.append(total)
            total += -(-size // _ALIGN) * _ALIGN
        buffer = block(total) if total else None
        if buffer is None:
            return
        for number, start in zip(numbers, starts):
            gradient = parameters[number].grad
            assert gradient is not None
            flat = torch.frombuffer(buffer, dtype=gradient.dtype, count=gradient.numel(), offset=start)
            place = flat.view(gradient.shape)  # a storage of its own: a copy does not copy the slab
            place.copy_(gradient)
            gradient.data = place
            self._place[number] = place.data_ptr()


def lies_at(gradient: torch.Tensor | None, place: int) -> bool:
    """Whether it has not moved away."""
    return gradient is not None and gradient.layout is torch.strided and gradient.data_ptr() == place


def movable(parameter: torch.Tensor) -> bool:
    """Whether the user does not notice that the gradient's memory moves: it has all of its storage, and no graph."""
    gradient = parameter.grad
    return (
        gradient is not None
        and gradient.layout is torch.strided
        and gradient.is_cpu
        and gradient.is_contiguous()
        and gradient.numel() > 0
        and (gradient.dtype, gradient.shape) == (parameter.dtype, parameter.shape)
        and not (gradient.requires_grad or gradient.is_neg() or gradient._is_view() or gradient.is_inference())
        and type(gradient) is torch.Tensor
        and gradient.untyped_storage().nbytes() == gradient.numel() * gradient.element_size()
        and not (is_shared(gradient) or is_held(gradient))
    )
