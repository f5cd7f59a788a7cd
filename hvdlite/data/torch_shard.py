"""An IterableShard that is a torch IterableDataset: DataLoader treats nothing else as data without indices."""

from torch.utils.data import IterableDataset

from .shards import IterableShard


class TorchIterableShard(IterableShard, IterableDataset):
    """An ``IterableShard`` that is also a torch ``IterableDataset``, so that a DataLoader accepts it."""
