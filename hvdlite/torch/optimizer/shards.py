"""Shards: what a rank keeps of a sharded optimizer, and the step on it.

A *piece* is what a rank owns of a parameter: a view of the parameter's own memory, of one dimension where tensors may
be cut. An inner optimizer of the original's class has the pieces as its parameters, in the original's groups. So
groups, frozen parameters, counters of steps and late parameters are the original's business. A parameter that is not
contiguous has a copy as its piece.

A step points the pieces at their shares of the averaged gradients, steps the inner optimizer, and publishes each
bucket: by an allgather in place where a parameter is cut, or by a broadcast from its owner.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import torch

from ... import _core
from ...errors import HvdError, HvdMismatchError
from ...errors.codes import uncoded
from ...lifecycle.init import incarnations
from ...ops import Handle, Max, Sum
from ...ops.tensors import placed
from ...process_sets.process_set import number_of
from ...training.shard_layout import Bucket, Item, Piece, lay_out, owners_of
from ..ops import plain
from .cut_trial import Verdict, flags_of, is_cut, judge, twin
from .gradient_memory import gathered
from .reproducible_norm import euclidean, greatest
from .sent_gradient import SentGradient
from .shard_carrier import WINDOW, ShardedExchange
from .state_offload import StateFile

_HANDED_ON = ("grad_scale", "found_inf")  # by GradScaler to a fused optimizer


class Shards:
    """The pieces of one rank, and the optimizer that steps on them."""

    def __init__(self, owner: Any, base: Any, exchange: ShardedExchange, verdict: Verdict, cap: int,
                 offload: StateFile | None = None) -> None:  # fmt: skip
        self._owner, self._base, self._exchange, self.verdict, self._cap = owner, base, exchange, verdict, cap
        self.carrier, self._wire = exchange.carrier, exchange.wire
        self.process_set = self.carrier.process_set
        self._step: Any = getattr(base.step, "__wrapped__", base.step) if hasattr(base.step, "hooked") else base.step
        self.offload = offload
        self.loaded: dict[str, Any] | None = None  # a whole state that was loaded after the last step
        self._flags = flags_of(owner)
        self.assign()

    def assign(self) -> None:
        """The ranks are those of this job now. Nothing is laid out, and no rank has state."""
        self.carrier.assign()
        self.ranks, self.me = self.carrier.ranks, self.carrier.me
        self._owners: dict[int, int] | None = None if self.verdict.anywhere else {}
        self._loads = [0] * self.ranks
        self.inner = twin(self._owner, self._base, [[] for _ in self._owner.__dict__["param_groups"]])
        self.pieces: dict[tuple[int, Piece], torch.Tensor] = {}  # by bucket and piece

    def is_of_this_job(self) -> bool:
        """Whether the layout is that of the ranks that there are now."""
        return bool(self.pieces or self.carrier.buckets) and self.carrier.incarnation == incarnations()

    def is_cut(self, key: str, value: torch.Tensor, shape: torch.Size) -> bool:
        """Whether pieces have parts of this entry. shape: of the piece, or of the parameter for a whole state."""
        return self.verdict.anywhere and is_cut(key, value, shape, self.verdict)

    def require_job(self) -> None:
        """HvdError if the shares are not of the ranks that there are now."""
        self.carrier.require_job()

    def add(self, group_of: dict[int, int]) -> None:
        """Parameters, by number, and the group of each."""
        parameters = self._wire.parameters
        items = [
            Item(n, parameters[n].numel(), (parameters[n].dtype, parameters[n].device), parameters[n].element_size())
            for n in sorted(group_of)
        ]
        if self._owners is not None:
            self._owners.update(owners_of(items, self._loads))
        first = len(self.carrier.buckets)
        self.carrier.append(lay_out(items, self._cap, self._owners))
        groups = self._owner.__dict__["param_groups"]
        for group in groups[len(self.inner.param_groups) :]:
            self.inner.param_groups.append({**group, "params": []})
        for index, bucket in list(enumerate(self.carrier.buckets))[first:]:
            for piece in self._cut(bucket):
                self.pieces[index, piece] = made = self._view(parameters[piece.number], piece)
                self.inner.param_groups[group_of[piece.number]]["params"].append(made)
        if self.offload is not None:
            fresh = [made for (index, _), made in self.pieces.items() if index >= first]
            self.offload.add((made, made.numel() * self._bytes_of_state(made)) for made in fresh)

    def _bytes_of_state(self, made: torch.Tensor) -> int:
        return len(self.verdict.keys) * made.element_size()  # of each element

    def _cut(self, bucket: Bucket) -> Iterator[Piece]:
        """What this rank owns of a bucket, in pieces that an offload can bear."""
        for piece in bucket.pieces(self.me, self.ranks):
            most = piece.end - piece.begin
            if self.offload is not None:
                most = self.offload.elements(self._bytes_of_state(self._wire.parameters[piece.number]))
            for begin in range(piece.begin, piece.end, most):
                end = min(begin + most, piece.end)
                yield Piece(piece.number, begin, end, piece.offset + begin - piece.begin)

    def state_of(self, made: torch.Tensor) -> dict[str, Any]:
        """The state of a piece, which is brought into memory for it; empty if there is none. Do not keep its values."""
        if self.offload is not None and made in self.inner.state:
            self.offload.bring(self, self.offload.chunk_of[made])
        found: dict[str, Any] = self.inner.state.get(made, {})
        return found

    def set_state(self, made: torch.Tensor, entries: dict[str, Any]) -> None:
        """Replace the state of a piece."""
        self.state_of(made)
        self.inner.state[made] = entries
        if self.offload is not None:
            self.offload.grown(self, self.offload.chunk_of[made])

    def drop_state(self) -> None:
        """No piece has state."""
        self.inner.state.clear()
        if self.offload is not None:
            self.offload.forget()

    def _view(self, parameter: torch.Tensor, piece: Piece) -> torch.Tensor:
        value = parameter.detach()
        if not self.verdict.anywhere:
            return value
        return value.view(-1)[piece.begin : piece.end] if value.is_contiguous() else _part(value, piece).clone()

    def numbers(self) -> dict[int, int]:
        """The number of each parameter, by its id."""
        return {id(parameter): number for number, parameter in enumerate(self._wire.parameters)}

    def prepare(self) -> None:
        """Give the pieces the memory of their parameters, their shares of the gradients, and the groups' options."""
        self.require_job()
        self._judge_again()
        for (index, piece), made in self.pieces.items():
            parameter = self._wire.parameters[piece.number]
            if parameter.dtype != made.dtype or parameter.device != made.device:
                raise HvdError(
                    f"parameter {self._wire.names[piece.number]!r} was {made.dtype} on {made.device} when the "
                    f"optimizer was wrapped, and is {parameter.dtype} on {parameter.device}: convert the model before "
                    "hvd.DistributedOptimizer(..., shard=True) [HVD200]"
                )
            now = self._view(parameter, piece)
            if now.data_ptr() != made.data_ptr():
                made.data = now
            share = self.carrier.shares.get(index)
            if share is None or not isinstance(parameter.grad, SentGradient):
                made.grad = None
            else:
                made.grad = share[piece.offset : piece.stop].view(made.shape)
        for mine, inner in zip(self._owner.__dict__["param_groups"], self.inner.param_groups):
            inner.update((key, value) for key, value in mine.items() if key != "params")
        for key in _HANDED_ON:
            self.inner.__dict__.pop(key, None)
            if key in self._owner.__dict__:
                self.inner.__dict__[key] = self._owner.__dict__[key]

    def _judge_again(self) -> None:
        """HvdError if options were set, by a late group or a loaded state, with which tensors may not be cut."""
        flags = flags_of(self._owner)
        if flags == self._flags:
            return
        verdict = judge(self._owner, self._base)
        if verdict.refused or (self.verdict.anywhere and not verdict.anywhere):
            raise HvdError(
                "options of a sharded optimizer were changed so that its tensors may not be cut as they are, such as "
                "by fused=True: set them before hvd.DistributedOptimizer(..., shard=True) [HVD200]"
            )
        self.verdict, self._flags = self.verdict._replace(keys=self.verdict.keys | verdict.keys), flags

    def step(self, *args: Any, **kwargs: Any) -> None:
        """Step on the pieces and publish what they have become."""
        self.loaded = None
        self.prepare()
        unsent = deque(index for index, _ in enumerate(self.carrier.buckets) if index in self.carrier.shares)
        try:
            self._stepped(args, kwargs)
            self.publish(unsent)
        except BaseException as error:
            if not isinstance(error, HvdError):
                self._give_up(unsent)
            raise

    def _stepped(self, args: Any, kwargs: Any) -> None:
        if self.offload is None:
            self._step(self.inner, *args, **kwargs)
        else:
            self.offload.step(self, lambda: self._step(self.inner, *args, **kwargs))
        for mine, inner in zip(self._owner.__dict__["param_groups"], self.inner.param_groups):
            mine.update((key, value) for key, value in inner.items() if key != "params")

    def _give_up(self, unsent: deque[int]) -> None:
        """This rank has failed in its step. The others disagree with what it sends then, and wait for nothing."""
        waits = [gathered(torch.zeros(1, dtype=torch.uint8), self.carrier.name(at), self.process_set) for at in unsent]
        for each in waits:
            with suppress(HvdError):
                each.wait()

    def publish(self, unsent: deque[int]) -> None:
        """The parameters of these buckets become on all ranks what their owners have."""
        sent: deque[tuple[Handle, Any]] = deque()
        failure: Exception | None = None
        while unsent:
            sent.append(self._sent(unsent[0], self.carrier.buckets[unsent[0]]))
            unsent.popleft()
            if len(sent) > WINDOW:
                failure = failure or _failure(*sent.popleft())
        while sent:
            failure = _failure(*sent.popleft()) or failure
        if failure is not None:
            raise failure

    def _sent(self, index: int, bucket: Bucket) -> tuple[Handle, Any]:
        """A bucket on its way to all ranks, and what spreads it when it has come."""
        parameters = [self._wire.parameters[number].detach() for number in bucket.numbers]
        mine = {piece: made for (at, piece), made in self.pieces.items() if at == index}
        alone = len(parameters) == 1 and parameters[0].is_contiguous()
        flat = parameters[0].view(-1) if alone else self.carrier.flat(bucket)[: bucket.total]
        low, high = bucket.section(self.me, self.ranks)
        if not alone:
            for piece, made in mine.items():
                flat[low + piece.offset : low + piece.stop].view(made.shape).copy_(made)

        def spread(whole: torch.Tensor) -> None:
            at = 0
            for parameter, count in zip(parameters, bucket.counts):
                if not alone or whole is not flat:
                    parameter.copy_(whole[at : at + count].view(parameter.shape))
                at += count
            if alone:
                plain.adapter.written(parameters[0])
            else:
                self.carrier.spare(flat)

        name = self.carrier.name(index)
        if bucket.owner is not None:
            return _broadcast(flat, name, bucket.owner, self.process_set), spread
        if not flat.is_cpu:
            return gathered(flat[low:high], name, self.process_set), spread
        return _gathered_in_place(flat, low, high, name, self.process_set), spread

    def drop(self) -> None:
        """Gradients are zero."""
        self.carrier.shares.clear()
        for made in self.pieces.values():
            made.grad = None
        for parameter in self._wire.parameters:
            if isinstance(parameter.grad, SentGradient):
                parameter.grad = None

    def gradients(self) -> Iterator[torch.Tensor]:
        """This rank's shares of the averaged gradients, after `prepare`."""
        return (made.grad for made in self.pieces.values() if made.grad is not None)

    def agreed(self, value: float) -> float:
        """The greatest of the ranks' values."""
        return float(self._combined(torch.tensor([value], dtype=torch.float64), Max))

    def _combined(self, mine: torch.Tensor, op: int) -> torch.Tensor:
        """By the name of the first bucket: a rank that is in its backward or step meanwhile disagrees at once."""
        try:
            return plain.allreduce(mine, op=op, name=self.carrier.label(0), process_set=self.process_set)
        except HvdMismatchError as error:
            raise HvdMismatchError(
                "clip_grad_norm_ and GradScaler look at the shares of all ranks, so all ranks must call them. Another "
                f"rank left it out: {uncoded(str(error))} [HVD310]"
            ) from None

    def norm(self, norm_type: float) -> float:
        """The norm of the averaged gradients of the whole model."""
        if norm_type == float("inf"):
            return self.agreed(greatest(self.gradients()))
        count = sum(bucket.total for bucket in self.carrier.buckets)
        return euclidean(list(self.gradients()), count, self.agreed, lambda sums: self._combined(sums, Sum))


def _part(value: torch.Tensor, piece: Piece) -> torch.Tensor:
    return value.reshape(-1)[piece.begin : piece.end]


def _failure(handle: Handle, spread: Any) -> Exception | None:
    try:
        spread(handle.wait())
    except Exception as error:
        return error
    return None


def _broadcast(flat: torch.Tensor, name: str, owner: int, process_set: Any) -> Handle:
    view = plain.adapter.view(flat)
    pending = _core.submit(
        _core.BROADCAST, 0, view.dtype, name, view.shape, view.address, view.address, flat.untyped_storage(),
        root=owner, process_set=number_of(process_set), quiet=_core.SOON, **placed(view),
    )  # fmt: skip
    return Handle([pending], lambda _: flat)


def _gathered_in_place(flat: torch.Tensor, low: int, high: int, name: str, process_set: Any) -> Handle:
    """This rank's section of a tensor has its values; all sections will."""
    view, size = plain.adapter.view(flat), flat.element_size()
    pending = _core.submit(
        _core.ALLGATHER, 0, view.dtype, name, (high - low,), view.address + low * size, view.address,
        flat.untyped_storage(), process_set=number_of(process_set), output_bytes=flat.numel() * size, quiet=_core.SOON,
    )  # fmt: skip
    return Handle([pending], lambda _: flat)
