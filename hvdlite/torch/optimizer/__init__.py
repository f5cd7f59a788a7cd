"""Distributed optimizers, in reading order:

`wrap` makes one of any torch optimizer; `methods` is what a training loop calls on it; `exchange` takes a gradient from
its hook (`hooks`) to its average, as the gradient book (hvdlite.optimizer) says; `backward` knows when a backward pass
ends, `order` when it is worth sending what is ready; `carriers` know what travels together, `wire` in what form, `run`
how hundreds do in one call, `names` under which name; `skipping` deals with what an exception has left of a round.
`buckets` are for comm hooks, `sparse` for sparse gradients, `weights` and `uneven` for batches that differ, `delta` for
Adasum; `start` and `twice` look for mistakes of scripts.
"""

from .buckets import GradBucket
from .uneven import uneven_inputs
from .weights import WeightedAverage
from .wrap import DistributedOptimizer

__all__ = ["DistributedOptimizer", "GradBucket", "WeightedAverage", "uneven_inputs"]
