"""Checkpoint of an elastic state: one file, replaced as a whole and verified when it is read.

A file is written beside the old one, brought to the disk, and renamed: whatever happens meanwhile, one of the two is
there, and whole. Its head holds the length and the SHA-256 of what follows, a pickle; a file that was cut or changed
is refused with its name and not read as far as it goes. A pickle runs code when it is read: the file is trusted as the
script is.

Each path belongs to one job. Another job's file is known by its head, not by inode and time: file systems of clusters
round times, and use inodes again. It is never replaced, or the two would take turns.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import re
import socket
import struct
import sys
import time
from collections.abc import Callable, Iterator
from typing import IO, Any

from ..errors import HvdError, HvdStateError
from ..errors.codes import coded

MAGIC = b"hvdlite state 1\n"
_HEAD = struct.Struct("<16s32sQ")  # MAGIC, SHA-256, bytes that follow
_CHUNK = 1 << 20
_PART_AGE = 3600  # seconds after which no process writes a part any more, on any host
_QUIET = 60  # seconds from one warning to the next


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
    """The file of a state. unread: no rank has what is in it, if there is such a file; until the first sync is done.
    taken: another job writes it as well, so this one does not. behind: it may lack the last commit."""

    def __init__(self, path: str, seconds: float, unread: bool) -> None:
        self.unread, self.taken = unread, False
        self._path, self._seconds, self._next = os.path.abspath(os.fspath(path)), seconds, 0.0
        self._head: bytes | None = None  # of the file that this job wrote or read last; None: of whichever is there
        self.behind = True
        self._warn_at = 0.0

    def is_due(self) -> bool:
        """Whether the last one that was written is old enough."""
        return not self.taken and time.monotonic() >= self._next

    def ranks_changed(self) -> None:
        """Another rank may have written the file since this one did."""
        self._head, self.behind = None, True

    def committed(self, state_dict: Callable[[], Any]) -> None:
        """Rank 0 has committed: the file follows, if it is due."""
        self.behind = True
        if self.is_due():
            self.write(state_dict())

    def ended(self, state_dict: Callable[[], Any]) -> None:
        """Training is over: its last commit is kept, due or not."""
        if self.behind and not self.taken:
            self.write(state_dict())

    def write(self, state: Any) -> bool:
        """Replaces the file; whether it has this state now. Where it cannot be written the old one stays, and a warning
        says so, once a minute. Raises HvdStateError where the state itself cannot be written."""
        self.behind = True
        try:
            if self._is_taken():
                return False
            self._head = write(self._path, state)
            self.behind = False
        except OSError as error:
            return self.failed(error.strerror or str(error))
        except Exception as error:  # whatever the pickling of a user's class raises
            why = unpicklable(state) or str(error)
            raise HvdStateError(coded("HVD425", f"the state cannot be saved to {self._path}: {why}")) from error
        self._next = time.monotonic() + self._seconds
        return True

    def failed(self, why: str) -> bool:
        """It cannot be written. Warns once a minute; False."""
        if time.monotonic() >= self._warn_at:
            report(
                f"{self._path} cannot be written ({why}): commits are kept in memory only until it can be written "
                "[HVD425]"
            )
            self._warn_at = time.monotonic() + _QUIET
        self._next = time.monotonic() + self._seconds
        return False

    def _is_taken(self) -> bool:
        """Whether another job writes the file as well; prints it when it is found out."""
        head = b"" if self.taken else _head_of(self._path)
        if head and self._head not in (None, head):
            self.taken = True
            report(f"another job also writes {self._path}: give each job its own path [HVD425]")
        return self.taken

    def load_into(self, state: Any) -> None:
        """Lets the state go on from the file, if there is one. Raises HvdStateError."""
        _remove_parts(self._path)
        try:
            self._head = _head_of(self._path)  # before: if it is replaced meanwhile, another job is at work
            kept = read(self._path)
        except OSError as error:
            raise HvdStateError(f"{self._path} cannot be read: {error.strerror} [HVD425]") from None
        if kept is None:
            report(f"there is no {self._path} yet: training begins")
            return
        try:
            state.load_state_dict(kept)
        except Exception as error:
            why = f"{type(error).__name__}: {error}"
            raise HvdStateError(coded("HVD425", f"{self._path} is the state of another training: {why}")) from error
        self.behind = False
        report(f"training goes on from {self._path}")


def report(text: str) -> None:
    """A line of rank 0."""
    print(f"hvdlite: {text}", file=sys.stderr, flush=True)


def unpicklable(state_dict: Any) -> str | None:
    """Which attribute cannot be pickled, why, and what to do; None where each can, or has no name here."""
    import cloudpickle

    parts = state_dict.values() if isinstance(state_dict, dict) else ()
    for name, value in (item for part in parts if isinstance(part, dict) for item in part.items()):
        try:
            cloudpickle.dumps(value)
        except Exception as error:
            why = f"{type(error).__name__}: {error}"
            return f"attribute {name!r} of the state cannot be pickled ({why}); keep it outside of the State"
    return None


@contextlib.contextmanager
def named(attributes: dict[str, Any]) -> Iterator[None]:
    """Sends or keeps them: HvdStateError names the one that cannot be pickled."""
    try:
        yield
    except HvdError:  # of the sending
        raise
    except Exception as error:
        why = unpicklable({"objects": attributes})
        if why is None:
            raise
        raise HvdStateError(f"{why} [HVD425]") from error


def _host() -> str:
    return socket.gethostname().replace(".", "_")


def _remove_parts(path: str) -> None:
    """Removes what processes that were killed while they wrote have left beside the file."""
    folder, name = os.path.split(path)
    part_of = re.compile(re.escape(name) + r"\.([^.]+)\.(\d+)\.part")
    with contextlib.suppress(OSError):
        for found in filter(None, map(part_of.fullmatch, os.listdir(folder))):
            part = os.path.join(folder, found[0])
            with contextlib.suppress(OSError):
                old = time.time() - os.stat(part).st_mtime > _PART_AGE
                if old or (found[1] == _host() and not _is_alive(int(found[2]))):
                    os.unlink(part)


def _is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:  # another user's
        return True
    return True


def write(path: str, state: Any) -> bytes:
    """Replaces the file by this state; returns its head. Raises OSError, and what pickle raises; then the old file is
    still there."""
    import cloudpickle

    beside = f"{path}.{_host()}.{os.getpid()}.part"
    try:
        with open(beside, "wb") as file:
            file.write(bytes(_HEAD.size))
            body = _Hashed(file)
            cloudpickle.CloudPickler(body, protocol=5).dump(state)
            file.seek(0)
            head = _HEAD.pack(MAGIC, body.hash.digest(), body.length)
            file.write(head)
            file.flush()
            os.fsync(file.fileno())
        os.replace(beside, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(beside)
        raise
    with contextlib.suppress(OSError):  # not every file system can; the file has been replaced all the same
        folder = os.open(os.path.dirname(path), os.O_RDONLY)
        try:
            os.fsync(folder)  # the rename, too
        finally:
            os.close(folder)
    return head


def _head_of(path: str) -> bytes:
    """b"" where there is no such file."""
    try:
        with open(path, "rb") as file:
            return file.read(_HEAD.size)
    except FileNotFoundError:
        return b""


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
                f"{path} is not a state that hvdlite has saved, or it was changed since: its length and hash do not "
                "match its header. Give another path, or remove the file to train from the beginning [HVD425]"
            )
        file.seek(_HEAD.size)
        return pickle.load(file)
