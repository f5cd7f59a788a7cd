"""Reductions: allreduce (everyone gets the result), reduce (the root does), reducescatter (everyone gets some rows).

Integers wrap, 16-bit floats are added in float32 and rounded once, scales are applied in the same rounding; the core
sees to that. A group (`grouped_`) is several tensors that become ready as one: none is reduced before all ranks have
given all of them.

`compression` changes what travels in the forms that return a new tensor at once, as in Horovod; see `terms`. Tensors on
devices that it would only cast, and of which nobody wants a gradient, are cast by the core.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from .. import _core
from ..adapter import T
from ..process_set import ProcessSet, global_process_set, number_of, rank_in, share_of
from .handle import Handle
from .quick import Landing, Quick
from .tensors import group_of, placed
from .terms import Average, NoneCompressor, Terms, compress, full_name, reduction


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
        return Handle([pending], lambda _: self._landed(mine, target) if in_place else target)

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
            return Handle(pending, lambda _: [self._landed(mine, target) for mine, _, _, target, _ in prepared])
        return Handle(pending, lambda _: [target for _, _, _, target, _ in prepared])

    def allreduce_async(
        self, tensor: Any, average: bool | None = None, name: str | None = None, op: int | None = None,
        prescale_factor: float = 1.0, postscale_factor: float = 1.0, process_set: ProcessSet = global_process_set, *,
        priority: int = 0
    ) -> Handle:  # fmt: skip
        """Reduce a tensor of the same shape and dtype over all ranks; `synchronize` returns a new one.

        op is Average (default), Sum, Adasum, Min, Max or Product; every rank's tensor is multiplied by prescale_factor
        before and the result by postscale_factor after. The tensor must not be changed until synchronized. Of what is
        ready together, the greater priority goes first; it must be the same on all ranks.
        Raises ValueError for an unsupported dtype, op, or a name that is in flight, and on ranks outside process_set.
        """
        words = (name, average, op, op.__class__, prescale_factor, postscale_factor, priority)
        request = self._again(tensor, words, process_set)
        if request is not None:
            return Landing(self.adapter, request, tensor)
        terms = reduction(average, op, prescale_factor, postscale_factor, process_set)._replace(priority=priority)
        handle = self._allreduce(tensor, name, terms)
        self._remember(tensor, words, name, terms)
        return handle

    def allreduce_async_(
        self, tensor: Any, average: bool | None = None, name: str | None = None, op: int | None = None,
        prescale_factor: float = 1.0, postscale_factor: float = 1.0, process_set: ProcessSet = global_process_set, *,
        priority: int = 0
    ) -> Handle:  # fmt: skip
        """allreduce_async whose result overwrites the tensor."""
        words = (name, average, op, op.__class__, prescale_factor, postscale_factor, priority)
        request = self._again(tensor, words, process_set)
        if request is not None:
            return Landing(self.adapter, request, tensor, in_place=True)
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
        """allreduce_async and synchronize: the reduced tensor, a new one. Its gradient: reduced in the same way."""
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
        small, ctx = compress(compression, tensor)
        return compression.decompress(self._now("allreduce", self._allreduce, small, name, terms), ctx)

    def allreduce_(
        self, tensor: Any, average: bool | None = None, name: str | None = None, op: int | None = None,
        prescale_factor: float = 1.0, postscale_factor: float = 1.0, process_set: ProcessSet = global_process_set, *,
        timeout: Any = None
    ) -> T:  # fmt: skip
        """allreduce in place: overwrites and returns the tensor."""
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
        """allreduce_async of several tensors that become ready as one; `synchronize` returns the list."""
        terms = reduction(average, op, prescale_factor, postscale_factor, process_set)
        return self._grouped_allreduce(tensors, name, terms)

    def grouped_allreduce_async_(
        self, tensors: Sequence[Any], average: bool | None = None, name: str | None = None, op: int | None = None,
        prescale_factor: float = 1.0, postscale_factor: float = 1.0, process_set: ProcessSet = global_process_set
    ) -> Handle:  # fmt: skip
        """grouped_allreduce_async in place."""
        terms = reduction(average, op, prescale_factor, postscale_factor, process_set)
        return self._grouped_allreduce(tensors, name, terms, in_place=True)

    def grouped_allreduce(
        self, tensors: Sequence[Any], average: bool | None = None, name: str | None = None,
        compression: Any = NoneCompressor, op: int | None = None, prescale_factor: float = 1.0,
        postscale_factor: float = 1.0, process_set: ProcessSet = global_process_set, *,
        timeout: Any = None
    ) -> list[T]:  # fmt: skip
        """allreduce of several tensors that travel as one group: the list of reduced tensors."""
        terms = reduction(average, op, prescale_factor, postscale_factor, process_set, timeout)
        return self._group_now("grouped_allreduce", self._grouped_allreduce, tensors, name, terms, compression)

    def grouped_allreduce_(
        self, tensors: Sequence[Any], average: bool | None = None, name: str | None = None, op: int | None = None,
        prescale_factor: float = 1.0, postscale_factor: float = 1.0, process_set: ProcessSet = global_process_set, *,
        timeout: Any = None
    ) -> list[T]:  # fmt: skip
        """grouped_allreduce in place."""
        terms = reduction(average, op, prescale_factor, postscale_factor, process_set, timeout)
        return self._grouped_allreduce(tensors, name, terms, True, True).wait(terms.timeout)

    def _group_now(
        self, kind: str, start: Any, tensors: Any, name: str | None, terms: Terms, compression: Any
    ) -> list[T]:
        if compression is NoneCompressor:
            return self._now(kind, start, tensors, name, terms)
        pairs = [compress(compression, one) for one in group_of(tensors)]
        results = self._now(kind, start, [small for small, _ in pairs], name, terms)
        return [compression.decompress(result, ctx) for result, (_, ctx) in zip(results, pairs)]

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
        """allreduce_async whose result only the root gets; `synchronize` returns an empty tensor on the others.

        root_rank is a global rank. Raises as allreduce_async, and ValueError for a root outside process_set.
        """
        terms = reduction(None, op, prescale_factor, postscale_factor, process_set)._replace(root_rank=root_rank)
        return self._reduce(tensor, name, terms)

    def reduce(
        self, tensor: Any, root_rank: int, op: int | None = None, name: str | None = None,
        prescale_factor: float = 1.0, postscale_factor: float = 1.0, process_set: ProcessSet = global_process_set, *,
        timeout: Any = None
    ) -> T:  # fmt: skip
        """The reduced tensor on the root, a tensor of no elements on the other ranks, whose `.sum()` is 0.

        Differentiable: every rank runs backward, the others from their empty result, and the root's gradient goes
        to all.
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
        """Reduce a tensor over all ranks and keep this rank's rows; `synchronize` returns them as a new tensor.

        The first dimension is cut in equal parts; of what is left over, the first ranks get one row each.
        ValueError for a tensor without dimensions.
        """
        return self._reducescatter(tensor, name, reduction(None, op, prescale_factor, postscale_factor, process_set))

    def reducescatter(
        self, tensor: Any, name: str | None = None, compression: Any = NoneCompressor, op: int = Average,
        process_set: ProcessSet = global_process_set, prescale_factor: float = 1.0, postscale_factor: float = 1.0, *,
        exact_grad: bool = False, timeout: Any = None
    ) -> T:  # fmt: skip
        """reducescatter_async and synchronize: this rank's rows of the reduced tensor.

        The gradient is Horovod's, which is the exact one times the number of ranks; exact_grad=True gives that.
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
        """reducescatter_async of several tensors that become ready as one; `synchronize` returns the list."""
        terms = reduction(None, op, prescale_factor, postscale_factor, process_set)
        return self._grouped_reducescatter(tensors, name, terms)

    def grouped_reducescatter(
        self, tensors: Sequence[Any], name: str | None = None, compression: Any = NoneCompressor, op: int = Average,
        process_set: ProcessSet = global_process_set, prescale_factor: float = 1.0, postscale_factor: float = 1.0, *,
        exact_grad: bool = False, timeout: Any = None
    ) -> list[T]:  # fmt: skip
        """reducescatter of several tensors that travel as one group: the list of this rank's rows."""
        terms = reduction(None, op, prescale_factor, postscale_factor, process_set, timeout)._replace(exact=exact_grad)
        return self._group_now(
            "grouped_reducescatter", self._grouped_reducescatter, tensors, name, terms, compression
        )  # fmt: skip
