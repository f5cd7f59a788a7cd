"""`DistributedOptimizer(..., shard=True)`: each rank keeps its share of the optimizer's state (ZeRO stage 1).

The averaged gradients are shares, too. A rank steps on its share of the parameters, and all ranks get the result. The
method is that of S. Rajbhandari et al., ZeRO: Memory Optimizations Toward Training Trillion Parameter Models, SC 2020.
Values and state have the bits of the optimizer without ``shard``, as the trial (`cut_trial`) finds out.

`ShardedMethods` stands before the methods of `Distributed`, and `StepOnShards` between them and the original's class.
"""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

from ...errors import HvdMismatchError
from ...errors.codes import coded, uncoded
from ...errors.user_warning import warn
from ...ops import Average, Sum
from ...process_sets.process_set import ProcessSet, global_process_set
from ...rendezvous import elastic_member
from ...training.consistency import require_equal
from ..compression import Compression
from .cut_trial import depends_on_calls, judge
from .gradient_codec import Wire
from .methods import Distributed, called_by_grad_scaler
from .reproducible_norm import clip, known_norm
from .shard_carrier import ShardCarrier, ShardedExchange, ShardedWire
from .shard_state import take_whole, whole_state
from .shards import Shards
from .share_reduction import across
from .state_offload import StateFile, bytes_of

_MB = 1 << 20
_COMPRESSIONS = (Compression.none, Compression.fp16, Compression.bf16)


class Sharding(NamedTuple):
    """What the arguments of `DistributedOptimizer` say. inside: the ranks that shard, this one among them."""

    inside: ProcessSet
    cap_mb: float
    offload: str | None  # a folder, for state of more than memory_cap bytes
    memory_cap: int

    @classmethod
    def of(cls, shard: Any, process_set: ProcessSet, cap_mb: Any, offload: Any, memory_cap: Any) -> Sharding | None:
        """None: the optimizer is not sharded. TypeError or ValueError for what they must not be."""
        if (offload is None) != (memory_cap is None) or (offload is not None and shard is False):
            raise ValueError(
                "offload= needs shard=True and memory_cap=, the bytes of the optimizer's state that stay in memory, "
                'such as "2G" [HVD200]'
            )
        if shard is False:
            return None
        if shard is not True and not isinstance(shard, ProcessSet):
            raise TypeError(f"shard={shard!r} must be True, False or a hvd.ProcessSet [HVD200]")
        if isinstance(cap_mb, bool) or not isinstance(cap_mb, (int, float)) or not cap_mb > 0:
            raise ValueError(f"shard=True: bucket_cap_mb={cap_mb!r} must be a number above 0 [HVD200]")
        inside = process_set if shard is True else shard
        folder = None if offload is None else os.fspath(offload)
        return cls(inside, cap_mb, folder, 0 if folder is None else bytes_of(memory_cap))

    def warn_of_one_rank(self, alone: bool) -> None:
        """With one rank nothing is sharded."""
        if alone and self.offload is not None:
            warn("offload= does nothing for one rank, which has the whole state in memory: start more ranks [HVD200]")


class ShardedMethods(Distributed):
    """What a training loop calls, where that is not the same as without ``shard``."""

    _hvd_shards: Shards

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """The parameter groups. GradScaler finds this rank's shares of the averaged gradients."""
        exchange: Any = self._hvd
        if not called_by_grad_scaler():
            return self.__dict__["param_groups"]
        if not exchange.skipping:
            exchange.complete()
            exchange.behind = None
        shards = self._hvd_shards
        shards.prepare()
        sick = any(not torch.isfinite(gradient).all() for gradient in shards.gradients())
        flag = torch.zeros(1)  # infinite on all ranks, which must skip the step together
        flag.grad = torch.full((1,), float("inf") if shards.agreed(float(sick)) else 0.0)
        return [{"params": [*shards.pieces.values(), flag]}]

    @param_groups.setter
    def param_groups(self, groups: list[dict[str, Any]]) -> None:
        self.__dict__["param_groups"] = groups

    def zero_grad(self, *args: Any, **kwargs: Any) -> None:
        """The original's zero_grad. Shares are dropped, and gradients become None."""
        super().zero_grad(*args, **kwargs)
        self._hvd_shards.drop()

    def clip_grad_norm_(
        self, max_norm: float, norm_type: float = 2.0, error_if_nonfinite: bool = False
    ) -> torch.Tensor:
        """As without ``shard``, and with the same bits. All ranks must call it."""
        exchange: Any = self._hvd
        exchange.complete()
        self._hvd_shards.prepare()
        norm = self._hvd_shards.norm(known_norm(norm_type))
        return clip(self._hvd_shards.gradients(), norm, max_norm, error_if_nonfinite)

    def state_dict(self) -> Any:
        """The original's state_dict, whole, on rank 0 of the process set; None elsewhere. All ranks must call it."""
        state = whole_state(self._hvd_shards)
        outline = super().state_dict()  # type: ignore[misc]
        if state is None:
            return None
        numbers = self._hvd_shards.numbers()
        order = [numbers[id(each)] for group in self.__dict__["param_groups"] for each in group["params"]]
        outline["state"] = {at: state[number] for at, number in enumerate(order) if number in state}
        return outline

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a whole state, of any number of ranks or of one process. Each rank keeps its share of it."""
        if state_dict is None:
            raise ValueError(
                "this state is None, as state_dict() of a sharded optimizer returns it on other ranks than the first: "
                "save it on rank 0, and load that file on all ranks [HVD200]"
            )
        if not elastic_member.is_elastic():
            self._hvd_shards.require_job()
        super().load_state_dict(state_dict)
        self._hvd_shards.drop()
        self._hvd_shards.loaded = state_dict

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """The original's add_param_group, on all ranks with the same parameters."""
        known = len(self._hvd.wire.parameters)  # type: ignore[union-attr]
        super().add_param_group(param_group)
        if self._hvd_shards.is_of_this_job() or not elastic_member.is_elastic():
            lay_out(self, range(known, len(self._hvd.wire.parameters)))  # type: ignore[union-attr]

    def register_comm_hook(self, state: Any, hook: Any, bucket_cap_mb: float = 25.0) -> None:
        """ValueError: gradients are reduced to their owners only."""
        raise ValueError("shard=True reduces the gradients to their owners: it takes no comm hook [HVD227]")


class StepOnShards:
    """Behind `Distributed`, in the place of the original's step."""

    _hvd_shards: Shards

    def step(self, closure: Callable[[], Any] | None = None, *args: Any, **kwargs: Any) -> Any:
        """The original's step, on this rank's share."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        with torch.no_grad():
            try:
                self._hvd_shards.step(*args, **kwargs)
            except HvdMismatchError as error:
                raise _other_step(error) from None
        return loss

    if hasattr(torch.optim.Optimizer, "profile_hook_step"):
        step = torch.optim.Optimizer.profile_hook_step(step)  # runs the hooks that users register


def _other_step(error: HvdMismatchError) -> HvdMismatchError:
    found = HvdMismatchError(
        "optimizer.step() of a sharded optimizer publishes each rank's share, so all ranks must take the step. Another "
        f"rank left it out, or called state_dict() meanwhile. The parameters are a mixture of old and new ones: load a "
        f"checkpoint on all ranks: {uncoded(str(error))} [HVD310]"
    )
    found.ranks = error.ranks
    return found


def sharded(
    optimizer: torch.optim.Optimizer, wrapped: Any, wire_of: Callable[[type[Wire]], Wire], passes: int,
    pairs: Sequence[tuple[torch.Tensor, str]], sharding: Sharding
) -> Any:  # fmt: skip
    """Make `wrapped`, an object of a class with these methods, a sharded optimizer of these parameters.

    wire_of: makes the wire, of the class that it is given.
    """
    inside = sharding.inside
    base = type(optimizer)
    verdict = judge(optimizer, base)
    if verdict.refused:
        raise ValueError(f"{base.__name__} cannot be sharded: {verdict.refused}. Leave out shard=True [HVD200]")
    offload = None
    if sharding.offload is not None:
        if not verdict.anywhere or depends_on_calls(optimizer, base):
            raise ValueError(
                f"offload= steps on one part of the state after the other, which {base.__name__} with these options "
                "does not support: leave out offload= [HVD200]"
            )
        offload = StateFile(sharding.offload, sharding.memory_cap)
    exchange = ShardedExchange(wire_of(ShardedWire), passes)
    exchange.carrier = ShardCarrier(exchange, inside, across(inside, exchange.wire.process_set))
    for parameter, name in pairs:
        exchange.add(parameter, name)
    before, loaded = dict(wrapped.state), optimizer.state_dict()  # the same tensors
    wrapped.state.clear()  # the original has it, too
    wrapped.__dict__["_hvd"] = exchange
    wrapped.__dict__["_hvd_shards"] = Shards(wrapped, base, exchange, verdict, int(sharding.cap_mb * _MB), offload)
    if not elastic_member.is_elastic():  # there it is done by the first sync, in which newcomers take part
        lay_out(wrapped, range(len(pairs)))
        take_whole(wrapped._hvd_shards, before)
    wrapped._hvd_shards.loaded = loaded if before else None  # for broadcast_optimizer_state
    exchange.wire.start.optimizer = weakref.ref(wrapped)
    weakref.finalize(wrapped, exchange.hooks.remove)
    return wrapped


def lay_out(wrapped: Any, fresh: range) -> None:
    """The layout of these parameters, if all ranks have the same ones. Collective."""
    shards, wire, numbers = wrapped._hvd_shards, wrapped._hvd.wire, wrapped._hvd_shards.numbers()
    group_of = {
        numbers[id(parameter)]: index
        for index, group in enumerate(wrapped.__dict__["param_groups"])
        for parameter in group["params"]
        if numbers[id(parameter)] in fresh
    }
    mine = [
        (wire.names[n], list(wire.parameters[n].shape), str(wire.parameters[n].dtype), group_of[n],
         shards.verdict.anywhere)
        for n in fresh
    ]  # fmt: skip
    require_equal("DistributedOptimizer(shard=True)", mine, wire.process_set, _shown, "Build the same optimizer")
    shards.add(group_of)


def _shown(entries: list[Any]) -> str:
    return ", ".join(f"{name} {shape} {dtype.removeprefix('torch.')}" for name, shape, dtype, *_ in entries[:3])


def refuse(
    optimizer: torch.optim.Optimizer, pairs: Sequence[tuple[torch.Tensor, str]], op: Any, compression: Any,
    groups: Any, sharding: Sharding
) -> None:  # fmt: skip
    """ValueError for what a sharded optimizer does not support."""
    why = None
    if op not in (Average, Sum):
        why = "op must be hvd.Average or hvd.Sum, since shares of the others do not add up"
    elif compression not in _COMPRESSIONS:
        why = f"compression={compression!r} is not supported: use Compression.none, .fp16 or .bf16"
    elif groups:
        why = "groups are not supported, since the layout of the shares decides what travels together"
    elif isinstance(optimizer, torch.optim.LBFGS):
        why = "LBFGS looks at all parameters at once. Leave out shard=True"
    elif elastic_member.is_elastic() and sharding.inside is not global_process_set:
        why = "in an elastic job, whose process sets end with a rank that is lost, all ranks shard: use shard=True"
    elif elastic_member.is_elastic() and sharding.offload is not None:
        why = "an elastic job keeps copies of the state in memory, which offload= has no room for"
    if why is not None:
        raise ValueError(coded("HVD200", f"shard=True: {why}"))
    held = sorted(
        (each.data_ptr(), each.data_ptr() + each.numel() * each.element_size(), name)
        for each, name in pairs
        if each.numel()
    )
    for (_, end, one), (begin, _, other) in zip(held, held[1:]):
        if begin < end:
            raise ValueError(
                f"shard=True: parameters {one!r} and {other!r} share memory, so two ranks could own the same numbers: "
                "tie modules by one Parameter [HVD200]"
            )
