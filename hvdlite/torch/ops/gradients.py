"""Gradients of the collectives: the rules, and how a result joins autograd's graph.

A rule gets what is known of the call (`Past`) and the gradients of its results, and returns those of its inputs. The
collectives that it makes are differentiable themselves, so gradients of gradients work.

Exact means: the gradient of the sum of all ranks' losses. By that measure allreduce, reduce, gather, scatter and
alltoall are exact. Horovod's allgather and broadcast average where the exact gradient sums, and its reducescatter is
the exact one times the number of ranks; scripts rely on it, so that is the default, and exact_grad=True the other.
Min, Max, Product and Adasum have no gradient here.

The communication is over before autograd comes in: `_Arrived` only ties the results to the inputs.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from ... import _core
from ...ops import Average, Sum, Terms


class Past(NamedTuple):
    """A call that is over."""

    ops: Any  # the TorchCollectives
    kind: str
    name: str | None
    terms: Terms
    brought: list[Any]  # ragged collectives: rows from each rank, for each result
    shapes: list[torch.Size]  # of the inputs

    @property
    def backward_name(self) -> str | None:
        """The name of what the gradient sends."""
        return None if self.name is None else self.name + ".backward"

    @property
    def scaled(self) -> dict[str, Any]:
        """The reduction again."""
        terms = self.terms
        if terms.op not in (Average, Sum):
            raise NotImplementedError(
                f"{self.kind} with op {_core.op_name(terms.op)} has no gradient: use hvd.Average or hvd.Sum, or "
                "detach the tensor [HVD207]"
            )
        return {
            "op": terms.op,
            "prescale_factor": terms.prescale,
            "postscale_factor": terms.postscale,
            "process_set": terms.process_set,
        }


def tracked(tensor: Any) -> bool:
    """Whether this tensor's gradient may be needed."""
    return isinstance(tensor, torch.Tensor) and tensor.requires_grad and torch.is_grad_enabled()


class _Arrived(torch.autograd.Function):
    """Results that depend on tensors by a rule."""

    @staticmethod
    def forward(ctx: Any, past: Past, results: tuple[torch.Tensor, ...], *tensors: torch.Tensor) -> Any:
        ctx.past = past
        ctx.differentiable = [result.is_floating_point() for result in results]
        ctx.mark_non_differentiable(*(result for result in results if not result.is_floating_point()))
        return tuple(results)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        kept = [i for i, counts in enumerate(ctx.differentiable) if counts]
        returned = _RULES[ctx.past.kind](_of(ctx.past, kept), [gradients[i] for i in kept])
        of_input = dict(zip(kept, returned))
        return None, None, *(of_input.get(i) for i in range(len(ctx.past.shapes)))


def _of(past: Past, kept: list[int]) -> Past:
    """Without the members of a group that have no gradient."""
    brought = [past.brought[i] for i in kept] if past.brought else []
    return past._replace(brought=brought, shapes=[past.shapes[i] for i in kept])


def attach(past: Past, result: Any, tensors: tuple[torch.Tensor, ...]) -> Any:
    """The result, one tensor or several, with a history that leads to the tensors."""
    if isinstance(result, torch.Tensor):
        return _Arrived.apply(past, (result,), *tensors)[0]
    if past.kind == "alltoall":  # the second is received_splits
        return _Arrived.apply(past, (result[0],), *tensors)[0], result[1]
    return list(_Arrived.apply(past, tuple(result), *tensors))


def join_scatter(
    ops: Any, tensor: torch.Tensor | None, result: torch.Tensor, requires_grad: bool, name: str | None, terms: Terms
) -> torch.Tensor:
    """The result of a scatter. The root's tensor is None elsewhere, and yet all must help with its gradient: the
    scatter has sent whether there will be one."""
    if not requires_grad or not torch.is_grad_enabled():
        return result
    is_root = tensor is not None
    source = tensor if tensor is not None else torch.empty(0, dtype=result.dtype, requires_grad=True)
    past = Past(ops, "scatter", name, terms, [is_root], [source.shape])
    return attach(past, result, (source,))


def _allreduce(past: Past, gradients: list[torch.Tensor]) -> list[torch.Tensor]:
    return [past.ops.allreduce(gradients[0], name=past.backward_name, **past.scaled)]


def _grouped_allreduce(past: Past, gradients: list[torch.Tensor]) -> list[torch.Tensor]:
    return past.ops.grouped_allreduce(gradients, name=past.backward_name, **past.scaled)


def _allgather(past: Past, gradients: list[torch.Tensor]) -> list[torch.Tensor]:
    op, members = (Sum if past.terms.exact else Average), past.terms.process_set
    total = past.ops.allreduce(gradients[0], name=past.backward_name, op=op, process_set=members)
    return [total.split(past.brought[0])[members.rank()]]


def _grouped_allgather(past: Past, gradients: list[torch.Tensor]) -> list[torch.Tensor]:
    op, members = (Sum if past.terms.exact else Average), past.terms.process_set
    totals = past.ops.grouped_allreduce(gradients, name=past.backward_name, op=op, process_set=members)
    return [total.split(rows)[members.rank()] for total, rows in zip(totals, past.brought)]


def _broadcast(past: Past, gradients: list[torch.Tensor]) -> list[torch.Tensor]:
    op, root, members = (Sum if past.terms.exact else Average), past.terms.root_rank, past.terms.process_set
    total = past.ops.reduce(gradients[0], root, op=op, name=past.backward_name, process_set=members)
    return [total if _core.rank() == root else torch.zeros_like(gradients[0]) + total.sum()]


def _reduce(past: Past, gradients: list[torch.Tensor]) -> list[torch.Tensor]:
    terms, scaled = past.terms, past.scaled
    is_root = _core.rank() == terms.root_rank
    own = gradients[0] if is_root else gradients[0].new_zeros(past.shapes[0]) + gradients[0].sum()
    shared = past.ops.broadcast(own, terms.root_rank, past.backward_name, terms.process_set, exact_grad=True)
    divisor = terms.process_set.size() if scaled["op"] == Average else 1
    return [shared * (terms.prescale * terms.postscale / divisor)]


def _of_scattered(past: Past) -> float:
    """By what the gathered gradient of a reducescatter is multiplied."""
    size, op = past.terms.process_set.size(), past.scaled["op"]
    horovods = size if op == Sum else 1
    return past.terms.prescale * past.terms.postscale * (horovods / size if past.terms.exact else horovods)


def _reducescatter(past: Past, gradients: list[torch.Tensor]) -> list[torch.Tensor]:
    gradient = gradients[0] * _of_scattered(past)
    return [past.ops.allgather(gradient, past.backward_name, past.terms.process_set, exact_grad=past.terms.exact)]


def _grouped_reducescatter(past: Past, gradients: list[torch.Tensor]) -> list[torch.Tensor]:
    factor, members = _of_scattered(past), past.terms.process_set
    scaled = [gradient * factor for gradient in gradients]
    return past.ops.grouped_allgather(scaled, past.backward_name, members, exact_grad=past.terms.exact)


def _alltoall(past: Past, gradients: list[torch.Tensor]) -> list[torch.Tensor]:
    """The gradient. Rows that were sent to no rank have a gradient of zero."""
    back, _ = past.ops.alltoall(gradients[0], past.brought[0], past.backward_name, past.terms.process_set)
    missing = past.shapes[0][0] - len(back)
    return [torch.cat([back, back.new_zeros(missing, *back.shape[1:])]) if missing else back]


def _gather(past: Past, gradients: list[torch.Tensor]) -> list[torch.Tensor]:
    terms = past.terms
    splits = past.brought[0] if _core.rank() == terms.root_rank else None
    return [past.ops.scatter(gradients[0], terms.root_rank, splits, past.backward_name, terms.process_set)]


def _scatter(past: Past, gradients: list[torch.Tensor]) -> list[torch.Tensor]:
    back = past.ops.gather(gradients[0], past.terms.root_rank, past.backward_name, past.terms.process_set)
    if not past.brought[0]:
        return [gradients[0].new_zeros(0)]
    missing = past.shapes[0][0] - len(back)
    return [torch.cat([back, back.new_zeros(missing, *back.shape[1:])]) if missing else back]


_RULES: dict[str, Callable[[Past, list[torch.Tensor]], list[torch.Tensor]]] = {
    "allreduce": _allreduce,
    "grouped_allreduce": _grouped_allreduce,
    "allgather": _allgather,
    "grouped_allgather": _grouped_allgather,
    "broadcast": _broadcast,
    "reduce": _reduce,
    "reducescatter": _reducescatter,
    "grouped_reducescatter": _grouped_reducescatter,
    "alltoall": _alltoall,
    "gather": _gather,
    "scatter": _scatter,
}
