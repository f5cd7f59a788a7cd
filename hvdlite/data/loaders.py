"""Loaders of Horovod's: a class that is iterated over batches, and a mixin that prepares them in a thread.

    class Loader(AsyncDataLoaderMixin, MyLoader):       MyLoader: a BaseDataLoader with _iterate
        pass

Each iteration has a thread and a queue of its own, which end with it: also when the loop is left early, when _iterate
raises (the exception comes out of the loop) and when the loader is iterated again and again.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Iterator
from typing import Any

from .waiting import timed

_END = object()


class BaseDataLoader:
    """Base class of loaders that produce batches with ``_iterate`` (Horovod's interface).

    A subclass defines ``__len__``, the number of batches, and ``_iterate``, a generator of the batches of one pass. It
    may define ``_process_batch(batch)``, which converts each batch; by default a batch stays as it is. Iterating counts
    the time that the loop waits for each batch, as ``hvd.data.timer`` does.

    Example:
        >>> class Numbers(hvd.data.BaseDataLoader):
        ...     def __len__(self):
        ...         return 3
        ...     def _iterate(self):
        ...         return iter(range(3))
        >>> list(Numbers())
        [0, 1, 2]
    """

    def __len__(self) -> int:
        """Return the number of batches."""
        raise NotImplementedError

    def _iterate(self) -> Iterator[Any]:
        """Return an iterator over the batches of one pass."""
        raise NotImplementedError

    def _process_batch(self, batch: Any) -> Any:
        """Convert a batch before the loop receives it. The default returns it unchanged."""
        return batch

    def __iter__(self) -> Iterator[Any]:
        return timed(map(self._process_batch, self._iterate()))


class _Reading:
    """One pass: a thread that fills a queue until it is at the end or its reader has stopped."""

    def __init__(self, batches: Iterator[Any], ahead: int, debug: bool) -> None:
        self._batches, self._debug = batches, debug
        self._queue: queue.Queue[tuple[Any, BaseException | None]] = queue.Queue(ahead)
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._read, name="hvdlite loader", daemon=True)
        self._thread.start()

    def _read(self) -> None:
        try:
            for batch in self._batches:
                if not self._put(batch, None):
                    return
            self._put(_END, None)
        except BaseException as error:
            self._put(_END, error)

    def _put(self, batch: Any, error: BaseException | None) -> bool:
        while not self._stopped.is_set():
            try:
                self._queue.put((batch, error), timeout=0.1)
                return True
            except queue.Full:
                continue
        return False

    def batches(self) -> Iterator[Any]:
        while True:
            if self._debug and self._queue.empty():
                print("hvdlite: the data loader's queue is empty: training waits for data", flush=True)
            batch, error = self._queue.get()
            if error is not None:
                raise error
            if batch is _END:
                return
            yield batch

    def stop(self) -> None:
        self._stopped.set()
        self._drain()
        self._thread.join()
        self._drain()
        self._queue.put((_END, None))  # for a reader that still waits

    def _drain(self) -> None:
        try:
            while True:
                self._queue.get_nowait()
        except queue.Empty:
            pass


class AsyncDataLoaderMixin:
    """Mixin that prepares the batches of a ``BaseDataLoader`` ahead in a thread.

    Name it before the loader class. Each pass has its own thread and queue, which end with the pass, also if the loop
    breaks or ``_iterate`` raises. An exception of ``_iterate`` is raised in the loop. Several passes may be open at
    once.

    Args:
        async_loader_queue_size (int): the number of batches prepared ahead. 0: no thread. Default: 64.
        debug_data_loader (bool): print a line whenever the loop has to wait for a batch. Default: False.
        args: passed on to the next class.
        kwargs: passed on to the next class.

    Example:
        >>> class Numbers(hvd.data.BaseDataLoader):
        ...     def __len__(self):
        ...         return 3
        ...     def _iterate(self):
        ...         return iter(range(3))
        >>> class Loader(hvd.data.AsyncDataLoaderMixin, Numbers):
        ...     pass
        >>> list(Loader(async_loader_queue_size=2))
        [0, 1, 2]
    """

    def __init__(
        self, async_loader_queue_size: int = 64, debug_data_loader: bool = False, *args: Any, **kwargs: Any
    ) -> None:
        self.async_loader_queue_size = async_loader_queue_size
        self.debug_data_loader = debug_data_loader
        self._readings: list[_Reading] = []
        super().__init__(*args, **kwargs)

    def __iter__(self) -> Iterator[Any]:
        if self.async_loader_queue_size <= 0:
            yield from timed(map(self._process_batch, self._iterate()))  # type: ignore[attr-defined]
            return
        reading = _Reading(iter(self._iterate()), self.async_loader_queue_size, self.debug_data_loader)  # type: ignore[attr-defined]
        self._readings.append(reading)
        try:
            yield from timed(map(self._process_batch, reading.batches()))  # type: ignore[attr-defined]
        finally:
            self._readings.remove(reading)
            reading.stop()

    def close_async_loader(self) -> None:
        """Stop the threads of all open passes. A second call does nothing."""
        for reading in list(self._readings):
            reading.stop()
