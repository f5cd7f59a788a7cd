"""Check that no DistributedDataParallel of torch averages the same gradients.

Then each gradient is averaged by two libraries that know nothing of each other, and which of them writes it last is
chance. DistributedDataParallel leaves no mark on a module or on a parameter, and its hooks are the Reducer's, in C++.
So a living one is looked for among all objects that the garbage collector knows: only in a process that has
initialized torch.distributed, where that takes some 30 ms once per optimizer.
"""

from __future__ import annotations

import gc
from collections.abc import Iterable

import torch

from ...errors.user_warning import warn


def warn_of_ddp(parameters: Iterable[torch.Tensor]) -> None:
    """A warning if there is a DistributedDataParallel of several ranks that has one of these."""
    if not (torch.distributed.is_available() and torch.distributed.is_initialized()):
        return
    mine = set(map(id, parameters))
    for each in gc.get_objects():
        if not issubclass(type(each), torch.nn.parallel.DistributedDataParallel) or each.process_group.size() == 1:
            continue
        if not mine.isdisjoint(map(id, each.parameters())):
            warn(
                "hvdlite: torch's DistributedDataParallel and hvd.DistributedOptimizer both average these gradients, "
                "in no order: use one of them. Pass the model without DistributedDataParallel, or leave out "
                "hvd.DistributedOptimizer [HVD242]",
                RuntimeWarning,
            )
            return
