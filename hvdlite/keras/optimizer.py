"""A Keras optimizer whose gradients are averaged over all ranks before they are applied.

    model.compile(optimizer=hvd.DistributedOptimizer(keras.optimizers.Adam(1e-3)), ...)

The new optimizer is of a class made of our `apply` and the given optimizer's class, and takes over its state;
isinstance, schedules and saving see the original (as its `__class__`, too), and a saved model opens without hvdlite
(then with the plain optimizer; hvd.load_model makes it distributed again). Copies are distributed (copies.py). Keras's
own accumulation, clipping, averaging of weights and loss scaling come after ours.

Loss scaling asks whether gradients are finite before it applies them. Where it wraps a distributed optimizer, as
model.compile does with mixed_float16, ranks would disagree about that, and some would wait for ever: there all ranks
are asked (`LossScaleOptimizer.check_finite`).

`backward_passes_per_step` n: gradients of n calls are added up, and the n-th call reduces and applies; the others
change nothing (passes.py). With `average_aggregated_gradients` the sum is divided by n.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from importlib import import_module
from typing import Any

from .. import _core
from ..ops import Adasum, Average, Min
from ..ops.terms import NoneCompressor
from ..optimizer import check_passes
from ..process_set import ProcessSet, global_process_set
from . import backend
from .backend import keras
from .checked import check_built
from .copies import Copied, plain_of, teach
from .legacy import Legacy, kinds, of_loss_scale, put_inside
from .passes import Passes
from .window import ATTRIBUTE, Window
from .xla import stay_out_of_xla

made_in = "hvdlite.keras"  # what the classes of distributed optimizers say about where they are from


class Distributed(Copied):
    """The methods that a distributed optimizer has before those of its own class."""

    _hvd: Any
    _hvd_passes: Any

    def register_local_var(self, variable: Any) -> None:
        """The gradient of this variable is not averaged."""
        self._hvd.register_local(variable)

    def apply(self, grads: Iterable[Any], trainable_variables: Iterable[Any] | None = None) -> None:
        """Averages the gradients, then applies them."""
        gradients = list(grads)
        owners = None if trainable_variables is None else list(trainable_variables)
        named = owners if owners is not None else getattr(self, "_trainable_variables", gradients)
        inherited: Any = super()
        if self._hvd_passes is not None:
            self._hvd_passes.apply(self, inherited, gradients, owners, named)
        else:
            inherited.apply(self._hvd(gradients, named), owners)


def _agree_on_finite() -> None:
    """Makes loss scaling around a distributed optimizer ask all ranks."""
    wrapper = getattr(keras.optimizers, "LossScaleOptimizer", None)
    local = getattr(wrapper, "check_finite", None)
    if local is None or hasattr(local, "_hvd_local"):
        return

    def check_finite(self: Any, grads: Any) -> Any:
        finite = local(self, grads)
        reduces = getattr(self.inner_optimizer, "_hvd", None)
        if reduces is None:  # ours is outside: these are averages already, but for local variables
            outer = getattr(self, "_hvd", None)
            reduces = outer if outer is not None and outer._local else None
        if reduces is None or reduces.alone:
            return finite
        number = keras.ops.cast(finite, "int32")
        agreed = backend.ops().allreduce(
            number, op=Min, name="LossScaleOptimizer.finite", process_set=reduces.process_set
        )
        return keras.ops.cast(agreed, "bool")

    check_finite._hvd_local = local  # type: ignore[attr-defined]
    wrapper.check_finite = check_finite  # type: ignore[union-attr]


def DistributedOptimizer(
    optimizer: Any, name: str | None = None, device_dense: str = "", device_sparse: str = "",
    compression: Any = NoneCompressor, sparse_as_dense: bool = False, gradient_predivide_factor: float = 1.0,
    op: int = Average, backward_passes_per_step: int = 1, average_aggregated_gradients: bool = False,
    num_groups: int = 0, groups: int | Sequence[Sequence[Any]] | None = None,
    process_set: ProcessSet = global_process_set, scale_local_gradients: bool = True
) -> Any:  # fmt: skip
    """An optimizer like the given one whose gradients are averaged over all ranks (or combined as `op` says).

    compression: Compression.none, .fp16, .bf16 or a Compressor of your own. sparse_as_dense: tf.IndexedSlices are made
    dense before they travel, instead of gathered. gradient_predivide_factor f: gradients are divided by f before the
    sum and by size/f after. groups: gradients that travel as one, as a number of groups or lists of variables
    (num_groups is its old name). process_set: average over these ranks; on others the optimizer stays local. Gradients
    of variables given to `register_local_var` stay local, divided by the number of ranks unless scale_local_gradients
    is False.
    Raises TypeError for what is no optimizer of Keras, no process set or no compression, ValueError for arguments that
    do not go together.
    """
    if not isinstance(optimizer, kinds() if backend.legacy() else keras.optimizers.Optimizer):
        hint = ": set TF_USE_LEGACY_KERAS=1" if "tf_keras." in str(type(optimizer)) else ""
        raise TypeError(
            f"expected an optimizer of {keras.__name__} {keras.__version__}, not {type(optimizer)}{hint} [HVD223]"
        )
    if vars(optimizer).get("_hvd_of_config"):
        optimizer = plain_of(optimizer)
    if isinstance(optimizer, (Distributed, Legacy)):
        raise ValueError("this optimizer is a DistributedOptimizer already [HVD223]")
    passes = backward_passes_per_step
    check_passes(passes)
    if op == Adasum and average_aggregated_gradients:
        raise ValueError("Adasum does not support average_aggregated_gradients == True [HVD224]")
    _core.size()
    if backend.legacy() and of_loss_scale(optimizer) is not None:
        return put_inside(optimizer, DistributedOptimizer(
            of_loss_scale(optimizer), name, device_dense, device_sparse, compression, sparse_as_dense,
            gradient_predivide_factor, op, passes, average_aggregated_gradients, num_groups, groups, process_set,
            scale_local_gradients,
        ))  # fmt: skip
    reduces = backend.reducer(
        name or "DistributedOptimizer", compression, sparse_as_dense, op, gradient_predivide_factor, num_groups, groups,
        process_set, scale_local_gradients,
    )  # fmt: skip
    base = type(optimizer)
    methods = Legacy if backend.legacy() else Distributed
    shown = property(lambda self: base)  # what Keras writes into files
    terms = {
        "name": name, "compression": compression, "sparse_as_dense": sparse_as_dense, "op": op,
        "gradient_predivide_factor": gradient_predivide_factor, "backward_passes_per_step": passes,
        "average_aggregated_gradients": average_aggregated_gradients, "num_groups": num_groups, "groups": groups,
        "process_set": process_set, "scale_local_gradients": scale_local_gradients,
    }  # fmt: skip
    said = {"__module__": made_in, "__class__": shown, "_hvd_terms": terms}
    made: Any = object.__new__(type(base.__name__, (methods, base), said))
    made.__dict__.update(optimizer.__dict__)
    made.__dict__["_hvd"] = reduces
    kind: Any = import_module("hvdlite.tensorflow.passes").Passes if backend.legacy() else Passes
    made.__dict__["_hvd_passes"] = kind(passes, bool(average_aggregated_gradients)) if passes > 1 else None
    if passes > 1:
        made.__dict__[ATTRIBUTE] = Window(made.__dict__["_hvd_passes"], made)
    _agree_on_finite()
    stay_out_of_xla()
    teach()
    return made


def PartialDistributedOptimizer(
    optimizer: Any, name: str | None = None, device_dense: str = "", device_sparse: str = "",
    compression: Any = NoneCompressor, sparse_as_dense: bool = False, gradient_predivide_factor: float = 1.0,
    op: int = Average, backward_passes_per_step: int = 1, average_aggregated_gradients: bool = False,
    num_groups: int = 0, groups: int | Sequence[Sequence[Any]] | None = None,
    process_set: ProcessSet = global_process_set, local_layers: Any = None, scale_local_gradients: bool = True
) -> Any:  # fmt: skip
    """DistributedOptimizer that leaves the trainable variables of `local_layers` (one or a list) to each rank.

    The layers must be built: ValueError for one that has no variables yet.
    """
    made = DistributedOptimizer(
        optimizer, name, device_dense, device_sparse, compression, sparse_as_dense, gradient_predivide_factor, op,
        backward_passes_per_step, average_aggregated_gradients, num_groups, groups, process_set, scale_local_gradients,
    )  # fmt: skip
    layers = [] if local_layers is None else local_layers
    for layer in list(layers) if isinstance(layers, (list, tuple, set)) else [layers]:
        if not isinstance(layer, keras.layers.Layer):
            raise ValueError(
                f"All local layers must be of keras.layers.Layer type, not {type(layer).__name__} [HVD224]"
            )
        check_built(layer)
        for variable in layer.trainable_weights:
            made.register_local_var(variable)
    return made
