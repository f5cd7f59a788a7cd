"""hvdlite on TensorFlow: `import hvdlite.tensorflow as hvd`.

    hvd.init()
    tape = hvd.DistributedGradientTape(tape)
    hvd.broadcast_variables(model.variables, root_rank=0)

Collectives take tensors, variables and tf.IndexedSlices, eagerly and inside tf.function, and have gradients. Nothing
here was compiled against TensorFlow: any version from 2.16 on is served.
"""

from __future__ import annotations

from .. import _public
from .._public import *  # noqa: F403
from .compression import Compression
from .ops import (
    allgather,
    allreduce,
    alltoall,
    broadcast,
    grouped_allgather,
    grouped_allreduce,
    grouped_reducescatter,
    join,  # noqa: F401  (by its name in _public)
    local_rank_op,
    local_size_op,
    process_set_included_op,
    rank_op,
    reducescatter,
    size_op,
)

__all__ = [
    "Compression",
    "allgather",
    "allreduce",
    "alltoall",
    "broadcast",
    "grouped_allgather",
    "grouped_allreduce",
    "grouped_reducescatter",
    "local_rank_op",
    "local_size_op",
    "process_set_included_op",
    "rank_op",
    "reducescatter",
    "size_op",
]
__all__ += _public.__all__
