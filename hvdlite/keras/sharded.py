"""`DistributedOptimizer(..., shard=True)` for Keras 3: each rank keeps its share of the optimizer's state.

This is stage 1 of ZeRO. `Sharded` stands before the methods of the optimizer's own class, and `OnShards` between them.
With one rank both pass on what they get. What a rank keeps, and the step on it: shards.py. The first step sends the
first rank's weights to all: else the parts would come from different weights.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from ..errors.codes import coded
from ..ops import Average, Sum
from ..ops.arguments import NoneCompressor
from ..rendezvous import elastic_member
from . import backend
from .backend import keras
from .optimizer import Distributed
from .shard_state import array, class_of, gathered, like, why_not
from .shards import Shards

_HDF5 = "save_optimizer_weights_to_hdf5_group"  # Keras's function for .h5 files asks for `variables` only
_WHOLE = ("clipnorm", "global_clipnorm", "use_ema", "gradient_accumulation_steps")  # look at more than a share


class Sharded(Distributed):
    """What a training loop calls, where that is not the same as without ``shard``."""

    _hvd_shards: Shards | None

    def apply(self, grads: Iterable[Any], trainable_variables: Iterable[Any] | None = None) -> None:
        """Average the gradients over all ranks, apply them to this rank's share, and give all ranks the result."""
        gradients = list(grads)
        owners = None if trainable_variables is None else list(trainable_variables)
        if self._hvd_shards is not None and gradients:
            self._hvd_shards.begin(owners, len(gradients))
        super().apply(gradients, owners)

    def register_local_var(self, variable: Any) -> None:
        """ValueError: what is one rank's own cannot be shared out."""
        raise ValueError(coded("HVD200", "shard=True: no variable can stay local. Leave out shard=True"))

    def gather_state(self) -> None:
        """Gather the whole state on rank 0, so that it can save the model. All ranks must call it."""
        shards = self._hvd_shards
        if shards is not None:
            shards.begin(None, 0)
            shards.whole = int(self.iterations), gathered(shards)  # type: ignore[attr-defined]


class OnShards:
    """Between `Distributed` and the original's class, in the place of the original's methods."""

    _hvd_shards: Shards | None

    def build(self, variables: Any) -> None:
        """Notes the variables. State is made by the first step, when the weights of all ranks are the same."""
        if self._hvd_shards is None:
            super().build(variables)  # type: ignore[misc]
        else:
            keras.optimizers.Optimizer.build(self, variables)

    def apply(self, grads: Any, trainable_variables: Any = None) -> None:
        """The original's apply, on this rank's share."""
        if self._hvd_shards is None:
            super().apply(grads, trainable_variables)  # type: ignore[misc]
        elif grads:
            self._hvd_shards.step(grads, trainable_variables or self._trainable_variables)  # type: ignore[attr-defined]

    @property
    def variables(self) -> list[Any]:
        """The variables that are the same on all ranks. For an HDF5 file: those of the whole state."""
        if self._hvd_shards is not None and sys._getframe(1).f_code.co_name == _HDF5:
            return list(self._hvd_shards.saved().variables)
        return super().variables  # type: ignore[misc, no-any-return]

    def save_own_variables(self, store: Any) -> None:
        """Saves what `gather_state` has gathered."""
        if self._hvd_shards is None:
            super().save_own_variables(store)  # type: ignore[misc]
        else:
            self._hvd_shards.saved().save_own_variables(store)

    def load_own_variables(self, store: Any) -> None:
        """Takes this rank's share of a whole state."""
        if self._hvd_shards is None:
            super().load_own_variables(store)  # type: ignore[misc]
        else:
            self.set_weights([np.asarray(store[str(i)]) for i in range(len(store.keys()))])

    def set_weights(self, weights: Sequence[Any]) -> None:
        """Takes this rank's share of a whole state."""
        if self._hvd_shards is None:
            super().set_weights(weights)  # type: ignore[misc]
        else:
            self._hvd_shards.take(list(weights))

    def _trackable_children(self, save_type: str = "checkpoint", **kwargs: Any) -> Any:
        """ValueError for a tf.train.Checkpoint, which would not have the state."""
        if self._hvd_shards is not None and save_type == "checkpoint":
            raise ValueError(
                "a checkpoint of TensorFlow cannot hold a sharded optimizer: call optimizer.gather_state() on all "
                "ranks, then model.save() on rank 0 [HVD200]"
            )
        return super()._trackable_children(save_type, **kwargs)  # type: ignore[misc]


def start(made: Any, optimizer: Any, reduces: Any) -> None:
    """Makes `made`, which has the optimizer's attributes, a sharded optimizer. It keeps its share of the state."""
    values = None
    if not reduces.alone and optimizer.built:
        values = [array(each) for each in optimizer.variables]
        made.__dict__.clear()
        made.__dict__.update(like(optimizer).__dict__)
        made._iterations.assign(optimizer._iterations.value)
    made.__dict__["_hvd_shards"] = None if reduces.alone else Shards(made, reduces, values)


def is_sharded(optimizer: Any) -> bool:
    """Whether it, or the optimizer in this loss scale, has only a share of the state."""
    both = (optimizer, getattr(optimizer, "inner_optimizer", None))
    return any(getattr(each, "_hvd_shards", None) is not None for each in both)


def refuse(optimizer: Any, op: Any, compression: Any, groups: Any) -> None:
    """ValueError for what a sharded optimizer does not support."""
    wrong = [name for name in _WHOLE if getattr(optimizer, name, None)]
    why = None
    if backend.legacy():
        why = "optimizers of Keras 2 (tf_keras) cannot be sharded. Use Keras 3, or leave out shard=True"
    elif op not in (Average, Sum):
        why = "op must be hvd.Average or hvd.Sum, since shares of the others do not add up"
    elif compression not in _compressions():
        why = f"compression={compression!r} is not supported: use Compression.none, .fp16 or .bf16"
    elif groups:
        why = "groups are not supported, since the layout of the shares decides what travels together"
    elif elastic_member.is_elastic():
        why = "an elastic job may lose a rank with its share of the state. Leave out shard=True, or the elastic launch"
    elif hasattr(optimizer, "inner_optimizer"):
        why = "a loss scale cannot be sharded: put the sharded optimizer inside it"
    elif wrong:
        why = f"{wrong[0]} of {class_of(optimizer).__name__} looks at more than a share. Leave it out, or shard=True"
    else:
        found = why_not(optimizer)
        why = f"{class_of(optimizer).__name__} cannot be sharded: {found}. Leave out shard=True" if found else None
    if why is not None:
        raise ValueError(coded("HVD200", f"shard=True: {why}"))


def _compressions() -> tuple[Any, ...]:
    of_backend = backend.ops().Compression
    return NoneCompressor, of_backend.none, of_backend.fp16, of_backend.bf16
