"""Format of a piece of a checkpoint, and reading some of its rows; checkpoint_files.py has the folder.

A piece is a zip file without compression, as np.savez writes it. Its rows lie by part (placement.py), and `parts` says
how many each part has, with a checksum. So a server reads the rows of its own parts and no others.

Nothing here trusts a file: lengths are compared with those of the index, arrays have the shape in their head, and no
pickle is read.
"""

from __future__ import annotations

import os
import struct
import zipfile
import zlib
from collections.abc import Iterator
from typing import Any, BinaryIO

import numpy as np

_NAMES_AT = 26  # in the header of a file in a zip file: the lengths of its name and of what follows it


def write_piece(folder: str, name: str, ids: Any, rows: Any, part: Any) -> dict[str, Any]:
    """Brings rows to the disk; what the index is to record about them. part: of each row, ascending. OSError where that
    fails."""
    numbers, first = np.unique(part, return_index=True)
    ends = [*first[1:].tolist(), len(ids)]
    sums = [_sum(n, ids[begin:end], rows[begin:end]) for n, begin, end in zip(numbers.tolist(), first.tolist(), ends)]
    parts = np.stack([numbers, np.diff(first, append=len(ids)), np.array(sums, np.int64)], axis=1)
    with open(os.path.join(folder, name), "wb") as file:
        np.savez(file, ids=ids, rows=rows, parts=parts)
        size = to_disk(file)
    return {"file": name, "rows": len(ids), "width": rows.shape[1], "last": int(ids.max(initial=-1)), "bytes": size}


def read_piece(folder: str, piece: dict[str, Any], chosen_parts: Any) -> Iterator[tuple[Any, Any]]:
    """(ids, rows) of those parts of a piece that are chosen (bool [parts]); the piece is one that `read_index` gave.
    ValueError [HVD034] if they are not what was written."""
    path = os.path.join(folder, piece["file"])
    check_length(path, piece["bytes"])
    try:
        with open(path, "rb") as file:
            at = _arrays_in(file, piece["rows"], piece["width"])
            parts = _read(file, at["parts"], 0, at["parts"][2][0]) if "parts" in at else None
            for begin, end, sums in _runs(parts, piece["rows"], chosen_parts):
                ids, rows = (_read(file, at[name], begin, end) for name in ("ids", "rows"))
                _check_rows(ids, rows, sums, piece["last"])
                yield ids, rows
    except Exception as error:  # whatever reading damaged bytes ends with
        raise ValueError(f"{path}: is damaged: {error!r} [HVD034]") from error


def _arrays_in(file: BinaryIO, rows: int, width: int) -> dict[str, tuple[int, Any, tuple[int, ...]]]:
    """(where it begins, dtype, shape) of each array of a piece. ValueError, BadZipFile for other arrays."""
    found = {}
    with zipfile.ZipFile(file) as packed:
        for each in packed.infolist():
            if each.compress_type != zipfile.ZIP_STORED:
                raise ValueError("it is compressed")  # small files could fill the memory
            file.seek(each.header_offset + _NAMES_AT)
            file.seek(sum(struct.unpack("<HH", file.read(4))), os.SEEK_CUR)  # its name, and more
            if np.lib.format.read_magic(file) != (1, 0):
                raise ValueError(f"{each.filename} is not an array of np.savez")
            shape, by_column, dtype = np.lib.format.read_array_header_1_0(file)
            found[each.filename.removesuffix(".npy")] = file.tell(), dtype, shape
            if by_column and min(shape, default=0) > 1:
                raise ValueError(f"{each.filename} lies by column")
        if "parts" not in found and (name := packed.testzip()):
            raise ValueError(f"the checksum of {name} differs")
    several = found.get("parts", (0, None, (0, 3)))[2][0]
    expected = {"ids": ("int64", (rows,)), "rows": ("float32", (rows, width)), "parts": ("int64", (several, 3))}
    actual = {name: (str(dtype), shape) for name, (_, dtype, shape) in found.items()}
    if actual != {name: expected[name] for name in ("ids", "rows", *["parts"] * ("parts" in actual))}:
        raise ValueError(f"it has {actual}, but was written with {expected}")
    return found


def _read(file: BinaryIO, at: tuple[int, Any, tuple[int, ...]], begin: int, end: int) -> Any:
    """Rows of an array from `begin` to `end`."""
    start, dtype, shape = at
    width = dtype.itemsize * int(np.prod(shape[1:], dtype=np.int64))
    file.seek(start + begin * width)
    came = file.read((end - begin) * width)
    return np.frombuffer(came, dtype).reshape(end - begin, *shape[1:])


def _runs(parts: Any, rows: int, chosen_parts: Any) -> Iterator[tuple[int, int, Any]]:
    """(first row, row after the last, parts) of parts that are wanted and lie beside each other."""
    if parts is None:
        yield 0, rows, None
        return
    numbers, counts = parts[:, 0], parts[:, 1]
    if parts.min(initial=0) < 0 or counts.sum() != rows or numbers.max(initial=0) >= len(chosen_parts):
        raise ValueError(f"its {len(parts)} parts do not have its {rows} rows")
    ends, chosen = np.cumsum(counts), np.flatnonzero(np.diff(chosen_parts[numbers], prepend=False, append=False))
    for first, last in zip(chosen[::2].tolist(), chosen[1::2].tolist()):
        yield int(ends[first] - counts[first]), int(ends[last - 1]), parts[first:last]


def _check_rows(ids: Any, rows: Any, parts: Any, last: int) -> None:
    """ValueError where they are not those that were written."""
    if ids.min(initial=0) < 0 or ids.max(initial=-1) > last:
        raise ValueError(f"has rows {ids.min()} to {ids.max()}, but was written with rows up to {last}")
    begin = 0
    for number, count, written in () if parts is None else parts.tolist():
        if _sum(number, ids[begin : begin + count], rows[begin : begin + count]) != written:
            raise ValueError(f"the checksum of part {number} differs")
        begin += count


def _sum(part: int, ids: Any, rows: Any) -> int:
    return zlib.crc32(rows.tobytes(), zlib.crc32(ids.tobytes(), part))


def to_disk(file: Any) -> int:
    """Flushes a file to the disk; its length."""
    file.flush()
    os.fsync(file.fileno())
    return os.fstat(file.fileno()).st_size


def check_length(path: str, size: int) -> None:
    try:
        found = os.stat(path).st_size
    except OSError as error:
        raise ValueError(f"{path} cannot be read (it was written with {size:,} bytes): {error} [HVD034]") from error
    if found != size:
        raise ValueError(f"{path} has {found:,} bytes, but was written with {size:,} [HVD034]")
