"""Folder of a checkpoint in parts: how ranks write one together, and how any number of ranks reads ranges from it.

    share-0-of-2.bin  raw ranges of tensors, one after the other; a file for each rank that has some
    rest.pt           what is not cut into ranges; the adapter's business
    manifest.json     what is in the others: each range with its file, offset, parameter and the CRC-32 of each MiB

Ranks write into `<folder>.draft`. The first rank adds the manifest when all files are on the disk, then renames. The
folder from before is `<folder>.old` between two renames, and it is found there if a job ends in between.

A folder may be damaged, or be made by a stranger. So each number of the manifest is checked, its names lead nowhere
else, and bytes count only after their checksum. What does not fit is a ValueError that names the file. A save removes
nothing but files that a save has written.
"""

from __future__ import annotations

import contextlib
import errno
import json
import math
import os
import re
import secrets
import time
import zlib
from collections.abc import Iterator
from itertools import zip_longest
from typing import Any, BinaryIO, NamedTuple

BLOCK = 1 << 20
WIDTHS = dict.fromkeys(("bool", "int8", "uint8", "float8_e4m3fn", "float8_e5m2"), 1)  # bytes of an element, by dtype
WIDTHS |= dict.fromkeys(("int16", "float16", "bfloat16"), 2) | dict.fromkeys(("int32", "float32"), 4)
WIDTHS |= dict.fromkeys(("int64", "float64", "complex64"), 8) | {"complex128": 16}
_MOST = 1 << 28  # bytes of a manifest
_FORMAT, _MANIFEST, REST = 1, "manifest.json", "rest.pt"
_SHARE = re.compile(r"share-[0-9]{1,7}-of-[0-9]{1,7}\.bin")
_OURS = re.compile(rf"{_SHARE.pattern}|rest\.pt|manifest\.json|begun-[0-9a-f]{{16}}|\.nfs[0-9a-f]+")
_AGAIN = "Load another checkpoint, or restore this folder from a copy"
_seen_within_s = 40.0  # for so long a client of NFS may believe what it knows of a folder


class Entry(NamedTuple):
    """Elements of a parameter (key "") or of its state, in a file."""

    file: str
    offset: int
    bytes: int
    parameter: str
    key: str
    begin: int
    end: int
    dtype: str
    crc32: list[int]


def draft_of(folder: str) -> str:
    """Where a save writes."""
    return f"{folder}.draft"


def begin(folder: str) -> str:
    """Make an empty draft; the name of a new file in it, which all ranks must see. ValueError for a user's folder."""
    for each in (folder, draft_of(folder), f"{folder}.old"):
        _require_ours(each)
    draft, begun = draft_of(folder), f"begun-{secrets.token_hex(8)}"
    remove(draft)
    os.makedirs(draft)
    open(os.path.join(draft, begun), "xb").close()
    return begun


def require_seen(folder: str, begun: str, maker: int) -> None:
    """ValueError if this rank does not see the draft that the rank `maker` made."""
    path, until = os.path.join(draft_of(folder), begun), time.monotonic() + _seen_within_s
    while not os.path.exists(path):
        if time.monotonic() > until:
            raise ValueError(
                f"{draft_of(folder)}, which rank {maker} made, is not here: the folder must be on a file system that "
                "all ranks share, under the same path"
            )
        time.sleep(0.1)


def _require_ours(folder: str) -> None:
    if not os.path.lexists(folder):
        return
    if os.path.islink(folder) or not os.path.isdir(folder):
        raise ValueError(f"{folder} is no folder: give a folder of its own")
    foreign = sorted(name for name in os.listdir(folder) if not _OURS.fullmatch(name))
    if foreign:
        raise ValueError(f"{folder} has {foreign[0]!r}, which is no file of a checkpoint: give a folder of its own")


def remove(folder: str) -> None:
    """Remove a folder of a checkpoint, if there is one. ValueError if it has other files, too."""
    _require_ours(folder)
    if os.path.lexists(folder):
        for name in os.listdir(folder):
            os.unlink(os.path.join(folder, name))
        os.rmdir(folder)


@contextlib.contextmanager
def written(path: str) -> Iterator[BinaryIO]:
    """A new file, on the disk when this ends. OSError that names the path."""
    try:
        with open(path, "xb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
    except (OSError, RuntimeError) as error:  # torch.save makes a RuntimeError of a write that failed
        raise OSError(f"{path} cannot be written: {error}. Make space there, or choose another folder") from error


def add(file: BinaryIO, entries: list[Entry], about: tuple[str, str, int, int, str], data: memoryview) -> None:
    """Write a range. about: parameter, key, begin, end and dtype."""
    offset, sums = file.tell(), []
    for at in range(0, len(data), BLOCK):
        sums.append(zlib.crc32(data[at : at + BLOCK]))
        file.write(data[at : at + BLOCK])
    entries.append(Entry(os.path.basename(file.name), offset, len(data), *about, sums))


def require_own(folder: str, begun: str) -> None:
    """ValueError if the draft is not the one that `begin` made."""
    if not os.path.exists(os.path.join(draft_of(folder), begun)):
        raise ValueError(f"another job writes to {draft_of(folder)}: give each job a folder of its own")


def finish(folder: str, begun: str, about: dict[str, Any], entries: list[Entry]) -> None:
    """Write the manifest, and put the draft in the place of the folder."""
    require_own(folder, begun)
    draft, old = draft_of(folder), f"{folder}.old"
    rest = checksum(os.path.join(draft, REST))
    raw = {"format": _FORMAT, **about, "rest": rest, "entries": [each._asdict() for each in entries]}
    Manifest(draft, text := json.dumps(raw))  # what cannot be read again is not put there
    with written(os.path.join(draft, _MANIFEST)) as file:
        file.write(text.encode())
    require_own(folder, begun)
    os.unlink(os.path.join(draft, begun))
    _sync(draft)
    if os.path.exists(folder):
        remove(old)
        os.rename(folder, old)
    os.rename(draft, folder)
    _sync(os.path.dirname(folder))
    with contextlib.suppress(OSError, ValueError):
        remove(old)


def checksum(path: str) -> list[int]:
    """[bytes, CRC-32] of a file."""
    total = crc = 0
    with _opened(path) as file:
        while block := file.read(BLOCK):
            total, crc = total + len(block), zlib.crc32(block, crc)
    return [total, crc]


def _opened(path: str) -> BinaryIO:
    """To read. OSError for what is no file: a pipe would never end."""
    if os.path.exists(path) and not os.path.isfile(path):
        raise OSError(errno.EINVAL, "it is no file", path)
    return open(path, "rb")


def _sync(folder: str) -> None:
    """The names in it, too, are on the disk. Not every file system can."""
    with contextlib.suppress(OSError):
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def found(folder: str) -> str:
    """Where the checkpoint is: the folder, or what a save that ended between its renames has left of it."""
    old = f"{folder}.old"
    if not os.path.exists(folder) and os.path.exists(os.path.join(old, _MANIFEST)):
        return old
    if os.path.exists(os.path.join(folder, _MANIFEST)):
        return folder
    why = "there is no such folder" if not os.path.isdir(folder) else f"{_MANIFEST} is not in it, so it is not whole"
    raise ValueError(f"{folder} is no checkpoint of save_sharded: {why}. Compare the path, or load another checkpoint")


class Manifest:
    """What is in a folder. ValueError for what is not a manifest, or not one of this format."""

    def __init__(self, folder: str, text: str | None = None) -> None:
        self.folder, self.path = folder, os.path.join(folder, _MANIFEST)
        self.parameters: dict[str, tuple[list[int], str]] = {}
        self.ranges: dict[tuple[str, str], list[Entry]] = {}
        try:
            if text is None:
                with _opened(self.path) as file:
                    text = file.read(_MOST + 1).decode()
                if len(text) > _MOST:
                    raise ValueError(f"it is larger than {_MOST} bytes")
            self.crc = zlib.crc32(text.encode())
            self._take(json.loads(text))
        except (OSError, ValueError, TypeError, KeyError, RecursionError) as error:
            why = error if type(error) is ValueError else repr(error)
            raise ValueError(f"{self.path} cannot be read as a manifest: {why}. {_AGAIN}") from error

    def _take(self, raw: Any) -> None:
        if raw["format"] != _FORMAT:
            raise ValueError(f"it has format {raw['format']!r}, and this version reads {_FORMAT}")
        for name, shape, dtype in raw["parameters"]:
            if type(name) is not str or name in self.parameters or not _counts(shape) or dtype not in WIDTHS:
                raise ValueError(f"the parameter {name!r} has the shape {shape!r} and the dtype {dtype!r}")
            self.parameters[name] = shape, dtype
        self.optimizer, self.groups, self.rest = raw["optimizer"], raw["groups"], raw["rest"]
        if type(self.optimizer) is not str or type(self.groups) is not list or not _counts(self.rest, 2):
            raise ValueError("its optimizer, groups or rest are not what they must be")
        if sorted(name for group in self.groups for name in group) != sorted(self.parameters):
            raise ValueError("its groups do not have each parameter once")
        for each in raw["entries"]:
            entry = Entry(**each)
            self._check(entry)
            self.ranges.setdefault((entry.parameter, entry.key), []).append(entry)
        for name in self.parameters:
            self.ranges.setdefault((name, ""), [])
        self.keys: dict[str, list[str]] = {name: [] for name in self.parameters}  # "" is one
        for (name, key), ranges in self.ranges.items():
            self.keys[name].append(key)
            ranges.sort(key=lambda one: one.begin)
            ends = [0, *(one.end for one in ranges)]
            if not key and any(one.dtype != self.parameters[name][1] for one in ranges):
                raise ValueError(f"values of {name!r} do not have its dtype")
            whole = [one.begin for one in ranges] == ends[:-1] and ends[-1] == math.prod(self.parameters[name][0])
            if not whole or len({one.dtype for one in ranges}) > 1:
                raise ValueError(f"it does not have each element of {_shown(name, key)} once")

    def _check(self, one: Entry) -> None:
        texts = type(one.file) is str and type(one.key) is str and _SHARE.fullmatch(one.file)
        if not texts or one.parameter not in self.parameters or one.dtype not in WIDTHS:
            raise ValueError(f"it has an entry of {one.parameter!r} in {one.file!r} of dtype {one.dtype!r}")
        numbers = _counts([one.offset, one.bytes, one.begin, one.end]) and one.begin <= one.end
        blocks = -(-one.bytes // BLOCK) if numbers else 0
        if not numbers or one.bytes != (one.end - one.begin) * WIDTHS[one.dtype] or not _counts(one.crc32, blocks):
            raise ValueError(f"the numbers of an entry of {_shown(one.parameter, one.key)} do not fit together")

    def require_same(self, about: dict[str, Any]) -> None:
        """ValueError that names what is another parameter, optimizer or group than in the checkpoint."""
        ours = {name: (shape, dtype) for name, shape, dtype in about["parameters"]}
        for name in [*self.parameters, *ours]:
            saved, here = (" ".join(map(str, one.get(name, ("not",)))) for one in (self.parameters, ours))
            if saved != here:
                raise ValueError(f"{self.path}: parameter {name!r} is {saved} there, and {here} in this optimizer")
        if self.optimizer != about["optimizer"]:
            raise ValueError(f"{self.path} is of {self.optimizer}, and this optimizer is {about['optimizer']}")
        for number, (theirs, mine) in enumerate(zip_longest(self.groups, about["groups"], fillvalue=())):
            if sorted(theirs) != sorted(mine):
                raise ValueError(f"{self.path}: group {number} has the parameters {theirs} there, and {mine} here")

    def read(self, name: str, key: str, begin: int, end: int) -> bytearray:
        """Elements of a parameter or of its state. Only the blocks that overlap them are read; each is checked."""
        ranges = self.ranges[name, key]
        width = WIDTHS[ranges[0].dtype] if ranges else 0
        out = memoryview(bytearray((end - begin) * width))
        for one in ranges:
            low, high = max(begin, one.begin), min(end, one.end)
            if low < high:
                start = (low - one.begin) * width
                self._copy(one, start, out[(low - begin) * width : (high - begin) * width])
        return out.obj  # type: ignore[return-value]

    def _copy(self, one: Entry, low: int, out: memoryview) -> None:
        path, high = os.path.join(self.folder, one.file), low + len(out)
        try:
            with _opened(path) as file:
                for number in range(low // BLOCK, -(-high // BLOCK)):
                    start, stop = number * BLOCK, min((number + 1) * BLOCK, one.bytes)
                    file.seek(one.offset + start)
                    data = file.read(stop - start)
                    if len(data) != stop - start:
                        raise ValueError(f"{path} ends before byte {one.offset + stop}: it was cut. {_AGAIN}")
                    if zlib.crc32(data) != one.crc32[number]:
                        raise ValueError(
                            f"{path}: bytes {one.offset + start} to {one.offset + stop}, of "
                            f"{_shown(one.parameter, one.key)}, are not those that were written (CRC-32). {_AGAIN}"
                        )
                    first, last = max(low, start), min(high, stop)
                    out[first - low : last - low] = data[first - start : last - start]
        except OSError as error:
            raise ValueError(f"{path} cannot be read: {error.strerror}. {_AGAIN}") from error

    def rest_path(self) -> str:
        """Of what is not cut, if its bytes are those that were written."""
        path = os.path.join(self.folder, REST)
        try:
            same = checksum(path) == self.rest
        except OSError as error:
            raise ValueError(f"{path} cannot be read: {error.strerror}. {_AGAIN}") from error
        if not same:
            raise ValueError(f"{path} is not as it was written (length or CRC-32). {_AGAIN}")
        return path


def _counts(numbers: Any, length: int | None = None) -> bool:
    """Whether it is a list of integers that count something, and of this length."""
    return (
        type(numbers) is list
        and all(type(each) is int and 0 <= each < 1 << 62 for each in numbers)
        and length in (None, len(numbers))
    )


def _shown(name: str, key: str) -> str:
    return f"{key!r} of {name!r}" if key else repr(name)
