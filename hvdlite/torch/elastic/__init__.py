"""Elastic training on PyTorch: `@hvd.elastic.run`, the state it works on, and a sampler that knows what was processed.

    @hvd.elastic.run
    def train(state):
        for state.epoch in range(state.epoch, epochs):
            ...
            state.commit()

    train(hvd.elastic.TorchState(model, optimizer, epoch=0))

Ranks come and go in jobs that hvdlite-run --min-np has started (see hvdlite.elastic). `PipelineState`, of a pipeline
whose stages follow the ranks, is imported when it is used: it stands on a higher floor.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

from ...elastic import ObjectState, State, run, run_fn
from .sampler import ElasticSampler
from .state import TorchState, get_handler_registry, set_handler_registry

__all__ = [
    "ElasticSampler",
    "ObjectState",
    "PipelineState",
    "State",
    "TorchState",
    "get_handler_registry",
    "run",
    "run_fn",
    "set_handler_registry",
]


def __getattr__(name: str) -> Any:
    if name != "PipelineState":
        raise AttributeError(f"module 'hvdlite.torch.elastic' has no attribute {name!r}")
    value = import_module("hvdlite.elastic_pipeline").PipelineState
    globals()[name] = value
    return value
