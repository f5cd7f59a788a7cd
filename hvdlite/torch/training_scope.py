"""`with hvd.scope(model, optimizer, loader)`: a training loop of one process is data-parallel inside, and not after.

Which of the four lines does a scope stand for? On entry all ranks get rank 0's model and optimizer, the optimizer is
wrapped, and the loader is replaced by one that reads this rank's share. On exit the ranks are compared, and the
optimizer is local again. Nothing else changes: a scope patches nothing that is made inside it. A hook before `step` of
every optimizer would come after gradients are clipped or unscaled, and so train something else, without an error.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils.data import BatchSampler, DataLoader, RandomSampler, Sampler, SequentialSampler

from ..errors.codes import coded
from ..ops import Adasum
from ..ops.objects import broadcast_object
from ..process_sets.process_set import ProcessSet, global_process_set
from ..training.consistency import require_equal
from .consistency import check_consistency
from .optimizer import DistributedOptimizer
from .state_broadcast import broadcast_parameters, broadcast_state

_KEPT = (
    "num_workers", "collate_fn", "pin_memory", "drop_last", "timeout", "worker_init_fn", "multiprocessing_context",
    "generator", "prefetch_factor", "persistent_workers", "pin_memory_device", "in_order",
)  # fmt: skip


@contextmanager
def scope(
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    loader: DataLoader[Any] | None = None,
    process_set: ProcessSet = global_process_set,
    **options: Any,
) -> Iterator[tuple[torch.nn.Module, Any, DataLoader[Any] | None]]:
    """Train a model data-parallel inside a ``with`` statement.

    All ranks of ``process_set`` must enter and leave it together. On entry they get the model and the optimizer's state
    of the set's first rank. Backward inside the scope averages gradients. The batch of all ranks together stays the
    loader's batch size, and has the rows that it has in one process. If their number does not divide by the number of
    ranks, the first rows of the epoch come once more.

    On exit parameters and the optimizer's state are compared bit by bit. Buffers such as the statistics of BatchNorm
    become those of the first rank, and backward is local again. If an exception leaves the scope, nothing is compared.

    Args:
        model (torch.nn.Module): the model, on its device.
        optimizer (torch.optim.Optimizer): its optimizer, not yet distributed.
        loader (DataLoader, optional): a loader of the whole training data. It must have a sampler that ``DataLoader``
            has made, and a batch size that is a multiple of the number of ranks. If it shuffles, the random state of
            the first rank decides the order of each epoch, as in one process. All ranks must then iterate together.
        process_set (ProcessSet): the ranks that train together. Default: all ranks.
        **options: as for ``DistributedOptimizer``, but for ``shard`` and ``op=hvd.Adasum``.

    Yields:
        tuple: the model, the distributed optimizer and the loader of this rank's share, which is None without one.

    Raises:
        HvdMismatchError: the ranks have different models, optimizers or loaders; on exit, different parameters.
        HvdNotInitializedError: before ``init``.
        ValueError: for a loader that cannot be shared, and for options that a scope does not take.
        TypeError: if an argument has a wrong type.

    Example:
        >>> model, rows = torch.nn.Linear(1, 1), torch.arange(8.0).reshape(8, 1)
        >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        >>> loader = torch.utils.data.DataLoader(rows, batch_size=4)
        >>> with hvd.scope(model, optimizer, loader) as (model, optimizer, loader):
        ...     print(len(loader), loader.batch_size)
        2 2
    """
    if options.get("shard") or options.get("op") == Adasum:
        raise ValueError(
            "hvd.scope takes neither shard nor op=hvd.Adasum, since its optimizer is local again in the end: use "
            "hvd.DistributedOptimizer [HVD224]"
        )
    if not isinstance(model, torch.nn.Module):
        raise TypeError(f"hvd.scope expects a torch.nn.Module, not {type(model).__name__} [HVD235]")
    if isinstance(loader, DataLoader) and isinstance(loader.sampler, _Share):  # of a scope before, by the same name
        loader = loader.sampler.whole
    require_equal("hvd.scope", _settings(loader), process_set, lambda found: f"{found}", "Give the same loader")
    shared = None if loader is None else _shared(loader, process_set)
    first = process_set.ranks[0]
    broadcast_state(model, optimizer, root_rank=first, process_set=process_set)
    wrapped = DistributedOptimizer(optimizer, model.named_parameters(), process_set=process_set, **options)
    try:
        yield model, wrapped, shared
        if wrapped._hvd is not None:
            wrapped._hvd.restart()
    finally:
        if wrapped._hvd is not None:
            wrapped._hvd.hooks.remove()
        for name in [name for name in wrapped.__dict__ if name == "step" or name.startswith("_hvd")]:
            del wrapped.__dict__[name]  # step: a scheduler's, which calls that of the distributed class
        wrapped.__class__ = type(optimizer)  # so that it may be given to another scope, copied and pickled
    buffers = dict(model.named_buffers())
    if buffers and process_set.size() > 1:
        broadcast_parameters(buffers, first, process_set)
    check_consistency(list(model.named_parameters()), wrapped, process_set)


def _settings(loader: Any) -> list[Any]:
    """What ranks must have alike of their loaders."""
    if type(loader) is not DataLoader:
        return [type(loader).__name__]
    rows = len(loader.dataset) if hasattr(loader.dataset, "__len__") else None  # type: ignore
    return [type(loader.sampler).__name__, ("rows", rows), ("batch size", loader.batch_size, loader.drop_last)]


def _shared(loader: DataLoader[Any], process_set: ProcessSet) -> DataLoader[Any]:
    """The loader of this rank's share."""
    if not isinstance(loader, DataLoader):
        raise TypeError(f"hvd.scope expects a torch DataLoader, not {type(loader).__name__} [HVD240]")
    size, sampler, batch, why = process_set.size(), loader.sampler, loader.batch_size, None
    if type(loader) is not DataLoader or type(loader.batch_sampler) not in (BatchSampler, type(None)):
        own = loader if type(loader) is not DataLoader else loader.batch_sampler
        why = f"its batches are made by {type(own).__name__}"
    elif batch is None:
        why = "it has a batch_sampler of its own, or makes no batches"
    elif type(sampler) not in (RandomSampler, SequentialSampler) or sampler.data_source is not loader.dataset:  # type: ignore
        why = f"it has a sampler of its own ({type(sampler).__name__})"
    elif getattr(sampler, "replacement", False) or len(sampler) != len(loader.dataset):  # type: ignore
        why = "its sampler draws another number of rows, or rows with replacement"
    elif batch % size:
        why = f"its batch size {batch} is no multiple of the number of ranks, which is {size}"
    if why is not None:
        raise ValueError(
            coded("HVD240", f"hvd.scope cannot share this loader: {why}. Share it by hvd.data.shard, and give none")
        )
    if size == 1:
        return loader
    assert batch is not None
    kept = {name: getattr(loader, name) for name in _KEPT if hasattr(loader, name)}
    return DataLoader(loader.dataset, batch // size, sampler=_Share(loader, process_set), **kept)


class _Share(Sampler[int]):
    """Every n-th row of the order that the loader would have in one process."""

    def __init__(self, loader: DataLoader[Any], process_set: ProcessSet) -> None:
        self.whole, self._set = loader, process_set

    def __len__(self) -> int:
        rows, size = len(self.whole.dataset), self._set.size()  # type: ignore[arg-type]
        return rows // size if self.whole.drop_last else -(-rows // size)

    def __iter__(self) -> Iterator[int]:
        order, count = list(range(len(self.whole.dataset))), len(self) * self._set.size()  # type: ignore[arg-type]
        if isinstance(self.whole.sampler, RandomSampler):
            order = list(self.whole.sampler) if self._set.rank() == 0 else []
            order = broadcast_object(order, self._set.ranks[0], "hvd.scope.epoch", self._set)
        order = (order * -(-count // max(1, len(order))))[:count]
        return iter(order[self._set.rank() :: self._set.size()])
