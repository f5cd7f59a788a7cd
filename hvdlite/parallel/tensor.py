"""Communication of tensor-parallel layers: pairs of collectives, each the gradient of the other.

`hvd.allreduce` has a gradient of its own: that of the sum of all ranks' losses. Layers have another convention. All
ranks of a set have the same loss; a tensor that is alike on all of them ("replicated") has the same, full gradient on
all of them; one that is cut has its part of it. With n ranks:

    function       forward                      backward                     where
    copy_to        as it is                     allreduce                    before a column cut (Megatron's f)
    reduce_from    allreduce                    as it is                     after a row cut (Megatron's g)
    split_to       this rank's part             allgather                    replicated to cut
    gather_from    allgather                    this rank's part             cut to replicated
    to_sequence    reducescatter                allgather                    parts of a sum to a cut sequence
    from_sequence  allgather                    reducescatter                a cut sequence to what a cut layer reads
    switch_axis    alltoall                     alltoall                     the cut moves to another dimension

gather_from is for what all ranks then use alike. Where the whole is combined with something cut, its gradient is in
parts on each rank: that is from_sequence. Like copy_to, it adds the parts. A copy_to behind one of them would add the
sums again, n times the gradient in silence, so copy_to looks back. start_switch and finish_switch are switch_axis in
two halves: what is computed between them hides the exchange, in forward and in backward.

A group is a ProcessSet, or anything with size() and rank(); one of size 1 never communicates, so that the same code
builds the whole model in one process. Names are those of collectives: None for unnamed ones, which ranks match by the
order of their calls; the backward's has ".backward" behind it. All ranks of the group make the same calls, and run the
same backwards.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, Protocol

import torch
from torch.autograd.function import BackwardCFunction, once_differentiable

import hvdlite.torch as hvd

from ..torch.graph_break import keep_off_graph


class Group(Protocol):
    """The ranks that a tensor is cut over."""

    def size(self) -> int:
        """How many they are."""

    def rank(self) -> int:
        """This one's place among them."""


def part_of(n: int, group: Group) -> tuple[int, int]:
    """The first of n rows that belongs to this rank, and the one after its last. Parts differ by one row at most."""
    size, rank = group.size(), group.rank()
    return n * rank // size, n * (rank + 1) // size


def copy_to(x: torch.Tensor, group: Group, name: str | None = None) -> torch.Tensor:
    """Return a replicated tensor for weights that are cut. In backward, the gradients of all ranks are added.

    All ranks of the group must call it, and run the same backward. It is the function f of Megatron-LM (Shoeybi et al.,
    2019). ``ColumnLinear`` calls it itself: call it only before cut weights of your own. A tensor that comes directly
    from ``from_sequence`` or ``copy_to`` is returned as it is, because those add already.

    Args:
        x (torch.Tensor): the same on all ranks.
        group (ProcessSet): the ranks over which layers are cut.
        name (str, optional): of the collective in backward. Calls without a name are matched by their order.

    Returns:
        torch.Tensor: ``x``.

    Raises:
        HvdMismatchError: in backward, shapes or dtypes differ.
        HvdPeerLostError: in backward, a rank has left or died.
        ValueError: other operations lie between ``from_sequence`` or ``copy_to`` and this call.

    Example:
        >>> from hvdlite import parallel
        >>> tp, weight = hvd.global_process_set, torch.full((2,), hvd.rank() + 1.0)  # a cut weight
        >>> x = torch.ones(2, requires_grad=True)
        >>> parallel.reduce_from(parallel.copy_to(x, tp) @ weight, tp).backward()
        >>> x.grad.tolist()
        [3.0, 3.0]
    """
    return x if group.size() == 1 or _added(x, group, name) else _pair(x, _same, _sum, group, name)


def reduce_from(x: torch.Tensor, group: Group, name: str | None = None) -> torch.Tensor:
    """Return the sum of all ranks' tensors on every rank. In backward, the gradient passes unchanged.

    All ranks of the group must call it. It is the function g of Megatron-LM (Shoeybi et al., 2019).

    Args:
        x (torch.Tensor): shape and dtype are the same on all ranks.
        group (ProcessSet): the ranks over which layers are cut.
        name (str, optional): of the collective. Calls without a name are matched by their order.

    Returns:
        torch.Tensor: the sum.

    Raises:
        HvdMismatchError: shapes or dtypes differ.
        HvdPeerLostError: a rank has left or died.

    Example:
        >>> from hvdlite import parallel
        >>> parallel.reduce_from(torch.tensor([hvd.rank() + 1.0]), hvd.global_process_set).tolist()
        [3.0]
    """
    return _pair(x, _sum, _same, group, name)


def split_to(x: torch.Tensor, dim: int, group: Group, name: str | None = None) -> torch.Tensor:
    """Return this rank's part of a replicated tensor. In backward, the parts are gathered.

    Use it where a model begins to work on a cut sequence, for example after the embedding. Weights that work on a cut
    sequence have parts of their gradients on each rank: put their module into ``SequenceParallel``.

    Args:
        x (torch.Tensor): the same on all n ranks.
        dim (int): the dimension that is cut, a multiple of n.
        group (ProcessSet): the ranks.
        name (str, optional): of the collective in backward. Calls without a name are matched by their order.

    Returns:
        torch.Tensor: shape (..., d / n, ...).

    Raises:
        ValueError: the dimension is not a multiple of n.

    Example:
        >>> from hvdlite import parallel
        >>> x = torch.arange(4.0, requires_grad=True)
        >>> mine = parallel.split_to(x, 0, hvd.global_process_set)
        >>> mine.tolist()
        [0.0, 1.0]  # rank 0
        [2.0, 3.0]  # rank 1
        >>> mine.square().sum().backward()  # the loss is the sum over ranks
        >>> x.grad.tolist()
        [0.0, 2.0, 4.0, 6.0]
    """
    _even("split_to", x, dim, group)
    return _pair(x, partial(_part, dim), partial(_all_parts, dim), group, name)


def gather_from(x: torch.Tensor, dim: int, group: Group, name: str | None = None) -> torch.Tensor:
    """Return all ranks' parts as one replicated tensor. In backward, each rank keeps its part.

    Use it where all ranks use the whole alike: a loss, a norm, or a ``ColumnLinear`` without ``sequence=``, which adds
    the gradients of all ranks itself. Where your own cut weights read it directly, use ``from_sequence``.

    Args:
        x (torch.Tensor): this rank's part, shape (..., d / n, ...), the same shape on all ranks.
        dim (int): the dimension that is cut.
        group (ProcessSet): the ranks.
        name (str, optional): of the collective. Calls without a name are matched by their order.

    Returns:
        torch.Tensor: shape (..., d, ...), parts in rank order.

    Raises:
        HvdMismatchError: the parts have different shapes or dtypes.
        HvdPeerLostError: a rank has left or died.

    Example:
        >>> from hvdlite import parallel
        >>> x = torch.tensor([float(hvd.rank())], requires_grad=True)
        >>> whole = parallel.gather_from(x, 0, hvd.global_process_set)
        >>> whole.tolist()
        [0.0, 1.0]
        >>> (whole * torch.tensor([3.0, 4.0])).sum().backward()  # all ranks have the same loss
        >>> x.grad.tolist()
        [3.0]  # rank 0
        [4.0]  # rank 1
    """
    return _pair(x, partial(_all_parts, dim), partial(_part, dim), group, name)


def to_sequence(x: torch.Tensor, dim: int, group: Group, name: str | None = None) -> torch.Tensor:
    """Return this rank's part of the sum of all ranks' tensors. In backward, the parts are gathered.

    It stands after weights of your own that are cut by rows. ``RowLinear`` and ``VocabEmbedding`` call it themselves if
    they have ``sequence=``. Add a bias afterwards, as ``copy_to(bias, group)``.

    Args:
        x (torch.Tensor): shape and dtype are the same on all n ranks.
        dim (int): the dimension that is cut, a multiple of n.
        group (ProcessSet): the ranks.
        name (str, optional): of the collective. Calls without a name are matched by their order.

    Returns:
        torch.Tensor: shape (..., d / n, ...).

    Raises:
        HvdMismatchError: shapes or dtypes differ.
        ValueError: the dimension is not a multiple of n.

    Example:
        >>> from hvdlite import parallel
        >>> parallel.to_sequence(torch.tensor([1.0, 2.0]), 0, hvd.global_process_set).tolist()
        [2.0]  # rank 0
        [4.0]  # rank 1
    """
    _even("to_sequence", x, dim, group)
    return _pair(x, partial(_part_of_sum, dim), partial(_all_parts, dim), group, name)


def from_sequence(x: torch.Tensor, dim: int, group: Group, name: str | None = None) -> torch.Tensor:
    """Return all ranks' parts for weights that are cut. In backward, each rank gets its part of the summed gradients.

    Cut weights of your own must read the result directly. ``ColumnLinear`` calls it itself if it has ``sequence=``. For
    anything that all ranks compute alike, such as a norm, use ``gather_from``, or let it work on the cut sequence
    (``SequenceParallel``).

    Args:
        x (torch.Tensor): this rank's part, shape (..., d / n, ...), the same shape on all ranks.
        dim (int): the dimension that is cut.
        group (ProcessSet): the ranks.
        name (str, optional): of the collective. Calls without a name are matched by their order.

    Returns:
        torch.Tensor: shape (..., d, ...), parts in rank order.

    Raises:
        HvdMismatchError: the parts have different shapes or dtypes.
        HvdPeerLostError: a rank has left or died.

    Example:
        >>> from hvdlite import parallel
        >>> tp, weight = hvd.global_process_set, torch.full((1,), hvd.rank() + 1.0)  # a cut weight
        >>> x = torch.ones(1, requires_grad=True)  # 1 place of a sequence of 2
        >>> y = parallel.to_sequence(parallel.from_sequence(x, 0, tp) * weight, 0, tp)
        >>> y.sum().backward()  # of this rank's place; the loss is the sum over ranks
        >>> y.tolist(), x.grad.tolist()
        ([3.0], [3.0])
    """
    return _pair(x, partial(_all_parts, dim), partial(_part_of_sum, dim), group, name)


def switch_axis(x: torch.Tensor, cut: int, whole: int, group: Group, name: str | None = None) -> torch.Tensor:
    """Move the cut of a tensor from one dimension to another: (c, w / n) becomes (c / n, w).

    In backward, it moves back.

    Args:
        x (torch.Tensor): cut along ``whole``, the same shape on all n ranks.
        cut (int): the dimension that is cut afterwards, a multiple of n.
        whole (int): the dimension that is whole afterwards.
        group (ProcessSet): the ranks.
        name (str, optional): of the collective. Calls without a name are matched by their order.

    Returns:
        torch.Tensor: the same values, cut along ``cut``.

    Raises:
        HvdMismatchError: shapes or dtypes differ.
        ValueError: dimension ``cut`` is not a multiple of n.

    Example:
        >>> from hvdlite import parallel
        >>> column = torch.tensor([[0.0], [10.0]]) + hvd.rank()
        >>> parallel.switch_axis(column, 0, 1, hvd.global_process_set).tolist()
        [[0.0, 1.0]]  # rank 0
        [[10.0, 11.0]]  # rank 1
    """
    _even("switch_axis", x, cut, group)
    return _pair(x, partial(_switch, cut, whole), partial(_switch, whole, cut), group, name)


class Switch:
    """A start_switch that finish_switch will end. Its two autograd nodes share it; several may be in flight."""

    def __init__(self, cut: int, whole: int, group: Group, name: str | None) -> None:
        self.cut, self.whole, self.group, self.name = cut, whole, group, name
        self.token: Any = None  # the tensor by which autograd knows that the finish comes after the start
        self.handle: Any = None

    def send(self, x: torch.Tensor, cut: int, name: str | None) -> None:
        """Begin to exchange parts along `cut`."""
        self.handle = hvd.alltoall_async(_packed(x, cut, self.group), name=name, process_set=_set(self.group))

    def arrived(self, whole: int) -> torch.Tensor:
        """What the others have sent, put together along `whole`."""
        handle, self.handle = self.handle, None
        return _joined(hvd.synchronize(handle)[0], whole)


def start_switch(x: torch.Tensor, cut: int, whole: int, group: Group, name: str | None = None) -> Switch:
    """Start a ``switch_axis``, which ``finish_switch`` ends. Work between the two hides the exchange, in backward too.

    Args:
        x (torch.Tensor): as in ``switch_axis``.
        cut (int): the dimension that is cut afterwards, a multiple of n.
        whole (int): the dimension that is whole afterwards.
        group (ProcessSet): the ranks.
        name (str, optional): of the collective. Several may be in progress, with different names or none.

    Returns:
        Switch: for ``finish_switch``.

    Raises:
        ValueError: dimension ``cut`` is not a multiple of n.

    Example:
        >>> from hvdlite import parallel
        >>> begun = parallel.start_switch(torch.tensor([[0.0], [10.0]]), 0, 1, hvd.global_process_set)
        >>> parallel.finish_switch(begun).tolist()
        [[0.0, 0.0]]  # rank 0
        [[10.0, 10.0]]  # rank 1
    """
    _even("start_switch", x, cut, group)
    begun = Switch(cut, whole, group, name)
    begun.token = x if group.size() == 1 else _Start.apply(x, begun)
    return begun


def finish_switch(begun: Switch) -> torch.Tensor:
    """Wait for a ``start_switch`` and return what ``switch_axis`` returns.

    Args:
        begun (Switch): the result of ``start_switch``.

    Returns:
        torch.Tensor: the same values, cut along the other dimension.

    Raises:
        HvdMismatchError: shapes or dtypes differ.
        HvdPeerLostError: a rank has left or died.

    Example:
        >>> from hvdlite import parallel
        >>> begun = parallel.start_switch(torch.tensor([[1.0], [2.0]]), 0, 1, hvd.global_process_set)
        >>> parallel.finish_switch(begun).tolist()
        [[1.0, 1.0]]  # rank 0
        [[2.0, 2.0]]  # rank 1
    """
    token, begun.token = begun.token, None
    return token if begun.group.size() == 1 else _Finish.apply(token, begun)


class _Start(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, begun: Switch) -> torch.Tensor:
        ctx.begun = begun
        begun.send(x, begun.cut, begun.name)
        return x.new_empty(0)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, _: torch.Tensor) -> Any:
        return ctx.begun.arrived(ctx.begun.cut), None


class _Finish(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, token: torch.Tensor, begun: Switch) -> torch.Tensor:
        ctx.begun = begun
        return begun.arrived(begun.whole)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        begun = ctx.begun
        begun.send(gradient, begun.whole, begun.name and begun.name + ".backward")
        return gradient.new_empty(0), None


Way = Callable[[torch.Tensor, Group, Any], torch.Tensor]


class _Pair(torch.autograd.Function):
    """One way forward and the other way back. Its backward is a pair again, so gradients of gradients are right."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, there: Way, back: Way, group: Group, name: Any, backward_name: Any) -> Any:
        ctx.turned = back, there, group, backward_name, name
        return there(x, group, name)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        return _Pair.apply(gradient, *ctx.turned), None, None, None, None, None


def _pair(x: torch.Tensor, there: Way, back: Way, group: Group, name: str | None) -> torch.Tensor:
    if group.size() == 1:
        return x
    return _Pair.apply(x, there, back, group, name, None if name is None else name + ".backward")


_LOOK_BACK = 64  # operations between two layers, such as norms, dropout and residuals. It takes 1 us for each


def _added(x: torch.Tensor, group: Group, name: str | None) -> bool:
    """Whether x is the very result of a pair that adds gradients. ValueError if only something before x is: operations
    between two sums would send n times the gradient back. It looks back as far as to functions written in Python, whose
    insides it cannot see; they end replicated regions anyway, as pairs do."""
    nodes: list[Any] = [x.grad_fn]
    for node in nodes:
        if not isinstance(node, BackwardCFunction):
            if node is not None and len(nodes) < _LOOK_BACK:
                nodes += [before for before, _ in node.next_functions]
            continue
        back, _, other, *_ = getattr(node, "turned", [None] * 3)
        added = "copy_to" if back is _sum else "from_sequence" if getattr(back, "func", 0) is _part_of_sum else None
        if added is None or _set(other).ranks != _set(group).ranks:
            continue
        if node is nodes[0]:
            return True
        remedy = "leave it out" if added == "copy_to" else "use gather_from in its place"
        raise ValueError(
            f"copy_to (as in ColumnLinear){f' {name!r}' if name else ''} on rank {hvd.rank()}: its input "
            f"{list(x.shape)}, a result of {nodes[0].name()}, comes from {added}, which adds the gradients of "
            f"{group.size()} ranks too: {remedy}, or give the layer sequence= and a cut input [HVD038]"
        )
    return False


# The compiler would look into `_Pair` and find collectives there: it breaks its graph around the calls instead.
keep_off_graph(copy_to, reduce_from, split_to, gather_from, to_sequence, from_sequence, switch_axis)
keep_off_graph(start_switch, finish_switch)


def _set(group: Group) -> Any:
    """A group of more than one rank is a process set."""
    return group


def _even(what: str, x: torch.Tensor, dim: int, group: Group) -> None:
    if x.shape[dim] % group.size():
        raise ValueError(
            f"{what}: dimension {dim} of a tensor of shape {list(x.shape)} cannot be split evenly over "
            f"{group.size()} ranks [HVD016]"
        )


def _packed(x: torch.Tensor, dim: int, group: Group) -> torch.Tensor:
    """(..., d, ...) as (n, ..., d / n, ...): a row for each rank, which is how collectives cut."""
    return torch.stack(x.chunk(group.size(), dim))


def _joined(rows: torch.Tensor, dim: int) -> torch.Tensor:
    return torch.cat(rows.unbind(0), dim)


def _same(x: torch.Tensor, group: Group, name: str | None) -> torch.Tensor:
    return x.view_as(x)


def _sum(x: torch.Tensor, group: Group, name: str | None) -> torch.Tensor:
    return hvd.allreduce(x.contiguous(), op=hvd.Sum, name=name, process_set=_set(group))


def _part(dim: int, x: torch.Tensor, group: Group, name: str | None) -> torch.Tensor:
    return x.chunk(group.size(), dim)[group.rank()].contiguous()


def _all_parts(dim: int, x: torch.Tensor, group: Group, name: str | None) -> torch.Tensor:
    return _joined(hvd.allgather(x.contiguous().unsqueeze(0), name=name, process_set=_set(group)), dim)


def _part_of_sum(dim: int, x: torch.Tensor, group: Group, name: str | None) -> torch.Tensor:
    return hvd.reducescatter(_packed(x, dim, group), op=hvd.Sum, name=name, process_set=_set(group))[0]


def _switch(cut: int, whole: int, x: torch.Tensor, group: Group, name: str | None) -> torch.Tensor:
    return _joined(hvd.alltoall(_packed(x, cut, group), name=name, process_set=_set(group)), whole)
