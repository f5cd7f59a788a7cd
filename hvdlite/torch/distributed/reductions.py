"""allreduce, reduce and reduce_scatter of torch.distributed, over the core's reductions.

Sums of floats are added in rank order, so the bits are the same in every run. AVG is the core's average, PREMUL_SUM its
prescale factor. Results come to the caller's memory where that is contiguous.

BAND, BOR and BXOR gather everyone's bits and combine them here: n times the bytes, since the core cannot do it.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import Work

from ... import _core
from ...ops import Average, Max, Min, Product, Sum
from .submission import Submission
from .tensors import Part, copy_back, fetch, fill, joined, moved, read

_Op = dist.ReduceOp
# By hash, the number of the operation: opts.reduceOp is a ReduceOp, ReduceOp.SUM is a RedOpType, and a dict that holds
# the one does not find the other.
_OPS = {hash(_Op.SUM): Sum, hash(_Op.AVG): Average, hash(_Op.MIN): Min, hash(_Op.MAX): Max, hash(_Op.PRODUCT): Product}
_BITS = {hash(_Op.BAND): torch.bitwise_and, hash(_Op.BOR): torch.bitwise_or, hash(_Op.BXOR): torch.bitwise_xor}
_SUM, _PREMUL = hash(_Op.SUM), hash(_Op.PREMUL_SUM)


class Reductions(Submission):
    """Calls whose result is a sum, or another reduction."""

    def _reduction(self, opts: Any) -> tuple[int, dict[str, Any]]:
        """The number of torch's operation, and what the core is to do for it."""
        operator: Any = opts if isinstance(opts, (_Op, _Op.RedOpType)) else getattr(opts, "reduceOp", _Op.SUM)
        number = hash(operator)
        if number == _PREMUL:
            return number, {"op": Sum, "prescale": operator.__getstate__()[1]}  # torch 2.2 has no asked.factor
        return number, {"op": _OPS.get(number, Sum)}

    def _sources(self, tensors: Sequence[torch.Tensor], terms: dict[str, Any]) -> list[torch.Tensor]:
        """What is read of them. PREMUL_SUM with a tensor as its factor: multiplied here."""
        if terms["op"] not in (Sum, Average) and any(each.is_complex() for each in tensors):
            raise ValueError(f"{tensors[0].dtype}: complex numbers can be added and averaged, but not ordered [HVD202]")
        factor = terms.get("prescale")
        if isinstance(factor, torch.Tensor):
            terms["prescale"] = 1.0
            return [read(each * factor) for each in tensors]
        return [read(each) for each in tensors]

    def allreduce(self, tensors: Any, opts: Any = None, timeout: Any = None) -> Work:
        """Each tensor becomes the reduction of all ranks' of it. Several: as one group."""
        operator = _OPS.get(hash(getattr(opts, "reduceOp", None)))
        one = not isinstance(tensors, torch.Tensor) and len(tensors) == 1
        if operator is not None and one and self._plain(opts, mine := tensors[0]):
            return self._at_once(_core.ALLREDUCE, operator, "all_reduce", mine, mine, tuple(mine.shape))
        tensors = [tensors] if isinstance(tensors, torch.Tensor) else list(tensors)
        if any(each.layout is not torch.strided for each in tensors):
            return self._sparse(tensors, opts)
        return self._everywhere("all_reduce", tensors, opts, tensors)

    def _everywhere(
        self, what: str, tensors: Sequence[torch.Tensor], opts: Any, results: list[torch.Tensor],
        then: Callable[[], Any] | None = None
    ) -> Work:  # fmt: skip
        """Each tensor becomes the reduction. then: what brings that, or a part of it, to the results."""
        number, terms = self._reduction(opts)
        if number in _BITS:
            return self._bitwise(what, tensors, _BITS[number], opts, results, then)
        sources = self._sources(tensors, terms)
        back = copies_back(sources, tensors)

        def finish(pendings: list[_core.Pending]) -> None:
            if back is not None:
                back(pendings)
            if then is not None:
                then()

        parts = [Part(each, each, each.shape) for each in sources]
        return self._go(_core.ALLREDUCE, what, parts, results, finish if back or then else None, opts, **terms)

    allreduce_coalesced = allreduce

    def _bitwise(
        self, what: str, tensors: Sequence[torch.Tensor], combine: Any, opts: Any, results: list[torch.Tensor],
        then: Callable[[], Any] | None
    ) -> Work:  # fmt: skip
        if any(each.is_floating_point() or each.is_complex() for each in tensors):
            raise ValueError(f"{what}: {tensors[0].dtype} has no bits to combine: pass integers or bool [HVD202]")
        sources = [moved(each) for each in tensors]
        everyone = [[torch.empty_like(each) for _ in range(self._count)] for each in sources]

        def finish(pendings: list[_core.Pending]) -> None:
            for target, parts, pending in zip(tensors, everyone, pendings):
                fill(parts, range(self._count), pending)
                copy_back(functools.reduce(combine, parts), target)
            if then is not None:
                then()

        parts = [Part(each, None, each.shape) for each in sources]
        return self._go(_core.ALLGATHER, what, parts, results, finish, opts)

    def _sparse(self, tensors: list[torch.Tensor], opts: Any) -> Work:
        """Indices and values of all ranks, coalesced."""
        (tensor,) = tensors
        if tensor.layout is not torch.sparse_coo or self._reduction(opts)[0] != _SUM:
            raise ValueError(
                f"allreduce of a tensor of layout {tensor.layout}: backend hvdlite takes sparse_coo and "
                "ReduceOp.SUM; make it dense with .to_dense() [HVD203]"
            )
        mine = tensor.detach().coalesce()
        rows = [mine.indices().t().contiguous(), mine.values().contiguous()]
        shapes = [(mine._nnz(), mine.sparse_dim()), (mine._nnz(), math.prod(mine.values().shape[1:]))]

        def finish(pendings: list[_core.Pending]) -> None:
            count = sum(pendings[0].gathered().rows_of)
            where = torch.empty((count, mine.sparse_dim()), dtype=torch.int64, device=mine.device)
            values = torch.empty((count, *mine.values().shape[1:]), dtype=mine.dtype, device=mine.device)
            for target, pending in zip((where, values), pendings):
                fetch(target, pending)
            tensor.copy_(torch.sparse_coo_tensor(where.t(), values, tensor.shape).coalesce())

        parts = [Part(each, None, shape) for each, shape in zip(rows, shapes)]
        return self._go(_core.ALLGATHER, "sparse", parts, tensors, finish, opts)

    def reduce(self, tensors: Any, opts: Any, op: Any = None, timeout: Any = None) -> Work:
        """The root's tensor becomes the reduction; the others' stay as they are."""
        tensors, root_rank = [tensors] if isinstance(tensors, torch.Tensor) else tensors, self._root(opts)
        opts = opts if op is None else op
        number, terms = self._reduction(opts)
        if number in _BITS:
            kept = [each if self._me == root_rank else each.clone() for each in tensors]
            return self._everywhere("reduce", kept, opts, list(tensors))
        (source,), (tensor,) = self._sources(tensors, terms), tensors
        root = self._set_ranks[root_rank]
        if self._me != root_rank:
            return self._go(
                _core.REDUCE, "reduce", [Part(source, None, source.shape)], [tensor], None, opts, root=root,
                **terms,
            )  # fmt: skip
        target = torch.empty_like(source)
        return self._go(
            _core.REDUCE, "reduce", [Part(source, target, source.shape)], [tensor],
            lambda _: copy_back(target, tensor), opts, root=root, **terms,
        )  # fmt: skip

    def reduce_scatter_single_coalesced(self, outputs: Any, inputs: Any, opts: Any = None) -> Work:
        """Each output becomes this rank's part of the reduction of an input; as one group."""
        for out, each in zip(outputs, inputs):
            if each.numel() != out.numel() * self._count or each.dtype != out.dtype:
                raise ValueError(
                    f"reduce_scatter: input of {list(each.shape)} {each.dtype}, output of {list(out.shape)} "
                    f"{out.dtype}: the input must have {self._count} times as many elements of the same dtype [HVD201]"
                )
        number, terms = self._reduction(opts)
        if number in _BITS:
            whole = [each.detach().clone().reshape(self._count, -1) for each in inputs]
            return self._parts_of(whole, outputs, opts)
        if not self._ascending:  # the parts in the order of the set
            order = sorted(range(self._count), key=self._set_ranks.__getitem__)
            inputs = [each.detach().reshape(self._count, -1)[order] for each in inputs]
        sources, targets = self._sources(inputs, terms), [read(out) for out in outputs]
        parts = [Part(source, target, (self._count, target.numel())) for source, target in zip(sources, targets)]
        return self._go(
            _core.REDUCESCATTER, "reduce_scatter", parts, list(outputs), copies_back(targets, outputs), opts, **terms
        )

    def _parts_of(self, whole: Sequence[Sequence[torch.Tensor]], outputs: Sequence[torch.Tensor], opts: Any) -> Work:
        """Reduces all parts on all ranks, of tensors that may be overwritten, and each rank takes its own."""

        def take() -> None:
            for out, parts in zip(outputs, whole):
                copy_back(parts[self._me], out)

        flat = [each for parts in whole for each in ([parts] if isinstance(parts, torch.Tensor) else parts)]
        return self._everywhere("reduce_scatter", flat, opts, list(outputs), take)

    def reduce_scatter_single(self, output: torch.Tensor, input: torch.Tensor, opts: Any = None) -> Work:
        """The output becomes this rank's part of the reduction of the input."""
        operator, part = _OPS.get(hash(getattr(opts, "reduceOp", None))), output.numel()
        fits = output.dtype is input.dtype and input.numel() == part * self._count
        if operator is not None and fits and self._ascending and self._plain(opts, output, input):
            return self._at_once(_core.REDUCESCATTER, operator, "reduce_scatter", input, output, (self._count, part))
        return self.reduce_scatter_single_coalesced([output], [input], opts)

    def reduce_scatter(self, outputs: Any, inputs: Any, opts: Any = None, timeout: Any = None) -> Work:
        """The output becomes the reduction of the inputs that are for this rank."""
        if isinstance(outputs, torch.Tensor):
            outputs, inputs = [outputs], [inputs]
        (output,), (parts,) = outputs, inputs
        if len(parts) != self._count:
            raise ValueError(f"reduce_scatter: {len(parts)} inputs for {self._count} ranks: pass one for each [HVD201]")
        if len({each.numel() for each in parts}) > 1 or parts[0].is_complex():  # a sum of each, on its rank
            return self._parts_of([[each.detach().clone() for each in parts]], [output], opts)
        source = joined(parts)
        if source.dtype != parts[0].dtype:
            source = torch.cat([each.reshape(-1) for each in parts])
        return self.reduce_scatter_single_coalesced([output], [source], opts)

    # by the names of torch before 2.13
    _reduce_scatter_base = reduce_scatter_single
    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced


def copies_back(
    sources: Sequence[torch.Tensor], targets: Sequence[torch.Tensor]
) -> Callable[[list[_core.Pending]], Any] | None:
    """What brings results from copies to the caller's tensors; None where they are no copies."""
    pairs = [(source, target) for source, target in zip(sources, targets) if source.data_ptr() != target.data_ptr()]

    def finish(_: list[_core.Pending]) -> None:
        for source, target in pairs:
            copy_back(source, target)

    return finish if pairs else None
