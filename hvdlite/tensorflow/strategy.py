"""tf.distribute over hvdlite: `hvd.Strategy()` in the place of `tf.distribute.MultiWorkerMirroredStrategy()`.

How can a script of tf.distribute train over hvdlite, with its variables, datasets, metrics and Keras's fit? The
Strategy is TensorFlow's own MultiWorkerMirroredStrategy, made for one worker, whose connections to other workers are
then replaced: what sums and gathers (cross_device_ops.py), how variables get first values, and which worker this is.
So there is no server, no TF_CONFIG and no port. All else is TensorFlow's code, as it is installed.

The places of these connections are private names of TensorFlow. They are looked for when a Strategy is made, and a
TensorFlow that has moved them is refused with its version. Variables get the first rank's values, as in TensorFlow.
"""

from __future__ import annotations

import json
import logging
import threading
from collections.abc import Callable
from typing import Any

import tensorflow as tf

from .. import _core, config
from ..keras.list_check import SAME_VARIABLES, Listed
from ..lifecycle.init import init, is_initialized
from ..ops import Terms
from ..process_sets.process_set import global_process_set
from ..rendezvous import elastic_member
from .cross_device_ops import HvdCrossDeviceOps, only
from .ops.order import once_more
from .ops.run import agree, run
from .strategy_for_keras import agree_on_finite, asks_for_shapes, check_version, refused

_REPLACED = (  # attributes and methods of `Strategy.extended`
    "_num_workers", "_id_in_cluster", "_is_chief", "_cluster_resolver", "_cross_device_ops", "_host_cross_device_ops",
    "_get_variable_creator_initial_value", "_use_merge_call",
)  # fmt: skip
_SAME_BITS = {tf.uint32: tf.int32, tf.uint64: tf.int64}
_INSTEAD = "use hvd.DistributedOptimizer or hvd.DistributedGradientTape"


class RankResolver(tf.distribute.cluster_resolver.ClusterResolver):  # type: ignore[misc]
    """Which worker this is, for scripts that ask `strategy.cluster_resolver`. Worker 0 is the chief."""

    task_type = "worker"
    rpc_layer = None

    @property
    def task_id(self) -> int:
        """The rank."""
        return _core.rank()

    def cluster_spec(self) -> Any:
        """A worker for each rank. The addresses are names: no server listens there."""
        return tf.train.ClusterSpec({"worker": [f"rank-{rank}:0" for rank in range(_core.size())]})

    def master(self, task_type: Any = None, task_id: Any = None, rpc_layer: Any = None) -> str:
        """Empty: TensorFlow runs in this process."""
        return ""


class Strategy(tf.distribute.MultiWorkerMirroredStrategy):  # type: ignore[misc]
    """A ``tf.distribute.Strategy`` with one replica on each rank.

    It takes the place of ``tf.distribute.MultiWorkerMirroredStrategy``, and is one. All ranks make it, and make the
    same variables in its scope, in the same order. The global batch of a dataset is divided by the ranks. Gradients are
    summed over them, so a loss is divided by the global batch, as in all of tf.distribute. It calls ``hvd.init()`` if
    the process is no rank yet.

    Args:
        cluster_resolver (ClusterResolver, optional): accepted for MultiWorkerMirroredStrategy, without effect: the
            launcher decides the ranks.
        communication_options (CommunicationOptions, optional): accepted likewise, without effect.
        communication (CommunicationImplementation, optional): accepted likewise, for the experimental class.

    Raises:
        HvdInitError: this process or this TensorFlow cannot have such a strategy: TF_CONFIG has another number of
            workers than the job has ranks, the job is elastic, the rank sees several GPUs, TensorFlow's own strategy
            was made before, or this TensorFlow is too different from those that are supported. A variable of Keras 3.0
            to 3.4 in its scope raises it, too: these do not sum gradients under tf.distribute.

    Example:
        >>> strategy = hvd.Strategy()
        >>> with strategy.scope():
        ...     weights = tf.Variable([1.0, 2.0])
        >>> strategy.num_replicas_in_sync == hvd.size()
        True
    """

    def __init__(
        self, cluster_resolver: Any = None, communication_options: Any = None, communication: Any = None
    ) -> None:
        if not is_initialized():
            init()
        _check_job()
        gpus = len(tf.config.list_logical_devices("GPU"))
        if gpus > 1:
            raise refused(
                f"this rank sees {gpus} GPUs: choose one a rank before any is used, by "
                "tf.config.set_visible_devices(gpus[hvd.local_rank()], 'GPU')"
            )
        one = tf.distribute.cluster_resolver.SimpleClusterResolver(
            tf.train.ClusterSpec({}), num_accelerators={"GPU": gpus}
        )
        with _quiet():
            try:
                super().__init__(one)
            except ValueError as error:
                if "already configured" not in str(error):
                    raise
                raise refused(
                    "TensorFlow's own MultiWorkerMirroredStrategy was made in this process before: make hvd.Strategy() "
                    "in its place"
                ) from error
        extended = self.extended
        missing = [name for name in _REPLACED if not hasattr(extended, name)]
        if missing:
            raise refused(
                f"TensorFlow {tf.__version__} has no {', '.join(missing)} in MultiWorkerMirroredStrategy, which "
                f"hvdlite replaces: {_INSTEAD}"
            )
        extended._num_workers, extended._id_in_cluster = _core.size(), _core.rank()
        extended._is_chief, extended._cluster_resolver = _core.rank() == 0, RankResolver()
        extended._task_type, extended._task_id = "worker", _core.rank()  # in names of temporary folders of Keras
        extended._cross_device_ops = extended._host_cross_device_ops = HvdCrossDeviceOps()
        extended._get_variable_creator_initial_value = _first_value
        extended._use_merge_call = _can_merge

    @tf.autograph.experimental.do_not_convert
    def scope(self) -> Any:
        """Return the context in which variables and models are made, as TensorFlow's.

        Returns:
            context manager: variables made in it are mirrored on all ranks.

        Raises:
            HvdStateError: the job in which the strategy was made is over.
        """
        self.extended._cross_device_ops.check()
        return super().scope()

    @tf.autograph.experimental.do_not_convert
    def reduce(self, reduce_op: Any, value: Any, axis: Any) -> Any:
        """Reduce a value over all ranks, as TensorFlow's.

        It also takes what ``fit`` of Keras 3 gives, and what TensorFlow's own MultiWorkerMirroredStrategy refuses: a
        structure of values, and a scalar with an axis.

        Args:
            reduce_op (tf.distribute.ReduceOp): SUM or MEAN, or its name.
            value (PerReplica or tensor): a value of this rank, or a structure of them.
            axis (int, optional): a dimension to reduce on each rank first, too. Default: none.

        Returns:
            tensor: the same on all ranks, or the structure of them.

        Raises:
            HvdStateError: the job in which the strategy was made is over.
            ValueError: the ranks have values of different shapes, or there is no such axis.
        """
        if tf.nest.is_nested(value):
            if asks_for_shapes():
                return tf.nest.map_structure(only, value)
            return tf.nest.map_structure(lambda each: self.reduce(reduce_op, each, axis), value)
        if axis is not None and getattr(getattr(only(value), "shape", None), "rank", None) == 0:
            axis = None
        return super().reduce(reduce_op, value, axis)


def _check_job() -> None:
    """HvdInitError for a job in which a Strategy would train something else than it seems to."""
    if elastic_member.is_elastic():
        raise refused(
            "the ranks of an elastic job change, and a Strategy keeps its number of replicas: use "
            "hvd.DistributedOptimizer with hvd.elastic.run, or restart the job from a checkpoint (--max-restarts)"
        )
    text = config.environ().get("TF_CONFIG")
    if not text:
        return
    try:
        cluster = json.loads(text).get("cluster", {})
        workers = sum(len(cluster.get(kind, ())) for kind in ("chief", "worker"))
    except (ValueError, AttributeError, TypeError, RecursionError):
        raise refused("TF_CONFIG is no JSON of a cluster: unset it, hvdlite-run starts the ranks") from None
    if workers not in (0, _core.size()):
        raise refused(
            f"TF_CONFIG has {workers} workers and the job has {_core.size()} "
            f"rank{'s'[: _core.size() > 1]}: start {workers} ranks by hvdlite-run, or unset TF_CONFIG"
        )


def _can_merge() -> bool:
    """Can a replica call merge_call here? Not in a branch of tf.cond, where Keras 3 sums accumulated gradients.

    The way without one is made by TensorFlow for XLA only, and does less: a variable of ONLY_FIRST_REPLICA cannot be
    assigned a tensor in such a branch. So it is taken only there.
    """
    replica = getattr(threading.current_thread(), "graph", None)  # in which TensorFlow's thread of a replica began
    return replica is None or replica is tf.compat.v1.get_default_graph()


class _quiet:
    """Without TensorFlow's lines about one worker and about collectives of its own, which mean nothing here."""

    def __enter__(self) -> None:
        tf.get_logger().addFilter(_drop)

    def __exit__(self, *error: object) -> None:
        tf.get_logger().removeFilter(_drop)


def _drop(record: logging.LogRecord) -> bool:
    return record.levelno > logging.WARNING


def _first_value(replica_id: int, device: str, primary_var: Any, **kwargs: Any) -> Callable[[], tf.Tensor]:
    """What makes a variable's first value: the first rank's. The others compute theirs for its shape."""
    check_version()
    agree_on_finite()

    def initial_value() -> tf.Tensor:
        with tf.device(device):
            value = kwargs["initial_value"]
            value = value() if callable(value) else value
            value = getattr(value, "wrapped_value", value)  # of a checkpoint
            value = tf.convert_to_tensor(value, dtype=kwargs.get("dtype"))
            if _core.size() == 1:
                return value
            alike = _SAME_BITS.get(value.dtype)
            sent = tf.bitcast(value, alike) if alike else value
            terms = Terms(global_process_set, root_rank=0)
            kind = f"{value.dtype.name} {value.shape}"
            shown = f"{kwargs.get('name')} {kind}"  # not compared: Keras counts layers of a rank's own in its names
            listed = Listed(once_more("Strategy"), 1, "variable", ["variable " + kind], [shown], SAME_VARIABLES)
            with tf.control_dependencies(agree(listed, global_process_set)):
                (first,) = run("broadcast", [tf.identity(sent)], ["Strategy.variable"], terms).results
            return tf.bitcast(first, value.dtype) if alike else first

    return initial_value
