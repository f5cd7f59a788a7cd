"""A Keras optimizer whose gradients are averaged over all ranks before they are applied.

    model.compile(optimizer=hvd.DistributedOptimizer(keras.optimizers.Adam(1e-3)), ...)

The new optimizer is of a class made of our `apply` and the given optimizer's class, and takes over its state;
isinstance, schedules and saving see the original (as its `__class__`, too), and a saved model opens without hvdlite
(then with the plain optimizer; hvd.load_model makes it distributed again). Copies are distributed
(optimizer_copies.py). Keras's own accumulation, clipping, averaging of weights and loss scaling come after ours.

Loss scaling asks whether gradients are finite before it applies them. Where it wraps a distributed optimizer, as
model.compile does with mixed_float16, ranks would disagree about that, and some would wait for ever: there all ranks
are asked (`LossScaleOptimizer.check_finite`).

`backward_passes_per_step` n: gradients of n calls are added up, and the n-th call reduces and applies; the others
change nothing (accumulation.py). With `average_aggregated_gradients` the sum is divided by n.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Sequence
from importlib import import_module
from typing import Any

from .. import _core
from ..ops import Adasum, Average, Min
from ..ops.arguments import NoneCompressor
from ..process_sets.process_set import ProcessSet, global_process_set
from ..training.gradient_tracker import check_passes
from . import backend
from .accumulation import Passes
from .accumulation_state import ATTRIBUTE, Window
from .arguments import check_built
from .backend import keras
from .consistency import state_of
from .legacy import Legacy, kinds, of_loss_scale, put_inside
from .optimizer_copies import Copied, plain_of, teach
from .xla import stay_out_of_xla

_OF_KERAS_2 = (
    "_agg_helper", "_aggregate_gradients", "_allreduce", "_allreduce_grads", "_compute_gradients",
    "aggregate_gradients", "compute_gradients", "get_gradients", "minimize",
)  # fmt: skip
made_in = "hvdlite.keras"  # the module of the classes of distributed optimizers


class Distributed(Copied):
    """The methods that a distributed optimizer has before those of its own class."""

    _hvd: Any
    _hvd_passes: Any

    def register_local_var(self, variable: Any) -> None:
        """Keep the gradient of a variable local: it is not averaged."""
        self._hvd.register_local(variable)

    def apply(self, grads: Iterable[Any], trainable_variables: Iterable[Any] | None = None) -> None:
        """Average the gradients over all ranks, then apply them."""
        gradients = list(grads)
        owners = None if trainable_variables is None else list(trainable_variables)
        named = owners if owners is not None else getattr(self, "_trainable_variables", gradients)
        inherited: Any = super()
        if self._hvd_passes is not None:
            self._hvd.refuse_sums(gradients)
            self._hvd_passes.apply(self, inherited, gradients, owners, named)
        else:
            inherited.apply(self._hvd(gradients, named), owners)

    def apply_gradients(self, grads_and_vars: Iterable[tuple[Any, Any]], *flags: Any, **more: Any) -> Any:
        """Average the gradients over all ranks, then apply them. TypeError for the flags of Keras 2 and Horovod."""
        if flags or more:
            shown = ", ".join([*map(repr, flags), *more])
            raise TypeError(
                f"apply_gradients of Keras 3 takes no argument after the pairs, but got {shown}. It averages the "
                "gradients. To apply gradients as they are, call it of the optimizer before it was wrapped [HVD224]"
            )
        return super().apply_gradients(grads_and_vars)  # type: ignore[misc]

    def __getattr__(self, name: str) -> Any:
        """AttributeError; of names that Horovod's optimizers for Keras 2 have, with what to call instead."""
        if name in _OF_KERAS_2:
            raise AttributeError(
                f"a distributed optimizer of Keras 3 has no {name}: compute gradients with tf.GradientTape and pass "
                "them to apply_gradients, which averages them, or set TF_USE_LEGACY_KERAS=1 for Keras 2 [HVD224]"
            )
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")


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
    process_set: ProcessSet = global_process_set, scale_local_gradients: bool = True, shard: bool = False
) -> Any:  # fmt: skip
    """Return an optimizer like ``optimizer`` whose gradients are averaged over all ranks before they are applied.

    Give it to ``model.compile``. All ranks must make the same steps. The new optimizer takes over the state of the
    given one, and its class has that class's methods and ``register_local_var(variable)``, which keeps a gradient
    local. A saved model opens without hvdlite, with the plain optimizer; ``hvd.load_model`` makes it distributed again.
    Keras's own clipping, weight averaging and loss scaling see averaged gradients. Models are not compiled by XLA.

    Args:
        optimizer (keras.optimizers.Optimizer): the optimizer.
        compression (Compressor): the form in which gradients travel, such as ``hvd.Compression.fp16``. With ``int8`` or
            ``int4`` large ones are rounded between hosts. Their feedback begins at zero after a load. Default: none.
        op (int): ``hvd.Average`` (default), ``Sum`` or ``Adasum``.
        backward_passes_per_step (int): add up the gradients of this many calls, then reduce and apply. The other calls
            change nothing. Default: 1.
        average_aggregated_gradients (bool): divide the added gradients by that number. Not with Adasum. Default: False.
        process_set (ProcessSet, optional): average over these ranks. On other ranks the optimizer stays local. Default:
            all.
        name (str, optional): prefix of the names of the collectives. The same on all ranks.
        sparse_as_dense (bool): convert ``tf.IndexedSlices`` to dense tensors before they travel. False (default)
            gathers their rows on TensorFlow. On PyTorch sparse gradients are always made dense.
        gradient_predivide_factor (float): f divides gradients by f before the sum, and by size / f after it. Only with
            Average. Default: 1.0.
        groups (int or list of lists of variables, optional): gradients that travel as one group, as the number of
            groups or as lists. Default: none. On PyTorch it has no effect.
        scale_local_gradients (bool): divide local gradients by the number of ranks, so that they have the same scale as
            averages. Default: True.
        shard (bool): True keeps on each rank its share of the optimizer's state and of the averaged gradients, with the
            same bits. Before rank 0 saves the model, all ranks call ``optimizer.gather_state()``. Default: False.
        num_groups (int): Horovod's old form of ``groups``.
        device_dense, device_sparse (str): accepted for Horovod, without effect.

    Returns:
        keras.optimizers.Optimizer: for ``isinstance`` it is of the class of ``optimizer``.

    Raises:
        HvdMismatchError: from a step, the ranks have different gradients, weights or optimizer state.
        HvdNotInitializedError: ``hvd.init()`` has not been called.
        HvdNotYetError: Keras runs on a backend other than TensorFlow, PyTorch and JAX, or on JAX, which does not
            support ``shard``, ``backward_passes_per_step``, ``int8`` and ``int4``.
        TypeError: ``optimizer`` is not an optimizer of this Keras, or ``compression`` is not a compressor.
        ValueError: the arguments do not go together, the optimizer is distributed already, or it cannot be sharded.

    Example:
        >>> import keras
        >>> weight = keras.Variable(1.0)
        >>> optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(learning_rate=1.0))
        >>> optimizer.apply([keras.ops.array(hvd.rank() + 1.0)], [weight])
        >>> float(weight)
        -0.5
    """
    if not isinstance(optimizer, kinds() if backend.legacy() else keras.optimizers.Optimizer):
        raise _not_an_optimizer(optimizer)
    if vars(optimizer).get("_hvd_of_config"):
        optimizer = plain_of(optimizer)
    if isinstance(optimizer, (Distributed, Legacy)):
        raise ValueError("this optimizer is a DistributedOptimizer already [HVD223]")
    if not isinstance(shard, bool):
        raise TypeError(f"shard={shard!r} must be True or False [HVD200]")
    passes = backward_passes_per_step
    check_passes(passes)
    if op == Adasum and average_aggregated_gradients:
        raise ValueError("Adasum does not support average_aggregated_gradients == True [HVD224]")
    _core.size()
    backend.refuse(optimizer, passes, shard)
    if shard:
        sharded: Any = import_module("hvdlite.keras.sharded")
        sharded.refuse(optimizer, op, compression, num_groups or groups)
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
    methods: Any = (sharded.Sharded, sharded.OnShards) if shard else (Legacy if backend.legacy() else Distributed,)
    shown = property(lambda self: base)  # what Keras writes into files
    terms = {
        "name": name, "compression": compression, "sparse_as_dense": sparse_as_dense, "op": op,
        "gradient_predivide_factor": gradient_predivide_factor, "backward_passes_per_step": passes,
        "average_aggregated_gradients": average_aggregated_gradients, "num_groups": num_groups, "groups": groups,
        "process_set": process_set, "scale_local_gradients": scale_local_gradients, "shard": shard,
    }  # fmt: skip
    attributes = {"__module__": made_in, "__class__": shown, "_hvd_terms": terms}
    made: Any = object.__new__(type(base.__name__, (*methods, base), attributes))
    made.__dict__.update(optimizer.__dict__)
    if shard:
        sharded.start(made, optimizer, reduces)
    made.__dict__["_hvd"] = reduces
    known = weakref.ref(made)
    reduces.watch(lambda: state_of(known()))
    kind: Any = import_module("hvdlite.tensorflow.accumulation").Passes if backend.legacy() else Passes
    made.__dict__["_hvd_passes"] = kind(passes, bool(average_aggregated_gradients)) if passes > 1 else None
    if passes > 1:
        made.__dict__[ATTRIBUTE] = Window(made.__dict__["_hvd_passes"], made)
    _agree_on_finite()
    stay_out_of_xla()
    teach()
    return made


def _not_an_optimizer(value: Any) -> TypeError:
    """What to raise for it: a name such as "adam", which compile() takes, or an optimizer of another Keras."""
    text, hint = str(type(value)), ""
    if isinstance(value, str):
        text, hint = f"the string {value!r}", f": pass keras.optimizers.get({value!r})"
    elif "tf_keras." in text:
        hint = ": set TF_USE_LEGACY_KERAS=1"
    return TypeError(f"expected an optimizer of {keras.__name__} {keras.__version__}, not {text}{hint} [HVD223]")


def PartialDistributedOptimizer(
    optimizer: Any, name: str | None = None, device_dense: str = "", device_sparse: str = "",
    compression: Any = NoneCompressor, sparse_as_dense: bool = False, gradient_predivide_factor: float = 1.0,
    op: int = Average, backward_passes_per_step: int = 1, average_aggregated_gradients: bool = False,
    num_groups: int = 0, groups: int | Sequence[Sequence[Any]] | None = None,
    process_set: ProcessSet = global_process_set, local_layers: Any = None, scale_local_gradients: bool = True
) -> Any:  # fmt: skip
    """Return a ``DistributedOptimizer`` that keeps the gradients of some layers local.

    Args:
        optimizer (keras.optimizers.Optimizer): the optimizer.
        local_layers (layer or list of layers, optional): layers whose trainable variables stay local. They must be
            built.
        compression (Compressor): as in ``DistributedOptimizer``, like all that follows.
        op (int): the reduction.
        backward_passes_per_step (int): the number of calls per step.
        average_aggregated_gradients (bool): divide the added gradients by that number.
        process_set (ProcessSet, optional): the ranks that take part.
        name (str, optional): prefix of the names of the collectives.
        sparse_as_dense (bool): convert sparse gradients.
        gradient_predivide_factor (float): the divisor before the sum.
        groups (int or list of lists of variables, optional): gradients that travel as one group.
        scale_local_gradients (bool): divide local gradients by the number of ranks.
        num_groups (int): Horovod's old form of ``groups``.
        device_dense, device_sparse (str): accepted for Horovod, without effect.

    Returns:
        keras.optimizers.Optimizer: as ``DistributedOptimizer``.

    Raises:
        ValueError: an entry of ``local_layers`` is not a layer or is not built. The other errors are those of
            ``DistributedOptimizer``.

    Example:
        >>> import keras
        >>> layer = keras.layers.Dense(1, use_bias=False, kernel_initializer="ones")
        >>> layer.build((None, 1))
        >>> sgd = keras.optimizers.SGD(learning_rate=1.0)
        >>> optimizer = hvd.PartialDistributedOptimizer(sgd, local_layers=layer, scale_local_gradients=False)
        >>> optimizer.apply([keras.ops.array([[hvd.rank() + 1.0]])], layer.trainable_weights)
        >>> layer.get_weights()[0].tolist()
        [[0.0]]  # rank 0
        [[-1.0]]  # rank 1
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
