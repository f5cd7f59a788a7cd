"""An IterableShard that is a torch IterableDataset: DataLoader treats nothing else as data without indices."""

from torch.utils.data import IterableDataset

from .shards import IterableShard


class TorchIterableShard(IterableShard, IterableDataset):
    """Every n-th item, as they come; a DataLoader's workers share them."""
