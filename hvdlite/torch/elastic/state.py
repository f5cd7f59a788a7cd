"""How is the state of a PyTorch job saved in memory, restored and sent to new ranks?

A handler per kind of object knows: of a model and an optimizer copies of their state_dict are kept, a sampler's
processed samples are united over the ranks, everything else is an object that is pickled. The registry says which kind
has which handler; users may add their own.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import torch

from ..._core import rank
from ...elastic import ObjectState
from ...objects import allgather_object, broadcast_object
from ..device import settled
from ..state import broadcast_optimizer_state, broadcast_parameters
from .sampler import ElasticSampler


class StateHandler:
    """Saves, restores and synchronizes one object. To be subclassed for the registry."""

    def __init__(self, value: Any) -> None:
        self.value = value

    def save(self) -> None:
        """Keep a copy in memory."""
        raise NotImplementedError

    def restore(self) -> None:
        """Go back to that copy."""
        raise NotImplementedError

    def sync(self) -> None:
        """Give every rank rank 0's."""
        raise NotImplementedError

    def set_value(self, value: Any) -> None:
        """Another object takes the place of this one."""
        self.value = value
        self.save()


class StateDictHandler(StateHandler):
    """Of whatever has state_dict and load_state_dict."""

    def __init__(self, value: Any) -> None:
        super().__init__(value)
        self.save()

    def save(self) -> None:
        self._saved = copy.deepcopy(self.value.state_dict())

    def restore(self) -> None:
        self.value.load_state_dict(copy.deepcopy(self._saved))

    def sync(self) -> None:
        self.value.load_state_dict(broadcast_object(self.value.state_dict()))
        self.save()


class ModelStateHandler(StateDictHandler):
    """Of a Module."""

    def sync(self) -> None:
        broadcast_parameters(self.value.state_dict(), root_rank=0)
        self.save()


class OptimizerStateHandler(StateDictHandler):
    """Of an optimizer. models: what knows its parameters' names."""

    models: Sequence[torch.nn.Module] = ()

    def sync(self) -> None:
        broadcast_optimizer_state(self.value, 0, self.models)
        self.save()


class SamplerStateHandler(StateDictHandler):
    """Of an ElasticSampler: what any rank has processed is processed."""

    def sync(self) -> None:
        everyone = allgather_object(self.value.state_dict())
        state = everyone[0]
        same = [other for other in everyone if other["epoch"] == state["epoch"]]
        state["processed_indices"] = set().union(*(other["processed_indices"] for other in same))
        self.value.load_state_dict(state)
        self.save()


_handler_registry: list[tuple[type, type]] = [
    (torch.nn.Module, ModelStateHandler),
    (torch.optim.Optimizer, OptimizerStateHandler),
    (torch.optim.lr_scheduler.LRScheduler, StateDictHandler),
    (torch.amp.GradScaler if hasattr(torch.amp, "GradScaler") else torch.cuda.amp.GradScaler, StateDictHandler),
    (ElasticSampler, SamplerStateHandler),
]


def get_handler_registry() -> list[tuple[type, type]]:
    """Pairs (type of object, class of handler); the first that fits is taken."""
    return _handler_registry


def set_handler_registry(registry: list[tuple[type, type]]) -> None:
    """Another list of pairs, for states made from now on."""
    global _handler_registry
    _handler_registry = registry


def _handler_of(value: Any) -> StateHandler | None:
    for kind, handler in _handler_registry:
        if isinstance(value, kind):
            return handler(value)
    return None


class TorchState(ObjectState):
    """A PyTorch job's state: model, optimizer, and whatever else is given by name, kept as attributes.

    Several models and optimizers may be given under any names. An object of a kind that the registry knows is handled
    by its handler, all others are pickled.
    """

    def __init__(self, model: Any = None, optimizer: Any = None, **kwargs: Any) -> None:
        kwargs.update(model=model, optimizer=optimizer)
        handlers = {name: _handler_of(value) for name, value in kwargs.items()}
        self._handlers = {name: handler for name, handler in handlers.items() if handler is not None}
        for name, handler in self._handlers.items():
            object.__setattr__(self, name, handler.value)
        rest = {name: value for name, value in kwargs.items() if name not in self._handlers}
        super().__init__(bcast_object=broadcast_object, get_rank=rank, **rest)

    def save(self) -> None:
        """Keep a copy of everything in memory.

        Raises HvdError, and keeps the copies of before, if values lie on a GPU and the job has failed while they came
        about: what a lost rank has left of a sum there is no state to go back to.
        """
        settled()
        for handler in self._handlers.values():
            handler.save()
        super().save()

    def restore(self) -> None:
        """Go back to what was saved last."""
        for handler in self._handlers.values():
            handler.restore()
        super().restore()

    def sync(self) -> None:
        """Give every rank rank 0's state; optimizer state goes by the names that the models' parameters have."""
        models = [each.value for each in self._handlers.values() if isinstance(each.value, torch.nn.Module)]
        for handler in self._handlers.values():
            if isinstance(handler, OptimizerStateHandler):
                handler.models = models
            handler.sync()
        super().sync()

    def reset(self) -> None:
        """Deal the samples to the ranks there are now."""
        for handler in self._handlers.values():
            if isinstance(handler.value, ElasticSampler):
                handler.value.reset()

    def __setattr__(self, name: str, value: Any) -> None:
        if name in self.__dict__.get("_handlers", {}):
            self._handlers[name].set_value(value)
        super().__setattr__(name, value)
