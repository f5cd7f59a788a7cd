"""Which part of the data is this rank's, and loaders that read ahead.

    train = hvd.data.shard(dataset, shuffle=True)       a view of a torch dataset; train.set_epoch(epoch)
    rows, labels = hvd.data.shard((rows, labels))       arrays
    for line in hvd.data.shard(open("corpus.txt")):     anything that can be iterated
    loader = hvd.data.timer(DataLoader(train))          how long the loop waits for batches: in hvd.stats()
    loader = hvd.data.watch(DataLoader(train))          warns if all ranks read the same, with HVDLITE_CHECK_DATA=1

BaseDataLoader and AsyncDataLoaderMixin are Horovod's. All are imported when they are used first: this package comes
with every import of hvdlite.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .first_batch import watch
    from .loaders import AsyncDataLoaderMixin, BaseDataLoader
    from .shards import IterableShard, Shard, shard
    from .waiting import timer

__all__ = ["AsyncDataLoaderMixin", "BaseDataLoader", "IterableShard", "Shard", "shard", "timer", "watch"]

_HOME = {"AsyncDataLoaderMixin": "loaders", "BaseDataLoader": "loaders", "timer": "waiting", "watch": "first_batch"}


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = globals()[name] = getattr(import_module(f".{_HOME.get(name, 'shards')}", __name__), name)
    return value


def __dir__() -> list[str]:
    return sorted(set(globals()) | set(__all__))
