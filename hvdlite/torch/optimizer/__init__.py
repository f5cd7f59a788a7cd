"""Distributed optimizers, in reading order:

`factory` makes one of any torch optimizer; `methods` is what a training loop calls on it; `reducer` takes a gradient
from its hook (`hooks`) to its average, as the gradient tracker (hvdlite.training.gradient_tracker) decides;
`backward_pass` knows when a backward pass ends; `buckets` decides what travels together, `gradient_codec` in what form,
`gradient_memory` where it lies and `gradient_allocator` where autograd allocates it; `averages` are for ranks that
differ in their batches and for Adasum; `gradient_watch` and `noise_estimate` measure gradients; `failed_backward` deals
with what an exception has left of a round; `checks` looks for mistakes of scripts.
"""

from .averages import WeightedAverage, uneven_inputs
from .buckets import GradBucket
from .factory import DistributedOptimizer
from .gradient_watch import GradientStats, gradient_stats, watch_gradients
from .noise_estimate import NoiseScale, noise_scale

__all__ = [
    "DistributedOptimizer",
    "GradBucket",
    "GradientStats",
    "NoiseScale",
    "WeightedAverage",
    "gradient_stats",
    "noise_scale",
    "uneven_inputs",
    "watch_gradients",
]
