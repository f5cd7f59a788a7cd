"""Reads the IDX files of MNIST and Fashion-MNIST, plain or gzipped.

A file has two zero bytes, one byte for the type (8: unsigned bytes), and one byte for the number of dimensions. Then
each dimension follows as a 32-bit big-endian number, and then the values. Any other file raises an error with its name
and the defect.
"""

import gzip
import math
import struct
from pathlib import Path

import numpy as np

UNSIGNED_BYTES = 8
KINDS = {"train": "train", "test": "t10k"}


class IdxError(ValueError):
    """A file is missing or is not what it should be; the text says which and why."""


def read_idx(path: Path, dimensions: int) -> np.ndarray:
    """The array of uint8 in an IDX file of so many dimensions; raises IdxError."""
    try:
        with gzip.open(path) if path.suffix == ".gz" else path.open("rb") as file:
            content = file.read()
    except (OSError, EOFError) as error:
        raise IdxError(f"{path}: cannot be read ({error})") from None
    if len(content) < 4 or content[:2] != b"\0\0":
        raise IdxError(f"{path}: is no IDX file (it starts with {content[:4].hex() or 'nothing'})")
    if content[2] != UNSIGNED_BYTES:
        raise IdxError(f"{path}: holds values of type 0x{content[2]:02x}, expected unsigned bytes (0x08)")
    if content[3] != dimensions:
        raise IdxError(f"{path}: has {content[3]} dimensions, expected {dimensions}")
    start = 4 + 4 * dimensions
    if len(content) < start:
        raise IdxError(f"{path}: ends in its header")
    shape = struct.unpack(f">{dimensions}I", content[4:start])
    if len(content) - start != math.prod(shape):
        raise IdxError(
            f"{path}: says {' x '.join(map(str, shape))} values but holds {len(content) - start} bytes of them"
        )
    return np.frombuffer(content, np.uint8, offset=start).reshape(shape)


def _find(directory: Path, name: str) -> Path:
    for candidate in (directory / name, directory / f"{name}.gz"):
        if candidate.exists():
            return candidate
    raise IdxError(f"{directory}: has neither {name} nor {name}.gz")


def read_pair(directory: Path, part: str) -> "tuple[np.ndarray, np.ndarray]":
    """Images (n, height, width) and labels (n,) of the part "train" or "test", both uint8; raises IdxError."""
    images_path = _find(directory, f"{KINDS[part]}-images-idx3-ubyte")
    labels_path = _find(directory, f"{KINDS[part]}-labels-idx1-ubyte")
    images, labels = read_idx(images_path, 3), read_idx(labels_path, 1)
    if len(images) != len(labels):
        raise IdxError(f"{images_path} has {len(images)} images, {labels_path} has {len(labels)} labels")
    if images.size == 0:
        raise IdxError(f"{images_path}: holds no image")
    return images, labels
