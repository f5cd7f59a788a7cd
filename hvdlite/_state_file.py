"""How does the state of training survive the end of a job? As one file, which is replaced as a whole and checked.

A file is written beside the old one, brought to the disk, and renamed: whatever happens meanwhile, one of the two is
there, and whole. Its head holds the length and the SHA-256 of what follows, a pickle; a file that was cut or changed
is refused with its name and not read as far as it goes. A pickle runs code when it is read: the file is trusted as the
script is.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import struct
import sys
import time
from typing import IO, Any

from ._coded import coded
from .errors import HvdStateError

MAGIC = b"hvdlite state 1\n"
_HEAD = struct.Struct("<16s32sQ")  # MAGIC, SHA-256, bytes that follow
_CHUNK = 1 << 20


class _Hashed:
    """A file that knows the hash of what was written."""

    def __init__(self, file: IO[bytes]) -> None:
        import hashlib

        self._file, self.hash, self.length = file, hashlib.sha256(), 0

    def write(self, part: Any) -> int:
        self.hash.update(part)
        self.length += memoryview(part).nbytes
        return self._file.write(part)


class Kept:
    """The file of a state. unread: no rank has what is in it, if there is such a file; until the first sync is done."""

    def __init__(self, path: str, seconds: float, unread: bool) -> None:
        self.unread = unread
        self._path, self._seconds, self._next = os.path.abspath(os.fspath(path)), seconds, 0.0
        self._told = ""  # why the last commit was not written

    def is_due(self) -> bool:
        """Whether the last one that was written is old enough."""
        return time.monotonic() >= self._next

    def write(self, state: Any) -> None:
        """Replaces the file. Where that cannot be, the old one stays, and a warning says so, once for each cause.
        Raises HvdStateError where the state itself cannot be written."""
        try:
            write(self._path, state)
            self._told = ""
        except OSError as error:
            told, self._told = self._told, error.strerror or str(error)
            if self._told != told:
                _say(f"{self._path} cannot be written ({self._told}): commits are in memory only until it can [HVD425]")
        except Exception as error:  # whatever the pickling of a user's class raises
            raise HvdStateError(coded("HVD425", f"the state cannot be kept in {self._path}: {error}")) from error
        self._next = time.monotonic() + self._seconds

    def load_into(self, state: Any) -> None:
        """Lets the state go on from the file, if there is one. Raises HvdStateError."""
        try:
            kept = read(self._path)
        except OSError as error:
            raise HvdStateError(f"{self._path} cannot be read: {error.strerror} [HVD425]") from None
        if kept is None:
            _say(f"there is no {self._path} yet: training begins")
            return
        try:
            state.load_state_dict(kept)
        except Exception as error:
            why = f"{type(error).__name__}: {error}"
            raise HvdStateError(coded("HVD425", f"{self._path} is the state of another training: {why}")) from error
        _say(f"training goes on from {self._path}")


def _say(text: str) -> None:
    print(f"hvdlite: {text}", file=sys.stderr, flush=True)


def write(path: str, state: Any) -> None:
    """Replaces the file by this state. Raises OSError, and what pickle raises; then the old file is still there."""
    import cloudpickle

    beside = f"{path}.part"
    try:
        with open(beside, "wb") as file:
            file.write(bytes(_HEAD.size))
            body = _Hashed(file)
            cloudpickle.CloudPickler(body, protocol=5).dump(state)
            file.seek(0)
            file.write(_HEAD.pack(MAGIC, body.hash.digest(), body.length))
            file.flush()
            os.fsync(file.fileno())
        os.replace(beside, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(beside)
        raise
    folder = os.open(os.path.dirname(path), os.O_RDONLY)
    try:
        os.fsync(folder)  # the rename, too
    finally:
        os.close(folder)


def read(path: str) -> Any:
    """The state, or None where there is no such file. Raises HvdStateError for one that is not whole, OSError."""
    try:
        file = open(path, "rb")
    except FileNotFoundError:
        return None
    import hashlib  # late: `import hvdlite` does not need it

    with file:
        head, found, length = file.read(_HEAD.size), hashlib.sha256(), 0
        while chunk := file.read(_CHUNK):
            found.update(chunk)
            length += len(chunk)
        if head != _HEAD.pack(MAGIC, found.digest(), length):
            raise HvdStateError(
                f"{path} is no state that hvdlite has saved, or it was cut or changed since: its length and hash are "
                "not those of its head. Give another path, or remove it to train from the beginning [HVD425]"
            )
        file.seek(_HEAD.size)
        return pickle.load(file)
