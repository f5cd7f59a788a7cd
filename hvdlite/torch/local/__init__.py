"""Local steps with a rare exchange: LocalSGD, DiLoCo and Streaming DiLoCo, in reading order:

`schedule` says which fragment of the model is sent and which arrives after each step, without tensors; `weight_sum` is
one sum over the ranks in flight; `fragment` has global weights; `diloco` and `local_sgd` have the classes, which hooks
of the optimizer drive. How they go on in an elastic job is in ../elastic/local_steps.py.
"""

from .diloco import DiLoCo
from .local_sgd import LocalSGD

__all__ = ["DiLoCo", "LocalSGD"]
