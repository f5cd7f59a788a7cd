"""Save and load of a table while its server answers ranks: a forked child writes, a thread reads.

The child has the memory of the server at the moment of the fork (pages are copied when one of both writes to them), so
what it writes is a snapshot, and training goes on beside it. A fork has no other threads: the child touches arrays and
files only, closes all that it has inherited but a pipe, and ends without the interpreter's exit. A load needs the
server's own memory, so it is a thread, and fills a shard of its own. Rank 0 asks for `progress` until a job is over: no
answer takes long, however large the table is.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import signal
import threading
from typing import Any

import numpy as np

from . import checkpoint_pieces
from .shard import Shard

_PR_SET_PDEATHSIG = 1
_FILE_BYTES = 64 << 20


class Saving:
    """A child that writes the rows of a shard whose part is `owned` (bool [parts]), as pieces with this token."""

    def __init__(self, shard: Shard, owned: Any, folder: str, token: str) -> None:
        self._pipe, into = os.pipe()
        self._output, parent = bytearray(), os.getpid()
        try:
            self._pid = os.fork()
        except OSError:
            os.close(self._pipe)
            raise
        finally:
            if os.getpid() == parent:
                os.close(into)
        if self._pid == 0:
            with contextlib.suppress(BaseException):
                _write_all(shard, owned, folder, token, parent, into)
            os._exit(0)
        os.set_blocking(self._pipe, False)

    def progress(self) -> dict[str, Any] | None:
        """The child's result; None: it still writes."""
        try:
            while came := os.read(self._pipe, 1 << 16):
                self._output += came
        except BlockingIOError:
            return None
        status = self._reaped()
        try:
            result: dict[str, Any] = json.loads(self._output)
        except ValueError:
            return {"error": f"its process that writes ended with status {status} [HVD033]"}
        return result

    def _reaped(self) -> int:
        os.close(self._pipe)
        _, status = os.waitpid(self._pid, 0)
        return os.waitstatus_to_exitcode(status)

    def stop(self) -> None:
        """Ends it, if `progress` has not reported its end."""
        os.kill(self._pid, signal.SIGKILL)
        self._reaped()


def _write_all(shard: Shard, owned: Any, folder: str, token: str, parent: int, into: int) -> None:
    """The child."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, ctypes.c_ulong(signal.SIGKILL))
    os.closerange(3, into)
    os.closerange(into + 1, os.sysconf("SC_OPEN_MAX"))  # else ranks would not see a server that ends
    if os.getppid() != parent:
        return
    written = list[dict[str, Any]]()
    count = max(1, _FILE_BYTES // (8 + 4 * (shard.dim + shard.state_width)))
    try:
        os.makedirs(folder, exist_ok=True)
        for number, (ids, rows) in enumerate(shard.by_part(owned, count)):
            name = f"{token}-{shard.me}-{number}.npz"
            written.append({"file": name})
            written[-1] = checkpoint_pieces.write_piece(folder, name, ids, rows, shard.placement.places(ids)[0])
        result: dict[str, Any] = {"written": written}
    except Exception as error:
        result = failed(error)
        for piece in written:
            with contextlib.suppress(OSError):
                os.remove(os.path.join(folder, piece["file"]))
    with open(into, "wb") as file:
        file.write(json.dumps(result).encode())


class Loading:
    """A thread that fills `shard` with those rows of a save that lie here. order: that of the table that was saved."""

    def __init__(self, shard: Shard, folder: str, listed: list[dict[str, Any]], order: str) -> None:
        self.shard = shard
        self._result: dict[str, Any] | None = None
        self._stopped = False
        here = shard.parts_here() if order == shard.placement.order else np.ones(shard.placement.parts, bool)
        threading.Thread(target=self._read_all, args=(folder, listed, here), name="hvdlite-load", daemon=True).start()

    def _read_all(self, folder: str, listed: list[dict[str, Any]], here: Any) -> None:
        try:
            for piece in listed:
                for ids, rows in checkpoint_pieces.read_piece(folder, piece, here):
                    if self._stopped:
                        return
                    if rows.shape[1] != self.shard.dim + self.shard.state_width:
                        raise ValueError(
                            f"{folder}: {piece['file']} has rows of {rows.shape[1]} numbers, but table "
                            f"{self.shard.name!r} has {self.shard.dim + self.shard.state_width} [HVD034]"
                        )
                    self.shard.put(ids, rows)
            self._result = {"loaded": self.shard.used}
        except Exception as error:
            self._result = failed(error)

    def progress(self) -> dict[str, Any] | None:
        """What became of it; None: it still reads."""
        return self._result

    def stop(self) -> None:
        """Ends it soon."""
        self._stopped = True


def failed(error: Exception) -> dict[str, str]:
    """What a rank raises."""
    text = str(error)
    return {"error": text if "[HVD034]" in text else f"{type(error).__name__}: {text} [HVD033]"}
