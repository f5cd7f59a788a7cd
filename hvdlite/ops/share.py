"""Where everyone ends with the same: broadcast (the root's tensor) and allgather (every rank's rows, in rank order).

The first dimension of an allgather may differ between ranks, and be 0; how many rows came from whom is kept in the
handle (`brought`), so that a gradient needs no second collective.

Roots are global ranks, also with process sets: `rank_in` translates. A root outside the set is a ValueError.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from .. import _core
from ..adapter import T
from ..process_set import ProcessSet, global_process_set, number_of, rank_in
from .handle import Handle
from .tensors import Tensors, group_of, placed
from .terms import Terms, full_name


class Shares(Tensors[T]):
    """allgather and broadcast."""

    def _allgather(self, tensor: Any, name: str | None, terms: Terms, waits: bool = False) -> Handle:
        mine, view = self._rows("allgather", tensor)
        pending = _core.submit(
            _core.ALLGATHER, 0, view.dtype, full_name("allgather.", name), view.shape, view.address, 0,
            self.adapter.memory(mine), process_set=number_of(terms.process_set),
            quiet=_core.QUIET if waits else _core.SOON,
            **placed(view, fetched=True),
        )  # fmt: skip

        def finish(pending: list[_core.Pending]) -> T:
            result, rows = self.fetched(pending[0], mine, view)
            handle.brought.append(rows)
            return result

        handle = Handle([pending], finish)
        return handle

    def _grouped_allgather(self, tensors: Any, name: str | None, terms: Terms, waits: bool = False) -> Handle:
        prepared = [self._rows("grouped_allgather", tensor) for tensor in group_of(tensors)]
        pending = self._submit_all(
            _core.ALLGATHER,
            [(view, self.adapter.memory(mine), 0) for mine, view in prepared],
            full_name("grouped_allgather.", name),
            terms._replace(op=0),
            waits,
        )

        def finish(pending: list[_core.Pending]) -> list[T]:
            results = [self.fetched(one, mine, view) for one, (mine, view) in zip(pending, prepared)]
            handle.brought.extend(rows for _, rows in results)
            return [result for result, _ in results]

        handle = Handle(pending, finish)
        return handle

    def allgather_async(
        self, tensor: Any, name: str | None = None, process_set: ProcessSet = global_process_set
    ) -> Handle:
        """Concatenate every rank's tensor along the first dimension, which may differ between ranks.

        The other dimensions and the dtype must be the same. ValueError for a tensor without dimensions.
        """
        return self._allgather(tensor, name, Terms(process_set))

    def allgather(
        self, tensor: Any, name: str | None = None, process_set: ProcessSet = global_process_set, *,
        exact_grad: bool = False, timeout: Any = None
    ) -> T:  # fmt: skip
        """allgather_async and synchronize: every rank's tensor, concatenated along the first dimension.

        The gradient is Horovod's, the average of the ranks' gradients; exact_grad=True gives their sum.
        """
        terms = Terms(process_set, exact=exact_grad, timeout=_core.seconds_of(timeout))
        return self._now("allgather", self._allgather, tensor, name, terms)

    def grouped_allgather_async(
        self, tensors: Sequence[Any], name: str | None = None, process_set: ProcessSet = global_process_set
    ) -> Handle:
        """allgather_async of several tensors that become ready as one; `synchronize` returns the list."""
        return self._grouped_allgather(tensors, name, Terms(process_set))

    def grouped_allgather(
        self, tensors: Sequence[Any], name: str | None = None, process_set: ProcessSet = global_process_set, *,
        exact_grad: bool = False, timeout: Any = None
    ) -> list[T]:  # fmt: skip
        """allgather of several tensors that travel as one group: the list of concatenated tensors."""
        terms = Terms(process_set, exact=exact_grad, timeout=_core.seconds_of(timeout))
        return self._now("grouped_allgather", self._grouped_allgather, tensors, name, terms)

    def _broadcast(
        self, tensor: Any, name: str | None, terms: Terms, waits: bool = False, in_place: bool = False
    ) -> Handle:
        accepted = self.adapter.accept(tensor, in_place)
        mine, view = self._readable(accepted)
        target = mine if in_place else self.adapter.like(mine, view.shape)
        number = number_of(terms.process_set)
        pending = _core.submit(
            _core.BROADCAST, 0, view.dtype, full_name("broadcast.", name), view.shape, view.address,
            self.adapter.view(target).address, (self.adapter.memory(mine), target),
            root=rank_in(terms.process_set, terms.root_rank), process_set=number,
            quiet=_core.QUIET if waits else _core.SOON,
            **placed(view),
        )  # fmt: skip
        return Handle([pending], lambda _: self._landed(accepted, target) if in_place else target)

    def broadcast_async(
        self, tensor: Any, root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set
    ) -> Handle:
        """The root's tensor on every rank, as a new one; shape and dtype must be the same on all."""
        return self._broadcast(tensor, name, Terms(process_set, root_rank=root_rank))

    def broadcast_async_(
        self, tensor: Any, root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set
    ) -> Handle:
        """broadcast_async that overwrites the tensor."""
        return self._broadcast(tensor, name, Terms(process_set, root_rank=root_rank), in_place=True)

    def broadcast(
        self, tensor: Any, root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set, *,
        exact_grad: bool = False, timeout: Any = None
    ) -> T:  # fmt: skip
        """broadcast_async and synchronize: a new tensor.

        The root's gradient is Horovod's, the average of the ranks' gradients; exact_grad=True gives their sum.
        """
        terms = Terms(process_set, root_rank=root_rank, exact=exact_grad, timeout=_core.seconds_of(timeout))
        return self._now("broadcast", self._broadcast, tensor, name, terms)

    def broadcast_(
        self, tensor: Any, root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set, *,
        timeout: Any = None
    ) -> T:  # fmt: skip
        """broadcast in place: overwrites and returns the tensor."""
        terms = Terms(process_set, root_rank=root_rank, timeout=_core.seconds_of(timeout))
        return self._broadcast(tensor, name, terms, True, True).wait(terms.timeout)
