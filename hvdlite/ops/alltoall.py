"""Where everyone ends with something of its own: alltoall, and what is made of it (gather, scatter), and send/recv.

gather is an alltoall in which every rank gives all its rows to the root. scatter is one in which only the root gives,
and as the others cannot know what comes, the root's rows travel as bytes behind a small header: dtype, shape, whether
they lay on a device. So no rank waits for a description before it can submit; and so they travel through the CPU's
memory, also those of a device, and go to each rank's own device in the end.

send and recv concern two ranks of a set; no other rank takes part. They are matched by name, or, without one, by how
many unnamed ones there were between these two in this direction. An asynchronous one goes out at once: of gradients
more follow within a millisecond, of a send nothing, and the other rank may have nothing else to do.
"""

from __future__ import annotations

import math
from array import array
from operator import index
from typing import Any

from .. import _core
from .._core import byte_exchange
from ..errors import HvdArgumentError
from ..process_sets.process_set import ProcessSet, global_process_set, number_of, rank_in
from .adapter import T
from .arguments import Terms, full_name
from .handle import Handle
from .tensors import Tensors, placed

_TRACKED, _ON_DEVICE = 1 << 32, 1 << 33


def _count(value: Any) -> int:
    try:
        if not isinstance(value, bool):
            return index(value)
    except TypeError:
        pass
    raise HvdArgumentError(
        f"alltoall expects splits to contain integer elements (rows for each rank), not {value!r} [HVD209]"
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

        brought: list[Any] = []

        def finish(pending: list[_core.Pending]) -> tuple[T, T]:
            result, rows = self.fetched(pending[0], mine, view)
            brought.append(rows)
            numbers = array("i" if counted == "int32" else "q", rows)
            received = self.adapter.new((len(rows),), counted)
            byte_exchange.copy_from(self.adapter.view(received).address, numbers)
            return result, received

        return Handle([pending], finish, brought)

    def alltoall_async(
        self, tensor: Any, splits: Any = None, name: str | None = None, process_set: ProcessSet = global_process_set
    ) -> Handle:
        """Start an ``alltoall`` and return a handle.

        Do not change ``tensor`` until ``synchronize`` has returned. It has no gradient.

        Args:
            tensor (array): as in ``alltoall``.
            splits (list of int or 1-D array, optional): as in ``alltoall``. Default: equal parts.
            name (str, optional): name of the collective, the same on all ranks. Default: calls without a name are
                matched by their order.
            process_set (ProcessSet): ranks that take part. Default: all ranks.

        Returns:
            Handle: ``synchronize`` returns the pair (rows from every rank, number of rows from each rank), with or
            without ``splits``.

        Raises:
            HvdNotInitializedError: before ``init``. ``synchronize`` raises what the plain form raises while it waits.
            ValueError: for an unsupported dtype or op, for a name that is in flight, and on a rank outside
                ``process_set``.
            TypeError: if an argument has a wrong type.
            HvdArgumentError: for a tensor without dimensions, and for splits that do not fit.

        Example:
            >>> rows, received = hvd.synchronize(hvd.alltoall_async(np.array([3, 4])))
            >>> rows.tolist(), received.tolist()
            ([3, 3], [1, 1])  # rank 0
            ([4, 4], [1, 1])  # rank 1
        """
        return self._alltoall(tensor, name, Terms(process_set, splits=splits))

    def alltoall(
        self, tensor: Any, splits: Any = None, name: str | None = None, process_set: ProcessSet = global_process_set, *,
        timeout: Any = None
    ) -> Any:  # fmt: skip
        """Send some rows to every rank and return the rows from every rank.

        The first rows of ``tensor`` go to rank 0, the next ones to rank 1, and so on. The dtype and all dimensions but
        the first must be the same on all ranks. It blocks until all ranks of ``process_set`` have called it. The
        gradient is exact: it sends each row's gradient back to the rank that the row came from.

        Args:
            tensor (array): at least one dimension.
            splits (list of int or 1-D array, optional): number of rows for each rank; int32 or int64. Their sum is at
                most the first dimension. Default: equal parts.
            name (str, optional): name of the collective, the same on all ranks. Default: calls without a name are
                matched by their order.
            process_set (ProcessSet): ranks that take part. Default: all ranks.
            timeout (float or datetime.timedelta, optional): seconds to wait, above 0, as in ``synchronize``. Default:
                no limit of this call.

        Returns:
            array, or (array, array) if ``splits`` is given: the rows from every rank in the order of the ranks, new,
            and the number of rows from each rank.

        Raises:
            HvdMismatchError: if the ranks disagree on dtype or other dimensions.
            HvdPeerLostError: if a rank dies or leaves the job.
            HvdTimeoutError: if ``timeout`` passes first.
            HvdNotInitializedError: before ``init``.
            ValueError: for an unsupported dtype or op, for a name that is in flight, and on a rank outside
                ``process_set``.
            TypeError: if an argument has a wrong type.
            HvdArgumentError: for a tensor without dimensions, and for splits that do not fit.

        Example:
            >>> hvd.alltoall(np.array([0, 1]) + 10 * hvd.rank()).tolist()
            [0, 10]  # rank 0
            [1, 11]  # rank 1
            >>> rows, received = hvd.alltoall(np.array([5, 6, 7]), splits=[1, 2])
            >>> rows.tolist(), received.tolist()
            ([5, 5], [1, 1])  # rank 0
            ([6, 7, 6, 7], [2, 2])  # rank 1
        """
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

        brought: list[Any] = []

        def finish(pending: list[_core.Pending]) -> T:
            result, rows = self.fetched(pending[0], mine, view)
            brought.append(rows)
            return result

        return Handle([pending], finish, brought)

    def gather_async(
        self, tensor: Any, root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set
    ) -> Handle:
        """Start a ``gather`` and return a handle.

        Do not change ``tensor`` until ``synchronize`` has returned. It has no gradient.

        Args:
            tensor (array): as in ``gather``.
            root_rank (int): global rank that gets the result.
            name (str, optional): name of the collective, the same on all ranks. Default: calls without a name are
                matched by their order.
            process_set (ProcessSet): ranks that take part. Default: all ranks.

        Returns:
            Handle: ``synchronize`` returns what ``gather`` returns.

        Raises:
            HvdNotInitializedError: before ``init``. ``synchronize`` raises what the plain form raises while it waits.
            ValueError: for an unsupported dtype or op, for a name that is in flight, and on a rank outside
                ``process_set``.
            TypeError: if an argument has a wrong type.
            HvdArgumentError: for a tensor without dimensions.

        Example:
            >>> handle = hvd.gather_async(np.array([hvd.rank()]), root_rank=1)
            >>> hvd.synchronize(handle).tolist()
            []  # rank 0
            [0, 1]  # rank 1
        """
        return self._gather(tensor, name, Terms(process_set, root_rank=root_rank))

    def gather(
        self, tensor: Any, root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set, *,
        timeout: Any = None
    ) -> T:  # fmt: skip
        """Concatenate the tensors of all ranks along the first dimension and return the result on one rank.

        The first dimension may differ between ranks. The other dimensions and the dtype must be the same. In PyTorch it
        is differentiable: all ranks must run backward, the others from their empty result.

        Args:
            tensor (array): at least one dimension.
            root_rank (int): global rank that gets the result.
            name (str, optional): name of the collective, the same on all ranks. Default: calls without a name are
                matched by their order.
            process_set (ProcessSet): ranks that take part. Default: all ranks.
            timeout (float or datetime.timedelta, optional): seconds to wait, above 0, as in ``synchronize``. Default:
                no limit of this call.

        Returns:
            array: on the root the rows of all ranks, in the order of the ranks; elsewhere a tensor of no rows. New, of
            the dtype of ``tensor``.

        Raises:
            HvdMismatchError: if the ranks disagree on root, dtype or other dimensions.
            HvdPeerLostError: if a rank dies or leaves the job.
            HvdTimeoutError: if ``timeout`` passes first.
            HvdNotInitializedError: before ``init``.
            ValueError: for an unsupported dtype or op, for a name that is in flight, and on a rank outside
                ``process_set``.
            TypeError: if an argument has a wrong type.
            HvdArgumentError: for a tensor without dimensions.

        Example:
            >>> hvd.gather(np.array([10, 11]) + hvd.rank(), root_rank=0).tolist()
            [10, 11, 11, 12]  # rank 0
            []  # rank 1
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
            byte_exchange.copy_into(block, start, source, count * row_bytes)
            at, source = start + count * row_bytes, source + count * row_bytes
        return block, lengths

    def _unpacked(self, gathered: _core.RaggedResult) -> tuple[T, bool]:
        head = byte_exchange.read_int64(gathered.address, 2)
        shape = tuple(byte_exchange.read_int64(gathered.address, 2 + head[1])[2:])
        result = self.adapter.new(shape, _core.dtype_name(head[0] & (_TRACKED - 1)))
        start = 8 * (2 + head[1])
        byte_exchange.copy(self.adapter.view(result).address, gathered.address + start, gathered.bytes - start)
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
        address, keep = byte_exchange.address_of(block)
        pending = _core.submit(
            _core.ALLTOALL, 0, _core.DTYPES["uint8"], full_name("scatter.", name), (len(block),), address, 0,
            keep, root=root, splits=lengths, process_set=number, quiet=_core.QUIET if waits else _core.SOON,
        )  # fmt: skip

        brought: list[Any] = []

        def finish(pending: list[_core.Pending]) -> T:
            result, tracked = self._unpacked(pending[0].gathered())
            brought.append(tracked)
            return result

        return Handle([pending], finish, brought)

    def scatter_async(
        self, tensor: Any, root_rank: int, splits: Any = None, name: str | None = None,
        process_set: ProcessSet = global_process_set
    ) -> Handle:  # fmt: skip
        """Start a ``scatter`` and return a handle.

        The root's rows are copied before it returns. It has no gradient.

        Args:
            tensor (array): on the root, at least one dimension; None elsewhere.
            root_rank (int): global rank whose tensor is cut.
            splits (list of int or 1-D array, optional): as in ``scatter``. Default: equal parts.
            name (str, optional): name of the collective, the same on all ranks. Default: calls without a name are
                matched by their order.
            process_set (ProcessSet): ranks that take part. Default: all ranks.

        Returns:
            Handle: ``synchronize`` returns this rank's rows.

        Raises:
            HvdNotInitializedError: before ``init``. ``synchronize`` raises what the plain form raises while it waits.
            ValueError: for an unsupported dtype or op, for a name that is in flight, and on a rank outside
                ``process_set``.
            TypeError: if an argument has a wrong type.
            HvdArgumentError: on the root, for a tensor without dimensions, and for splits that do not fit.

        Example:
            >>> rows = np.array([7, 8, 9]) if hvd.rank() == 1 else None
            >>> handle = hvd.scatter_async(rows, root_rank=1, splits=[2, 1])
            >>> hvd.synchronize(handle).tolist()
            [7, 8]  # rank 0
            [9]  # rank 1
        """
        return self._scatter(tensor, name, Terms(process_set, root_rank=root_rank, splits=splits))

    def scatter(
        self, tensor: Any, root_rank: int, splits: Any = None, name: str | None = None,
        process_set: ProcessSet = global_process_set, *,
        timeout: Any = None
    ) -> T:  # fmt: skip
        """Cut the root's tensor along the first dimension and return each rank its part.

        Only the root's ``tensor`` and ``splits`` are used; the other ranks pass None and need not have the dtype or
        shape. The rows travel through host memory. In PyTorch it is differentiable if the root's tensor requires a
        gradient; then all ranks must run backward.

        Args:
            tensor (array): on the root, at least one dimension; None elsewhere.
            root_rank (int): global rank whose tensor is cut.
            splits (list of int or 1-D array, optional): on the root, number of rows for each rank, as in ``alltoall``.
                Default: equal parts.
            name (str, optional): name of the collective, the same on all ranks. Default: calls without a name are
                matched by their order.
            process_set (ProcessSet): ranks that take part. Default: all ranks.
            timeout (float or datetime.timedelta, optional): seconds to wait, above 0, as in ``synchronize``. Default:
                no limit of this call.

        Returns:
            array: this rank's rows, new, of the dtype of the root's tensor.

        Raises:
            HvdMismatchError: if the ranks disagree on the root.
            HvdPeerLostError: if a rank dies or leaves the job.
            HvdTimeoutError: if ``timeout`` passes first.
            HvdNotInitializedError: before ``init``.
            ValueError: for an unsupported dtype or op, for a name that is in flight, and on a rank outside
                ``process_set``.
            TypeError: if an argument has a wrong type.
            HvdArgumentError: on the root, for a tensor without dimensions, and for splits that do not fit.

        Example:
            >>> rows = np.array([[1, 2], [3, 4]]) if hvd.rank() == 0 else None
            >>> hvd.scatter(rows, root_rank=0).tolist()
            [[1, 2]]  # rank 0
            [[3, 4]]  # rank 1
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
            raise ValueError(f"rank {me} cannot send to itself or receive from itself [HVD217]")
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
        return Handle([pending], lambda _: None if sends else self._completed(mine, held))

    def send_async(
        self, tensor: Any, dst: int, name: str | None = None, process_set: ProcessSet = global_process_set
    ) -> Handle:
        """Start a ``send`` and return a handle.

        Do not change ``tensor`` until ``synchronize`` has returned.

        Args:
            tensor (array): any shape.
            dst (int): global rank that receives.
            name (str, optional): name of the transfer, the same on both ranks. Default: matched by order.
            process_set (ProcessSet): set that both ranks belong to. Default: all ranks.

        Returns:
            Handle: ``synchronize`` returns None when the tensor has arrived.

        Raises:
            HvdNotInitializedError: before ``init``. ``synchronize`` raises what the plain form raises while it waits.
            ValueError: if ``dst`` is this rank or outside ``process_set``, for an unsupported dtype, and for a name
                that is in flight.
            TypeError: if an argument has a wrong type.

        Example:
            >>> other, mine = 1 - hvd.rank(), np.array([0])
            >>> handle = hvd.send_async(np.array([hvd.rank()]), dst=other)
            >>> hvd.recv(mine, src=other).tolist(), hvd.synchronize(handle)
            ([1], None)  # rank 0
            ([0], None)  # rank 1
        """
        return self._between(tensor, name, process_set, dst, True, False)

    def send(
        self, tensor: Any, dst: int, name: str | None = None, process_set: ProcessSet = global_process_set, *,
        timeout: Any = None
    ) -> None:  # fmt: skip
        """Send a tensor to one rank, and return when it has arrived.

        Rank ``dst`` must call ``recv`` with a tensor of the same shape and dtype. No other rank takes part. A call
        without a name is matched with the receiver's by their order between these two ranks. It has no gradient.

        Args:
            tensor (array): any shape.
            dst (int): global rank that receives.
            name (str, optional): name of the transfer, the same on both ranks. Default: matched by order.
            process_set (ProcessSet): set that both ranks belong to. Default: all ranks.
            timeout (float or datetime.timedelta, optional): seconds to wait, above 0, as in ``synchronize``. Default:
                no limit of this call.

        Raises:
            HvdMismatchError: if the two ranks disagree on shape or dtype.
            HvdPeerLostError: if a rank dies or leaves the job.
            HvdTimeoutError: if ``timeout`` passes first.
            HvdNotInitializedError: before ``init``.
            ValueError: if ``dst`` is this rank or outside ``process_set``, for an unsupported dtype, and for a name
                that is in flight.
            TypeError: if an argument has a wrong type.

        Example:
            >>> if hvd.rank() == 0:
            ...     hvd.send(np.array([1, 2]), dst=1)
            ... else:
            ...     print(hvd.recv(np.array([0, 0]), src=0).tolist())
            [1, 2]  # rank 1
        """
        seconds = _core.seconds_of(timeout)
        self._between(tensor, name, process_set, dst, True, True).wait(seconds)

    def recv_async(
        self, tensor: Any, src: int, name: str | None = None, process_set: ProcessSet = global_process_set
    ) -> Handle:
        """Start a ``recv``, which overwrites the tensor, and return a handle.

        Do not read or change ``tensor`` until ``synchronize`` has returned.

        Args:
            tensor (array): any shape; writable.
            src (int): global rank that sends.
            name (str, optional): name of the transfer, the same on both ranks. Default: matched by order.
            process_set (ProcessSet): set that both ranks belong to. Default: all ranks.

        Returns:
            Handle: ``synchronize`` returns ``tensor`` itself.

        Raises:
            HvdNotInitializedError: before ``init``. ``synchronize`` raises what the plain form raises while it waits.
            ValueError: if ``src`` is this rank or outside ``process_set``. Also if ``tensor`` cannot be written, for
                an unsupported dtype, and for a name that is in flight.
            TypeError: if an argument has a wrong type.

        Example:
            >>> other = 1 - hvd.rank()
            >>> handle = hvd.recv_async(np.array([0]), src=other)
            >>> hvd.send(np.array([hvd.rank() + 5]), dst=other)
            >>> hvd.synchronize(handle).tolist()
            [6]  # rank 0
            [5]  # rank 1
        """
        return self._between(tensor, name, process_set, src, False, False)

    def recv(
        self, tensor: Any, src: int, name: str | None = None, process_set: ProcessSet = global_process_set, *,
        timeout: Any = None
    ) -> T:  # fmt: skip
        """Overwrite a tensor with the one that another rank sends, and return it.

        Rank ``src`` must call ``send`` with a tensor of the same shape and dtype. It blocks until the tensor has
        arrived. It has no gradient.

        Args:
            tensor (array): any shape; writable.
            src (int): global rank that sends.
            name (str, optional): name of the transfer, the same on both ranks. Default: matched by order.
            process_set (ProcessSet): set that both ranks belong to. Default: all ranks.
            timeout (float or datetime.timedelta, optional): seconds to wait, above 0, as in ``synchronize``. Default:
                no limit of this call.

        Returns:
            array: ``tensor`` itself.

        Raises:
            HvdMismatchError: if the two ranks disagree on shape or dtype.
            HvdPeerLostError: if a rank dies or leaves the job.
            HvdTimeoutError: if ``timeout`` passes first.
            HvdNotInitializedError: before ``init``.
            ValueError: if ``src`` is this rank or outside ``process_set``. Also if ``tensor`` cannot be written, for
                an unsupported dtype, and for a name that is in flight.
            TypeError: if an argument has a wrong type.

        Example:
            >>> x = np.array([hvd.rank() + 0.5])
            >>> if hvd.rank() == 1:
            ...     hvd.send(x, dst=0)
            ... else:
            ...     print(hvd.recv(x, src=1).tolist())
            [1.5]  # rank 0
        """
        seconds = _core.seconds_of(timeout)
        return self._between(tensor, name, process_set, src, False, True).wait(seconds)
