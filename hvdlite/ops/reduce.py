"""Reductions: allreduce (everyone gets the result), reduce (the root does), reducescatter (everyone gets some rows).

Integers wrap, 16-bit floats are added in float32 and rounded once, scales are applied in the same rounding; the core
sees to that. A group (`grouped_`) is several tensors that become ready as one: none is reduced before all ranks have
given all of them.

`compression` changes what travels in the forms that return a new tensor at once, as in Horovod; see `terms`. Tensors on
devices that it would only cast, and that need no gradient, are cast by the core.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from .. import _core
from ..process_sets.process_set import ProcessSet, global_process_set, number_of, rank_in, share_of
from .adapter import T
from .arguments import Average, NoneCompressor, Quantized, Terms, compress, full_name, reduction
from .fast_path import DirectHandle, Quick
from .handle import Handle
from .tensors import group_of, placed


class Reductions(Quick[T]):
    """allreduce, reduce, reducescatter."""

    def _prepare(self, tensor: Any, in_place: bool) -> tuple[T, T, Any, T, int]:
        """The caller's tensor, what is read, its view, where the result comes, and that one's address."""
        mine = self.adapter.accept(tensor, in_place)
        source, view = self._readable(mine)
        if in_place:
            return mine, source, view, source, view.address
        target = self.adapter.like(source, view.shape)
        return mine, source, view, target, self.adapter.view(target).address

    def _allreduce(
        self, tensor: Any, name: str | None, terms: Terms, waits: bool = False, in_place: bool = False
    ) -> Handle:
        mine, source, view, target, address = self._prepare(tensor, in_place)
        pending = _core.submit(
            _core.ALLREDUCE, terms.op, view.dtype, full_name("allreduce.", name), view.shape, view.address, address,
            (self.adapter.memory(source), target), prescale=terms.prescale, postscale=terms.postscale,
            process_set=number_of(terms.process_set), priority=terms.priority,
            quiet=_core.QUIET if waits else _core.SOON, **placed(view),
        )  # fmt: skip
        return Handle([pending], lambda _: self._completed(mine, target) if in_place else target)

    def _grouped_allreduce(
        self, tensors: Any, name: str | None, terms: Terms, waits: bool = False, in_place: bool = False
    ) -> Handle:
        # Everything is looked at before anything is submitted.
        prepared = [self._prepare(tensor, in_place) for tensor in group_of(tensors)]
        pending = self._submit_all(
            _core.ALLREDUCE,
            [(view, (self.adapter.memory(source), target), address) for _, source, view, target, address in prepared],
            full_name("grouped_allreduce.", name),
            terms,
            waits,
        )
        if in_place:
            return Handle(pending, lambda _: [self._completed(mine, target) for mine, _, _, target, _ in prepared])
        return Handle(pending, lambda _: [target for _, _, _, target, _ in prepared])

    def allreduce_async(
        self, tensor: Any, average: bool | None = None, name: str | None = None, op: int | None = None,
        prescale_factor: float = 1.0, postscale_factor: float = 1.0, process_set: ProcessSet = global_process_set, *,
        priority: int = 0
    ) -> Handle:  # fmt: skip
        """Start an ``allreduce`` and return a handle.

        Do not change ``tensor`` until ``synchronize`` has returned. It has no gradient.

        Args:
            tensor (array): any shape, the same on all ranks.
            name (str, optional): name of the collective, the same on all ranks. Default: calls without a name are
                matched by their order.
            op (int, optional): ``Average`` (default), ``Sum``, ``Adasum``, ``Min``, ``Max`` or ``Product``.
            process_set (ProcessSet): ranks that take part. Default: all ranks.
            priority (int): of tensors that are ready together, a greater number goes first. It must be the same on all
                ranks. Default: 0.
            prescale_factor (float): factor for each rank's tensor before the reduction. Default: 1.0.
            postscale_factor (float): factor for the result. Default: 1.0.
            average (bool, optional): Horovod's old form of ``op``: True is ``Average``, False is ``Sum``.

        Returns:
            Handle: ``synchronize`` returns the reduced tensor, a new one.

        Raises:
            HvdNotInitializedError: before ``init``. ``synchronize`` raises what the plain form raises while it waits.
            ValueError: for an unsupported dtype or op, for a name that is in flight, and on a rank outside
                ``process_set``.
            TypeError: if an argument has a wrong type.

        Example:
            >>> handle = hvd.allreduce_async(np.array([1.0, 2.0]), name="loss", op=hvd.Sum)
            >>> hvd.synchronize(handle).tolist()
            [2.0, 4.0]
        """
        words = (name, average, op, op.__class__, prescale_factor, postscale_factor, priority)
        request = self._again(tensor, words, process_set)
        if request is not None:
            return DirectHandle(self.adapter, request, tensor)
        terms = reduction(average, op, prescale_factor, postscale_factor, process_set)._replace(priority=priority)
        handle = self._allreduce(tensor, name, terms)
        self._remember(tensor, words, name, terms)
        return handle

    def allreduce_async_(
        self, tensor: Any, average: bool | None = None, name: str | None = None, op: int | None = None,
        prescale_factor: float = 1.0, postscale_factor: float = 1.0, process_set: ProcessSet = global_process_set, *,
        priority: int = 0
    ) -> Handle:  # fmt: skip
        """Start an ``allreduce_``, which overwrites the tensor, and return a handle.

        Do not read or change ``tensor`` until ``synchronize`` has returned. It has no gradient.

        Args:
            tensor (array): any shape, the same on all ranks; writable.
            name (str, optional): name of the collective, the same on all ranks. Default: calls without a name are
                matched by their order.
            op (int, optional): ``Average`` (default), ``Sum``, ``Adasum``, ``Min``, ``Max`` or ``Product``.
            process_set (ProcessSet): ranks that take part. Default: all ranks.
            priority (int): as in ``allreduce_async``. Default: 0.
            prescale_factor (float): factor for each rank's tensor before the reduction. Default: 1.0.
            postscale_factor (float): factor for the result. Default: 1.0.
            average (bool, optional): Horovod's old form of ``op``: True is ``Average``, False is ``Sum``.

        Returns:
            Handle: ``synchronize`` returns ``tensor`` itself.

        Raises:
            HvdNotInitializedError: before ``init``. ``synchronize`` raises what the plain form raises while it waits.
            ValueError: for an unsupported dtype or op, for a name that is in flight, and on a rank outside
                ``process_set``.
            TypeError: if an argument has a wrong type.

        Example:
            >>> x = np.array([1, 2])
            >>> handle = hvd.allreduce_async_(x, op=hvd.Sum)
            >>> hvd.synchronize(handle) is x, x.tolist()
            (True, [2, 4])
        """
        words = (name, average, op, op.__class__, prescale_factor, postscale_factor, priority)
        request = self._again(tensor, words, process_set)
        if request is not None:
            return DirectHandle(self.adapter, request, tensor, in_place=True)
        terms = reduction(average, op, prescale_factor, postscale_factor, process_set)._replace(priority=priority)
        handle = self._allreduce(tensor, name, terms, in_place=True)
        self._remember(tensor, words, name, terms)
        return handle

    def allreduce(
        self, tensor: Any, average: bool | None = None, name: str | None = None, compression: Any = NoneCompressor,
        op: int | None = None, prescale_factor: float = 1.0, postscale_factor: float = 1.0,
        process_set: ProcessSet = global_process_set, *,
        timeout: Any = None
    ) -> T:  # fmt: skip
        """Reduce a tensor over all ranks and return the result.

        All ranks of ``process_set`` must call it with the same shape, dtype, op and factors. It blocks until all ranks
        have called it. Integer sums wrap; an ``Average`` of integers rounds toward zero. Sums of float16 and bfloat16
        are made in float32 and rounded once. ``Adasum`` is the operator of Maleki et al., "Scaling Distributed Training
        with Adaptive Summation" (2020).

        The gradient in PyTorch is reduced with the same op and factors, so all ranks must run backward. Only
        ``Average`` and ``Sum`` have a gradient.

        Args:
            tensor (array): any shape, the same on all ranks.
            name (str, optional): name of the collective, the same on all ranks. Default: calls without a name are
                matched by their order.
            op (int, optional): ``Average`` (default), ``Sum``, ``Adasum``, ``Min``, ``Max`` or ``Product``.
            process_set (ProcessSet): ranks that take part. Default: all ranks.
            timeout (float or datetime.timedelta, optional): seconds to wait, above 0, as in ``synchronize``. Default:
                no limit of this call.
            compression (Compressor): form in which floating-point tensors travel, such as ``Compression.fp16``.
                Default: ``Compression.none``.
            prescale_factor (float): factor for each rank's tensor before the reduction. Default: 1.0.
            postscale_factor (float): factor for the result. Default: 1.0.
            average (bool, optional): Horovod's old form of ``op``: True is ``Average``, False is ``Sum``.

        Returns:
            array: the reduced tensor, new, with the shape and dtype of ``tensor``.

        Raises:
            HvdMismatchError: if the ranks disagree on shape, dtype, op or factors.
            HvdPeerLostError: if a rank dies or leaves the job.
            HvdTimeoutError: if ``timeout`` passes first.
            HvdNotInitializedError: before ``init``.
            HvdNotFiniteError: if a rank gave NaN or infinity and ``HVDLITE_NAN_GUARD`` is on.
            ValueError: for an unsupported dtype or op, for a name that is in flight, and on a rank outside
                ``process_set``.
            TypeError: if an argument has a wrong type.

        Example:
            >>> x = np.array([1.0, 2.0]) * (hvd.rank() + 1)
            >>> hvd.allreduce(x).tolist()
            [1.5, 3.0]
            >>> hvd.allreduce(x, op=hvd.Max).tolist()
            [2.0, 4.0]
        """
        words = (name, average, op, op.__class__, prescale_factor, postscale_factor)
        request = None
        if compression is NoneCompressor and timeout is None and not self._tracked(tensor):
            request = self._again(tensor, words, process_set)
        if request is not None:
            adapter = self.adapter
            source = adapter.address(tensor)
            result, target = adapter.twin(tensor)
            request.run(source, target, (adapter.memory(tensor), result))
            return result
        terms = reduction(average, op, prescale_factor, postscale_factor, process_set, timeout)
        if compression is NoneCompressor:
            result = self._now("allreduce", self._allreduce, tensor, name, terms)
            self._remember(tensor, words, name, terms)
            return result
        if isinstance(compression, Quantized):
            found = self._quantized([tensor], name, terms, compression)
            return found[0] if found is not None else self._now("allreduce", self._allreduce, tensor, name, terms)
        small, ctx = compress(compression, tensor)
        return compression.decompress(self._now("allreduce", self._allreduce, small, name, terms), ctx)

    def allreduce_(
        self, tensor: Any, average: bool | None = None, name: str | None = None, op: int | None = None,
        prescale_factor: float = 1.0, postscale_factor: float = 1.0, process_set: ProcessSet = global_process_set, *,
        timeout: Any = None
    ) -> T:  # fmt: skip
        """Reduce a tensor over all ranks in place.

        Like ``allreduce``, but the result overwrites ``tensor``. It has no gradient.

        Args:
            tensor (array): any shape, the same on all ranks; writable.
            name (str, optional): name of the collective, the same on all ranks. Default: calls without a name are
                matched by their order.
            op (int, optional): ``Average`` (default), ``Sum``, ``Adasum``, ``Min``, ``Max`` or ``Product``.
            process_set (ProcessSet): ranks that take part. Default: all ranks.
            timeout (float or datetime.timedelta, optional): seconds to wait, above 0, as in ``synchronize``. Default:
                no limit of this call.
            prescale_factor (float): factor for each rank's tensor before the reduction. Default: 1.0.
            postscale_factor (float): factor for the result. Default: 1.0.
            average (bool, optional): Horovod's old form of ``op``: True is ``Average``, False is ``Sum``.

        Returns:
            array: ``tensor`` itself.

        Raises:
            HvdMismatchError: if the ranks disagree on shape, dtype, op or factors.
            HvdPeerLostError: if a rank dies or leaves the job.
            HvdTimeoutError: if ``timeout`` passes first.
            HvdNotInitializedError: before ``init``.
            ValueError: for an unsupported dtype or op, for a name that is in flight, and on a rank outside
                ``process_set``.
            TypeError: if an argument has a wrong type.

        Example:
            >>> x = np.array([1.0, 2.0]) * (hvd.rank() + 1)
            >>> hvd.allreduce_(x, op=hvd.Sum) is x, x.tolist()
            (True, [3.0, 6.0])
        """
        words = (name, average, op, op.__class__, prescale_factor, postscale_factor)
        request = self._again(tensor, words, process_set) if timeout is None else None
        if request is not None:
            adapter = self.adapter
            address = adapter.address(tensor)
            request.run(address, address, adapter.memory(tensor))
            adapter.written(tensor)
            return tensor
        terms = reduction(average, op, prescale_factor, postscale_factor, process_set, timeout)
        self._allreduce(tensor, name, terms, True, True).wait(terms.timeout)
        self._remember(tensor, words, name, terms)
        return tensor

    def grouped_allreduce_async(
        self, tensors: Sequence[Any], average: bool | None = None, name: str | None = None, op: int | None = None,
        prescale_factor: float = 1.0, postscale_factor: float = 1.0, process_set: ProcessSet = global_process_set
    ) -> Handle:  # fmt: skip
        """Start a ``grouped_allreduce`` and return one handle for the group.

        Do not change the tensors until ``synchronize`` has returned. It has no gradient.

        Args:
            tensors (list of arrays): as in ``grouped_allreduce``.
            name (str, optional): name of the collective, the same on all ranks. Default: calls without a name are
                matched by their order.
            op (int, optional): ``Average`` (default), ``Sum``, ``Adasum``, ``Min``, ``Max`` or ``Product``.
            process_set (ProcessSet): ranks that take part. Default: all ranks.
            prescale_factor (float): factor for each rank's tensor before the reduction. Default: 1.0.
            postscale_factor (float): factor for the result. Default: 1.0.
            average (bool, optional): Horovod's old form of ``op``: True is ``Average``, False is ``Sum``.

        Returns:
            Handle: ``synchronize`` returns the list of reduced tensors.

        Raises:
            HvdNotInitializedError: before ``init``. ``synchronize`` raises what the plain form raises while it waits.
            ValueError: for an unsupported dtype or op, for a name that is in flight, and on a rank outside
                ``process_set``.
            TypeError: if an argument has a wrong type.

        Example:
            >>> handle = hvd.grouped_allreduce_async([np.array([1.0]), np.array([2.0])], op=hvd.Sum)
            >>> [each.tolist() for each in hvd.synchronize(handle)]
            [[2.0], [4.0]]
        """
        terms = reduction(average, op, prescale_factor, postscale_factor, process_set)
        return self._grouped_allreduce(tensors, name, terms)

    def grouped_allreduce_async_(
        self, tensors: Sequence[Any], average: bool | None = None, name: str | None = None, op: int | None = None,
        prescale_factor: float = 1.0, postscale_factor: float = 1.0, process_set: ProcessSet = global_process_set
    ) -> Handle:  # fmt: skip
        """Start a ``grouped_allreduce_``, which overwrites the tensors, and return one handle for the group.

        Do not read or change the tensors until ``synchronize`` has returned. It has no gradient.

        Args:
            tensors (list of arrays): as in ``grouped_allreduce_``.
            name (str, optional): name of the collective, the same on all ranks. Default: calls without a name are
                matched by their order.
            op (int, optional): ``Average`` (default), ``Sum``, ``Adasum``, ``Min``, ``Max`` or ``Product``.
            process_set (ProcessSet): ranks that take part. Default: all ranks.
            prescale_factor (float): factor for each rank's tensor before the reduction. Default: 1.0.
            postscale_factor (float): factor for the result. Default: 1.0.
            average (bool, optional): Horovod's old form of ``op``: True is ``Average``, False is ``Sum``.

        Returns:
            Handle: ``synchronize`` returns the list of the tensors themselves.

        Raises:
            HvdNotInitializedError: before ``init``. ``synchronize`` raises what the plain form raises while it waits.
            ValueError: for an unsupported dtype or op, for a name that is in flight, and on a rank outside
                ``process_set``.
            TypeError: if an argument has a wrong type.

        Example:
            >>> x = np.array([1.0])
            >>> _ = hvd.synchronize(hvd.grouped_allreduce_async_([x], op=hvd.Sum))
            >>> x.tolist()
            [2.0]
        """
        terms = reduction(average, op, prescale_factor, postscale_factor, process_set)
        return self._grouped_allreduce(tensors, name, terms, in_place=True)

    def grouped_allreduce(
        self, tensors: Sequence[Any], average: bool | None = None, name: str | None = None,
        compression: Any = NoneCompressor, op: int | None = None, prescale_factor: float = 1.0,
        postscale_factor: float = 1.0, process_set: ProcessSet = global_process_set, *,
        timeout: Any = None
    ) -> list[T]:  # fmt: skip
        """Reduce several tensors over all ranks as one group.

        No tensor is reduced before all ranks have given all of them. All ranks must give tensors of the same shapes and
        dtypes in the same order. The gradient is that of ``allreduce``.

        Args:
            tensors (list of arrays): the tensors; their shapes and dtypes may differ from each other.
            name (str, optional): name of the collective, the same on all ranks. Default: calls without a name are
                matched by their order.
            op (int, optional): ``Average`` (default), ``Sum``, ``Adasum``, ``Min``, ``Max`` or ``Product``.
            process_set (ProcessSet): ranks that take part. Default: all ranks.
            timeout (float or datetime.timedelta, optional): seconds to wait, above 0, as in ``synchronize``. Default:
                no limit of this call.
            compression (Compressor): form in which floating-point tensors travel, such as ``Compression.fp16``.
                Default: ``Compression.none``.
            prescale_factor (float): factor for each rank's tensor before the reduction. Default: 1.0.
            postscale_factor (float): factor for the result. Default: 1.0.
            average (bool, optional): Horovod's old form of ``op``: True is ``Average``, False is ``Sum``.

        Returns:
            list of arrays: the reduced tensors, new, in the order of ``tensors``.

        Raises:
            HvdMismatchError: if the ranks disagree on shapes, dtypes, op or factors.
            HvdPeerLostError: if a rank dies or leaves the job.
            HvdTimeoutError: if ``timeout`` passes first.
            HvdNotInitializedError: before ``init``.
            ValueError: for an unsupported dtype or op, for a name that is in flight, and on a rank outside
                ``process_set``.
            TypeError: if an argument has a wrong type.

        Example:
            >>> loss, counts = hvd.grouped_allreduce([np.array(0.5), np.array([1, 2])], op=hvd.Sum)
            >>> loss.tolist(), counts.tolist()
            (1.0, [2, 4])
        """
        terms = reduction(average, op, prescale_factor, postscale_factor, process_set, timeout)
        return self._group_now("grouped_allreduce", self._grouped_allreduce, tensors, name, terms, compression)

    def grouped_allreduce_(
        self, tensors: Sequence[Any], average: bool | None = None, name: str | None = None, op: int | None = None,
        prescale_factor: float = 1.0, postscale_factor: float = 1.0, process_set: ProcessSet = global_process_set, *,
        timeout: Any = None
    ) -> list[T]:  # fmt: skip
        """Reduce several tensors over all ranks as one group, in place.

        Like ``grouped_allreduce``, but the results overwrite ``tensors``. It has no gradient.

        Args:
            tensors (list of arrays): the tensors; writable.
            name (str, optional): name of the collective, the same on all ranks. Default: calls without a name are
                matched by their order.
            op (int, optional): ``Average`` (default), ``Sum``, ``Adasum``, ``Min``, ``Max`` or ``Product``.
            process_set (ProcessSet): ranks that take part. Default: all ranks.
            timeout (float or datetime.timedelta, optional): seconds to wait, above 0, as in ``synchronize``. Default:
                no limit of this call.
            prescale_factor (float): factor for each rank's tensor before the reduction. Default: 1.0.
            postscale_factor (float): factor for the result. Default: 1.0.
            average (bool, optional): Horovod's old form of ``op``: True is ``Average``, False is ``Sum``.

        Returns:
            list of arrays: the tensors themselves, in the order of ``tensors``.

        Raises:
            HvdMismatchError: if the ranks disagree on shapes, dtypes, op or factors.
            HvdPeerLostError: if a rank dies or leaves the job.
            HvdTimeoutError: if ``timeout`` passes first.
            HvdNotInitializedError: before ``init``.
            ValueError: for an unsupported dtype or op, for a name that is in flight, and on a rank outside
                ``process_set``.
            TypeError: if an argument has a wrong type.

        Example:
            >>> x, y = np.array([1.0]), np.array([2, 3])
            >>> _ = hvd.grouped_allreduce_([x, y], op=hvd.Sum)
            >>> x.tolist(), y.tolist()
            ([2.0], [4, 6])
        """
        terms = reduction(average, op, prescale_factor, postscale_factor, process_set, timeout)
        return self._grouped_allreduce(tensors, name, terms, True, True).wait(terms.timeout)

    def _group_now(
        self, kind: str, start: Any, tensors: Any, name: str | None, terms: Terms, compression: Any
    ) -> list[T]:
        if isinstance(compression, Quantized) and kind == "grouped_allreduce":
            found = self._quantized(group_of(tensors), name, terms, compression)
            if found is not None:
                return found
            compression = NoneCompressor
        if compression is NoneCompressor:
            return self._now(kind, start, tensors, name, terms)
        pairs = [compress(compression, one) for one in group_of(tensors)]
        results = self._now(kind, start, [small for small, _ in pairs], name, terms)
        return [compression.decompress(result, ctx) for result, (_, ctx) in zip(results, pairs)]

    def _quantized(self, tensors: list[Any], name: str | None, terms: Terms, compression: Quantized) -> list[T] | None:
        if any(map(self._tracked, tensors)):
            raise ValueError(
                f"compression={compression!r} has no gradient: call it under torch.no_grad(), or detach the tensor "
                "[HVD208]"
            )
        from .quantized import reduced  # few programs need it

        return reduced(self.adapter, compression, tensors, name, terms)

    def reduced_async_(self, tensors: list[Any], name: str | None, terms: Terms) -> Handle:
        """grouped_allreduce_async_ with these terms."""
        return self._grouped_allreduce(tensors, name, terms, in_place=True)

    def _reduce(self, tensor: Any, name: str | None, terms: Terms, waits: bool = False) -> Handle:
        mine, view = self._readable(tensor)
        number, root = number_of(terms.process_set), rank_in(terms.process_set, terms.root_rank)
        is_root = _core.rank() == terms.root_rank
        target = self.adapter.like(mine, view.shape if is_root else (0,))
        pending = _core.submit(
            _core.REDUCE, terms.op, view.dtype, full_name("reduce.", name), view.shape, view.address,
            self.adapter.view(target).address if is_root else 0, (self.adapter.memory(mine), target), root=root,
            prescale=terms.prescale, postscale=terms.postscale, process_set=number,
            quiet=_core.QUIET if waits else _core.SOON,
            **placed(view),
        )  # fmt: skip
        return Handle([pending], lambda _: target)

    def reduce_async(
        self, tensor: Any, root_rank: int, op: int | None = None, name: str | None = None,
        prescale_factor: float = 1.0, postscale_factor: float = 1.0, process_set: ProcessSet = global_process_set
    ) -> Handle:  # fmt: skip
        """Start a ``reduce`` and return a handle.

        Do not change ``tensor`` until ``synchronize`` has returned. It has no gradient.

        Args:
            tensor (array): any shape, the same on all ranks.
            root_rank (int): global rank that gets the result.
            op (int, optional): ``Average`` (default), ``Sum``, ``Adasum``, ``Min``, ``Max`` or ``Product``.
            name (str, optional): name of the collective, the same on all ranks. Default: calls without a name are
                matched by their order.
            process_set (ProcessSet): ranks that take part. Default: all ranks.
            prescale_factor (float): factor for each rank's tensor before the reduction. Default: 1.0.
            postscale_factor (float): factor for the result. Default: 1.0.

        Returns:
            Handle: ``synchronize`` returns what ``reduce`` returns.

        Raises:
            HvdNotInitializedError: before ``init``. ``synchronize`` raises what the plain form raises while it waits.
            ValueError: for an unsupported dtype or op, for a name that is in flight, and on a rank outside
                ``process_set``.
            TypeError: if an argument has a wrong type.

        Example:
            >>> handle = hvd.reduce_async(np.array([1, 5]) * (hvd.rank() + 1), root_rank=1, op=hvd.Max)
            >>> hvd.synchronize(handle).tolist()
            []  # rank 0
            [2, 10]  # rank 1
        """
        terms = reduction(None, op, prescale_factor, postscale_factor, process_set)._replace(root_rank=root_rank)
        return self._reduce(tensor, name, terms)

    def reduce(
        self, tensor: Any, root_rank: int, op: int | None = None, name: str | None = None,
        prescale_factor: float = 1.0, postscale_factor: float = 1.0, process_set: ProcessSet = global_process_set, *,
        timeout: Any = None
    ) -> T:  # fmt: skip
        """Reduce a tensor over all ranks and return the result on one rank.

        All ranks of ``process_set`` must call it with the same shape, dtype, op and factors. In PyTorch it is
        differentiable: all ranks must run backward, the others from their empty result, and all ranks get the root's
        gradient.

        Args:
            tensor (array): any shape, the same on all ranks.
            root_rank (int): global rank that gets the result.
            op (int, optional): ``Average`` (default), ``Sum``, ``Adasum``, ``Min``, ``Max`` or ``Product``.
            name (str, optional): name of the collective, the same on all ranks. Default: calls without a name are
                matched by their order.
            process_set (ProcessSet): ranks that take part. Default: all ranks.
            timeout (float or datetime.timedelta, optional): seconds to wait, above 0, as in ``synchronize``. Default:
                no limit of this call.
            prescale_factor (float): factor for each rank's tensor before the reduction. Default: 1.0.
            postscale_factor (float): factor for the result. Default: 1.0.

        Returns:
            array: on the root the reduced tensor, new, with the shape and dtype of ``tensor``; elsewhere an empty
            tensor of shape ``(0,)``, whose sum is 0.

        Raises:
            HvdMismatchError: if the ranks disagree on shape, dtype, op, factors or root.
            HvdPeerLostError: if a rank dies or leaves the job.
            HvdTimeoutError: if ``timeout`` passes first.
            HvdNotInitializedError: before ``init``.
            ValueError: for an unsupported dtype or op, for a name that is in flight, and on a rank outside
                ``process_set``.
            TypeError: if an argument has a wrong type.

        Example:
            >>> hvd.reduce(np.array([1.0, 2.0]), root_rank=0, op=hvd.Sum).tolist()
            [2.0, 4.0]  # rank 0
            []  # rank 1
        """
        terms = reduction(None, op, prescale_factor, postscale_factor, process_set, timeout)._replace(
            root_rank=root_rank
        )
        return self._now("reduce", self._reduce, tensor, name, terms)

    def _shares(self, tensors: list[Any], terms: Terms) -> list[tuple[T, Any, T, int]]:
        """For each tensor: what is read, its view, where this rank's rows come, and that one's address."""
        prepared = []
        for tensor in tensors:
            mine, view = self._rows("reducescatter", tensor)
            target = self.adapter.like(mine, (share_of(terms.process_set, view.shape[0]), *view.shape[1:]))
            prepared.append((mine, view, target, self.adapter.view(target).address))
        return prepared

    def _reducescatter(self, tensor: Any, name: str | None, terms: Terms, waits: bool = False) -> Handle:
        number = number_of(terms.process_set)
        ((mine, view, target, address),) = self._shares([tensor], terms)
        pending = _core.submit(
            _core.REDUCESCATTER, terms.op, view.dtype, full_name("reducescatter.", name), view.shape, view.address,
            address, (self.adapter.memory(mine), target), prescale=terms.prescale, postscale=terms.postscale,
            process_set=number, quiet=_core.QUIET if waits else _core.SOON, **placed(view),
        )  # fmt: skip
        return Handle([pending], lambda _: target)

    def _grouped_reducescatter(self, tensors: Any, name: str | None, terms: Terms, waits: bool = False) -> Handle:
        number_of(terms.process_set)
        prepared = self._shares(group_of(tensors), terms)
        pending = self._submit_all(
            _core.REDUCESCATTER,
            [(view, (self.adapter.memory(mine), target), address) for mine, view, target, address in prepared],
            full_name("grouped_reducescatter.", name),
            terms,
            waits,
        )
        return Handle(pending, lambda _: [target for _, _, target, _ in prepared])

    def reducescatter_async(
        self, tensor: Any, name: str | None = None, op: int = Average, process_set: ProcessSet = global_process_set,
        prescale_factor: float = 1.0, postscale_factor: float = 1.0
    ) -> Handle:  # fmt: skip
        """Start a ``reducescatter`` and return a handle.

        Do not change ``tensor`` until ``synchronize`` has returned. It has no gradient.

        Args:
            tensor (array): as in ``reducescatter``.
            name (str, optional): name of the collective, the same on all ranks. Default: calls without a name are
                matched by their order.
            op (int): as in ``allreduce``. Default: ``Average``.
            process_set (ProcessSet): ranks that take part. Default: all ranks.
            prescale_factor (float): factor for each rank's tensor before the reduction. Default: 1.0.
            postscale_factor (float): factor for the result. Default: 1.0.

        Returns:
            Handle: ``synchronize`` returns this rank's rows of the reduced tensor.

        Raises:
            HvdNotInitializedError: before ``init``. ``synchronize`` raises what the plain form raises while it waits.
            ValueError: for an unsupported dtype or op, for a name that is in flight, and on a rank outside
                ``process_set``.
            TypeError: if an argument has a wrong type.
            HvdArgumentError: for a tensor without dimensions.

        Example:
            >>> handle = hvd.reducescatter_async(np.array([1, 2]), op=hvd.Sum)
            >>> hvd.synchronize(handle).tolist()
            [2]  # rank 0
            [4]  # rank 1
        """
        return self._reducescatter(tensor, name, reduction(None, op, prescale_factor, postscale_factor, process_set))

    def reducescatter(
        self, tensor: Any, name: str | None = None, compression: Any = NoneCompressor, op: int = Average,
        process_set: ProcessSet = global_process_set, prescale_factor: float = 1.0, postscale_factor: float = 1.0, *,
        exact_grad: bool = False, timeout: Any = None
    ) -> T:  # fmt: skip
        """Reduce a tensor over all ranks and return this rank's rows of the result.

        The first dimension is cut into equal parts in the order of the ranks. If it does not divide evenly, the first
        ranks get one row more. All ranks of ``process_set`` must call it with the same shape, dtype, op and factors.

        Args:
            tensor (array): at least one dimension; the same shape on all ranks.
            name (str, optional): name of the collective, the same on all ranks. Default: calls without a name are
                matched by their order.
            op (int): as in ``allreduce``. Default: ``Average``.
            process_set (ProcessSet): ranks that take part. Default: all ranks.
            timeout (float or datetime.timedelta, optional): seconds to wait, above 0, as in ``synchronize``. Default:
                no limit of this call.
            compression (Compressor): form in which floating-point tensors travel, such as ``Compression.fp16``.
                Default: ``Compression.none``.
            prescale_factor (float): factor for each rank's tensor before the reduction. Default: 1.0.
            postscale_factor (float): factor for the result. Default: 1.0.
            exact_grad (bool): PyTorch only. True gives the exact gradient. Default: False, Horovod's gradient,
                which is the exact one times the number of ranks.

        Returns:
            array: this rank's rows of the reduced tensor, new, of the dtype of ``tensor``.

        Raises:
            HvdMismatchError: if the ranks disagree on shape, dtype, op or factors.
            HvdPeerLostError: if a rank dies or leaves the job.
            HvdTimeoutError: if ``timeout`` passes first.
            HvdNotInitializedError: before ``init``.
            ValueError: for an unsupported dtype or op, for a name that is in flight, and on a rank outside
                ``process_set``.
            TypeError: if an argument has a wrong type.
            HvdArgumentError: for a tensor without dimensions.

        Example:
            >>> hvd.reducescatter(np.array([1.0, 2.0, 3.0]), op=hvd.Sum).tolist()
            [2.0, 4.0]  # rank 0
            [6.0]  # rank 1
        """
        terms = reduction(None, op, prescale_factor, postscale_factor, process_set, timeout)._replace(exact=exact_grad)
        if compression is NoneCompressor:
            return self._now("reducescatter", self._reducescatter, tensor, name, terms)
        small, ctx = compress(compression, tensor)
        return compression.decompress(self._now("reducescatter", self._reducescatter, small, name, terms), ctx)

    def grouped_reducescatter_async(
        self, tensors: Sequence[Any], name: str | None = None, op: int = Average,
        process_set: ProcessSet = global_process_set, prescale_factor: float = 1.0, postscale_factor: float = 1.0
    ) -> Handle:  # fmt: skip
        """Start a ``grouped_reducescatter`` and return one handle for the group.

        Do not change the tensors until ``synchronize`` has returned. It has no gradient.

        Args:
            tensors (list of arrays): as in ``grouped_reducescatter``.
            name (str, optional): name of the collective, the same on all ranks. Default: calls without a name are
                matched by their order.
            op (int): as in ``allreduce``. Default: ``Average``.
            process_set (ProcessSet): ranks that take part. Default: all ranks.
            prescale_factor (float): factor for each rank's tensor before the reduction. Default: 1.0.
            postscale_factor (float): factor for the result. Default: 1.0.

        Returns:
            Handle: ``synchronize`` returns the list of this rank's rows.

        Raises:
            HvdNotInitializedError: before ``init``. ``synchronize`` raises what the plain form raises while it waits.
            ValueError: for an unsupported dtype or op, for a name that is in flight, and on a rank outside
                ``process_set``.
            TypeError: if an argument has a wrong type.
            HvdArgumentError: for a tensor without dimensions.

        Example:
            >>> handle = hvd.grouped_reducescatter_async([np.array([1, 2])], op=hvd.Sum)
            >>> [part.tolist() for part in hvd.synchronize(handle)]
            [[2]]  # rank 0
            [[4]]  # rank 1
        """
        terms = reduction(None, op, prescale_factor, postscale_factor, process_set)
        return self._grouped_reducescatter(tensors, name, terms)

    def grouped_reducescatter(
        self, tensors: Sequence[Any], name: str | None = None, compression: Any = NoneCompressor, op: int = Average,
        process_set: ProcessSet = global_process_set, prescale_factor: float = 1.0, postscale_factor: float = 1.0, *,
        exact_grad: bool = False, timeout: Any = None
    ) -> list[T]:  # fmt: skip
        """Reduce several tensors over all ranks as one group and return this rank's rows of each.

        No tensor is reduced before all ranks have given all of them. Each tensor is cut as in ``reducescatter``.

        Args:
            tensors (list of arrays): the tensors, each of at least one dimension; the same shapes on all ranks.
            name (str, optional): name of the collective, the same on all ranks. Default: calls without a name are
                matched by their order.
            op (int): as in ``allreduce``. Default: ``Average``.
            process_set (ProcessSet): ranks that take part. Default: all ranks.
            timeout (float or datetime.timedelta, optional): seconds to wait, above 0, as in ``synchronize``. Default:
                no limit of this call.
            compression (Compressor): form in which floating-point tensors travel, such as ``Compression.fp16``.
                Default: ``Compression.none``.
            prescale_factor (float): factor for each rank's tensor before the reduction. Default: 1.0.
            postscale_factor (float): factor for the result. Default: 1.0.
            exact_grad (bool): PyTorch only. As in ``reducescatter``. Default: False.

        Returns:
            list of arrays: this rank's rows of each reduced tensor, new, in the order of ``tensors``.

        Raises:
            HvdMismatchError: if the ranks disagree on shapes, dtypes, op or factors.
            HvdPeerLostError: if a rank dies or leaves the job.
            HvdTimeoutError: if ``timeout`` passes first.
            HvdNotInitializedError: before ``init``.
            ValueError: for an unsupported dtype or op, for a name that is in flight, and on a rank outside
                ``process_set``.
            TypeError: if an argument has a wrong type.
            HvdArgumentError: for a tensor without dimensions.

        Example:
            >>> parts = hvd.grouped_reducescatter([np.array([1, 2]), np.array([3, 4])], op=hvd.Sum)
            >>> [part.tolist() for part in parts]
            [[2], [6]]  # rank 0
            [[4], [8]]  # rank 1
        """
        terms = reduction(None, op, prescale_factor, postscale_factor, process_set, timeout)._replace(exact=exact_grad)
        return self._group_now(
            "grouped_reducescatter", self._grouped_reducescatter, tensors, name, terms, compression
        )  # fmt: skip
