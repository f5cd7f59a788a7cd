"""Epoch number shared between set_epoch and the worker processes of a DataLoader.

It lies in memory of its own (a memfd): workers that are forked have it already, and those that are spawned get it as
they start. It needs no /dev/shm, which may be full or read-only.

Any other copy or pickle has a number of its own.
"""

from __future__ import annotations

import mmap
import os
import weakref
from multiprocessing.context import get_spawning_popen
from multiprocessing.reduction import DupFd
from typing import Any


class SharedNumber:
    """An integer of 64 bits. fd: the memory of one that is there already."""

    def __init__(self, value: int = 0, fd: int | None = None) -> None:
        self._fd = os.memfd_create("hvdlite_epoch") if fd is None else fd
        weakref.finalize(self, os.close, self._fd)
        if fd is None:
            os.ftruncate(self._fd, 8)
        self._memory = memoryview(mmap.mmap(self._fd, 8)).cast("q")
        if fd is None:
            self.value = value

    @property
    def value(self) -> int:
        """What was written last, in whichever process."""
        return self._memory[0]

    @value.setter
    def value(self, value: int) -> None:
        self._memory[0] = value

    def __reduce__(self) -> Any:
        if get_spawning_popen() is None:
            return SharedNumber, (self.value,)
        return _received, (DupFd(self._fd),)


def _received(handle: Any) -> SharedNumber:
    return SharedNumber(fd=handle.detach())
