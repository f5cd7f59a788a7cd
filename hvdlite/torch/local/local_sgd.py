"""`LocalSGD`: the average of the ranks' weights, as DiLoCo with the plainest outer optimizer.

The outer gradient of a rank is G - L, and SGD with rate 1 subtracts its average from G. So the new global weights are
the average of all L, and the two classes have the same bits where DiLoCo is given that optimizer. All else (fragments,
elastic jobs, checkpoints) is DiLoCo's.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from .diloco import DiLoCo


class LocalSGD(DiLoCo):
    """Training in which ranks average their weights every ``sync_every`` steps.

    It is ``DiLoCo`` whose outer optimizer is SGD with rate 1 (S. U. Stich, 2018, arXiv 1805.09767). With
    ``sync_every=1`` and a plain SGD it is synchronous training.

    Args:
        named_parameters (torch.nn.Module or iterable of (str, tensor)): as in ``DiLoCo``.
        optimizer (torch.optim.Optimizer): as in ``DiLoCo``.
        sync_every (int): steps between two averages. Default: 100.
        kwargs: ``fragments``, ``delay``, ``alpha``, ``compression`` and ``process_set`` of ``DiLoCo``.

    Example:
        >>> model = torch.nn.Linear(1, 1, bias=False)
        >>> hvd.broadcast_parameters(model.state_dict(), root_rank=0)
        >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        >>> trainer = hvd.LocalSGD(model, optimizer, sync_every=10)
        >>> for step in range(25 + hvd.rank()):
        ...     model(torch.ones(1, 1)).sum().backward()
        ...     optimizer.step()
        >>> trainer.finish()
        >>> hvd.check_consistency(model)
    """

    def __init__(
        self, named_parameters: torch.nn.Module | Iterable[tuple[str, torch.Tensor]], optimizer: torch.optim.Optimizer,
        sync_every: int = 100, **kwargs: Any
    ) -> None:  # fmt: skip
        super().__init__(named_parameters, optimizer, sync_every, outer=_average, **kwargs)


def _average(parameters: list[torch.nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=1.0)
