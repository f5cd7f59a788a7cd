"""ElasticSampler: the samples of this rank in an epoch that other ranks may resume.

All ranks shuffle alike, from seed and epoch. The samples of an epoch that are not processed yet are dealt out one by
one, rank by rank; the first are dealt again until all ranks have equally many. Processed is reported in one of two
ways: `record_batch` counts on all ranks being equally far (Horovod's rule), `record_indices` names samples. `reset`
deals anew what is left, to however many ranks there are.

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
    """Sampler that divides a dataset's indices among the ranks and continues an epoch after ranks have changed.

    Give it to a DataLoader and put it into the ``TorchState``. Call ``record_batch`` after each batch. When the set of
    ranks changes, the samples of the epoch that no rank has processed are divided again. Call ``set_epoch`` at the
    end of each epoch, so that an interrupted job does not repeat a finished epoch. All ranks get equally many samples;
    if the rest does not divide evenly, the first samples of the rest are repeated.

    Args:
        dataset (Sized): anything with a length that does not change.
        shuffle (bool): shuffle in an order that depends on ``seed`` and the epoch. Default: True.
        seed (int): the seed of the shuffle, the same on all ranks. Default: 0.

    Attributes:
        epoch (int): the current epoch.
        remaining_indices (list[int]): the indices that were not processed when the samples were dealt last.

    Raises:
        HvdNotInitializedError: ``hvd.init()`` has not been called.

    Example:
        >>> sampler = hvd.elastic.ElasticSampler(range(6), shuffle=False)
        >>> list(sampler)
        [0, 2, 4]  # rank 0
        [1, 3, 5]  # rank 1
        >>> sampler.record_batch(0, batch_size=1)
        >>> sampler.reset()
        >>> list(sampler)
        [2, 4]  # rank 0
        [3, 5]  # rank 1
    """

    def __init__(self, dataset: Sized, shuffle: bool = True, seed: int = 0) -> None:
        self.dataset = dataset
        self.shuffle = shuffle
        self.seed = seed
        self.epoch = 0
        self.processed_num = 0  # samples of this epoch on all ranks, by record_batch
        self.processed_indices: set[int] = set()  # of the dataset, in this epoch, by record_indices
        self.unshared: set[int] = set()  # of these, what this rank has named and not sent to the others yet
        self.reset()

    def set_epoch(self, epoch: int) -> None:
        """Begin an epoch: none of its samples are processed.

        Args:
            epoch (int): the number of the epoch, the same on all ranks.
        """
        self.epoch = epoch
        self.processed_num = 0
        self.processed_indices = set()
        self.unshared = set()
        self.reset()

    def record_batch(self, batch_idx: int, batch_size: int) -> None:
        """Record that every rank has processed one more batch. All ranks must be equally far (Horovod's rule).

        Args:
            batch_idx (int): the number of the batch. It is not used.
            batch_size (int): the number of samples in the batch on each rank.
        """
        self.processed_num += batch_size * self.num_replicas

    def record_indices(self, indices: Iterable[int]) -> None:
        """Record that this rank has processed these samples. Do not mix it with ``record_batch``.

        In an elastic job ``TorchState`` sends the indices to the other ranks at each commit. This adds one small
        allgather to the commit.

        Args:
            indices (iterable of int): indices in the dataset.
        """
        named = {int(index) for index in indices}
        self.processed_indices |= named
        self.unshared |= named

    def get_indices(self, batch_idx: int, batch_size: int) -> list[int]:
        """Return the indices of one batch of this rank.

        Args:
            batch_idx (int): the number of the batch since the samples were dealt last.
            batch_size (int): the number of samples per batch on each rank.

        Returns:
            list[int]: indices in the dataset; fewer than ``batch_size`` in the last batch.
        """
        return self._dealt()[batch_idx * batch_size : (batch_idx + 1) * batch_size]

    def state_dict(self) -> dict[str, Any]:
        """Return the epoch and the processed samples.

        Returns:
            dict: for ``load_state_dict``.
        """
        return {
            "epoch": self.epoch,
            "processed_num": self.processed_num,
            "processed_indices": set(self.processed_indices),
            "unshared": set(self.unshared),
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue from a state of this or another rank, with the ranks there are now.

        Args:
            state_dict (dict): the value of ``state_dict``.
        """
        self.epoch = state_dict["epoch"]
        self.processed_num = state_dict.get("processed_num", 0)
        self.processed_indices = set(state_dict.get("processed_indices", ()))
        self.unshared = set(state_dict.get("unshared", ()))
        self.reset()

    def reset(self) -> None:
        """Deal the samples that are not processed to the ranks there are now.

        Raises:
            HvdNotInitializedError: ``hvd.init()`` has not been called.
        """
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
