"""Files of one attempt in a folder: those of the newest, unless an older one is asked for.

A job that is started again, or a process that becomes a rank once more, writes into the same folder. What lay there
before was renamed NAME.1, the one before that NAME.2, and so on (csrc/engine/flight_recorder/rotation.c); but a rank
that was killed has left no record, and its plain name is of an attempt before the others'. So it is not the names that
tell attempts apart: each file says in its beginning whose it is, "job":"...","epoch":N, and when it was begun or
written. So the epochs of an elastic job are attempts here, and two processes that had one rank are in two of them.
"""

from __future__ import annotations

import argparse
import os
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import NamedTuple

from .regular_file import opened

HEAD_BYTES = 4096
_INCARNATION = re.compile(rb'"job":\s?"([^"\\]{0,64})",\s?"epoch":\s?(\d{1,20})')
_SECONDS = re.compile(rb'"(?:written|begun)":\s?(\d{1,12})[,}]')
_MICROS = re.compile(rb'"start_time_since_epoch_in_micros":\s?(\d{1,18})[,}]')

Incarnation = tuple[bytes, int]  # the job, and which of its inits


class Found(NamedTuple):
    """The files of one attempt, and how many others there are."""

    paths: list[Path]
    older: int  # attempts before this one
    newer: int  # and after it


class NoAttemptError(ValueError):
    """There are not so many; the text says how many."""


def add_argument(parser: argparse.ArgumentParser) -> None:
    """--before N, the same for all that read a folder."""
    parser.add_argument(
        "--before", type=_count, default=0, metavar="N",
        help="read the N-th attempt before the newest one (0, the default: the newest)",
    )  # fmt: skip


def _count(text: str) -> int:
    if not text.isdecimal() or len(text) > 6:
        raise argparse.ArgumentTypeError(f"{text!r} is no number of attempts")
    return int(text)


def with_older(paths: Iterable[Path]) -> list[Path]:
    """These files, each followed by what was renamed to make room for it."""
    found = []
    for path in paths:
        kept = [each for each in path.parent.glob(f"{_plain(path.name)}.*") if each.suffix[1:].isdecimal()]
        found += [path, *sorted(kept, key=lambda each: int(each.suffix[1:]))]
    return list(dict.fromkeys(found))


def _plain(name: str) -> str:
    return re.sub(r"([*?[])", r"[\1]", name)


def choose(paths: Iterable[Path], before: int = 0) -> Found:
    """Those of the newest attempt, or of the one so many before it. What does not say whose it is is the newest's.

    Raises NoAttemptError. Files that cannot be read are among the newest: the reader reports them.
    """
    found: dict[Path, tuple[Incarnation | None, float]] = {path: _identity(path) for path in paths}
    newest: dict[Incarnation, float] = {}
    for incarnation, when in found.values():
        if incarnation is not None:
            newest[incarnation] = max(newest.get(incarnation, when), when)
    order = sorted(newest, key=lambda incarnation: newest[incarnation], reverse=True)
    if before and before >= len(order):
        raise NoAttemptError(
            f"there {'is' if len(order) == 1 else 'are'} {len(order)} attempt{'s' * (len(order) != 1)} here: "
            f"--before takes {f'0 to {len(order) - 1}' if len(order) > 1 else '0 only'} [HVD723]"
        )
    wanted_key = order[before] if order else None
    chosen = [
        path
        for path, (incarnation, _) in found.items()
        if incarnation == wanted_key or (incarnation is None and not before)
    ]
    return Found(chosen, max(len(order) - 1 - before, 0), before)


def _identity(path: Path) -> tuple[Incarnation | None, float]:
    """(whose a file is, when it was begun or written: seconds of the epoch)."""
    try:
        with opened(path) as file:
            head = file.read(HEAD_BYTES)
            when = os.fstat(file.fileno()).st_mtime
    except OSError:
        return None, 0.0
    incarnation, seconds, micros = _INCARNATION.search(head), _SECONDS.search(head), _MICROS.search(head)
    if seconds:
        when = float(seconds[1]) + when % 1  # of two in one second the file's own time decides
    elif micros:
        when = int(micros[1]) / 1e6
    return (None if incarnation is None else (incarnation[1], int(incarnation[2]))), when


def note(found: Found, command: str) -> str | None:
    """What to say of attempts that are not shown. command: that shows them."""
    if not found.older:
        return None
    several = found.older > 1
    return (
        f"{found.older} older attempt{'s are' if several else ' is'} here, too: {command} --before {found.newer + 1}"
        f"{f' to {found.newer + found.older}' if several else ''} shows {'them' if several else 'it'}"
    )


def of_rank(paths: Iterable[Path], pattern: re.Pattern[str]) -> Mapping[int, Path]:
    """By rank, which is the pattern's first group. Of two the one that comes first."""
    found: dict[int, Path] = {}
    for path in paths:
        match = pattern.match(path.name)
        if match:
            found.setdefault(int(match.group(1)), path)
    return found
