"""Which part of the data is this rank's, and loaders that read ahead.

    train = hvd.data.shard(dataset, shuffle=True)       a view of a torch dataset; train.set_epoch(epoch)
    rows, labels = hvd.data.shard((rows, labels))       arrays
    for line in hvd.data.shard(open("corpus.txt")):     anything that can be iterated
    loader = hvd.data.watch(DataLoader(train))          warns if all ranks read the same, with HVDLITE_CHECK_DATA=1

BaseDataLoader and AsyncDataLoaderMixin are Horovod's.
"""

from .first_batch import watch
from .loaders import AsyncDataLoaderMixin, BaseDataLoader
from .shards import IterableShard, Shard, shard

__all__ = ["AsyncDataLoaderMixin", "BaseDataLoader", "IterableShard", "Shard", "shard", "watch"]
