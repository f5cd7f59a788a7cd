"""broadcast, all_gather, all_to_all, gather and scatter of torch.distributed: what is moved and not reduced.

Any dtype moves, as bytes where the core has none. Where the caller's output is one contiguous tensor and the group's
ranks ascend, the core writes into it; lists of tensors are filled from the core's memory. Where all ranks give as much
by definition (`even`), the core needs no exchange of counts. Gather and scatter are an all_to_all in which all rows go
to the root or come from it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch._C._distributed_c10d import Work

from ... import _core
from ..adapter import DTYPES
from .reductions import copies_back
from .submission import Submission
from .tensors import Part, apart, copy_back, fill, fresh, joined, moved, read

_Finish = Callable[[list[_core.Pending]], Any]


class Moves(Submission):
    """Calls whose result is what ranks gave, as it is."""

    def broadcast(self, tensors: Any, opts: Any, timeout: Any = None) -> Work:
        """Each tensor becomes the root's."""
        tensors = [tensors] if isinstance(tensors, torch.Tensor) else list(tensors)
        root = self._root(opts)
        sources = [read(each) for each in tensors]
        inputs = [each if each.dtype in DTYPES else moved(each) for each in sources]
        return self._go(
            _core.BROADCAST, "broadcast", [Part(each, each, each.shape) for each in inputs],
            tensors, None if self._me == root else copies_back(sources, tensors),
            opts, root=self._set_ranks[root],
        )  # fmt: skip

    # -- everyone gets the same

    def _gather_all(
        self, targets: Sequence[Sequence[torch.Tensor]], inputs: Sequence[torch.Tensor], opts: Any
    ) -> Work:  # fmt: skip
        sources = [moved(each) for each in inputs]

        def finish(pendings: list[_core.Pending]) -> None:
            for parts, pending in zip(targets, pendings):
                fill(parts, self._set_ranks, pending)

        results = [each for parts in targets for each in parts]
        return self._go(
            _core.ALLGATHER, "all_gather", [Part(each, None, each.shape) for each in sources], results, finish, opts
        )

    def allgather(self, outputs: Any, inputs: Any, opts: Any = None) -> Work:
        """Each list of outputs becomes what the ranks gave as an input."""
        if isinstance(inputs, torch.Tensor):
            outputs, inputs = [outputs], [inputs]
        if len(outputs) != len(inputs) or any(len(each) != self._count for each in outputs):
            raise ValueError(f"all_gather needs a list of {self._count} tensors, one from each rank [HVD201]")
        return self._gather_all(outputs, inputs, opts)

    def allgather_coalesced(self, outputs: Any, inputs: Any, opts: Any = None) -> Work:
        """outputs: for each rank a list of tensors; those of allgather are for each tensor a list of ranks."""
        if len(outputs) != self._count or any(len(each) != len(inputs) for each in outputs):
            raise ValueError(
                f"all_gather_coalesced needs {self._count} lists, one for each rank, of {len(inputs)} [HVD201]"
            )
        return self._gather_all(list(zip(*outputs)), inputs, opts)

    def all_gather_single_coalesced(self, outputs: Any, inputs: Any, opts: Any = None) -> Work:
        """Each output becomes what the ranks gave as an input, one after the other."""
        for out, each in zip(outputs, inputs):
            if out.numel() != each.numel() * self._count or out.dtype != each.dtype:
                raise ValueError(
                    f"all_gather: output of {list(out.shape)} {out.dtype}, input of {list(each.shape)} {each.dtype}: "
                    f"the output must have {self._count} times as many elements of the same dtype [HVD201]"
                )
        sources, targets = [moved(each) for each in inputs], [fresh(out) for out in outputs]
        parts = [
            Part(each, out if self._ascending else None, each.shape, out.numel() * out.element_size())
            for each, out in zip(sources, targets)
        ]

        def finish(pendings: list[_core.Pending]) -> None:
            for out, target, each, pending in zip(outputs, targets, inputs, pendings):
                pieces = target.view(-1).split(each.numel()) if each.numel() else [target] * self._count
                fill(pieces, self._set_ranks, pending, target if self._ascending else None)
                copy_back(target, out)

        return self._go(_core.ALLGATHER, "all_gather", parts, list(outputs), finish, opts, even=True)

    def all_gather_single(self, output: torch.Tensor, input: torch.Tensor, opts: Any = None) -> Work:
        """The output becomes what the ranks gave, one after the other."""
        count = input.numel()
        if count and self._ascending and self._plain(opts, output, input) and output.dtype is input.dtype:
            mine = output.data_ptr() + self._me * input.nbytes  # where FSDP2 puts its part
            if output.numel() == count * self._count and (input.data_ptr() == mine or apart(input, output)):
                return self._at_once(_core.ALLGATHER, 0, "all_gather", input, output, (count,), output.nbytes)
        return self.all_gather_single_coalesced([output], [input], opts)

    # -- everyone gets its own

    def _exchange(
        self, what: str, source: torch.Tensor, splits: Sequence[int], finish: _Finish, results: list[torch.Tensor],
        opts: Any, root: int = 0, output: torch.Tensor | None = None, even: bool = False
    ) -> Work:  # fmt: skip
        """source in one dimension; splits in its elements, in the order of the group. output: contiguous, for all that
        comes. even: the splits are equal on all ranks."""
        target, room = None, 0
        if not self._ascending:
            parts, order = list(source.split(list(splits))), sorted(range(self._count), key=self._set_ranks.__getitem__)
            source, splits = torch.cat([parts[each] for each in order]), [splits[each] for each in order]
        elif output is not None:
            target, room = output, output.numel() * output.element_size()
        return self._go(
            _core.ALLTOALL, what, [Part(source, target, source.shape, room)], results, finish, opts,
            splits=None if even else tuple(splits), root=root, even=even,
        )  # fmt: skip

    def all_to_all_single(
        self, output: torch.Tensor, input: torch.Tensor, output_splits: Any, input_splits: Any, opts: Any = None
    ) -> Work:
        """The output becomes what the ranks gave for this one. Splits: rows; none, on all ranks: equal parts."""
        even, count = not output_splits and not input_splits, input.numel()
        fits = output.dtype is input.dtype and output.shape == input.shape and input.dim()
        fits = fits and count and input.shape[0] % self._count == 0 and self._ascending
        if even and fits and self._plain(opts, output, input) and apart(input, output):
            return self._at_once(_core.ALLTOALL, 0, "all_to_all", input, output, (count,), output.nbytes)
        parts, taken = _rows(input, input_splits, self._count), _rows(output, output_splits, self._count)
        source = moved(input)
        row = source.numel() // max(sum(parts), 1)
        target = fresh(output)
        pieces = target.split(taken) if target.dim() else [target]

        def finish(pendings: list[_core.Pending]) -> None:
            fill(pieces, self._set_ranks, pendings[0], target if self._ascending else None)
            copy_back(target, output)

        splits = [each * row for each in parts]
        return self._exchange("all_to_all", source, splits, finish, [output], opts, 0, target, even)

    def alltoall(self, outputs: Any, inputs: Any, opts: Any = None) -> Work:
        """Each output becomes what a rank gave for this one; each input is for a rank."""
        if len(outputs) != self._count or len(inputs) != self._count:
            raise ValueError(f"all_to_all needs {self._count} inputs and outputs, one for each rank [HVD201]")
        splits = [moved(each).numel() for each in inputs]
        return self._exchange(
            "all_to_all", joined(inputs), splits, lambda pendings: fill(outputs, self._set_ranks, pendings[0]),
            list(outputs), opts,
        )  # fmt: skip

    def gather(self, outputs: Any, inputs: Any, opts: Any, timeout: Any = None) -> Work:
        """The root's outputs become what the ranks gave."""
        if isinstance(inputs, torch.Tensor):
            outputs, inputs = [outputs], [inputs]
        source, root = moved(inputs[0]), self._root(opts)
        if self._me == root and len(outputs[0]) != self._count:
            raise ValueError(f"gather needs a list of {self._count} tensors on the root [HVD201]")
        splits = [source.numel() if each == root else 0 for each in range(self._count)]
        parts = outputs[0] if self._me == root else []
        return self._exchange(
            "gather", source, splits, lambda pendings: fill(parts, self._set_ranks, pendings[0]), [*parts], opts,
            self._set_ranks[root],
        )  # fmt: skip

    def scatter(self, outputs: Any, inputs: Any, opts: Any, timeout: Any = None) -> Work:
        """The output becomes what the root gave for this rank."""
        if isinstance(outputs, torch.Tensor):
            outputs, inputs = [outputs], [inputs]
        (output,), root = outputs, self._root(opts)
        parts = inputs[0] if self._me == root else []
        if self._me == root and len(parts) != self._count:
            raise ValueError(f"scatter needs a list of {self._count} tensors on the root [HVD201]")
        source = joined(parts) if parts else moved(output)[:0]
        splits = [moved(each).numel() for each in parts] or [0] * self._count

        def finish(pendings: list[_core.Pending]) -> None:
            fill([output], [self._set_ranks[root]], pendings[0])

        return self._exchange("scatter", source, splits, finish, [output], opts, self._set_ranks[root])

    # by the names of torch before 2.13
    _allgather_base = all_gather_single
    allgather_into_tensor_coalesced = all_gather_single_coalesced
    alltoall_base = all_to_all_single


def _rows(tensor: torch.Tensor, splits: Any, count: int) -> list[int]:
    """How many rows of a tensor are for each rank, or from it. Raises ValueError where they do not add up."""
    rows = tensor.shape[0] if tensor.dim() else 1
    found = list(splits) if splits else [rows // count] * count
    if sum(found) != rows or len(found) != count:
        actual = f"splits {found}" if splits else f"no splits, and {count} ranks"
        raise ValueError(
            f"all_to_all_single: a tensor of {list(tensor.shape)}, {actual}: the sizes do not add up [HVD201]"
        )
    return found
