"""Bytes without a tensor: memory copied to and from the core, and Python's bytes sent by the core's collectives.

What needs no framework, such as objects and the agreement about process sets, travels as bytes; what a result holds
that the engine has allocated is copied out here. No address outlives a call: the submitter keeps the memory alive
(`_core.Pending`). Lengths are the caller's to know; nothing here can check an address.
"""

from __future__ import annotations

from typing import Any

from . import ALLGATHER, BROADCAST, DTYPES, Pending, ffi, submit


def copy(target: int, source: Any, count: int) -> None:
    """Copies `count` bytes from the core's memory to an address."""
    if count:
        ffi.memmove(ffi.cast("void *", target), source, count)


def move(target: int, source: int, count: int) -> None:
    """Copies `count` bytes from an address to another, which may be the same."""
    if count and target != source:
        ffi.memmove(ffi.cast("void *", target), ffi.cast("void *", source), count)


def pointer_address(pointer: Any) -> int:
    """The address of memory of the core's."""
    return int(ffi.cast("uintptr_t", pointer))


def copy_from(target: int, source: Any) -> None:
    """Copies all of a Python buffer to an address."""
    view = memoryview(source).cast("B")
    ffi.memmove(ffi.cast("void *", target), view, len(view))


def copy_into(block: bytearray, at: int, source: int, count: int) -> None:
    """Copies `count` bytes from an address to an offset in a block."""
    if count:
        ffi.memmove(ffi.from_buffer(block) + at, ffi.cast("void *", source), count)


def address_of(block: bytearray) -> tuple[int, Any]:
    """Where a block lies, and what must be kept so that it stays there."""
    view = ffi.from_buffer(block)
    return int(ffi.cast("uintptr_t", view)), view


def read_int64(source: Any, count: int) -> list[int]:
    """The first numbers in the core's memory."""
    numbers = ffi.new("int64_t[]", count)
    ffi.memmove(numbers, source, 8 * count)
    return list(numbers)


def allgather_bytes(mine: bytes | bytearray, name: str | None, process_set: int = 0) -> list[bytes]:
    """Every rank's bytes, in rank order. Blocks."""
    block = ffi.from_buffer(mine)
    address = int(ffi.cast("uintptr_t", block))
    pending = submit(
        ALLGATHER, 0, DTYPES["uint8"], name, (len(mine),), address, 0, (mine, block), process_set=process_set
    )
    pending.wait()
    gathered, parts, at = pending.gathered(), [], 0
    for count in gathered.rows_of:
        parts.append(bytes(ffi.buffer(ffi.cast("char *", gathered.address) + at, count)) if count else b"")
        at += count
    pending.release()
    return parts


def broadcast_bytes(block: bytearray, root: int, name: str | None, process_set: int = 0) -> None:
    """Fills `block`, which is as long on every rank, with the root's. Blocks."""
    pending = broadcast_bytes_async(block, root, name, process_set)
    pending.wait()
    pending.release()


def broadcast_bytes_async(block: bytearray, root: int, name: str | None, process_set: int = 0) -> Pending:
    """Starts `broadcast_bytes`. Wait for what it returns, again if a signal has interrupted that, and release it."""
    view = ffi.from_buffer(block)
    address = int(ffi.cast("uintptr_t", view))
    return submit(
        BROADCAST, 0, DTYPES["uint8"], name, (len(block),), address, address, view, root=root, process_set=process_set
    )
