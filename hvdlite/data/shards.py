"""Sharding: the part of the data that this rank reads.

One function for all kinds of data: what has a length and can be indexed is seen through a view that knows this rank's
indices; arrays are sliced; what can only be iterated is dealt out as it comes.

Ranks that take their gradients together need equally many batches, or the last one waits. So all shards are equally
long by default: the first samples are dealt once more to fill up ("pad", as torch's DistributedSampler), or the last
few are left out ("drop"). "keep" deals every sample once, for evaluation: lengths differ by one.

Rank and size are read once, when the shard is made: in a DataLoader's workers there is no rank. After shutdown and
init, make new shards.
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import ItemsView, Iterable, Iterator, KeysView, Mapping, Set
from typing import Any

from ..errors.user_warning import warn
from ..process_sets.process_set import ProcessSet, global_process_set
from .first_batch import FirstBatch
from .rows import columns, count, taken
from .same_items import require_same_data, require_same_items
from .shared_epoch import SharedNumber

UNEVEN = ("pad", "drop", "keep")
_SET_ITERATOR: type = type(iter(set()))


def shard(
    data: Any,
    *,
    shuffle: bool = False,
    seed: int = 0,
    uneven: str = "pad",
    strided: bool = False,
    check: bool | None = None,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """Return this rank's part of the data.

    All ranks must pass the same data in the same order, for example ``sorted(files)``. No data moves between ranks:
    each rank selects its own part. Rank and size are read once, so make a new shard after ``hvd.shutdown()`` and
    ``hvd.init()``.

    By default all parts have the same length, because ranks that average gradients need equally many batches.

    Args:
        data: one of these kinds. A dataset with ``__len__`` and ``__getitem__``; a list or range; an array, tensor,
            pandas frame, pyarrow table, HDF5 dataset or scipy sparse matrix, of which each rank takes rows; a tuple or
            dict of arrays of equal length, of which each rank takes the same rows; or any iterable.
        shuffle (bool): shuffle the samples in an order that depends only on ``seed`` and the epoch. Needs data with a
            length. Default: False.
        seed (int): the seed of the shuffle, the same on all ranks. Default: 0.
        uneven (str): what to do if the length is not a multiple of the number of ranks. ``"pad"`` (default) repeats
            the first samples, as torch's ``DistributedSampler`` does. ``"drop"`` leaves out the last samples.
            ``"keep"`` gives each sample to one rank, so lengths differ by one; use it for evaluation.
        strided (bool): for arrays and lists, take every n-th row instead of one run of rows. Default: False.
        check (bool, optional): True compares the length and the first items of all ranks, and also warns if all ranks
            get identical samples, as ``watch`` does. All ranks must then call ``shard`` and read their first sample.
            None takes ``HVDLITE_CHECK_DATA`` (default: off), which only warns.
        process_set (ProcessSet, optional): the ranks that share the data. This rank must be a member. Default: all
            ranks.

    Returns:
        A ``Shard`` for a dataset; a list for a list; rows of the same type for arrays; a tuple or dict of such rows for
        a tuple or dict; an ``IterableShard`` for an iterable.

    Raises:
        HvdMismatchError: with ``check=True``, the ranks pass different data. For an iterable, on the first pass.
        HvdNotInitializedError: ``hvd.init()`` has not been called.
        TypeError: ``data`` is not data, is a set (which has no order), a string, or an array whose rows cannot be
            selected.
        ValueError: ``uneven`` is unknown, the arrays have different lengths, an iterable is to be shuffled, or this
            rank is not a member of ``process_set``.

    Example:
        >>> hvd.data.shard([10, 11, 12, 13])
        [10, 11]  # rank 0
        [12, 13]  # rank 1
        >>> rows, labels = hvd.data.shard((np.arange(6).reshape(3, 2), np.array([7, 8, 9])), strided=True)
        >>> labels.tolist()
        [7, 9]  # rank 0
        [8, 7]  # rank 1
    """
    if uneven not in UNEVEN:
        raise ValueError(f"uneven={uneven!r}: must be one of {', '.join(map(repr, UNEVEN))} [HVD240]")
    deal = _Deal(process_set.rank(), process_set.size(), shuffle, seed, uneven)
    first = FirstBatch.if_enabled(check, process_set)
    if isinstance(data, (str, bytes)):
        raise TypeError(f"cannot shard a {type(data).__name__}: make it a list of samples [HVD240]")
    if _has_no_order(data):
        kind = type(data).__name__
        raise TypeError(f"cannot shard a {kind}, whose order differs between processes: pass sorted(...) [HVD240]")
    parts = columns(data)
    compared = process_set if check and process_set.size() > 1 else None
    if parts is not None:
        result = _of_arrays(data, parts, deal, strided)
        if compared is not None:
            require_same_data(
                lambda row: [taken(part, range(row, row + 1)) for part in parts], count(parts[0]), compared
            )
        if first is not None:
            first.look(result)
        return result
    if hasattr(data, "__len__") and hasattr(data, "__getitem__") and not _is_iterable_dataset(data):
        if compared is not None:
            require_same_data(data.__getitem__, len(data), compared)
        return Shard(data, deal, first)
    if not isinstance(data, Iterable):
        raise TypeError(f"cannot shard a {type(data).__name__}: it has no length and cannot be iterated [HVD240]")
    if shuffle:
        raise ValueError("shuffle needs data with a length: shuffle an iterable before you shard it [HVD240]")
    return _iterable(data, deal, first, compared)


class _Deal:
    """How the samples 0 .. n-1 go to the ranks."""

    def __init__(self, rank: int, size: int, shuffle: bool, seed: int, uneven: str) -> None:
        if isinstance(seed, bool) or not hasattr(seed, "__index__"):
            raise TypeError(f"seed must be a whole number, not {seed!r} [HVD240]")
        self.rank, self.size, self.shuffle, self.seed, self.uneven = rank, size, shuffle, seed, uneven

    def mine(self, count: int, epoch: int, strided: bool) -> range | list[int]:
        """This rank's indices."""
        if self.uneven == "keep" or count == 0:
            total, most = count, -(-count // self.size)
        else:
            most = count // self.size if self.uneven == "drop" else -(-count // self.size)
            total = most * self.size
        if strided or self.shuffle:
            found = range(self.rank, total, self.size)
        elif self.uneven == "keep":
            short, longer = divmod(count, self.size)
            begin = self.rank * short + min(self.rank, longer)
            found = range(begin, begin + short + (self.rank < longer))
        else:
            found = range(self.rank * most, (self.rank + 1) * most)
        if self.shuffle:
            import random  # loads OpenSSL, which few need

            order = list(range(count))
            random.Random(self.seed * 1_000_003 + epoch).shuffle(order)
            return [order[index % count] for index in found]
        return found if not found or found[-1] < count else [index % count for index in found]


class Shard:
    """This rank's samples of a dataset, seen as a dataset. ``hvd.data.shard`` makes it.

    Give it to a DataLoader without a sampler. With ``shuffle=True``, call ``set_epoch`` on all ranks before each epoch.

    Args:
        data: the dataset.
        deal: how samples are dealt to ranks; ``hvd.data.shard`` makes it.
        first: the check of the first sample, or None.

    Example:
        >>> from collections import UserList
        >>> mine = hvd.data.shard(UserList("abcd"), shuffle=True)
        >>> mine.set_epoch(1)
        >>> len(mine), len(set(mine.indices()))
        (2, 2)
    """

    def __init__(self, data: Any, deal: _Deal, first: FirstBatch | None = None) -> None:
        self.data = data
        self._deal = deal
        self._first = first
        self._length = len(deal.mine(len(data), 0, True))
        _warn_if_empty(self._length, len(data), deal)
        self._epoch = SharedNumber()
        self._dealt: tuple[int, Any] = (-1, ())

    def set_epoch(self, epoch: int) -> None:
        """Deal the samples in the order of an epoch. Running DataLoader workers follow.

        All ranks must set the same epoch, or samples are read twice or not at all.

        Args:
            epoch (int): the number of the epoch, 0 or more.

        Raises:
            ValueError: ``epoch`` is not a number.
        """
        self._epoch.value = int(epoch)

    def indices(self) -> Any:
        """Return the indices of this rank's samples in the dataset, in the order of the current epoch.

        Returns:
            range or list[int]: as many indices as the shard has samples.
        """
        epoch = self._epoch.value
        if self._dealt[0] != epoch:
            self._dealt = (epoch, self._deal.mine(len(self.data), epoch, True))
        return self._dealt[1]

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, index: int) -> Any:
        if not -self._length <= index < self._length:
            raise IndexError(f"sample {index} is outside a shard of {self._length} samples [HVD240]")
        sample = self.data[self.indices()[index]]
        if self._first is not None:
            self._first.look(sample)
        return sample


class IterableShard:
    """Every n-th item of an iterable, in the order of the iterable. ``hvd.data.shard`` makes it.

    Each pass reads all the data on every rank and skips the items of the other ranks. The workers of a torch DataLoader
    share this rank's items. With torch imported it is a torch ``IterableDataset``. It can be iterated as often as its
    data.

    Args:
        data (iterable): the data.
        deal: how items are dealt to ranks; ``hvd.data.shard`` makes it.
        first: the check of the first item, or None.
        compared (ProcessSet, optional): the ranks that compare their first items, once. None: no comparison.

    Example:
        >>> list(hvd.data.shard(iter("abcd")))
        ['a', 'c']  # rank 0
        ['b', 'd']  # rank 1
    """

    def __init__(
        self, data: Iterable[Any], deal: _Deal, first: FirstBatch | None = None, compared: ProcessSet | None = None
    ) -> None:
        self.data = data
        self._deal = deal
        self._first = first
        self._compared = compared

    def __iter__(self) -> Iterator[Any]:
        worker, workers = _worker()
        items = iter(self.data)
        if self._compared is not None:
            process_set, self._compared = self._compared, None
            beginning = list(itertools.islice(items, self._deal.size))
            require_same_items(lambda: beginning, None, process_set)
            items = itertools.chain(beginning, items)
        for item in itertools.islice(_dealt(items, self._deal), worker, None, workers):
            if self._first is not None:
                self._first.look(item)
            yield item


def _dealt(items: Iterator[Any], deal: _Deal) -> Iterator[Any]:
    """This rank's item of each round of one item per rank; the last round may be too short."""
    beginning: list[Any] = []  # what fills up the last round
    while True:
        items_of_round = list(itertools.islice(items, deal.size))
        if len(items_of_round) == deal.size:
            if not beginning and deal.uneven == "pad":
                beginning = items_of_round
            yield items_of_round[deal.rank]
            continue
        have = len(items_of_round)
        if have and deal.rank < have and deal.uneven != "drop":
            yield items_of_round[deal.rank]
        elif have and deal.uneven == "pad":
            beginning = beginning or items_of_round
            yield beginning[(deal.rank - have) % len(beginning)]
        return


def _has_no_order(data: Any) -> bool:
    """A set. The keys of a dict have its order, and so has what can be indexed."""
    if isinstance(data, Set):
        return not isinstance(data, (KeysView, ItemsView)) and not hasattr(data, "__getitem__")
    return isinstance(data, _SET_ITERATOR)


def _of_arrays(data: Any, parts: list[Any], deal: _Deal, strided: bool) -> Any:
    lengths = [count(part) for part in parts]
    if len(set(lengths)) > 1:
        raise ValueError(f"arrays that belong together must have equal lengths; these have {lengths} rows [HVD240]")
    rows = deal.mine(lengths[0], 0, strided)
    _warn_if_empty(len(rows), lengths[0], deal)
    mine = [taken(part, rows) for part in parts]
    if isinstance(data, Mapping):
        return dict(zip(data, mine))
    return tuple(mine) if isinstance(data, tuple) else mine[0]


def _warn_if_empty(mine: int, whole: int, deal: _Deal) -> None:
    """A rank without samples makes no step, and the others wait for it or none trains."""
    if mine == 0:
        remedy = "check the path or the filter of the data" if whole == 0 else "use fewer ranks or uneven='pad'"
        warn(
            f"hvd.data.shard: rank {deal.rank} of {deal.size} gets none of {whole} samples (uneven={deal.uneven!r}), "
            f"so it takes no training step, and ranks that do wait for it: {remedy} [HVD240]"
        )


def _torch() -> Any:
    """torch if the program uses it."""
    return sys.modules.get("torch")


def _is_iterable_dataset(data: Any) -> bool:
    torch = _torch()
    return torch is not None and isinstance(data, torch.utils.data.IterableDataset)


def _iterable(data: Any, *how: Any) -> IterableShard:
    """An IterableShard that torch's DataLoader knows as an IterableDataset, if the program uses torch."""
    torch = _torch()
    if torch is None:
        return IterableShard(data, *how)
    from .torch_shard import TorchIterableShard

    return TorchIterableShard(data, *how)


def _worker() -> tuple[int, int]:
    """(number of this DataLoader worker, how many there are)."""
    torch = _torch()
    known = torch.utils.data.get_worker_info() if torch is not None else None
    return (0, 1) if known is None else (known.id, known.num_workers)
