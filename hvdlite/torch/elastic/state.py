"""TorchState: save in memory, restore, and broadcast to new ranks.

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

from ..._core import rank
from ...elastic import ObjectState, _warn_of_sums
from ...elastic.state_form import of_same_names
from ...errors import HvdStateError
from ...ops.objects import allgather_object, broadcast_object
from ...rendezvous import elastic_member
from ..compressed.residuals import for_all
from ..device import settled
from ..state_broadcast import broadcast_optimizer_state, broadcast_parameters
from . import partial_step
from .sampler import ElasticSampler


def on_cpu(tree: Any) -> Any:
    """The same with tensors on the CPU."""
    return tree_map_only(torch.Tensor, torch.Tensor.cpu, tree)  # the next job, or the next rank, may have other GPUs


class StateHandler:
    """Base class of handlers, each of which saves, restores and synchronizes one object of a ``TorchState``.

    Subclass it and add the class to the registry (``set_handler_registry``). ``TorchState`` calls ``save`` of all
    handlers after ``sync`` of all, so ``sync`` need not save. ``save`` must make a new copy and bind it to an attribute
    of the handler. If another handler fails, ``TorchState`` puts the old attributes back. A ``save`` that overwrites
    its copy in place defeats this: a rank lost at that moment leaves a mixture of two commits.

    Args:
        value: the object.
    """

    number = -1  # of the commit that is being saved, or that all go on from; TorchState sets it

    def __init__(self, value: Any) -> None:
        self.value = value

    def save(self) -> None:
        """Keep a copy of the object in memory."""
        raise NotImplementedError

    def restore(self) -> None:
        """Go back to the copy."""
        raise NotImplementedError

    def sync(self) -> None:
        """Give every rank the object of rank 0. Sending must not change the copy that ``restore`` goes back to."""
        raise NotImplementedError

    def saved(self) -> Any:
        """Return the copy as an object that can be pickled, for ``State.save_to``."""
        raise HvdStateError(f"{type(self).__name__} has no saved() and take(): State.save_to needs both [HVD425]")

    def take(self, saved: Any) -> None:
        """Replace the copy by ``saved``, and go back to it."""
        raise NotImplementedError

    def set_value(self, value: Any) -> None:
        """Replace the object by another one, and keep a copy of it."""
        self.value = value
        self.save()


class StateDictHandler(StateHandler):
    """Handler of an object with ``state_dict`` and ``load_state_dict``."""

    def __init__(self, value: Any) -> None:
        super().__init__(value)
        self.save()

    def save(self) -> None:
        self._saved = copy.deepcopy(for_all(self.value.state_dict()))

    def restore(self) -> None:
        self.value.load_state_dict(copy.deepcopy(self._saved))

    def sync(self) -> None:
        self.value.load_state_dict(broadcast_object(for_all(self.value.state_dict())))

    def saved(self) -> Any:
        moved = on_cpu(self._saved)
        if hasattr(self._saved, "_metadata"):  # of a Module: the versions of its parts
            moved._metadata = self._saved._metadata
        return moved

    def take(self, saved: Any) -> None:
        self._saved = saved
        self.restore()


class ModelStateHandler(StateDictHandler):
    """Handler of a ``torch.nn.Module``."""

    def sync(self) -> None:
        broadcast_parameters(self.value.state_dict(), root_rank=0)


class OptimizerStateHandler(StateDictHandler):
    """Handler of an optimizer. ``models``: the modules that name its parameters."""

    models: Sequence[torch.nn.Module] = ()

    def sync(self) -> None:
        broadcast_optimizer_state(self.value, 0, self.models)


class SamplerStateHandler(StateDictHandler):
    """Handler of an ``ElasticSampler``. A sample that any rank has processed counts as processed.

    Ranks may have saved one commit more than the one from which all continue. The samples in between are processed
    again with the weights of that commit, so they must not count. For that the handler keeps the copy of the previous
    commit too.
    """

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
    """Return the list that assigns a handler class to each kind of object in a ``TorchState``.

    By default it has ``Module``, ``Optimizer``, ``LRScheduler``, ``GradScaler`` and ``ElasticSampler``. Objects of
    other kinds are pickled.

    Returns:
        list[tuple[type, type]]: pairs (type of object, class of handler). The first pair that fits is used.

    Example:
        >>> hvd.elastic.get_handler_registry()[0][0].__name__
        'Module'
    """
    return _handler_registry


def set_handler_registry(registry: list[tuple[type, type]]) -> None:
    """Replace the list that assigns handlers. It applies to states that are made afterwards.

    Args:
        registry (list[tuple[type, type]]): pairs (type of object, subclass of ``StateHandler``); see
            ``hvdlite.torch.elastic.state.StateHandler``.

    Example:
        >>> hvd.elastic.set_handler_registry(hvd.elastic.get_handler_registry())
    """
    global _handler_registry
    _handler_registry = registry


def _handler_of(value: Any) -> StateHandler | None:
    if hasattr(value, "_hvd_shards"):
        from .sharded_state import ShardedStateHandler

        return ShardedStateHandler(value)
    if hasattr(value, "_hvd_local_steps"):
        from .local_steps import LocalStepsHandler

        return LocalStepsHandler(value)
    for kind, handler in _handler_registry:
        if isinstance(value, kind):
            return handler(value)
    return None


class TorchState(ObjectState):
    """State of a PyTorch job: a model, an optimizer and any other objects, kept as attributes.

    Several models and optimizers may be given, under any names. Models, optimizers, schedulers, gradient scalers and
    ``ElasticSampler`` are saved by their ``state_dict``. Other objects are copied and pickled. Assigning an attribute
    replaces the object. Copies on a GPU stay there, so each GPU needs memory for one more copy of model and optimizer.

    Args:
        model (torch.nn.Module, optional): the model.
        optimizer (torch.optim.Optimizer, optional): the optimizer. It may be a ``hvd.DistributedOptimizer``.
        kwargs: more objects, by the name of the attribute.

    Example:
        >>> model = torch.nn.Linear(2, 1)
        >>> state = hvd.elastic.TorchState(model, torch.optim.SGD(model.parameters(), lr=0.1), epoch=0)
        >>> state.epoch, state.model.weight.data = 5, torch.zeros(1, 2)
        >>> state.commit()
        >>> state.model.weight.data = torch.ones(1, 2)
        >>> state.restore()
        >>> state.epoch, model.weight.tolist()
        (5, [[0.0, 0.0]])
    """

    def __init__(self, model: Any = None, optimizer: Any = None, **kwargs: Any) -> None:
        kwargs.update(model=model, optimizer=optimizer)
        handlers = {name: _handler_of(value) for name, value in kwargs.items()}
        self._handlers = {name: handler for name, handler in handlers.items() if handler is not None}
        for name, handler in self._handlers.items():
            object.__setattr__(self, name, handler.value)
        rest = {name: value for name, value in kwargs.items() if name not in self._handlers}
        self._kept = partial_step.kept(self._parts())
        super().__init__(bcast_object=broadcast_object, get_rank=rank, **rest)

    def _save_commit(self) -> None:
        """The samples that a rank has named are sent first: it may be lost, or removed, with what only it knows; and
        the file has rank 0's."""
        if elastic_member.is_elastic() or self._file is not None:
            for sampler in self._samplers():
                sampler.share()
        super()._save_commit()

    def save(self) -> None:
        """Keep a copy of everything in memory.

        Raises:
            HvdError: values lie on a GPU and the job failed while they were computed. The previous copies are kept,
                because what a lost rank has left is not a valid state.
        """
        with self._all_or_none():
            kept = partial_step.kept(self._parts())
            self._save_handlers()
            super().save()
            self._kept = kept

    def restore(self) -> None:
        """Go back to the copy that was saved last. Gradients become None, unless the commit was within a step.

        With a ``DiLoCo`` the rank keeps what it has: others have no copy of its local steps to go back to.
        """
        own = self._own()
        for handler in self._handlers.values():
            if not own or (isinstance(handler.value, (torch.nn.Module, torch.optim.Optimizer)) and handler not in own):
                handler.restore()
        if own:
            partial_step.go_back(self._parts(), None)
            self.save()
            return
        partial_step.go_back(self._parts(), self._kept)
        super().restore()

    def sync(self) -> None:
        """Give every rank the state of rank 0. All ranks must call it.

        Optimizer state is assigned by the names of the models' parameters. Gradients become those of rank 0 if it is in
        the middle of a step, else None. With a ``DiLoCo``, ranks that have made steps keep their own models and
        optimizers.

        Raises:
            HvdMismatchError: models or optimizers have different parameters on the ranks.
            HvdPeerLostError: a rank has left or died. All copies stay as they were.
        """
        models = [each.value for each in self._handlers.values() if isinstance(each.value, torch.nn.Module)]
        local, own = self._local(), self._own()
        with self._all_or_none():
            for handler in own:
                handler.save()
            mine = partial_step.kept(self._parts())
            try:
                for handler in self._handlers.values():
                    if isinstance(handler, OptimizerStateHandler):
                        handler.models = models
                    handler.sync()
                kept = broadcast_object(on_cpu(mine))
            finally:
                for each in local[:1]:
                    each.put_back(own)
            kept = mine if own else kept
            for each in local:
                each.catch_up()
            partial_step.go_back(self._parts(), kept)
            self._save_handlers()
            super().sync()
            self._kept = kept
        if partial_step.has_sums(kept) and not local:
            _warn_of_sums()

    def _form(self) -> dict[str, str]:
        return {**super()._form(), **{name: type(each.value).__name__ for name, each in self._handlers.items()}}

    def state_dict(self) -> dict[str, Any]:
        """Return what was saved last, on the CPU.

        Returns:
            dict: ``{"handlers": {name: state_dict}, "objects": {name: value}, "step": of an unfinished step or None}``.

        Raises:
            HvdStateError: a handler of your own does not define ``saved`` and ``take``.
        """
        handlers = {name: each.saved() for name, each in self._handlers.items()}
        return {**super().state_dict(), "handlers": handlers, "step": on_cpu(self._kept)}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go back to a state that ``state_dict`` has returned.

        Args:
            state_dict (dict): the value of ``state_dict``, from this job or another one.

        Raises:
            HvdStateError: the names differ.
            RuntimeError: a model has other parameters; ``load_state_dict`` of PyTorch raises it.
        """
        with self._all_or_none():
            for name, saved in of_same_names(state_dict.get("handlers", {}), self._handlers).items():
                self._handlers[name].take(saved)
            super().load_state_dict(state_dict)
            self._kept = state_dict.get("step")
            partial_step.go_back(self._parts(), self._kept)

    def _parts(self) -> list[Any]:
        return [handler.value for handler in self._handlers.values()]

    def _save_handlers(self) -> None:
        settled()
        for handler in self._handlers.values():
            handler.save()

    @contextmanager
    def _all_or_none(self) -> Iterator[None]:
        """All handlers have new copies afterwards, or none has: where the body raises they have those of before."""
        before = [(handler, dict(vars(handler))) for handler in self._handlers.values()]
        for handler in self._handlers.values():
            handler.number = self._number
        try:
            yield
        except BaseException:
            for handler, had in before:
                handler.__dict__ = had
            raise

    def _local(self) -> list[Any]:
        return [each for each in self._handlers.values() if hasattr(each, "catch_up")]

    def _own(self) -> list[StateHandler]:
        """Handlers of models and optimizers with which this rank has made local steps."""
        local, handlers = self._local(), self._handlers.values()
        return [handler for handler in handlers if any(each.keeps(handler.value) for each in local)]

    def _samplers(self) -> list[SamplerStateHandler]:
        return [each for each in self._handlers.values() if isinstance(each, SamplerStateHandler)]

    def reset(self) -> None:
        """Deal the samples of every ``ElasticSampler`` to the ranks there are now."""
        for handler in self._handlers.values():
            if isinstance(handler.value, ElasticSampler):
                handler.value.reset()

    def __setattr__(self, name: str, value: Any) -> None:
        if name in self.__dict__.get("_handlers", {}):
            self._handlers[name].set_value(value)
            self._kept = None  # it was of the parameters of another object
        super().__setattr__(name, value)
