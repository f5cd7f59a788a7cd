"""Distributed optimizers, in reading order:

`factory` makes one of any torch optimizer; `methods` is what a training loop calls on it; `reducer` takes a gradient
from its hook (`hooks`) to its average, as the gradient book (hvdlite.training.gradient_tracker) decides;
`backward_pass` knows when a backward pass ends, `ready_order` when it is worth sending what is ready; `grouping` know
what travels together, `gradient_codec` in what form, `batched_send` how hundreds do in one call, `names` under which
name; `failed_backward` deals with what an exception has left of a round. `comm_hook` are for comm hooks, `sparse` for
sparse gradients, `averaging_weights` and `uneven` for batches that differ, `adasum` for Adasum; `initial_check` and
`ddp_check` look for mistakes of scripts.
"""

from .averaging_weights import WeightedAverage
from .comm_hook import GradBucket
from .factory import DistributedOptimizer
from .uneven import uneven_inputs

__all__ = ["DistributedOptimizer", "GradBucket", "WeightedAverage", "uneven_inputs"]
