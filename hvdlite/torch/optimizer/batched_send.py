"""Gradients that are sent in one call, step after step: what is looked at each time, and what only once.

The plain case is a dense gradient in CPU memory of the parameter's dtype and shape, in row-major order, reduced where
it lies. Whatever else a gradient may be (absent, sparse, in another order or dtype, on a device) is seen here before
anything is sent, and its run is then sent one by one in the ways that the wire has for it.

What may change between two steps is looked at in every one of them: where the gradient lies, how much there is of it,
its dtype and its order.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch

from ..._core.request_batch import BatchEntry, Run, Sent
from ...ops.arguments import full_name, reduction
from ...process_sets.process_set import number_of
from ..ops import plain

_PLAIN = {torch.Tensor}


class GradientRun:
    """Some parameters whose gradients travel alike."""

    def __init__(self, parameters: list[torch.Tensor], counts: list[int], run: Run) -> None:
        self.parameters, self._run = parameters, run
        self._dtypes = [parameter.dtype for parameter in parameters]
        self._counts = counts
        self._needed = [count * parameter.element_size() for count, parameter in zip(counts, parameters)]
        self._addresses: list[int] = []
        self._bytes: list[int] = []  # of their storages, which may be resized in place

    @staticmethod
    def of(members: Sequence[tuple[str, torch.Tensor]], settings: dict[str, Any]) -> GradientRun | None:
        """The run of these names and parameters; None if one of them can never be sent so."""
        terms = reduction(
            None, settings["op"], settings["prescale_factor"], settings["postscale_factor"], settings["process_set"]
        )
        made = []
        for name, parameter in members:
            try:
                view = plain.adapter.view(parameter)
            except ValueError:  # no dtype or device that can be sent; sending it alone raises the error
                return None
            if view.device is not None:  # so will its gradient be
                return None
            made.append(BatchEntry(full_name("allreduce.", name) or "", view.dtype, tuple(view.shape)))
        run = Run(made, terms.op, terms.prescale, terms.postscale, number_of(terms.process_set))
        return GradientRun([parameter for _, parameter in members], [math.prod(one.shape) for one in made], run)

    def gradients(self) -> list[torch.Tensor] | None:
        """The gradients, if all can be sent as they are."""
        try:
            gradients: list[Any] = [parameter.grad for parameter in self.parameters]
            if set(map(type, gradients)) != _PLAIN:  # a class may override anything
                return None
            addresses = [gradient.data_ptr() for gradient in gradients]
            if [gradient.dtype for gradient in gradients] != self._dtypes:
                return None
            if [gradient.numel() for gradient in gradients] != self._counts:  # the run would reach beyond its memory
                return None
            for gradient in gradients:
                if not gradient.is_contiguous():
                    return None
            sizes = [gradient.untyped_storage().nbytes() for gradient in gradients]
        except (AttributeError, RuntimeError):  # there is none, or it is sparse
            return None
        if addresses != self._addresses or sizes != self._bytes:
            for gradient, needed, size in zip(gradients, self._needed, sizes):
                if not gradient.is_cpu or gradient.is_neg():
                    return None
                offset = gradient.storage_offset()
                # torch/storage_check.py
                if needed > size or (offset and offset * gradient.element_size() + needed > size):
                    return None
            self._addresses = []  # a signal handler may raise half-way
            self._run.point(addresses)
            self._addresses, self._bytes = addresses, sizes
        return gradients

    def prepare(self, gradients: list[torch.Tensor]) -> Sent:
        """What will send what `gradients` has returned."""
        return self._run.prepare([plain.adapter.memory(gradient) for gradient in gradients])


def written(tensors: list[torch.Tensor]) -> None:
    """The core has overwritten them: let autograd find out when backward needs what was there before."""
    try:
        torch.autograd.graph.increment_version(tensors)
    except (TypeError, AttributeError, RuntimeError):  # an older torch takes one; an inference tensor has no version
        for tensor in tensors:
            plain.adapter.written(tensor)
