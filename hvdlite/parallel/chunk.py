"""Forward and backward of one micro-batch through adjacent layers.

    forward   take the input from the chunk before (or from x), compute, send copies of the output on
    backward  take its gradient from the chunk behind, backward, send the input's gradient back

A stage is one chunk, or several with the schedule "interleaved". How tensors travel is the edges' (stage_link.py).
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

import torch
from torch.func import functional_call
from torch.utils.checkpoint import checkpoint as recomputed

from ..errors.user_warning import warn
from .stage import as_arguments
from .stage_link import Edge, Look, looks_of
from .structure import put_together


class Flight(NamedTuple):
    """A micro-batch between its forward and its backward, with what its tensors looked like when they came and went."""

    inputs: list[torch.Tensor]  # from the chunk before
    came: list[Look]
    outputs: list[torch.Tensor]
    gave: list[Look]


class Chunk:
    """Some layers of a stage. number: which of its chunks; None: it has one. before, after: the edges to the
    neighbours; None at the ends of the model. checkpoint: compute activations again before the backward."""

    def __init__(
        self, module: torch.nn.Module, number: int | None, before: Edge | None, after: Edge | None, checkpoint: bool
    ) -> None:  # fmt: skip
        self.module, self.before, self.after, self.checkpoint = module, before, after, checkpoint
        self._only = {} if number is None else {"chunk": number}
        self.live: dict[int, Flight] = {}  # by micro-batch
        self._warned = False

    def forward(self, k: int, x: Any, count: int, leaves: Any, loss: Callable[[Any], torch.Tensor]) -> None:
        """Micro-batch k of `count` in its mini-batch. x: for the first chunk. leaves: the parameters; None: the
        module's own. loss: of the last chunk's output."""
        values, inputs, came, _ = self._taken(k, x)
        out = self._computed(values, leaves)
        if self.after is None:
            outputs = [loss(out)]
        else:
            copies = self.after.copies(out)
            self.after.give(copies, k, count)
            outputs = copies.tensors
            self._warn(outputs, inputs)
        self.live[k] = Flight(inputs, came, outputs, looks_of(outputs))

    def backward(self, k: int, within: AbstractContextManager[Any]) -> None:
        """Of micro-batch k, in a context."""
        inputs, came, outputs, gave = self.live.pop(k)
        found = list(zip(outputs, self.after.take_back(gave, k) if self.after else [None]))
        used = [(t, grad) for t, grad in found if t.requires_grad and (grad is not None or not self.after)]
        if used:
            with within:
                torch.autograd.backward([t for t, _ in used], [grad for _, grad in used])
        if self.before:
            self.before.give_back(inputs, came, k)

    def without_graph(self, k: int, x: Any, count: int) -> tuple[Any, int]:
        """The output, and into how many parts the mini-batch was cut; 0: its reader knows."""
        values, _, _, parts = self._taken(k, x)
        out = self._computed(values, None)
        if self.after is not None:
            self.after.give(self.after.copies(out), k, parts or count)
        return out, parts

    def expect(self, what: str, k: int) -> None:
        """What a later action receives may come already."""
        if what == "F" and self.before:
            self.before.expect(k)
        elif what == "B" and self.after and k in self.live:
            self.after.expect_back(self.live[k].gave, k)

    def settle(self) -> None:
        """All sends have arrived."""
        for edge in (self.before, self.after):
            if edge:
                edge.settle()

    def apart(self) -> Chunk:
        """Another on the same layers for what is no training, while nothing is in flight here."""
        before, after = (edge.apart() if edge else None for edge in (self.before, self.after))
        return Chunk(self.module, self._only.get("chunk"), before, after, self.checkpoint)

    def _taken(self, k: int, x: Any) -> tuple[tuple[Any, ...], list[torch.Tensor], list[Look], int]:
        """The arguments that micro-batch k brings, those of its tensors that have come from the chunk before, what
        these look like there, and into how many the mini-batch was cut."""
        if self.before is None:
            return as_arguments(x), [], [], 0
        tensors, looks, form, count = self.before.take(k)
        grads = torch.is_grad_enabled()
        tensors = [t.requires_grad_(look.tracked and grads) for t, look in zip(tensors, looks)]
        return as_arguments(put_together(tensors, form)), tensors, looks, count

    def _computed(self, values: tuple[Any, ...], leaves: Any) -> Any:
        def run(*x: Any) -> Any:
            if leaves is None:
                return self.module(*x, **self._only)
            return functional_call(self.module, leaves, x, self._only)

        if self.checkpoint and torch.is_grad_enabled():
            return recomputed(run, *values, use_reentrant=False)
        return run(*values)

    def _warn(self, outputs: list[torch.Tensor], inputs: list[torch.Tensor]) -> None:
        """Of an output that does not learn, though something before it could. Masks and the like that travel beside
        one that learns are no reason."""
        if self._warned or not any(t.requires_grad for t in (*inputs, *self.module.parameters())):
            return
        if any(t.is_floating_point() for t in outputs) and not any(t.requires_grad for t in outputs):
            self._warned = True
            layers = ", ".join(name for name, _ in self.module.named_children())
            warn(
                f"no output of the stage with the layers {layers} needs a gradient: the layers before do not learn "
                "from it [HVD020]"
            )  # fmt: skip
