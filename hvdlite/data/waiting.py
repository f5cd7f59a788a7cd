"""Time that a training loop waits for its data: the time inside `next`, which `hvd.stats()` shows.

It is measured where the loop itself waits, in the process that trains: what workers do meanwhile is theirs. Loaders of
hvdlite do it by themselves; around others, such as torch's DataLoader, stands a `timer`. Two looks at the clock and a
call of the core for each batch; nothing is printed and nothing changed.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from time import monotonic_ns
from typing import Any

from .. import _core, metrics
from ..errors.user_warning import warn
from ..lifecycle import init


def timed(batches: Iterable[Any]) -> Iterator[Any]:
    """Gives out the batches, and counts the time until each is there; also that of finding that there are no more.

    A warning if there is none: other ranks may wait for this one in their first step.
    """
    iterator, none = iter(batches), True
    while True:
        begun = monotonic_ns()
        try:
            batch = next(iterator)
        except StopIteration:
            if none:
                warn_of_none()
            return
        finally:
            metrics.data_waited(monotonic_ns() - begun)
        none = False
        yield batch


def warn_of_none() -> None:
    """A rank without a batch makes no step, and the others wait for it."""
    rank = f"rank {_core.rank()}: " if init.is_initialized() else ""
    warn(
        f"{rank}the loader gave no batch, so this rank takes no training step, and ranks that do wait for it: check "
        "the data, a batch size with drop_last=True, and that an iterator is made anew for each epoch [HVD240]"
    )


class Timed:
    """The batches of any loader, such as a DataLoader; all else is the loader's own."""

    def __init__(self, batches: Any) -> None:
        self._batches = batches

    def __len__(self) -> int:
        return len(self._batches)

    def __iter__(self) -> Iterator[Any]:
        return timed(self._batches)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._batches, name)


def timer(batches: Iterable[Any]) -> Any:
    """Wrap a loader so that ``hvd.stats()`` shows how long the training loop waits for batches.

    The wrapper measures the time inside ``next`` in the training process. It costs two clock reads and one call of the
    core per batch. It calls no collective.

    Args:
        batches (iterable): a loader, such as a torch ``DataLoader``.

    Returns:
        iterable: the same batches in the same order. ``len()`` and attributes are those of the loader.

    Raises:
        TypeError: ``batches`` cannot be iterated.

    Example:
        >>> loader = hvd.data.timer([1, 2, 3])
        >>> sum(loader), len(loader)
        (6, 3)
    """
    if not hasattr(batches, "__iter__"):
        raise TypeError(f"timer() needs an iterable, not {type(batches).__name__} [HVD242]")
    return Timed(batches)
