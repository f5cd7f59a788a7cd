"""Which samples are this rank's, when an epoch may be interrupted and resumed by other ranks?

All ranks shuffle alike, from seed and epoch. The samples of an epoch that are not processed yet are dealt out one by
one, rank by rank; the first are dealt again until all ranks have equally many. Processed is told in one of two ways:
`record_batch` counts on all ranks being equally far (Horovod's rule), `record_indices` names samples. `reset` deals
anew what is left, to however many ranks there are.

What a rank has named only this rank knows, and it may be lost. So TorchState exchanges at each commit of an elastic job
what is new (`unshared`); a count needs no exchange.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator, Sized
from typing import Any

from torch.utils.data import Sampler

from ..._core import rank, size


class ElasticSampler(Sampler):
    """Deals a dataset's indices to the ranks. Put it into TorchState; after each batch call record_batch.

    dataset: anything with a length that stays. shuffle: in an order that depends on seed and epoch, which must be the
    same on all ranks. Call set_epoch at the end of each epoch, so that one that was interrupted is not begun again.
    """

    def __init__(self, dataset: Sized, shuffle: bool = True, seed: int = 0) -> None:
        self.dataset = dataset
        self.shuffle = shuffle
        self.seed = seed
        self.epoch = 0
        self.processed_num = 0  # samples of this epoch on all ranks, by record_batch
        self.processed_indices: set[int] = set()  # of the dataset, in this epoch, by record_indices
        self.unshared: set[int] = set()  # of these, what this rank has named and not told to the others yet
        self.reset()

    def set_epoch(self, epoch: int) -> None:
        """Begin this epoch: nothing of it is processed."""
        self.epoch = epoch
        self.processed_num = 0
        self.processed_indices = set()
        self.unshared = set()
        self.reset()

    def record_batch(self, batch_idx: int, batch_size: int) -> None:
        """Every rank has processed one more batch of that size."""
        self.processed_num += batch_size * self.num_replicas

    def record_indices(self, indices: Iterable[int]) -> None:
        """This rank has processed these samples of the dataset. Not to be mixed with record_batch."""
        named = {int(index) for index in indices}
        self.processed_indices |= named
        self.unshared |= named

    def get_indices(self, batch_idx: int, batch_size: int) -> list[int]:
        """The samples of one batch of this rank."""
        return self._dealt()[batch_idx * batch_size : (batch_idx + 1) * batch_size]

    def state_dict(self) -> dict[str, Any]:
        """What load_state_dict takes."""
        return {
            "epoch": self.epoch,
            "processed_num": self.processed_num,
            "processed_indices": set(self.processed_indices),
            "unshared": set(self.unshared),
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on where that state was, with the ranks there are now."""
        self.epoch = state_dict["epoch"]
        self.processed_num = state_dict.get("processed_num", 0)
        self.processed_indices = set(state_dict.get("processed_indices", ()))
        self.unshared = set(state_dict.get("unshared", ()))
        self.reset()

    def reset(self) -> None:
        """Deal what is not processed to the ranks there are now. Raises HvdNotInitializedError before init()."""
        self.num_replicas = size()
        self.rank = rank()
        order = list(range(len(self.dataset)))
        if self.shuffle:
            random.Random(self.seed + self.epoch).shuffle(order)
        left = order[self.processed_num :]
        self.remaining_indices = [index for index in left if index not in self.processed_indices]
        self.num_samples = -(-len(self.remaining_indices) // self.num_replicas)
        self.total_size = self.num_samples * self.num_replicas

    def _dealt(self) -> list[int]:
        left = self.remaining_indices
        if not left:
            return []
        again = -(-self.total_size // len(left))
        return (left * again)[self.rank : self.total_size : self.num_replicas]

    def __iter__(self) -> Iterator[int]:
        self.indices = self._dealt()
        return iter(self.indices)

    def __len__(self) -> int:
        return self.num_samples
