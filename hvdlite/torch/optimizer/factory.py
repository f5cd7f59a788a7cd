"""`DistributedOptimizer`: any torch optimizer becomes one that averages gradients while backward runs.

`DistributedOptimizer` returns an object of a new class, made of our methods and the class of the optimizer it is given:
isinstance, LR schedulers and GradScaler see the original. It takes over state and parameter groups, not copies. Hooks
on the parameters start each gradient's allreduce in place when backward has accumulated it; the end of backward waits
for all. With one rank there are no hooks, unless the job is elastic and may grow.

What users should know:
  - Every rank sends every trainable parameter once per backward (of the last of `backward_passes_per_step`). Where
    backward did not reach one on this rank, zeros are sent and its gradient becomes the average of the others; where it
    was reached on no rank, the gradient becomes zero, not None, so weight decay and momentum act on it. Frozen
    parameters (requires_grad=False) are left alone.
  - Ranks run the same number of backward passes per step. One that skips backward altogether takes part in `step` (or
    `synchronize`); until then it must call no other collective that blocks, since the others wait in backward for it.
    `optimizer.wait_in_backward = False` moves their waiting to step() as well.
  - An exception in backward that a rank catches ends the step for all: the other ranks raise HvdMismatchError, which
    names it, where they wait (`failed_backward`). All go on by zero_grad() and the next batch.
  - In the first rounds the ranks compare their parameters (`checks`): in another order without `named_parameters` they
    are an HvdMismatchError, and with other values a warning; HVDLITE_CHECK_START changes that.
  - A user's hooks on a parameter run first, those on its AccumulateGrad node may not.
  - Several threads that run backward for one optimizer at once need backward_passes_per_step = their number.

Names of gradients come from `named_parameters`, or are made of the group's and the parameter's number.
"""

from __future__ import annotations

import os
import weakref
from collections.abc import Iterable, Sequence
from typing import Any
from weakref import WeakKeyDictionary

import torch

from ... import _core
from ...errors.codes import coded
from ...errors.user_warning import warn
from ...lifecycle.init import incarnations
from ...ops import Adasum, Average, Sum, op_of
from ...process_sets.process_set import ProcessSet, global_process_set
from ...rendezvous import elastic_member
from ...training.gradient_tracker import GradientTracker
from .. import storage_check
from ..compressed import choice
from ..compression import Compression
from . import sharded
from .averages import Combination, WeightedAverage
from .buckets import InGroups
from .gradient_codec import Wire
from .methods import Copyless, Delta, Distributed
from .reducer import Exchange

made_in: str | None = None  # the module of the classes of distributed optimizers; None: the base's


def DistributedOptimizer(
    optimizer: torch.optim.Optimizer,
    named_parameters: Iterable[tuple[str, torch.Tensor]] | None = None,
    compression: Any = Compression.none,
    backward_passes_per_step: int = 1,
    op: int | WeightedAverage = Average,
    gradient_predivide_factor: float = 1.0,
    num_groups: int = 0,
    groups: int | Sequence[Sequence[torch.Tensor]] | None = None,
    sparse_as_dense: bool = False,
    process_set: ProcessSet = global_process_set,
    shard: bool | ProcessSet = False,
    bucket_cap_mb: float = 25.0,
    offload: str | os.PathLike[str] | None = None,
    memory_cap: int | str | None = None,
) -> Any:
    """Return an optimizer of the same class whose ``step`` uses gradients that are reduced over all ranks.

    It shares the parameter groups and the state of ``optimizer``. Backward sends each gradient as soon as it is ready,
    and returns when all are reduced. All ranks must run the same number of backward passes per step. A parameter that
    backward did not reach on this rank contributes zeros. ``Adasum`` is the exception: it combines the changes that
    local steps make (Maleki et al., 2020), and reduces no gradients.

    The first rounds compare the parameters of the ranks. Set ``HVDLITE_CHECK_START`` to change what a difference does.

    Args:
        optimizer (torch.optim.Optimizer): the optimizer to wrap.
        named_parameters (iterable of (str, tensor), optional): usually ``model.named_parameters()``; the same names on
            all ranks. Default: parameters are matched by their places in the optimizer.
        compression (Compressor): form in which gradients travel. ``Compression.int8`` and ``Compression.int4`` round
            between hosts only, and from the second step on. Default: ``Compression.none``.
        backward_passes_per_step (int): backward passes whose gradients are summed before they travel. Default: 1.
        op (int or WeightedAverage): ``Average``, ``Sum``, ``Min``, ``Max``, ``Product``, ``Adasum`` or a
            ``WeightedAverage``. Default: ``Average``.
        sparse_as_dense (bool): True sends sparse gradients dense. False gathers their indices and values. Default:
            False.
        process_set (ProcessSet): ranks that take part; on other ranks the optimizer stays local. Default: all ranks.
        groups (int or list of lists of tensors, optional): parameters whose gradients travel together, or a number of
            groups to make. Results do not depend on it.
        gradient_predivide_factor (float): with ``Average`` only: gradients are divided by it before the sum and by size
            / factor after it, which keeps float16 sums in range. Default: 1.0.
        shard (bool or ProcessSet): True keeps on each rank its share of the optimizer's state and of the averaged
            gradients, with the same results. All ranks must then create the optimizer, call ``step`` and call
            ``state_dict`` together. Clip with ``clip_grad_norm_`` of the optimizer. With a process set, such as
            ``mesh.group("local")``, its ranks share one whole state, and each group has one. Default: False.
        bucket_cap_mb (float): with ``shard``, the most MiB of small gradients that travel together. Default: 25.
        offload (str or path, optional): with ``shard=True``, a folder on a local disk for the part of the optimizer's
            state that is beyond ``memory_cap``. Same results. Default: all state is in memory.
        memory_cap (int or str, optional): with ``offload``, the bytes of state that a rank keeps in memory, such as
            ``"2G"``.
        num_groups (int): Horovod's old name of an integer ``groups``. Default: 0.

    Returns:
        torch.optim.Optimizer: a new object, also with ``synchronize``, ``skip_synchronize``, ``no_sync``,
        ``set_backward_passes_per_step``, ``register_comm_hook`` and ``collect_residuals``.

    Raises:
        HvdNotInitializedError: before ``init``.
        ValueError: for names that are missing or not unique, and for arguments that exclude each other or have invalid
            values. For parameters that wrap other tensors, such as DTensor.
        TypeError: if ``optimizer`` or ``process_set`` has a wrong type.

    Example:
        >>> weight = torch.nn.Parameter(torch.tensor([5.0]))
        >>> optimizer = torch.optim.SGD([weight], lr=1.0)
        >>> optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=[("weight", weight)])
        >>> (weight * (hvd.rank() + 1)).sum().backward()
        >>> optimizer.step()
        >>> weight.tolist()
        [3.5]
    """
    compression, weighted = choice.of_job(compression, op, shard), isinstance(op, WeightedAverage)
    chosen = _checked(optimizer, process_set, gradient_predivide_factor, op, compression)
    in_buckets, size = choice.in_buckets(compression, Sum if weighted else chosen), _core.size()
    GradientTracker(backward_passes_per_step)  # its check, for one rank as well
    pairs = named(optimizer, named_parameters)
    names = {} if named_parameters is None else dict(pairs)
    refuse_wrappers(pairs)
    members = grouped(groups, num_groups, [parameter for parameter, _ in pairs])
    may_grow = elastic_member.is_elastic() and process_set is global_process_set  # a job of one rank now, of more later
    alone = not may_grow and (size == 1 or not process_set.included() or process_set.size() == 1)
    combines = chosen == Adasum and not weighted and not alone
    sharding = sharded.Sharding.of(shard, process_set, bucket_cap_mb, offload, memory_cap)
    if sharding is not None:
        sharded.refuse(optimizer, pairs, op if weighted else chosen, compression, members, sharding)
        sharding.warn_of_one_rank(alone)
    if not combines:
        refuse_complex(pairs)
    if not alone:
        suffix, serial = (suffix_for(each, process_set) for each in ([name for _, name in pairs], ["optimizer"]))
        pairs = [(parameter, name + suffix) for parameter, name in pairs]
    if combines:
        wrapped = _wrapped(optimizer, (Delta,), names)
        wrapped.__dict__["_hvd_delta"] = Combination(pairs, serial, compression, process_set)
        wrapped.__dict__["_hvd_passes"] = backward_passes_per_step
        return wrapped

    def wire_of(kind: type[Wire]) -> Any:
        bare, dense = in_buckets or compression is Compression.none, bool(sparse_as_dense)
        return kind(chosen, gradient_predivide_factor, compression, process_set, serial, bare, dense)

    methods = (Distributed,) if sharding is None or alone else (sharded.ShardedMethods, sharded.StepOnShards)
    wrapped = _wrapped(optimizer, methods, names)
    wrapped.__dict__["_hvd_passes"] = backward_passes_per_step
    if sharding is not None and not alone:
        return sharded.sharded(optimizer, wrapped, wire_of, backward_passes_per_step, pairs, sharding)
    if not alone:
        wire = wire_of(Wire)
        exchange = Exchange(wire, backward_passes_per_step)
        for parameter, name in pairs:
            exchange.add(parameter, name)
        if in_buckets:
            exchange.carrier = choice.carrier_of(compression, exchange)
        elif members:
            exchange.carrier = InGroups(exchange, members)
        wrapped.__dict__["_hvd"] = exchange
        wire.start.optimizer = weakref.ref(wrapped)
        weakref.finalize(wrapped, exchange.hooks.remove)
    return wrapped


def _checked(optimizer: Any, process_set: Any, gradient_predivide_factor: Any, op: Any, compression: Any) -> Any:
    """The reduction that these arguments choose. TypeError or ValueError for what they must not be."""
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise TypeError(f"expected a torch.optim.Optimizer, not {type(optimizer).__name__} [HVD223]")
    if isinstance(optimizer, Copyless):
        raise ValueError("this optimizer is a DistributedOptimizer already [HVD223]")
    if not isinstance(process_set, ProcessSet):
        raise TypeError(f"process_set must be a hvd.ProcessSet, not {process_set!r} [HVD212]")
    process_set.size()  # ValueError for a set that was not added
    predivides = isinstance(gradient_predivide_factor, (int, float)) and gradient_predivide_factor > 0
    if not predivides or isinstance(gradient_predivide_factor, bool):
        raise ValueError(f"gradient_predivide_factor={gradient_predivide_factor!r} must be a number above 0 [HVD222]")
    weighted = isinstance(op, WeightedAverage)
    chosen: Any = op if weighted else op_of(None, op)  # type: ignore[arg-type]
    if gradient_predivide_factor != 1.0 and (weighted or chosen != Average):
        raise ValueError("gradient_predivide_factor not supported with op != Average: it needs op=hvd.Average [HVD224]")
    functions = callable(getattr(compression, "compress", None)) and callable(getattr(compression, "decompress", None))
    if not functions and not choice.in_buckets(compression, Average):
        raise ValueError(
            f"compression={compression!r} is not known: use hvd.Compression.none, fp16, bf16, int8 or int4, "
            "hvd.PowerSGD(...), TopK(...) or Accordion(...), or a class with the functions compress and decompress of "
            "a Compressor [HVD208]"
        )
    return chosen


def refuse_complex(pairs: Iterable[tuple[torch.Tensor, str]]) -> None:
    """ValueError that names the first complex parameter."""
    for parameter, name in pairs:
        if parameter.is_complex():
            raise ValueError(
                f"parameter {name!r} is {parameter.dtype}, which cannot be averaged: keep it as two reals [HVD202]"
            )


def refuse_wrappers(pairs: Iterable[tuple[torch.Tensor, str]]) -> None:
    """ValueError that names the first trainable parameter which has no memory of its own."""
    for parameter, name in pairs:
        why = storage_check.wrapped(parameter) if parameter.requires_grad else None
        if why is not None:
            raise ValueError(f"parameter {name!r} is {why} [HVD203]")


def _wrapped(optimizer: torch.optim.Optimizer, methods: tuple[type, ...], names: dict[torch.Tensor, str]) -> Any:
    """The optimizer as an object of a class with our methods before its own."""
    base = type(optimizer)
    wrapped: Any = object.__new__(type(base.__name__, (*methods, base), {"__module__": made_in or base.__module__}))
    wrapped.__dict__.update(optimizer.__dict__)
    wrapped._hvd_names = names  # what broadcast_optimizer_state knows parameters by
    if hasattr(wrapped.__dict__.pop("step", None), "_wrapped_by_lr_sched"):
        # A scheduler made before wrapping watches the original for step(), to warn of a wrong order: let it see ours.
        optimizer._opt_called = True  # type: ignore[attr-defined]
        wrapped._hvd_original = optimizer  # the scheduler itself holds it as well; the groups are shared
    if hasattr(optimizer, "_optimizer_load_state_dict_post_hooks"):  # Optimizer.__init__ may have been left out
        groups, state = optimizer.param_groups, optimizer.state  # the hooks of both are one dict
        reference = weakref.ref(wrapped)
        optimizer.register_load_state_dict_post_hook(
            lambda loaded: _load_shared(loaded, groups, state, reference()), prepend=True
        )
    return wrapped


def _load_shared(loaded: Any, groups: list[dict[str, Any]], state: dict[Any, Any], wrapped: Any) -> None:
    """Move what load_state_dict has put into new groups and a new state into those that the original and the wrapped
    optimizer share: a scheduler made before wrapping holds the original, and the user may load into either."""
    if getattr(wrapped, "_hvd", None) is not None:
        wrapped._hvd.wire.start.ask()
    if isinstance(wrapped, Delta):
        wrapped._hvd_delta.drop()
    by_first = {id(group["params"][0]): group for group in groups if group["params"]}
    shared = []
    for new in loaded.param_groups:
        group = by_first.get(id(new["params"][0]), new) if new["params"] else new
        if group is not new:
            group.clear()
            group.update(new)
        shared.append(group)
    if loaded.state is not state:
        state.clear()
        state.update(loaded.state)
    if len(shared) == len(groups):  # else some were removed from this one
        groups[:] = shared
        shared = groups
    loaded.param_groups, loaded.state = shared, state
    if hasattr(wrapped, "_hvd_shards"):
        from .shard_state import take_whole

        take_whole(wrapped._hvd_shards, state)
        state.clear()


_used: WeakKeyDictionary[ProcessSet, tuple[int, dict[str, int]]] = WeakKeyDictionary()


def suffix_for(names: Iterable[str], process_set: ProcessSet) -> str:
    """What makes these names unlike those of earlier optimizers of this set.

    Two optimizers may have equal names (a GAN, an ensemble): each further one gets a suffix that counts them, the same
    on all ranks of a process set if these build their optimizers in the same order. Each set counts for itself, since
    ranks outside may build none; each init() begins anew, since ranks that come later have counted nothing; what was
    refused does not count.
    """
    incarnation, used = _used.get(process_set, (0, {}))
    if incarnation != incarnations():
        used = {}
    _used[process_set] = incarnations(), used  # how many optimizers have a parameter of that name
    names = list(names)
    earlier = max((used.get(name, 0) for name in names), default=0)
    used.update((name, earlier + 1) for name in names)
    return f"#{earlier + 1}" if earlier else ""


def named(
    optimizer: torch.optim.Optimizer, named_parameters: Iterable[tuple[str, torch.Tensor]] | None
) -> list[tuple[torch.Tensor, str]]:
    """Every parameter of the optimizer with its name, in order. ValueError as Horovod raises it."""
    groups = [group["params"] for group in optimizer.param_groups]
    if named_parameters is None:
        pairs = [(f"noname.{g}.{i}", p) for g, group in enumerate(groups) for i, p in enumerate(group)]
    else:
        pairs = list(named_parameters)
    if any(not (isinstance(pair, tuple) and len(pair) == 2 and isinstance(pair[0], str)) for pair in pairs):
        raise ValueError(
            "named_parameters should be a sequence of tuples (name, parameter), usually model.named_parameters()"
            " [HVD225]"
        )
    counts: dict[str, int] = {}
    for name, _ in pairs:
        counts[name] = counts.get(name, 0) + 1
    twice = sorted(name for name, count in counts.items() if count > 1)
    if twice:
        raise ValueError(f"names in named_parameters must be unique; these are not: {', '.join(twice)} [HVD225]")
    name_of = {id(parameter): name for name, parameter in pairs}
    missing = [f"{g}.{i}" for g, group in enumerate(groups) for i, p in enumerate(group) if id(p) not in name_of]
    if missing:
        raise ValueError(
            coded(
                "HVD225",
                "named_parameters does not name all parameters of the optimizer; missing (group.index): "
                + ", ".join(missing),
            )
        )
    return [(parameter, name_of[id(parameter)]) for group in groups for parameter in group]


def grouped(groups: Any, num_groups: int, parameters: Sequence[torch.Tensor]) -> list[list[int]]:
    """The numbers of the parameters of each group. ValueError as Horovod raises it."""
    if num_groups != 0:
        warn("Parameter `num_groups` has been replaced by `groups`", DeprecationWarning)
        groups = num_groups if groups is None else groups
    if groups is None:
        return []
    if isinstance(groups, (list, tuple)):
        return _listed(groups, parameters)
    if isinstance(groups, bool) or not isinstance(groups, int) or groups < 1:
        raise ValueError(
            f"groups={groups!r}: groups should be a positive integer or a list of lists of torch.Tensor [HVD226]"
        )
    trainable = [number for number, parameter in enumerate(parameters) if parameter.requires_grad]
    count = min(groups, len(trainable))
    size, larger = divmod(len(trainable), count) if count else (0, 0)
    ends = [index * size + min(index, larger) for index in range(count + 1)]
    return [trainable[begin:end] for begin, end in zip(ends, ends[1:])]


def _listed(groups: Sequence[Any], parameters: Sequence[torch.Tensor]) -> list[list[int]]:
    number_of = {id(parameter): number for number, parameter in enumerate(parameters)}
    seen: set[int] = set()
    for group in groups:
        if not isinstance(group, (list, tuple)):
            raise ValueError("groups should be a positive integer or a list of lists of torch.Tensor [HVD226]")
        for parameter in group:
            if not isinstance(parameter, torch.Tensor):
                raise ValueError("groups must consist of torch.Tensor. [HVD226]")
            if id(parameter) in seen:
                raise ValueError("A parameter can only appear once in groups. [HVD226]")
            if id(parameter) not in number_of:
                raise ValueError("a tensor in groups is not a parameter of the optimizer [HVD226]")
            seen.add(id(parameter))
    return [[number_of[id(parameter)] for parameter in group] for group in groups if group]
