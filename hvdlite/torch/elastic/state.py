"""How is the state of a PyTorch job saved in memory, restored and sent to new ranks?

A handler per kind of object knows: of a model and an optimizer copies of their state_dict are kept, a sampler's
processed samples are united over the ranks, everything else is an object that is pickled. The registry says which kind
has which handler; users may add their own.

All copies of a state are of one commit: where saving or sending fails, every handler has the copy of before. Else a
rank lost in the midst of `sync` would leave the others with the model of one commit and the optimizer of another.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils._pytree import tree_map_only

from ... import _member
from ..._core import rank
from ..._state_form import of_same_names
from ...elastic import ObjectState
from ...errors import HvdStateError
from ...objects import allgather_object, broadcast_object
from ..device import settled
from ..state import broadcast_optimizer_state, broadcast_parameters
from .sampler import ElasticSampler


class StateHandler:
    """Saves, restores and synchronizes one object. To be subclassed for the registry.

    TorchState calls `save` of all handlers when `sync` of all has ended, so `sync` need not save. `save` makes a new
    copy and binds it to an attribute of the handler; TorchState puts back what the attributes were if another handler
    fails. A `save` that overwrites its copy in place undoes that: a rank lost at the wrong time leaves a mixture.
    """

    def __init__(self, value: Any) -> None:
        self.value = value

    def save(self) -> None:
        """Keep a copy in memory."""
        raise NotImplementedError

    def restore(self) -> None:
        """Go back to that copy."""
        raise NotImplementedError

    def sync(self) -> None:
        """Give every rank rank 0's. What is sent first must not change what `restore` goes back to."""
        raise NotImplementedError

    def saved(self) -> Any:
        """That copy, as an object that can be pickled, for `State.save_to`."""
        raise HvdStateError(f"{type(self).__name__} has no saved() and take(): State.save_to needs both [HVD425]")

    def take(self, saved: Any) -> None:
        """Have this copy, and go back to it."""
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

    def saved(self) -> Any:
        moved = tree_map_only(torch.Tensor, torch.Tensor.cpu, self._saved)  # the next job may have other GPUs
        if hasattr(self._saved, "_metadata"):  # of a Module: the versions of its parts
            moved._metadata = self._saved._metadata
        return moved

    def take(self, saved: Any) -> None:
        self._saved = saved
        self.restore()


class ModelStateHandler(StateDictHandler):
    """Of a Module."""

    def sync(self) -> None:
        broadcast_parameters(self.value.state_dict(), root_rank=0)


class OptimizerStateHandler(StateDictHandler):
    """Of an optimizer. models: what knows its parameters' names."""

    models: Sequence[torch.nn.Module] = ()

    def sync(self) -> None:
        broadcast_optimizer_state(self.value, 0, self.models)


class SamplerStateHandler(StateDictHandler):
    """Of an ElasticSampler: what any rank has processed is processed.

    Ranks may have saved one commit more than the one that all go on from. What they processed in between is done again
    with the weights of that commit, so it must not count: the copy of the commit before is kept, too.
    """

    number = -1  # of the commit that is being saved, or that all go on from; TorchState sets it

    def __init__(self, value: Any) -> None:
        self._copies: dict[int, dict[str, Any]] = {}  # by number of commit: the last two
        super().__init__(value)

    def save(self) -> None:
        super().save()
        kept = {number: each for number, each in self._copies.items() if number == self.number - 1}
        self._copies = {**kept, self.number: self._saved}

    def share(self) -> None:
        """Tell all ranks which samples this one has named since it did so last. All ranks have to call it."""
        self.value.processed_indices.update(*allgather_object(self.value.unshared))
        self.value.unshared = set()

    def sync(self) -> None:
        mine = self.value.state_dict()
        if self.number < max(self._copies):
            mine = self._copies.get(self.number, mine)
        everyone = allgather_object(mine)
        same_epoch = [other["processed_indices"] for other in everyone if other["epoch"] == everyone[0]["epoch"]]
        self.value.load_state_dict({**everyone[0], "processed_indices": set().union(*same_epoch), "unshared": set()})


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

    def _save_commit(self) -> None:
        """The samples that a rank has named are told first: it may be lost, or removed, with what only it knows; and
        the file has rank 0's."""
        if _member.is_elastic() or self._file is not None:
            for sampler in self._samplers():
                sampler.share()
        super()._save_commit()

    def save(self) -> None:
        """Keep a copy of everything in memory.

        Raises HvdError, and keeps the copies of before, if values lie on a GPU and the job has failed while they came
        about: what a lost rank has left of a sum there is no state to go back to.
        """
        with self._all_or_none():
            self._save_handlers()
            super().save()

    def restore(self) -> None:
        """Go back to what was saved last."""
        for handler in self._handlers.values():
            handler.restore()
        super().restore()

    def sync(self) -> None:
        """Give every rank rank 0's state; optimizer state goes by the names that the models' parameters have."""
        models = [each.value for each in self._handlers.values() if isinstance(each.value, torch.nn.Module)]
        with self._all_or_none():
            for handler in self._handlers.values():
                if isinstance(handler, OptimizerStateHandler):
                    handler.models = models
                handler.sync()
            self._save_handlers()
            super().sync()

    def _form(self) -> dict[str, str]:
        return {**super()._form(), **{name: type(each.value).__name__ for name, each in self._handlers.items()}}

    def state_dict(self) -> dict[str, Any]:
        """What was saved last: state_dicts below "handlers" by name, all else below "objects"."""
        return {**super().state_dict(), "handlers": {name: each.saved() for name, each in self._handlers.items()}}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go back to what `state_dict` has given. HvdStateError for other names, and what PyTorch raises."""
        with self._all_or_none():
            for name, saved in of_same_names(state_dict.get("handlers", {}), self._handlers).items():
                self._handlers[name].take(saved)
            super().load_state_dict(state_dict)

    def _save_handlers(self) -> None:
        settled()
        for handler in self._handlers.values():
            handler.save()

    @contextmanager
    def _all_or_none(self) -> Iterator[None]:
        """All handlers have new copies afterwards, or none has: where the body raises they have those of before."""
        before = [(handler, dict(vars(handler))) for handler in self._handlers.values()]
        for sampler in self._samplers():
            sampler.number = self._number
        try:
            yield
        except BaseException:
            for handler, had in before:
                handler.__dict__ = had
            raise

    def _samplers(self) -> list[SamplerStateHandler]:
        return [each for each in self._handlers.values() if isinstance(each, SamplerStateHandler)]

    def reset(self) -> None:
        """Deal the samples to the ranks there are now."""
        for handler in self._handlers.values():
            if isinstance(handler.value, ElasticSampler):
                handler.value.reset()

    def __setattr__(self, name: str, value: Any) -> None:
        if name in self.__dict__.get("_handlers", {}):
            self._handlers[name].set_value(value)
        super().__setattr__(name, value)
