"""Check that ranks read different data. The commonest mistake: nobody sharded, every rank trains on everything, and
nothing fails; the job is only no faster than one process.

A FirstBatch looks at the first sample (or batch) that this rank is given and compares its digest with the other ranks',
once: one small allgather. If all are identical on several ranks, every rank's data is very likely the same, and rank 0
says so. It is a debugging option: all ranks must come to their first sample, so it is off by default.

A DataLoader's workers are other processes without a rank; there the digest is not compared, and `watch`, which
stands in the training process, is the one to use.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from .. import _core, config
from ..errors.user_warning import warn
from ..lifecycle import init
from ..ops.objects import allgather_object
from ..process_sets.process_set import ProcessSet, global_process_set

_NOTHING = b""


class FirstBatch:
    """Compares the first thing it is shown, and nothing afterwards."""

    def __init__(self, process_set: ProcessSet) -> None:
        self._process_set: ProcessSet | None = process_set

    @staticmethod
    def if_enabled(check: bool | None, process_set: ProcessSet) -> FirstBatch | None:
        """One if the argument or, where that is None, the option asks for it and there are several ranks."""
        enabled = config.load().values["check_data"] if check is None else check
        return FirstBatch(process_set) if enabled and process_set.size() > 1 else None

    def look(self, batch: Any) -> None:
        """Warns on the set's first rank if all ranks were shown the same. All ranks of the set have to call it."""
        self._compare(lambda: digest(batch))

    def look_at_none(self) -> None:
        """There is no batch on this rank. Called in place of `look`, for which other ranks would wait."""
        self._compare(lambda: _NOTHING)

    def _compare(self, mine: Callable[[], bytes | None]) -> None:
        process_set, self._process_set = self._process_set, None
        if process_set is None or not is_rank():
            return
        everyone = allgather_object(mine(), "first_batch", process_set)
        without = [str(rank) for rank, each in zip(process_set.ranks, everyone) if each == _NOTHING]
        if without and process_set.rank() == 0:
            warn(
                f"rank{'s' * (len(without) > 1)} {', '.join(without)} read no batch, and the others wait for them: "
                "give every rank equally many batches (hvd.data.shard), or call hvd.join() [HVD240]"
            )
        elif everyone[0] is not None and len(set(everyone)) == 1 and process_set.rank() == 0:
            warn(
                f"all {len(everyone)} ranks read the same first batch: shard the data with hvd.data.shard(dataset), "
                "or use a different seed on each rank for generated data [HVD241]"
            )


def watch(batches: Iterable[Any], check: bool | None = None, process_set: ProcessSet = global_process_set) -> Any:
    """Wrap a loader and warn if all ranks read the same first batch.

    The most common mistake in data-parallel training is that every rank reads all the data. Nothing fails then, but the
    job is no faster than one process. The wrapper compares a digest of the first batch over all ranks, once per loader,
    with one small allgather. If all digests are equal, the first rank of the set issues a ``UserWarning`` (HVD241).

    The check is off by default, because all ranks of the set must then read their first batch. The first rank to do so
    waits for the others. In a DataLoader's worker processes nothing is compared, so wrap the loader, not the dataset.

    Args:
        batches (iterable): a loader, such as a torch ``DataLoader``.
        check (bool, optional): True compares, False does not. None takes the option ``HVDLITE_CHECK_DATA`` (default:
            off).
        process_set (ProcessSet, optional): the ranks that are compared. Default: all ranks.

    Returns:
        iterable: the same batches in the same order. ``len()`` and attributes are those of the loader. Where nothing is
        compared this is ``batches`` itself.

    Raises:
        HvdNotInitializedError: the check is on and ``hvd.init()`` has not been called.
        HvdPeerLostError: while reading the first batch, a rank has left or died.

    Example:
        >>> mine = hvd.data.shard([[1, 2], [3, 4]])
        >>> list(hvd.data.watch(mine, check=True))
        [[1, 2]]  # rank 0
        [[3, 4]]  # rank 1
    """
    first = FirstBatch.if_enabled(check, process_set)
    return batches if first is None else _Watched(batches, first)


class _Watched:
    def __init__(self, batches: Any, first: FirstBatch) -> None:
        self._batches, self._first = batches, first

    def __len__(self) -> int:
        return len(self._batches)

    def __iter__(self) -> Iterator[Any]:
        none = True
        for batch in self._batches:
            none = False
            self._first.look(batch)
            yield batch
        if none:
            self._first.look_at_none()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._batches, name)


def is_rank() -> bool:
    """Whether collectives work here: not in a process that was forked from a rank."""
    return init.is_initialized() and _core.lib.hvd_forked() != 1


def digest(batch: Any) -> bytes | None:
    """16 bytes that depend on all of a batch, and not on the process: arrays by their memory, all else by how it is
    pickled. None for what cannot be read or pickled."""
    import hashlib  # loads OpenSSL, which few need

    state = hashlib.blake2b(digest_size=16)
    try:
        _feed(state, batch)
    except Exception:  # whatever a class raises that cannot be pickled
        return None
    return state.digest()


def _feed(state: Any, part: Any) -> None:
    from ..training.digest import digested

    if isinstance(part, dict):
        _feed(state, list(part.items()))
    elif isinstance(part, (list, tuple)):
        state.update(f"{len(part)}".encode())
        for value in part:
            _feed(state, value)
    else:
        form, of_part, _ = digested("", part, _bits)
        state.update(form.encode() + of_part)


def _bits(value: Any) -> Any:
    """The bits of a tensor of torch; None of anything else."""
    from ..training.digest import Bits

    torch = sys.modules.get("torch")
    if torch is None or not isinstance(value, torch.Tensor):
        return None
    memory = value.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy()
    return Bits(tuple(value.shape), str(value.dtype), [memory.tobytes()])
