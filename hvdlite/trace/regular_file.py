"""Open a file that was found in a folder or named by a user: only if it is a regular one, and without waiting.

Whatever lies in a folder may have the name of a record. A FIFO without a writer would keep its reader for ever,
and a device may have no end; so nothing is read before it is known what it is, as in
csrc/engine/flight_recorder/rotation.c. Links are followed: where a record really lies is its owner's affair.
"""

from __future__ import annotations

import errno
import io
import os
import stat

from ..errors.codes import coded

_KINDS = {stat.S_IFIFO: "a pipe", stat.S_IFDIR: "a folder", stat.S_IFCHR: "a device", stat.S_IFBLK: "a device"}


def opened(path: str | os.PathLike[str]) -> io.BufferedReader:
    """A plain file to read, or what a link leads to if that is one. Raises OSError with a text that names it and has a
    code: where it cannot be opened, and where it is something else."""
    shown = os.fspath(path)
    try:
        file = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC)
    except OSError as error:
        strange = error.errno in (errno.ENXIO, errno.ENODEV)
        why = (
            "is not a regular file but a socket or device" if strange else f"cannot be read: {error.strerror or error}"
        )
        refusal = type(error)(coded("HVD723", f"{shown} {why}"))
        refusal.errno = error.errno
        raise refusal from None
    kind = stat.S_IFMT(os.fstat(file).st_mode)
    if kind != stat.S_IFREG:
        os.close(file)
        what = _KINDS.get(kind, "something else")
        raise OSError(f"{shown} is not a regular file but {what} [HVD723]")
    return io.BufferedReader(io.FileIO(file))


def no_folder(path: str | os.PathLike[str]) -> str | None:
    """What to say of something that was given as a folder and is none; None where it is one, or is not there."""
    if os.path.isdir(path) or not os.path.lexists(path):
        return None
    beside = os.path.dirname(os.fspath(path)) or "."
    return coded("HVD723", f"{os.fspath(path)} is not a folder: give the folder that contains it, {beside}")
