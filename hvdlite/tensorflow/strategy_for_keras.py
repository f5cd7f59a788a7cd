"""What Keras 3 needs beside a Strategy of TensorFlow.

What does Keras 3 do under tf.distribute that goes wrong with several workers? Its first versions do not sum gradients.
It reduces a whole batch to know its shapes. And its loss scale looks at gradients before they are summed.

The versions are refused. The other two are recognized where Keras comes to the Strategy, since it has no hook for them.
"""

from __future__ import annotations

import sys
from types import FrameType
from typing import Any

import tensorflow as tf

from .. import _core
from ..errors import HvdInitError
from ..errors.codes import coded
from .cross_device_ops import HvdCrossDeviceOps


def refused(why: str) -> HvdInitError:
    """The error of a Strategy that cannot be."""
    return HvdInitError(coded("HVD429", f"hvd.Strategy(): {why}"))


def check_version() -> None:
    """HvdInitError for a variable of a Keras 3 whose optimizers leave out the sum of gradients (its pull requests 19467
    and 19969). TensorFlow itself imports Keras, so that it is there says nothing."""
    version = str(getattr(sys.modules.get("keras"), "__version__", ""))
    if _core.size() == 1 or not version.startswith(("3.0.", "3.1.", "3.2.", "3.3.", "3.4.")):
        return
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and not str(frame.f_globals.get("__name__")).startswith("keras.src."):
        frame = frame.f_back
    if frame is not None:
        raise refused(
            f"Keras {version} does not sum gradients under tf.distribute, so each rank would train alone: install "
            "keras>=3.5, use tf_keras, or use hvd.DistributedOptimizer"
        )


def asks_for_shapes() -> bool:
    """Does Keras 3 ask, before it builds a model? It reduces a whole first batch, of which it looks at shapes only.

    The batch does not travel then, and may have another number of rows on each rank.
    """
    frame = sys._getframe(1)
    for _ in range(4):  # from `reduce`, through what keeps it from being converted
        if frame is None or frame.f_code.co_name == "_maybe_symbolic_build":
            break
        frame = frame.f_back  # type: ignore[assignment]
    return frame is not None and frame.f_code.co_name == "_maybe_symbolic_build"


def agree_on_finite() -> None:
    """Let all ranks skip a step of mixed precision if one has gradients that are not finite.

    LossScaleOptimizer of Keras 3 looks at gradients before they are summed, so a rank alone would leave out the sum for
    which the others wait. That of tf_keras sums first.
    """
    optimizers = getattr(sys.modules.get("keras"), "optimizers", None)
    made = getattr(optimizers, "LossScaleOptimizer", None)
    alone = getattr(made, "check_finite", None)
    if made is None or alone is None or hasattr(alone, "_hvdlite_alone"):
        return

    def check_finite(self: Any, grads: Any) -> Any:
        finite, context = alone(self, grads), tf.distribute.get_replica_context()
        reducer = getattr(context and context.strategy.extended, "_cross_device_ops", None)
        if context is None or not isinstance(reducer, HvdCrossDeviceOps):
            return finite
        return tf.equal(context.all_reduce("SUM", tf.cast(finite, tf.int32)), _core.size())

    check_finite._hvdlite_alone = alone  # type: ignore[attr-defined]
    made.check_finite = check_finite
