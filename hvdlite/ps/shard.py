"""Shard: the rows of one table on one server, each made at its first use, with the optimizer's state.

Rows lie densely in the order in which they were made; an index by part and row within the part gives their position.
Both arrays are reserved as address space for as many rows as there can be, and take memory when they are written:
nothing is copied when a table grows. A table costs 4 bytes for each row that it might have (in pages that are touched),
and 4 bytes for each number of each row that was touched.
"""

from __future__ import annotations

import contextlib
import mmap
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from .._core import ffi, lib
from .optimizers import F32, Custom, Uniform, made, uniform_rows
from .placement import RowPlacement

_NO_RESERVE = 0x4000  # MAP_NORESERVE of Linux, which Python's mmap names from 3.13 on
_LOOK_BYTES = 16 << 20  # of new rows, after which it is looked again whether there is memory
_AT_ONCE = 256  # rows of an update: they and what the rule makes of them stay in the processor's cache
_KEEP_BYTES = 256 << 20  # of the host's memory that tables leave free


class Refused(Exception):
    """What a server cannot do; the text is for the worker that asked."""


def _reserved(count: int, dtype: Any, filled: bool = False) -> Any:
    """Zeros that take memory when they are written first. filled: from the first on, so in large pages, in which random
    rows are found faster."""
    size = max(1, count) * np.dtype(dtype).itemsize
    try:
        block = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _NO_RESERVE)
    except (OSError, OverflowError, ValueError) as error:
        raise Refused(f"cannot reserve {size / 1e9:.1f} GB of address space ({error})") from None
    if filled:
        with contextlib.suppress(OSError):  # of a kernel without them
            block.madvise(mmap.MADV_HUGEPAGE)
    return np.frombuffer(block, dtype)[:count]


def _items(rows: Any) -> Any:
    """Each row as one item, which NumPy copies faster than its numbers. None: rows have no numbers."""
    width = rows.shape[1] * rows.itemsize
    return rows.view(np.dtype((np.void, width)))[:, 0] if width else None


def memory() -> tuple[int, int]:
    """(bytes that are free, all) of this host, or of its control group where that has less."""
    info = dict(line.split(":") for line in Path("/proc/meminfo").read_text(encoding="ascii").splitlines())
    free, most = (int(info[name].split()[0]) << 10 for name in ("MemAvailable", "MemTotal"))
    for folder, limit, used in (
        ("/sys/fs/cgroup", "memory.max", "memory.current"),
        ("/sys/fs/cgroup/memory", "memory.limit_in_bytes", "memory.usage_in_bytes"),
    ):
        try:
            bound = int(Path(folder, limit).read_text(encoding="ascii"))
            free = min(free, bound - int(Path(folder, used).read_text(encoding="ascii")))
            most = min(most, bound)
        except (OSError, ValueError):  # there is none, or "max"
            continue
    return max(0, free), most


class Slices:
    """First values of the rows of a group: each table's are those that it would have alone."""

    def __init__(self, spec: dict[str, Any]) -> None:
        self._starts = np.cumsum([0, *[rows for _, rows in spec["tables"]]])[:-1]
        self._scales = np.array(spec["scale"], F32)
        self._seeds = np.array(spec["seed"], np.int64)

    def rows(self, ids: Any, dim: int) -> Any:
        """float32 [len(ids), dim]."""
        of = np.searchsorted(self._starts, ids, side="right") - 1
        return uniform_rows(ids - self._starts[of], dim, self._seeds[of, None], self._scales[of, None])


class Shard:
    """spec: the table's description, as Table sends it. Methods raise Refused."""

    def __init__(self, spec: dict[str, Any], me: int, servers: int) -> None:
        self.spec, self.name, self.total, self.dim, self.me = spec, spec["name"], spec["rows"], spec["dim"], me
        self.rule = made(spec["rule"], spec["options"])
        self.state_width = self.dim * self.rule.columns + self.rule.extra
        self._first = Slices(spec) if "tables" in spec else Uniform(spec["scale"], spec["seed"])
        self.placement = RowPlacement(self.total, servers, spec["replicas"], spec["order"])
        parts = np.nonzero((self.placement.owners == me).any(axis=1))[0]
        per_part = self.placement.rows_per_part
        self._base = np.full(self.placement.parts, -1, np.int64)
        self._base[parts] = np.arange(len(parts)) * per_part
        self._row_bytes = 4 * (self.dim + self.state_width) + 8
        whole = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        self._room = min(len(parts) * per_part, whole // self._row_bytes + 1, (1 << 31) - 2)
        self._index = _reserved(len(parts) * per_part, np.int32)  # slot + 1; 0: not made yet
        self.placement.set_arrays(base=self._base, index=self._index)
        self._ids = _reserved(self._room, np.int64)
        self._rows = _reserved(self._room * self.dim, F32, filled=True).reshape(-1, self.dim)
        state = _reserved(self._room * self.state_width, F32, filled=True)
        self._state = state.reshape(self._room, self.state_width)
        self._row_items, self._state_items = _items(self._rows), _items(self._state)
        self._unlooked = _LOOK_BYTES
        self.used = 0

    @property
    def bytes(self) -> int:
        """Of the rows that were made, with state and number."""
        return self.used * self._row_bytes

    def _bytes_of(self, rows: int) -> int:
        """And of the index: where rows have no order, each touches a page of the index, until it has all its pages."""
        return rows * self._row_bytes + min(rows * mmap.PAGESIZE, self._index.nbytes)

    def slots(self, ids: Any) -> Any:
        """Where these rows (all different) lie; those that are new are made."""
        slots = np.empty(len(ids), np.int64)
        native = self.placement.native
        if lib.hvd_row_slots(native, ffi.from_buffer(ids), len(ids), ffi.from_buffer("int64_t[]", slots)):
            return slots
        if np.count_nonzero(ids.view(np.uint64) >= self.total):  # as such, negative ones are the largest
            raise Refused(
                f"table {self.name!r} has rows 0 to {self.total - 1}, not {int(ids.min())} to {int(ids.max())}"
            )
        part, offset = self.placement.places(ids)
        base = self._base[part]
        if np.count_nonzero(base < 0):
            raise Refused(f"row {int(ids[base.argmin()])} of table {self.name!r} does not lie here")
        at = base + offset
        slots = self._index[at].astype(np.int64) - 1
        new = (slots < 0).nonzero()[0]
        if len(new):
            slots[new] = self._make(ids[new], at[new])
        return slots

    def _make(self, ids: Any, at: Any) -> Any:
        count = len(ids)
        need = self._bytes_of(self.used + count) - self._bytes_of(self.used)
        self._unlooked += need
        if self._unlooked >= _LOOK_BYTES or self.used + count > self._room:
            free, most = memory()
            if need > free - min(_KEEP_BYTES, most // 16) or self.used + count > self._room:
                raise Refused(
                    f"has {(most - free) / 1e9:.1f} of {most / 1e9:.1f} GB in use and cannot make {count:,} rows of "
                    f"table {self.name!r}, beside the {self.used:,} that it has"
                )
            self._unlooked = 0
        slots = np.arange(self.used, self.used + count)
        self._rows[self.used : self.used + count] = self._first.rows(ids, self.dim)
        self._ids[self.used : self.used + count] = ids
        self._index[at] = slots + 1
        self.used += count
        return slots

    def ids_at(self, slots: Any) -> Any:
        """The inverse of `slots`."""
        return self._ids[slots]

    def read(self, ids: Any) -> Any:
        """float32 [len(ids), dim]: a copy."""
        return self._rows.take(self.slots(ids), axis=0)

    def apply(self, slots: Any, grads: Any, scale: Any = None) -> None:
        """One update of these rows, all different, with scale * grads. Where the rule raises, nothing has changed."""
        at_once = max(1, len(slots)) if isinstance(self.rule, Custom) else _AT_ONCE  # our own rules do not raise
        with np.errstate(all="ignore"):
            for begin in range(0, len(slots), at_once):
                some, its = slots[begin : begin + at_once], grads[begin : begin + at_once]
                rows, state = self._rows.take(some, axis=0), self._state.take(some, axis=0)
                self.rule.update(rows, state, its if scale is None else its * scale)
                self._row_items[some] = rows.view(self._row_items.dtype)[:, 0]
                if self._state_items is not None:
                    self._state_items[some] = state.view(self._state_items.dtype)[:, 0]

    def by_part(self, owned: Any, count: int) -> Iterator[tuple[Any, Any]]:
        """(ids, rows with state) of all rows whose part is `owned` (bool [parts]), by part, so many at a time."""
        part = self.placement.places(self._ids[: self.used])[0].astype(np.int16)  # of which there are at most 16,384
        order = np.argsort(part, kind="stable")
        order = order[owned[part[order]]]
        for begin in range(0, len(order), count):
            some = order[begin : begin + count]
            yield self._ids[some], np.concatenate([self._rows[some], self._state[some]], axis=1)

    def parts_here(self) -> Any:
        """bool [parts]."""
        return self._base >= 0

    def put(self, ids: Any, whole: Any) -> None:
        """Sets rows with their state; those that do not lie here are left out."""
        here = self._base[self.placement.places(ids)[0]] >= 0
        slots = self.slots(ids[here])
        self._rows[slots] = whole[here, : self.dim]
        self._state[slots] = whole[here, self.dim :]
