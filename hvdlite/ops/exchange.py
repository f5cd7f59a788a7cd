"""Where everyone ends with something of its own: alltoall, and what is made of it (gather, scatter), and send/recv.

gather is an alltoall in which every rank gives all its rows to the root. scatter is one in which only the root gives,
and as the others cannot know what comes, the root's rows travel as bytes behind a small header: dtype, shape, whether
they lay on a device. So no rank waits for a description before it can submit; and so they travel through the CPU's
memory, also those of a device, and go to each rank's own device in the end.

send and recv concern two ranks of a set; nobody else takes part. They meet by name, or, without one, by how many
unnamed ones there were between these two in this direction. An asynchronous one goes out at once: of gradients more
follow within a millisecond, of a send nothing, and the other rank may have nothing else to do.
"""

from __future__ import annotations

import math
from array import array
from operator import index
from typing import Any

from .. import _bytes, _core
from ..adapter import T
from ..errors import HvdArgumentError
from ..process_set import ProcessSet, global_process_set, number_of, rank_in
from .handle import Handle
from .tensors import Tensors, placed
from .terms import Terms, full_name

_TRACKED, _ON_DEVICE = 1 << 32, 1 << 33


def _count(value: Any) -> int:
    try:
        if not isinstance(value, bool):
            return index(value)
    except TypeError:
        pass
    raise HvdArgumentError(
        f"alltoall expects splits to contain integer elements: how many rows go to each rank, not {value!r} [HVD209]"
    )


class Exchanges(Tensors[T]):
    """alltoall, gather, scatter, send, recv."""

    def _splits(self, splits: Any, rows: int, size: int) -> tuple[tuple[int, ...], str]:
        """Rows for each rank, and the dtype in which the caller counts. HvdArgumentError in Horovod's words."""
        if splits is None:
            if rows % size:
                raise HvdArgumentError(
                    f"splits not provided, but first dimension of tensor ({rows}) is not an even multiple of the "
                    f"number of workers ({size}): give splits [HVD209]"
                )
            return (rows // size,) * size, "int32"
        dtype = "int32"
        if isinstance(splits, range) or (hasattr(splits, "__array_interface__") and hasattr(splits, "tolist")):
            splits = list(splits) if isinstance(splits, range) else splits.tolist()  # an array of NumPy's
        if isinstance(splits, (list, tuple)):
            splits = [_count(count) for count in splits]
        elif not hasattr(splits, "tolist"):
            raise TypeError(f"alltoall expects splits to be a 1D tensor or a list, not {splits!r} [HVD209]")
        else:
            view = self.adapter.view(self.adapter.accept(splits))
            known = {_core.DTYPES["int32"]: "int32", _core.DTYPES["int64"]: "int64"}
            if view.dtype not in known:
                raise HvdArgumentError(
                    "alltoall expects splits to contain 32-bit integer elements (or 64-bit ones) [HVD209]"
                )
            if len(view.shape) != 1:
                raise HvdArgumentError(
                    f"alltoall expects a 1D splits tensor, not one of {len(view.shape)} dimensions [HVD209]"
                )
            dtype, splits = known[view.dtype], splits.tolist()
        if len(splits) != size:
            raise HvdArgumentError(
                f"Number of entries in splits ({len(splits)}) does not equal number of workers ({size}). [HVD209]"
            )
        if any(count < 0 for count in splits):
            raise HvdArgumentError(f"splits must not be negative: {list(splits)} [HVD209]")
        if sum(splits) > rows:
            raise HvdArgumentError(
                f"Sum of splits entries ({sum(splits)}) is greater than the first dimension of tensor ({rows})."
                " [HVD209]"
            )
        return tuple(splits), dtype

    def _alltoall(self, tensor: Any, name: str | None, terms: Terms, waits: bool = False) -> Handle:
        mine, view = self._rows("alltoall", tensor)
        number = number_of(terms.process_set)
        splits, counted = self._splits(terms.splits, view.shape[0], terms.process_set.size())
        pending = _core.submit(
            _core.ALLTOALL, 0, view.dtype, full_name("alltoall.", name), view.shape, view.address, 0,
            self.adapter.memory(mine), splits=splits, process_set=number, quiet=_core.QUIET if waits else _core.SOON,
            **placed(view, fetched=True),
        )  # fmt: skip

        def finish(pending: list[_core.Pending]) -> tuple[T, T]:
            result, rows = self.fetched(pending[0], mine, view)
            handle.brought.append(rows)
            numbers = array("i" if counted == "int32" else "q", rows)
            received = self.adapter.new((len(rows),), counted)
            _bytes.copy_from(self.adapter.view(received).address, numbers)
            return result, received

        handle = Handle([pending], finish)
        return handle

    def alltoall_async(
        self, tensor: Any, splits: Any = None, name: str | None = None, process_set: ProcessSet = global_process_set
    ) -> Handle:
        """Rows for every rank, one after the other; `synchronize` returns (rows from every rank, received_splits).

        splits: how many rows go to each rank, a list or a 1-D tensor of int32 or int64, of a sum of at most the first
        dimension; None: equal parts. The other dimensions and the dtype must be the same on all ranks.
        ValueError for splits that do not fit, and for a tensor without dimensions.
        """
        return self._alltoall(tensor, name, Terms(process_set, splits=splits))

    def alltoall(
        self, tensor: Any, splits: Any = None, name: str | None = None, process_set: ProcessSet = global_process_set, *,
        timeout: Any = None
    ) -> Any:  # fmt: skip
        """alltoall_async and synchronize: the rows from every rank; with splits (rows, received_splits)."""
        terms = Terms(process_set, splits=splits, timeout=_core.seconds_of(timeout))
        result, received = self._now("alltoall", self._alltoall, tensor, name, terms)
        return result if splits is None else (result, received)

    def _gather(self, tensor: Any, name: str | None, terms: Terms, waits: bool = False) -> Handle:
        mine, view = self._rows("gather", tensor)
        number, root = number_of(terms.process_set), rank_in(terms.process_set, terms.root_rank)
        splits = tuple(view.shape[0] if rank == root else 0 for rank in range(terms.process_set.size()))
        pending = _core.submit(
            _core.ALLTOALL, 0, view.dtype, full_name("gather.", name), view.shape, view.address, 0,
            self.adapter.memory(mine), root=root, splits=splits, process_set=number,
            quiet=_core.QUIET if waits else _core.SOON,
            **placed(view, fetched=True),
        )  # fmt: skip

        def finish(pending: list[_core.Pending]) -> T:
            result, rows = self.fetched(pending[0], mine, view)
            handle.brought.append(rows)
            return result

        handle = Handle([pending], finish)
        return handle

    def gather_async(
        self, tensor: Any, root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set
    ) -> Handle:
        """allgather_async whose result only the root gets; `synchronize` returns no rows on the other ranks.

        root_rank is a global rank. Raises as allgather_async, and ValueError for a root outside process_set.
        """
        return self._gather(tensor, name, Terms(process_set, root_rank=root_rank))

    def gather(
        self, tensor: Any, root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set, *,
        timeout: Any = None
    ) -> T:  # fmt: skip
        """Every rank's rows on the root, concatenated in rank order; a tensor of no rows on the other ranks.

        Differentiable: every rank runs backward, the others from their empty result.
        """
        terms = Terms(process_set, root_rank=root_rank, timeout=_core.seconds_of(timeout))
        return self._now("gather", self._gather, tensor, name, terms)

    def _packed(self, tensor: Any, terms: Terms) -> tuple[bytearray, tuple[int, ...]]:
        """The root's rows as bytes, each rank's part behind its header; the lengths of the parts."""
        mine, view = self._rows("scatter", tensor, near=True)
        counts, _ = self._splits(terms.splits, view.shape[0], terms.process_set.size())
        row_bytes = _core.dtype_bytes(view.dtype) * math.prod(view.shape[1:])
        what = view.dtype | (_TRACKED if terms.tracked else 0) | (_ON_DEVICE if view.home is not None else 0)
        headers = [array("q", (what, len(view.shape), count, *view.shape[1:])) for count in counts]
        lengths = tuple(len(header) * 8 + count * row_bytes for header, count in zip(headers, counts))
        block, at, source = bytearray(sum(lengths)), 0, view.address
        for header, count in zip(headers, counts):
            start = at + len(header) * 8
            block[at:start] = header.tobytes()
            _bytes.copy_into(block, start, source, count * row_bytes)
            at, source = start + count * row_bytes, source + count * row_bytes
        return block, lengths

    def _unpacked(self, gathered: _core.Gathered) -> tuple[T, bool]:
        head = _bytes.read_int64(gathered.address, 2)
        shape = tuple(_bytes.read_int64(gathered.address, 2 + head[1])[2:])
        result = self.adapter.new(shape, _core.dtype_name(head[0] & (_TRACKED - 1)))
        start = 8 * (2 + head[1])
        _bytes.copy(self.adapter.view(result).address, gathered.address + start, gathered.bytes - start)
        home = self.adapter.home() if head[0] & _ON_DEVICE else None
        if home is not None:
            result = home.far(result)
        return result, bool(head[0] & _TRACKED)

    def _scatter(self, tensor: Any, name: str | None, terms: Terms, waits: bool = False) -> Handle:
        number, root = number_of(terms.process_set), rank_in(terms.process_set, terms.root_rank)
        if _core.rank() == terms.root_rank:
            block, lengths = self._packed(tensor, terms)
        else:
            block, lengths = bytearray(), (0,) * terms.process_set.size()
        address, keep = _bytes.address_of(block)
        pending = _core.submit(
            _core.ALLTOALL, 0, _core.DTYPES["uint8"], full_name("scatter.", name), (len(block),), address, 0,
            keep, root=root, splits=lengths, process_set=number, quiet=_core.QUIET if waits else _core.SOON,
        )  # fmt: skip

        def finish(pending: list[_core.Pending]) -> T:
            result, tracked = self._unpacked(pending[0].gathered())
            handle.brought.append(tracked)
            return result

        handle = Handle([pending], finish)
        return handle

    def scatter_async(
        self, tensor: Any, root_rank: int, splits: Any = None, name: str | None = None,
        process_set: ProcessSet = global_process_set
    ) -> Handle:  # fmt: skip
        """The root's rows in parts, one for each rank; `synchronize` returns this rank's as a new tensor.

        Only the root's `tensor` and `splits` (as in alltoall) are looked at: the others give None and need to know
        neither dtype nor shape. root_rank is a global rank. ValueError for splits that do not fit.
        """
        return self._scatter(tensor, name, Terms(process_set, root_rank=root_rank, splits=splits))

    def scatter(
        self, tensor: Any, root_rank: int, splits: Any = None, name: str | None = None,
        process_set: ProcessSet = global_process_set, *,
        timeout: Any = None
    ) -> T:  # fmt: skip
        """scatter_async and synchronize: this rank's rows of the root's tensor.

        Differentiable where the root's tensor asks for a gradient: every rank runs backward then.
        """
        terms = Terms(process_set, root_rank=root_rank, splits=splits, timeout=_core.seconds_of(timeout))
        return self._now("scatter", self._scatter, tensor, name, terms)

    def _between(
        self, tensor: Any, name: str | None, process_set: ProcessSet, peer: int, sends: bool, waits: bool
    ) -> Handle:
        mine = self.adapter.accept(tensor, not sends)
        held, view = self._readable(mine)
        number, me, other = number_of(process_set), _core.rank(), rank_in(process_set, peer)
        if me == peer:
            raise ValueError(f"rank {me} cannot send to itself, nor receive from itself [HVD217]")
        own = rank_in(process_set, me)
        sender, receiver = (own, other) if sends else (other, own)
        full = full_name("send.", name)
        if full is None:
            full = f"send.noname.{_core.unnamed((sender, receiver), number)}"
        pending = _core.submit(
            _core.SEND, 0, view.dtype, full, view.shape, view.address, 0 if sends else view.address,
            self.adapter.memory(held), root=sender, peer=receiver, process_set=number,
            quiet=_core.QUIET if waits else _core.NOW,
            **placed(view),
        )  # fmt: skip
        return Handle([pending], lambda _: None if sends else self._landed(mine, held))

    def send_async(
        self, tensor: Any, dst: int, name: str | None = None, process_set: ProcessSet = global_process_set
    ) -> Handle:
        """Send a tensor to one rank, which calls recv with one of the same shape and dtype. dst is a global rank."""
        return self._between(tensor, name, process_set, dst, True, False)

    def send(
        self, tensor: Any, dst: int, name: str | None = None, process_set: ProcessSet = global_process_set, *,
        timeout: Any = None
    ) -> None:  # fmt: skip
        """send_async and synchronize: returns when the tensor has arrived. It has no gradient."""
        seconds = _core.seconds_of(timeout)
        self._between(tensor, name, process_set, dst, True, True).wait(seconds)

    def recv_async(
        self, tensor: Any, src: int, name: str | None = None, process_set: ProcessSet = global_process_set
    ) -> Handle:
        """Overwrite a tensor with what rank src sends; `synchronize` returns it. src is a global rank."""
        return self._between(tensor, name, process_set, src, False, False)

    def recv(
        self, tensor: Any, src: int, name: str | None = None, process_set: ProcessSet = global_process_set, *,
        timeout: Any = None
    ) -> T:  # fmt: skip
        """recv_async and synchronize: overwrites and returns the tensor. It has no gradient."""
        seconds = _core.seconds_of(timeout)
        return self._between(tensor, name, process_set, src, False, True).wait(seconds)
