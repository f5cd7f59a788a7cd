"""Folder of flight records: the one that is asked for, or one of the user's among temporary files.

HVDLITE_TRACE_DIR (`--trace-dir`) names a folder; "off" or "0" means none. Otherwise only what fails leaves records, in
`hvdlite-trace-UID/JOB` of the folder for temporary files, where any user may have put something of that name: the core
uses it only if it is the user's alone (csrc/engine/flight_recorder/dump.c). The newest KEPT jobs stay there.

The launcher and the ranks of its host find the same folder, each by itself: by the job's number.
"""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Mapping
from typing import NamedTuple

from ..config.options import OFF as OFF
from ..errors.codes import coded

KEPT = 20
_JOB = re.compile(r"[0-9a-f]{16}")
_RECORD = re.compile(r"rank-\d+\.flight\.json")
_OURS = re.compile(r"\.?rank-\d+\.(flight\.json|steps\.jsonl)(\.\d+)?")


class RecordFolder(NamedTuple):
    """A folder for records; None: there is none."""

    folder: str | None
    by_user: bool  # the user has named it: also what goes well is recorded


def base(environ: Mapping[str, str]) -> str:
    """The user's folder among temporary files."""
    return os.path.join(os.path.abspath(environ.get("TMPDIR") or "/tmp"), f"hvdlite-trace-{os.getuid()}")


def place_of(trace_dir: str | None, job: int, environ: Mapping[str, str]) -> RecordFolder:
    """Where this job's records go. trace_dir: as the option has it."""
    if trace_dir is not None:
        return RecordFolder(None, True) if trace_dir in OFF else RecordFolder(os.path.abspath(trace_dir), True)
    return RecordFolder(os.path.join(base(environ), f"{job:016x}"), False)


def found(folder: str) -> bool:
    """Are there flight records in a folder?"""
    try:
        return any(_RECORD.fullmatch(name) for name in os.listdir(folder))
    except OSError:
        return False


def prune(environ: Mapping[str, str], keep: int = KEPT) -> None:
    """Remove what jobs before the newest `keep` have left in `base`. What is not ours, or not the user's, stays."""
    try:
        own = os.lstat(base(environ))
        if not stat.S_ISDIR(own.st_mode) or own.st_uid != os.geteuid():
            return
        jobs = [each for each in os.scandir(base(environ)) if _JOB.fullmatch(each.name)]
        jobs = [each for each in jobs if each.is_dir(follow_symlinks=False)]
        jobs.sort(key=lambda each: each.stat(follow_symlinks=False).st_mtime, reverse=True)
    except OSError:
        return
    for old in jobs[keep:]:
        try:
            for name in os.listdir(old.path):
                if _OURS.fullmatch(name):
                    os.unlink(os.path.join(old.path, name))
            os.rmdir(old.path)
        except OSError:
            pass  # another rank is at it, or something else lies there


def last_words(environ: Mapping[str, str], job: int) -> str | None:
    """What the launcher says at the end of a failed job, if there are records on its host, or none can be. environ: of
    the ranks."""
    trace_dir = environ.get("HVDLITE_TRACE_DIR")
    folder, by_user = place_of(trace_dir, job, environ)
    if folder is None:
        return None
    if not found(folder):
        why = _unwritable(folder) if by_user else _not_own(base(environ))
        return None if why is None else coded("HVD725", f"there are no flight records: {why}")
    if trace_dir is None:
        prune(environ)
    return f"flight records: {folder} (hvdlite-trace analyze {folder})"


def _unwritable(folder: str) -> str | None:
    """Why nothing can be written there, if that is so."""
    there = folder
    while not os.path.lexists(there):
        there = os.path.dirname(there)
    if os.path.isdir(there) and os.access(there, os.W_OK | os.X_OK):
        return None
    return f"{folder} cannot be made or written (HVDLITE_TRACE_DIR)"


def _not_own(folder: str) -> str | None:
    """Why the core leaves this folder alone, if it does: any user may have made one of that name."""
    try:
        about = os.lstat(folder)
    except OSError:
        return _unwritable(folder)
    if stat.S_ISDIR(about.st_mode) and about.st_uid == os.geteuid() and not about.st_mode & 0o077:
        return None
    return (
        f"{folder} is no folder of this user alone (mode 0700): somebody else may have made it; name one by --trace-dir"
    )
