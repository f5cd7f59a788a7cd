"""The collectives on tensors, and their gradients: `plain` without, `collectives` with them.

A tensor that requires grad keeps its history through the forms that return a new tensor at once. In-place and
asynchronous forms, send and recv have no gradient. Backward passes communicate, so every rank must run them.
What each collective's gradient is stands in `gradients`; sparse tensors are in `sparse`.
"""

from __future__ import annotations

from typing import Any

import torch

from ...ops import Collectives, Handle, Terms
from ..adapter import TorchAdapter
from .gradients import Past, attach, join_scatter, tracked


class TorchCollectives(Collectives[torch.Tensor]):
    """The collectives, with gradients where a tensor asks for one."""

    def _tracked(self, tensor: Any) -> bool:
        return tracked(tensor)

    def _now(self, kind: str, start: Any, tensor: Any, name: str | None, terms: Terms) -> Any:
        grouped = isinstance(tensor, (list, tuple))
        requires_grad = any(map(tracked, tensor)) if grouped else tracked(tensor)
        if kind == "scatter":
            terms = terms._replace(tracked=requires_grad)
        handle: Handle = start(tensor, name, terms, True)
        brought = handle.brought
        if kind == "scatter":
            source = tensor if requires_grad else None
            handle.then(lambda result: join_scatter(self, source, result, brought[0], name, terms))
        elif requires_grad:
            tensors = tuple(tensor) if grouped else (tensor,)
            past = Past(self, kind, name, terms, brought, [each.shape for each in tensors])
            handle.then(lambda result: attach(past, result, tensors))
        return handle.wait(terms.timeout)


plain: Collectives[torch.Tensor] = Collectives(TorchAdapter())
collectives = TorchCollectives(plain.adapter)
