"""Where everyone ends with the same: broadcast (the root's tensor) and allgather (every rank's rows, in rank order).

The first dimension of an allgather may differ between ranks, and be 0; the number of rows of each rank is kept in
the handle (`brought`), so that a gradient needs no second collective.

Roots are global ranks, also with process sets: `rank_in` translates. A root outside the set is a ValueError.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from .. import _core
from ..process_sets.process_set import ProcessSet, global_process_set, number_of, rank_in
from .adapter import T
from .arguments import Terms, full_name
from .handle import Handle
from .tensors import Tensors, group_of, placed


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

        brought: list[Any] = []

        def finish(pending: list[_core.Pending]) -> T:
            result, rows = self.fetched(pending[0], mine, view)
            brought.append(rows)
            return result

        return Handle([pending], finish, brought)

    def _grouped_allgather(self, tensors: Any, name: str | None, terms: Terms, waits: bool = False) -> Handle:
        prepared = [self._rows("grouped_allgather", tensor) for tensor in group_of(tensors)]
        pending = self._submit_all(
            _core.ALLGATHER,
            [(view, self.adapter.memory(mine), 0) for mine, view in prepared],
            full_name("grouped_allgather.", name),
            terms._replace(op=0),
            waits,
        )

        brought: list[Any] = []

        def finish(pending: list[_core.Pending]) -> list[T]:
            results = [self.fetched(one, mine, view) for one, (mine, view) in zip(pending, prepared)]
            brought.extend(rows for _, rows in results)
            return [result for result, _ in results]

        return Handle(pending, finish, brought)

    def allgather_async(
        self, tensor: Any, name: str | None = None, process_set: ProcessSet = global_process_set
    ) -> Handle:
        """Start an ``allgather`` and return a handle.

        Do not change ``tensor`` until ``synchronize`` has returned. It has no gradient.

        Args:
            tensor (array): as in ``allgather``.
            name (str, optional): name of the collective, the same on all ranks. Default: calls without a name are
                matched by their order.
            process_set (ProcessSet): ranks that take part. Default: all ranks.

        Returns:
            Handle: ``synchronize`` returns the rows of all ranks.

        Raises:
            HvdNotInitializedError: before ``init``. ``synchronize`` raises what the plain form raises while it waits.
            ValueError: for an unsupported dtype or op, for a name that is in flight, and on a rank outside
                ``process_set``.
            TypeError: if an argument has a wrong type.
            HvdArgumentError: for a tensor without dimensions.

        Example:
            >>> handle = hvd.allgather_async(np.array([10 * hvd.rank()]))
            >>> hvd.synchronize(handle).tolist()
            [0, 10]
        """
        return self._allgather(tensor, name, Terms(process_set))

    def allgather(
        self, tensor: Any, name: str | None = None, process_set: ProcessSet = global_process_set, *,
        exact_grad: bool = False, timeout: Any = None
    ) -> T:  # fmt: skip
        """Concatenate the tensors of all ranks along the first dimension and return the result on every rank.

        The first dimension may differ between ranks and may be 0. The other dimensions and the dtype must be the same.
        It blocks until all ranks of ``process_set`` have called it.

        Args:
            tensor (array): at least one dimension.
            name (str, optional): name of the collective, the same on all ranks. Default: calls without a name are
                matched by their order.
            process_set (ProcessSet): ranks that take part. Default: all ranks.
            timeout (float or datetime.timedelta, optional): seconds to wait, above 0, as in ``synchronize``. Default:
                no limit of this call.
            exact_grad (bool): PyTorch only. True sums the ranks' gradients, which is exact. Default: False,
                their average, as in Horovod.

        Returns:
            array: the rows of all ranks, in the order of the ranks; new, of the dtype of ``tensor``.

        Raises:
            HvdMismatchError: if the ranks disagree on dtype or other dimensions.
            HvdPeerLostError: if a rank dies or leaves the job.
            HvdTimeoutError: if ``timeout`` passes first.
            HvdNotInitializedError: before ``init``.
            ValueError: for an unsupported dtype or op, for a name that is in flight, and on a rank outside
                ``process_set``.
            TypeError: if an argument has a wrong type.
            HvdArgumentError: for a tensor without dimensions.

        Example:
            >>> x = np.array([hvd.rank()] * (hvd.rank() + 1))
            >>> hvd.allgather(x).tolist()
            [0, 1, 1]
        """
        terms = Terms(process_set, exact=exact_grad, timeout=_core.seconds_of(timeout))
        return self._now("allgather", self._allgather, tensor, name, terms)

    def grouped_allgather_async(
        self, tensors: Sequence[Any], name: str | None = None, process_set: ProcessSet = global_process_set
    ) -> Handle:
        """Start a ``grouped_allgather`` and return one handle for the group.

        Do not change the tensors until ``synchronize`` has returned. It has no gradient.

        Args:
            tensors (list of arrays): as in ``grouped_allgather``.
            name (str, optional): name of the collective, the same on all ranks. Default: calls without a name are
                matched by their order.
            process_set (ProcessSet): ranks that take part. Default: all ranks.

        Returns:
            Handle: ``synchronize`` returns the list of gathered tensors.

        Raises:
            HvdNotInitializedError: before ``init``. ``synchronize`` raises what the plain form raises while it waits.
            ValueError: for an unsupported dtype or op, for a name that is in flight, and on a rank outside
                ``process_set``.
            TypeError: if an argument has a wrong type.
            HvdArgumentError: for a tensor without dimensions.

        Example:
            >>> handle = hvd.grouped_allgather_async([np.array([hvd.rank()])])
            >>> [each.tolist() for each in hvd.synchronize(handle)]
            [[0, 1]]
        """
        return self._grouped_allgather(tensors, name, Terms(process_set))

    def grouped_allgather(
        self, tensors: Sequence[Any], name: str | None = None, process_set: ProcessSet = global_process_set, *,
        exact_grad: bool = False, timeout: Any = None
    ) -> list[T]:  # fmt: skip
        """Concatenate each of several tensors over all ranks, as one group.

        No tensor is gathered before all ranks have given all of them. Each tensor follows the rules of ``allgather``.

        Args:
            tensors (list of arrays): the tensors, each of at least one dimension.
            name (str, optional): name of the collective, the same on all ranks. Default: calls without a name are
                matched by their order.
            process_set (ProcessSet): ranks that take part. Default: all ranks.
            timeout (float or datetime.timedelta, optional): seconds to wait, above 0, as in ``synchronize``. Default:
                no limit of this call.
            exact_grad (bool): PyTorch only. As in ``allgather``. Default: False.

        Returns:
            list of arrays: for each tensor the rows of all ranks, new, in the order of ``tensors``.

        Raises:
            HvdMismatchError: if the ranks disagree on dtypes or other dimensions.
            HvdPeerLostError: if a rank dies or leaves the job.
            HvdTimeoutError: if ``timeout`` passes first.
            HvdNotInitializedError: before ``init``.
            ValueError: for an unsupported dtype or op, for a name that is in flight, and on a rank outside
                ``process_set``.
            TypeError: if an argument has a wrong type.
            HvdArgumentError: for a tensor without dimensions.

        Example:
            >>> ids, scores = hvd.grouped_allgather([np.array([hvd.rank()]), np.array([0.5])])
            >>> ids.tolist(), scores.tolist()
            ([0, 1], [0.5, 0.5])
        """
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
        return Handle([pending], lambda _: self._completed(accepted, target) if in_place else target)

    def broadcast_async(
        self, tensor: Any, root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set
    ) -> Handle:
        """Start a ``broadcast`` and return a handle.

        Do not change ``tensor`` until ``synchronize`` has returned. It has no gradient.

        Args:
            tensor (array): any shape, the same on all ranks.
            root_rank (int): global rank whose tensor is sent.
            name (str, optional): name of the collective, the same on all ranks. Default: calls without a name are
                matched by their order.
            process_set (ProcessSet): ranks that take part. Default: all ranks.

        Returns:
            Handle: ``synchronize`` returns a new tensor with the root's values.

        Raises:
            HvdNotInitializedError: before ``init``. ``synchronize`` raises what the plain form raises while it waits.
            ValueError: for an unsupported dtype or op, for a name that is in flight, and on a rank outside
                ``process_set``.
            TypeError: if an argument has a wrong type.

        Example:
            >>> handle = hvd.broadcast_async(np.array([hvd.rank()]), root_rank=1)
            >>> hvd.synchronize(handle).tolist()
            [1]
        """
        return self._broadcast(tensor, name, Terms(process_set, root_rank=root_rank))

    def broadcast_async_(
        self, tensor: Any, root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set
    ) -> Handle:
        """Start a ``broadcast_``, which overwrites the tensor, and return a handle.

        Do not read or change ``tensor`` until ``synchronize`` has returned. It has no gradient.

        Args:
            tensor (array): any shape, the same on all ranks; writable.
            root_rank (int): global rank whose tensor is sent.
            name (str, optional): name of the collective, the same on all ranks. Default: calls without a name are
                matched by their order.
            process_set (ProcessSet): ranks that take part. Default: all ranks.

        Returns:
            Handle: ``synchronize`` returns ``tensor`` itself.

        Raises:
            HvdNotInitializedError: before ``init``. ``synchronize`` raises what the plain form raises while it waits.
            ValueError: for an unsupported dtype or op, for a name that is in flight, and on a rank outside
                ``process_set``.
            TypeError: if an argument has a wrong type.

        Example:
            >>> x = np.array([hvd.rank()])
            >>> _ = hvd.synchronize(hvd.broadcast_async_(x, root_rank=1))
            >>> x.tolist()
            [1]
        """
        return self._broadcast(tensor, name, Terms(process_set, root_rank=root_rank), in_place=True)

    def broadcast(
        self, tensor: Any, root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set, *,
        exact_grad: bool = False, timeout: Any = None
    ) -> T:  # fmt: skip
        """Return the root's tensor on every rank.

        All ranks of ``process_set`` must call it with the same root, shape and dtype. The values on other ranks are not
        used. The gradient of the root's tensor is made from the gradients of all ranks, so all ranks must run backward.

        Args:
            tensor (array): any shape, the same on all ranks.
            root_rank (int): global rank whose tensor is sent.
            name (str, optional): name of the collective, the same on all ranks. Default: calls without a name are
                matched by their order.
            process_set (ProcessSet): ranks that take part. Default: all ranks.
            timeout (float or datetime.timedelta, optional): seconds to wait, above 0, as in ``synchronize``. Default:
                no limit of this call.
            exact_grad (bool): PyTorch only. True sums the ranks' gradients, which is exact. Default: False,
                their average, as in Horovod.

        Returns:
            array: a new tensor with the root's values.

        Raises:
            HvdMismatchError: if the ranks disagree on root, shape or dtype.
            HvdPeerLostError: if a rank dies or leaves the job.
            HvdTimeoutError: if ``timeout`` passes first.
            HvdNotInitializedError: before ``init``.
            ValueError: for an unsupported dtype or op, for a name that is in flight, and on a rank outside
                ``process_set``.
            TypeError: if an argument has a wrong type.

        Example:
            >>> hvd.broadcast(np.array([1, 2]) * hvd.rank(), root_rank=1).tolist()
            [1, 2]
        """
        terms = Terms(process_set, root_rank=root_rank, exact=exact_grad, timeout=_core.seconds_of(timeout))
        return self._now("broadcast", self._broadcast, tensor, name, terms)

    def broadcast_(
        self, tensor: Any, root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set, *,
        timeout: Any = None
    ) -> T:  # fmt: skip
        """Overwrite a tensor with the root's and return it.

        Like ``broadcast``, but in place. It has no gradient.

        Args:
            tensor (array): any shape, the same on all ranks; writable.
            root_rank (int): global rank whose tensor is sent.
            name (str, optional): name of the collective, the same on all ranks. Default: calls without a name are
                matched by their order.
            process_set (ProcessSet): ranks that take part. Default: all ranks.
            timeout (float or datetime.timedelta, optional): seconds to wait, above 0, as in ``synchronize``. Default:
                no limit of this call.

        Returns:
            array: ``tensor`` itself.

        Raises:
            HvdMismatchError: if the ranks disagree on root, shape or dtype.
            HvdPeerLostError: if a rank dies or leaves the job.
            HvdTimeoutError: if ``timeout`` passes first.
            HvdNotInitializedError: before ``init``.
            ValueError: for an unsupported dtype or op, for a name that is in flight, and on a rank outside
                ``process_set``.
            TypeError: if an argument has a wrong type.

        Example:
            >>> x = np.array([1.0, 2.0]) * (hvd.rank() + 1)
            >>> hvd.broadcast_(x, root_rank=0) is x, x.tolist()
            (True, [1.0, 2.0])
        """
        terms = Terms(process_set, root_rank=root_rank, timeout=_core.seconds_of(timeout))
        return self._broadcast(tensor, name, terms, True, True).wait(terms.timeout)
