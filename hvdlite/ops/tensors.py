"""From a caller's tensor to an address for the core, and from the core's memory to a tensor for the caller.

What all collectives share: which tensor is read and which is written (in place the same, else a new one; of a tensor
that is not contiguous a copy that is, which goes back afterwards), how a group becomes requests that are ready as one,
and how the result of a ragged collective, which the engine allocates here or on a device, becomes a tensor.

`_now` is where a framework comes in between a call and its result: PyTorch hangs gradients there. Every collective is
started by a function (tensor, name, terms, waits), so that one such hook serves them all.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Generic

from .. import _core
from .._core import byte_exchange
from ..errors import HvdArgumentError
from ..process_sets.process_set import number_of
from .adapter import Adapter, T, View
from .arguments import Terms, full_name
from .handle import Handle


class Tensors(Generic[T]):
    """What the collectives of a framework are made of."""

    def __init__(self, adapter: Adapter[T]) -> None:
        self.adapter = adapter

    def _now(self, kind: str, start: Callable[..., Handle], tensor: Any, name: str | None, terms: Terms) -> Any:
        """A collective and its result at once. `kind` is the name of its gradient; `tensor` may be a list of them."""
        return start(tensor, name, terms, True).wait(terms.timeout)

    def _readable(self, tensor: Any, writable: bool = False) -> tuple[T, View]:
        """A caller's tensor, contiguous."""
        mine = self.adapter.accept(tensor, writable)
        view = self.adapter.view(mine)
        if view.contiguous:
            return mine, view
        mine = self.adapter.contiguous(mine)
        return mine, self.adapter.view(mine)

    def _rows(self, kind: str, tensor: Any, near: bool = False) -> tuple[T, View]:
        """A caller's tensor whose first dimension will be cut or joined. near: a copy here of one that lies on a
        device."""
        mine, view = self._readable(tensor)
        if near and view.device is not None:
            home, mine = view.device, view.device.near(mine)
            view = self.adapter.view(mine)._replace(home=home)
        if not view.shape:
            raise HvdArgumentError(
                f"{kind} needs a tensor of at least one dimension: reshape a scalar to (1,) [HVD210]"
            )
        return mine, view

    def _completed(self, tensor: T, target: T) -> T:
        """In place: a result that came to a contiguous copy goes back to the caller's tensor."""
        if target is not tensor:
            self.adapter.copy(tensor, target)
        else:
            self.adapter.written(tensor)
        return tensor

    def _submit_all(
        self, kind: int, members: Sequence[tuple[View, Any, int]], base: str | None, terms: Terms, waits: bool
    ) -> list[_core.Pending]:
        """Requests that become ready as one. Members: view, what to keep alive, address of the result (0: none)."""
        number, count, quiet = number_of(terms.process_set), len(members), _core.QUIET if waits else _core.SOON
        terms_of_device = [placed(view, kind == _core.ALLGATHER) for view, _, _ in members]
        group = _core.group_number(base, number)

        submissions = [
            _core.submission(
                kind, terms.op, view.dtype, None if base is None else f"{base}_{i}of{count}", view.shape, view.address,
                address, keep, prescale=terms.prescale, postscale=terms.postscale, process_set=number, group=group,
                group_count=count, priority=terms.priority, **device_terms,
            )
            for i, ((view, keep, address), device_terms) in enumerate(zip(members, terms_of_device), 1)
        ]  # fmt: skip
        return _core.submit_group(submissions, quiet)

    def fetched(self, pending: _core.Pending, like: T, view: View) -> tuple[T, list[int]]:
        """What a ragged collective brought, as a new tensor whose rows are like the view's, and where that is; how many
        came from each rank."""
        gathered = pending.gathered()
        result = self.adapter.like(like, (gathered.rows, *view.shape[1:]))
        target = self.adapter.view(result).address
        if view.device is not None:
            view.device.fetch(pending.native, target, pending.ready)
        else:
            byte_exchange.copy(target, gathered.address, gathered.bytes)
        return result, gathered.rows_of


def placed(view: View, fetched: bool = False) -> dict[str, Any]:
    """What `_core.submit` has to know of a tensor that lies on a device. fetched: so will the result be, by
    `fetched`, which waits for it there."""
    device = view.device
    if device is None:
        return {}
    follow = None if fetched else device.follow
    return {"device": device.number, "ready": device.ready(), "follow": follow, "found": device.found}


def group_of(tensors: Any) -> list[Any]:
    """The members of a group. TypeError for what is no list of tensors."""
    if isinstance(tensors, (str, bytes)) or not isinstance(tensors, Sequence):
        raise TypeError(f"a group must be a list or tuple of tensors, not {type(tensors).__name__} [HVD211]")
    return list(tensors)


__all__ = ["Tensors", "Terms", "full_name", "group_of", "placed"]
