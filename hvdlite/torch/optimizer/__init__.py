"""Distributed optimizers, in reading order:

`factory` makes one of any torch optimizer; `methods` is what a training loop calls on it; `reducer` takes a gradient
from its hook (`hooks`) to its average, as the gradient tracker (hvdlite.training.gradient_tracker) decides;
`backward_pass` knows when a backward pass ends; `buckets` decides what travels together, `gradient_codec` in what form,
and `gradient_memory` where it lies; `averages` are for ranks that differ in their batches and for Adasum;
`failed_backward` deals with what an exception has left of a round; `checks` looks for mistakes of scripts.
"""

from .averages import WeightedAverage, uneven_inputs
from .buckets import GradBucket
from .factory import DistributedOptimizer

__all__ = ["DistributedOptimizer", "GradBucket", "WeightedAverage", "uneven_inputs"]
