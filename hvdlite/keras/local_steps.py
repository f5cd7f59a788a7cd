"""Keras callbacks for ranks that train on their own and exchange every few batches: DiLoCo and LocalSGD.

    hvd.callbacks.DiLoCoCallback(sync_every=100)    an outer optimizer takes a step on the average change
    hvd.callbacks.LocalSGDCallback(sync_every=10)   the weights are averaged

All ranks hold the same global weights G. After `sync_every` batches a rank has weights L of its own. G - L, averaged
over the ranks, is the gradient of the outer optimizer, and its result is the new G and L of all ranks. Float weights
that no gradient changes (BatchNorm's statistics, frozen layers) are averaged without it, and integers stay local.

Ranks may have different numbers of batches. What a rank sends has weight 0 if it has made no step since the last
exchange. At the end of fit a rank takes part in exchanges until all ranks are there. Weights are counted first: they
decide whether anything else travels.
"""

from __future__ import annotations

from importlib import import_module
from itertools import zip_longest
from typing import Any

import numpy as np

from .. import _core
from ..errors import HvdNotYetError
from ..errors.codes import coded
from ..ops import Sum
from ..ops.arguments import NoneCompressor
from ..process_sets.process_set import ProcessSet, global_process_set
from ..rendezvous import elastic_member
from ..training.consistency import require_equal
from ..training.digest import digest
from . import backend
from .arguments import check_number, check_terms
from .naming import everywhere
from .undistributed import averaged

_Callback: Any = backend.keras.callbacks.Callback


class DiLoCoCallback(_Callback):
    """Callback that lets each rank take steps of its own, and exchanges weights every few batches (DiLoCo).

    Compile the model with a plain optimizer of Keras, whose state stays local. An outer optimizer, SGD with Nesterov
    momentum, takes a step on the average change of the weights (Douillard et al., 2023, arXiv 2311.08105). When ``fit``
    begins for the first time, all ranks get the weights of the first rank, so no other broadcast is needed. ``fit``
    ends with an exchange: then all ranks have the same weights. Ranks may have different numbers of batches.

    Between two exchanges a rank's weights are its own: metrics and checkpoints within ``fit`` are of these. Calls of
    ``fit`` continue with the same global weights and momentum. For another model or other weights make a new callback.

    Args:
        sync_every (int): batches between two exchanges. With ``steps_per_execution`` above 1, the exchange follows the
            execution that reaches this number.
        outer_learning_rate (float): the learning rate of the outer optimizer. Default: 0.7.
        outer_momentum (float): its Nesterov momentum. Default: 0.9.
        compression (Compressor): the form in which changes travel, such as ``hvd.Compression.bf16``. Default: none.
        process_set (ProcessSet, optional): the ranks that exchange. On other ranks it does nothing. Default: all.

    Raises:
        HvdMismatchError: when training starts, the ranks have different settings, models, global weights or momentum.
        HvdNotYetError: when training starts, the job is elastic.
        TypeError: an argument is of another kind.
        ValueError: an argument is out of range. When training starts, the model is not built, or its weights are not
            those of the last exchange. Or its optimizer averages gradients over the same ranks, or has ``use_ema``.

    Example:
        >>> import keras
        >>> model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)])
        >>> model.compile(keras.optimizers.AdamW(0.01), "mse")
        >>> callback = hvd.callbacks.DiLoCoCallback(sync_every=2)
        >>> history = model.fit(np.ones((96, 1)), np.full((96, 1), hvd.rank()), callbacks=[callback], verbose=0)
        >>> hvd.check_consistency(model.weights)
    """

    def __init__(
        self, sync_every: int, outer_learning_rate: float = 0.7, outer_momentum: float = 0.9,
        compression: Any = NoneCompressor, process_set: ProcessSet = global_process_set
    ) -> None:  # fmt: skip
        super().__init__()
        if isinstance(sync_every, bool) or not isinstance(sync_every, int) or sync_every < 1:
            raise ValueError(
                f"{type(self).__name__}: sync_every must be a number of batches, not {sync_every!r} [HVD238]"
            )
        check_number(self, "outer_learning_rate", outer_learning_rate, 0)
        check_number(self, "outer_momentum", outer_momentum, 0)
        check_terms(compression, 1.0, process_set)
        self.sync_every, self.compression, self.process_set = sync_every, compression, process_set
        self.outer_learning_rate, self.outer_momentum = float(outer_learning_rate), float(outer_momentum)
        self._variables: list[Any] = []
        self._dtypes: list[np.dtype] = []
        self._trained: list[bool] = []  # of each variable: whether the outer optimizer changes it
        self._names: list[str] = []
        self._global: list[np.ndarray] = []
        self._momentum: list[np.ndarray | None] = []
        self._steps = self._first = 0  # steps: since the last exchange

    def on_train_begin(self, logs: Any = None) -> None:
        """Compares what all ranks begin with. The first time, it gives them the weights of the first rank."""
        caller = type(self).__name__
        averaged[self.model] = self.process_set  # on the other ranks, too: what is compared all ranks compare
        if not self.process_set.included():
            return
        if elastic_member.is_elastic():
            raise HvdNotYetError(
                f"{caller} does not support elastic jobs: use hvd.DiLoCo of hvdlite.torch, or "
                "hvd.elastic.KerasState with hvd.DistributedOptimizer [HVD246]"
            )
        found = [(each, _array(each)) for each in self.model.weights]
        found = [(each, local) for each, local in found if "float" in local.dtype.name]
        self._variables, self._dtypes = [each for each, _ in found], [local.dtype for _, local in found]
        by_gradients = {backend.key_of(each) for each in self.model.trainable_weights}
        self._trained = [backend.key_of(each) in by_gradients for each in self._variables]
        names = [f"{everywhere(each)} {local.dtype}{list(local.shape)}" for each, local in found]
        problem = self._problem(names)
        mine = [f"{self.sync_every=} {self.outer_learning_rate=} {self.outer_momentum=}".replace("self.", "")]
        mine += [f"{name} {'trained' if each else 'not trained'}" for name, each in zip(names, self._trained)]
        mine += [f"the state {digest([*self._global, *self._buffers()]).hex()}"] if self._global else ["no state"]
        mine += [problem] if problem else []
        require_equal(caller, mine, self.process_set, ", ".join, "Use the same settings, model and state")
        if problem:
            raise ValueError(coded("HVD239", f"{caller} on rank {_core.rank()}: {problem}"))
        if not self._global:
            is_first = _core.rank() == self.process_set.ranks[0]
            values = [_exact(local) if is_first else np.zeros_like(_exact(local)) for _, local in found]
            self._global = self._sums(values, NoneCompressor)
            self._names, self._momentum = names, [None] * len(names)
            self._assign()

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        """Notes the first batch of an execution."""
        self._first = batch

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        """Counts batches, and exchanges if it is time."""
        of_epoch = (self.params or {}).get("steps") or batch + 1  # the last execution may have fewer batches
        self._steps += min(batch + 1, of_epoch) - self._first
        if self._steps >= self.sync_every:
            self._exchange(1)

    def on_train_end(self, logs: Any = None) -> None:
        """Exchanges until all ranks are here."""
        while self._exchange(0):
            pass
        averaged.pop(self.model, None)

    def state_dict(self) -> dict[str, Any]:
        """Return what training continues from, together with this rank's model and optimizer.

        Returns:
            dict: ``{"names": [str], "global": [array], "momentum": [array or None], "steps": since the last exchange}``

        Example:
            >>> hvd.callbacks.DiLoCoCallback(sync_every=2).state_dict()["steps"]
            0
        """
        buffers = [None if each is None else each.copy() for each in self._momentum]
        copies = [each.copy() for each in self._global]
        return {"names": list(self._names), "global": copies, "momentum": buffers, "steps": self._steps}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue from a state that ``state_dict`` has returned. All ranks must call it before ``fit``.

        Load the weights of the model, too. ``fit`` compares both.

        Args:
            state_dict (dict): the value of ``state_dict``.

        Example:
            >>> callback = hvd.callbacks.DiLoCoCallback(sync_every=2)
            >>> callback.load_state_dict(callback.state_dict())
        """
        self._names, self._steps = list(state_dict["names"]), int(state_dict["steps"])
        self._global = [np.array(each) for each in state_dict["global"]]
        self._momentum = [None if each is None else np.array(each) for each in state_dict["momentum"]]

    def _problem(self, names: list[str]) -> str:
        """Why training cannot begin; "" if it can."""
        optimizer: Any = self.model.optimizer
        optimizers = [optimizer, getattr(optimizer, "inner_optimizer", None)]
        sets = [each._hvd.process_set for each in optimizers if getattr(each, "_hvd", None) is not None]
        if any(len(each.ranks) > 1 and {*each.ranks} >= {*self.process_set.ranks} for each in sets):
            return (
                "the optimizer averages the gradients of all its ranks already: compile with the optimizer that "
                "DistributedOptimizer wraps, or give that a smaller process_set [HVD224]"
            )
        if any(getattr(each, "use_ema", False) for each in optimizers):
            return "use_ema=True replaces the weights before the last exchange: compile without it [HVD224]"
        if not names:
            return "the model is not built: call model.build(input_shape) before fit [HVD239]"
        for name, kept in zip_longest(names, self._names if self._global else names):
            if name != kept:
                return f"the model has {name}, the state has {kept}: make a new callback for another model [HVD239]"
        for name, variable, kept in zip(names, self._variables, self._global if self._steps == 0 else ()):
            local = _array(variable)
            if local.tobytes() != kept.astype(local.dtype).tobytes():
                return (
                    f"{name} is not what the last exchange has left: load the weights that belong to the state, or "
                    "make a new callback for other weights [HVD239]"
                )
        return ""

    def _buffers(self) -> list[Any]:
        return [b"none" if each is None else each for each in self._momentum]

    def _exchange(self, active: int) -> bool:
        """One exchange. Whether a rank is still active, and more will follow."""
        if not self.process_set.included():
            return False
        backend.synced(self.model)
        weight, sent = int(self._steps > 0), []
        ((weights, others),) = self._sums([np.array([weight, active], np.int32)], NoneCompressor)
        for variable, kept in zip(self._variables, self._global if weights else ()):
            local = _array(variable)  # of half precision: what steps have changed, not what rounding has
            sent.append(_exact(kept.astype(local.dtype)) - _exact(local) if weight else np.zeros_like(kept))
        for i, total in enumerate(self._sums(sent, self.compression)):
            total /= int(weights)
            self._step(i, total)
        self._assign()
        self._steps = 0
        return bool(others)

    def _step(self, i: int, gradient: np.ndarray) -> None:
        """SGD of PyTorch, with nesterov=True, on one of the global weights; a plain average if it is not trained."""
        if self._trained[i]:
            if self.outer_momentum:
                buffer = self._momentum[i]
                if buffer is None:
                    buffer = self._momentum[i] = gradient.copy()
                else:
                    buffer *= self.outer_momentum
                    buffer += gradient
                gradient += self.outer_momentum * buffer
            gradient *= self.outer_learning_rate
        self._global[i] -= gradient

    def _assign(self) -> None:
        for variable, value, dtype in zip(self._variables, self._global, self._dtypes):
            variable.assign(value.astype(dtype))

    def _sums(self, arrays: list[np.ndarray], compression: Any) -> list[np.ndarray]:
        """Sums over the ranks, in the backend's tensors, as its compressors expect."""
        made = [*map(import_module("torch").from_numpy, arrays)] if backend.backend() == "torch" else arrays
        ops = backend.ops()
        several = ops.allreduce if backend.backend() == "jax" else ops.grouped_allreduce
        sums = several(made, op=Sum, compression=compression, process_set=self.process_set, name=type(self).__name__)
        return [np.array(each) for each in sums]


class LocalSGDCallback(DiLoCoCallback):
    """Callback that lets each rank take steps of its own, and averages the weights every few batches (LocalSGD).

    It is ``DiLoCoCallback`` without an outer optimizer (Stich, 2018, arXiv 1805.09767).

    Args:
        sync_every (int): batches between two averages.
        compression (Compressor): as in ``DiLoCoCallback``.
        process_set (ProcessSet, optional): as in ``DiLoCoCallback``.

    Raises:
        TypeError: an argument is of another kind.
        ValueError: ``sync_every`` is below 1. The errors when training starts are those of ``DiLoCoCallback``.

    Example:
        >>> import keras
        >>> model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)])
        >>> model.compile(keras.optimizers.SGD(0.1), "mse")
        >>> callback = hvd.callbacks.LocalSGDCallback(sync_every=2)
        >>> history = model.fit(np.ones((96, 1)), np.full((96, 1), hvd.rank()), callbacks=[callback], verbose=0)
        >>> hvd.check_consistency(model)
    """

    def __init__(
        self, sync_every: int, compression: Any = NoneCompressor, process_set: ProcessSet = global_process_set
    ) -> None:
        super().__init__(sync_every, 1.0, 0.0, compression, process_set)


def _array(variable: Any) -> np.ndarray:
    return np.array(variable.numpy())


def _exact(array: np.ndarray) -> np.ndarray:
    """In float32 if it has less."""
    return array.astype(np.float64 if array.dtype == np.float64 else np.float32)


__all__ = ["DiLoCoCallback", "LocalSGDCallback"]
