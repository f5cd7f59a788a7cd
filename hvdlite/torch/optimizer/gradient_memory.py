"""Memory of gradients: what shares it, when it moves into shared memory, and what can be reduced where it lies.

Autograd makes a gradient of whatever tensor nobody else holds, but a tensor is not its memory: where a parameter is
used through a view (`bias.view(...)`, `unsqueeze`), p.grad may share its memory with a gradient that backward still
needs for another branch, or with the gradient of another parameter. What lies there must not change before backward is
over, and views that the user holds must stay views.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Container, Sequence
from typing import TYPE_CHECKING, Any

import torch

from ... import _core
from ..._core.memory import block
from ..._core.request_batch import BatchEntry, Run, Sent
from ...errors import is_outcome
from ...ops import Handle
from ...ops.arguments import full_name, reduction
from ...ops.tensors import placed
from ...process_sets.process_set import ProcessSet, number_of, on_new_incarnation
from .. import storage_check
from ..ops import plain
from .gradient_allocator import GradientAllocator

if TYPE_CHECKING:
    from .reducer import Exchange


# Torch counts the users of a memory. One is the tensor; the object that Python makes to ask is another, or is freed by
# then (before PyTorch 2.5), so it is tried with a memory that has one user, and then two. If torch does not report the
# count, others are assumed: that costs copies, and is right.
_users: Callable[[Any], int] = getattr(torch._C, "_storage_Use_Count", lambda storage: 0)


def _users_of_one() -> int | None:
    """What the count is for one tensor alone; None: this torch does not report it."""
    tensor = torch.empty(1, device="cpu")
    alone = _users(tensor.untyped_storage()._cdata)
    both = (tensor, tensor.view(1))
    return alone if _users(both[0].untyped_storage()._cdata) == alone + 1 else None


_alone = _users_of_one()
_owner_of: dict[int, weakref.ref[Exchange]] = {}  # by id of a parameter, which its exchange keeps alive


def is_shared(tensor: torch.Tensor) -> bool:
    """Whether another tensor, or something outside of torch that holds one, has this dense tensor's memory."""
    return _alone is None or _users(tensor.untyped_storage()._cdata) > _alone


def is_held(tensor: torch.Tensor) -> bool:
    """Whether something beside its parameter and Python has the tensor itself, as a DLPack capsule does."""
    count = getattr(tensor, "_use_count", None)
    return count is None or count() > 2


def sum_of_bits(tensor: torch.Tensor) -> torch.Tensor | None:
    """The sum of its memory as 64-bit numbers, where it lies: as fast as memory is. None: it has no memory."""
    tensor = storage_check.bare(tensor).detach()
    if tensor.layout is not torch.strided or tensor.is_meta or not storage_check.fits(tensor, tensor.data_ptr()):
        return None
    octets = tensor.resolve_conj().resolve_neg().contiguous().view(-1).view(torch.uint8)
    whole = octets.numel() // 8 * 8
    if octets.storage_offset() % 8 or whole < octets.numel():
        octets = torch.nn.functional.pad(octets, (0, -octets.numel() % 8))
    return octets.view(torch.int64).sum()


def owner_of(parameter: torch.Tensor) -> Exchange | None:
    """The exchange that reduces its gradient, if there is one."""
    return _owner_of.get(id(parameter), lambda: None)()


def take_over(exchange: Exchange, parameter: torch.Tensor, name: str) -> None:
    """Two optimizers that reduce one gradient, each in place, would spoil it: the newer one has it."""
    earlier = owner_of(parameter)
    if earlier is not None and earlier is not exchange:
        earlier.lost = name
        earlier.hooks.remove()
    _owner_of[id(parameter)] = weakref.ref(exchange)


_ALIGN, _PROBES = 64, 4
_incarnations: list[None] = []  # jobs that have ended
on_new_incarnation(lambda: _incarnations.append(None))


class GradientMemory:
    """Shared memory for the gradients of one optimizer, so that they are reduced without a copy.

    Shared memory (hvdlite._core.memory) is reduced in place, in about half the time; other memory is copied in and out.
    The question is what it costs to move a gradient there. Measured on two ranks, per gradient in us:

        float32 of                         64 KB   256 KB    1 MB    4 MB   16 MB
        reduced in shared memory              39       79     190     609    2372
        reduced elsewhere                     48       98     309    1085    4140
        copied into shared memory first       28       59     216     825    3464

    So copying pays at no size: it costs what the plane's own copies cost, and more. Hence the rule, which is the same
    for all sizes and depends on the mode alone:

      * Where a gradient's memory stays from step to step (zero_grad(set_to_none=False), or no zero_grad at all), it
        moves into shared memory once, when a round has shown it. From then on that costs nothing. Small ones move with
        the large, since tensors in shared memory and others cannot be in one bucket.
      * Where autograd makes a new tensor in each step (zero_grad() as it is by default, whether or not several passes
        add up in it then), it is allocated there, if PyTorch permits it (`gradient_allocator`). Otherwise it stays
        where it is made.

    The tensor itself moves, and no new one replaces it: a reference to p.grad stays one to the average. A tensor whose
    memory may be used otherwise stays where it is: a view, a tensor with views, a part of a larger storage (flat
    buffers of the user's), a tensor given to another library or with a graph (create_graph). A user that only keeps its
    address (data_ptr()) must ask again. A gradient that the user replaces is reduced where it is then. When most
    gradients have left shared memory (the mode has changed), their memory there is freed; after another init(), whose
    plane has other memory, gradients move once more. All of one move is one slab, freed with the last tensor in it.
    """

    def __init__(self) -> None:
        self._moved: dict[int, int] = {}  # to these addresses
        self._incarnation = len(_incarnations)
        self._staying: list[int] = []
        self._allocator = GradientAllocator()

    def look(self, parameters: Sequence[torch.Tensor], sparse: Container[int] = ()) -> None:
        """A step's first pass begins: which gradients have stayed since the last one? `sparse`: numbers of others.

        A few are looked at: as long as the first of the places is in use, or where there are none, and of the
        gradients no more than the one whose hook calls, nothing has changed.
        """
        if self._moved and self._incarnation == len(_incarnations):
            first = next(iter(self._moved))
            gradient = parameters[first].grad
            if gradient is not None and gradient.layout is torch.strided and gradient.data_ptr() == self._moved[first]:
                return
        elif not self._moved:
            probes = {len(parameters) * i // _PROBES for i in range(_PROBES)}
            if sum(parameters[number].grad is not None for number in probes) <= (len(probes) > 1):
                self._allocator.serve(parameters, sparse, len(_incarnations))
                return
        staying = [number for number, parameter in enumerate(parameters) if parameter.grad is not None]
        if self._moved and self._incarnation == len(_incarnations) and 2 * len(staying) >= len(self._moved):
            return
        self._moved, self._incarnation = {}, len(_incarnations)
        self._staying = staying if 2 * len(staying) >= len(parameters) else []
        if self._staying:
            self._allocator.give_up()

    def move_in(self, parameters: Sequence[torch.Tensor]) -> None:
        """A round is over, nothing is in flight: gradients that `look` has found to stay get their shared memory."""
        staying, self._staying = self._staying, []
        staying = [number for number in staying if movable(parameters[number])]
        if staying and not self._moved:
            self._take(staying, parameters)

    def _take(self, numbers: Sequence[int], parameters: Sequence[torch.Tensor]) -> None:
        sizes = [parameters[number].numel() * parameters[number].element_size() for number in numbers]
        starts, total = [], 0
        for size in sizes:
            starts.append(total)
            total += -(-size // _ALIGN) * _ALIGN
        buffer = block(total) if total else None
        if buffer is None:
            return
        for number, start in zip(numbers, starts):
            gradient = parameters[number].grad
            assert gradient is not None
            flat = torch.frombuffer(buffer, dtype=gradient.dtype, count=gradient.numel(), offset=start)
            view = flat.view(gradient.shape)  # a storage of its own: a copy does not copy the slab
            view.copy_(gradient)
            gradient.data = view
            self._moved[number] = view.data_ptr()


def movable(parameter: torch.Tensor) -> bool:
    """Whether the user does not notice that the gradient's memory moves: it has all of its storage, and no graph."""
    gradient = parameter.grad
    return (
        gradient is not None
        and gradient.layout is torch.strided
        and gradient.is_cpu
        and gradient.is_contiguous()
        and gradient.numel() > 0
        and (gradient.dtype, gradient.shape) == (parameter.dtype, parameter.shape)
        and not (gradient.requires_grad or gradient.is_neg() or gradient._is_view() or gradient.is_inference())
        and type(gradient) is torch.Tensor
        and gradient.untyped_storage().nbytes() == gradient.numel() * gradient.element_size()
        and not (is_shared(gradient) or is_held(gradient))
    )


_PLAIN = {torch.Tensor}


class GradientRun:
    """Gradients that are sent in one call, step after step: what is looked at each time, and what only once.

    The plain case is a dense gradient in CPU memory of the parameter's dtype and shape, in row-major order, reduced
    where it lies. Whatever else a gradient may be (absent, sparse, in another order or dtype, on a device) is seen here
    before anything is sent, and its run is then sent one by one in the ways that the wire has for it. What may change
    between two steps is looked at in every one of them: where it lies, how much there is of it, its dtype and order.
    """

    def __init__(self, parameters: list[torch.Tensor], counts: list[int], run: Run) -> None:
        self.parameters, self._run = parameters, run
        self._dtypes = [parameter.dtype for parameter in parameters]
        self._counts = counts
        self._needed = [count * parameter.element_size() for count, parameter in zip(counts, parameters)]
        self._addresses: list[int] = []
        self._bytes: list[int] = []  # of their storages, which may be resized in place

    @staticmethod
    def of(members: Sequence[tuple[str, torch.Tensor]], settings: dict[str, Any]) -> GradientRun | None:
        """The run of these names and parameters; None if one of them can never be sent so."""
        terms = reduction(
            None, settings["op"], settings["prescale_factor"], settings["postscale_factor"], settings["process_set"]
        )
        made = []
        for name, parameter in members:
            try:
                view = plain.adapter.view(parameter)
            except ValueError:  # no dtype or device that can be sent; sending it alone raises the error
                return None
            if view.device is not None:  # so will its gradient be
                return None
            made.append(BatchEntry(full_name("allreduce.", name) or "", view.dtype, tuple(view.shape)))
        run = Run(made, terms.op, terms.prescale, terms.postscale, number_of(terms.process_set))
        return GradientRun([parameter for _, parameter in members], [math.prod(one.shape) for one in made], run)

    def gradients(self) -> list[torch.Tensor] | None:
        """The gradients, if all can be sent as they are."""
        try:
            gradients: list[Any] = [parameter.grad for parameter in self.parameters]
            if set(map(type, gradients)) != _PLAIN:  # a class may override anything
                return None
            addresses = [gradient.data_ptr() for gradient in gradients]
            if [gradient.dtype for gradient in gradients] != self._dtypes:
                return None
            if [gradient.numel() for gradient in gradients] != self._counts:  # the run would reach beyond its memory
                return None
            for gradient in gradients:
                if not gradient.is_contiguous():
                    return None
            sizes = [gradient.untyped_storage().nbytes() for gradient in gradients]
        except (AttributeError, RuntimeError):  # there is none, or it is sparse
            return None
        if addresses != self._addresses or sizes != self._bytes:
            for gradient, needed, size in zip(gradients, self._needed, sizes):
                if not gradient.is_cpu or gradient.is_neg():
                    return None
                offset = gradient.storage_offset()
                # torch/storage_check.py
                if needed > size or (offset and offset * gradient.element_size() + needed > size):
                    return None
            self._addresses = []  # a signal handler may raise half-way
            self._run.point(addresses)
            self._addresses, self._bytes = addresses, sizes
        return gradients

    def prepare(self, gradients: list[torch.Tensor]) -> Sent:
        """What will send what `gradients` has returned."""
        return self._run.prepare([plain.adapter.memory(gradient) for gradient in gradients])


def written(tensors: list[torch.Tensor]) -> None:
    """The core has overwritten them: let autograd find out when backward needs what was there before."""
    try:
        torch.autograd.graph.increment_version(tensors)
    except (TypeError, AttributeError, RuntimeError):  # an older torch takes one; an inference tensor has no version
        for tensor in tensors:
            plain.adapter.written(tensor)


class Both:
    """The handles of a sparse gradient, waited for as one (`gradient_codec`)."""

    def __init__(self, handles: list[Handle]) -> None:
        self.handles = handles

    def wait(self) -> None:
        failure: Exception | None = None
        for handle in self.handles:
            if failure is None or handle.done():  # after a mismatch of the first, no rank may answer the second
                try:
                    handle.wait()
                except Exception as error:
                    if not is_outcome(error):
                        raise
                    failure = failure or error
        if failure is not None:
            raise failure


def gathered(rows: torch.Tensor, name: str, process_set: ProcessSet, priority: int = 0) -> Handle:
    """An allgather under a name of another kind of collective."""
    view = plain.adapter.view(rows)
    pending = _core.submit(
        _core.ALLGATHER, 0, view.dtype, name, view.shape, view.address, 0, rows, process_set=number_of(process_set),
        priority=priority, **placed(view, fetched=True),
    )  # fmt: skip
    return Handle([pending], lambda pending: plain.fetched(pending[0], rows, view)[0])


def no_rows(parameter: torch.Tensor, sparse_dims: int) -> torch.Tensor:
    """A sparse gradient of a parameter that nothing was added to."""
    indices = torch.empty((sparse_dims, 0), dtype=torch.int64, device=parameter.device)
    values = torch.empty((0, *parameter.shape[sparse_dims:]), dtype=parameter.dtype, device=parameter.device)
    return torch.sparse_coo_tensor(indices, values, parameter.shape, check_invariants=False)
