"""Names of an optimizer's gradients on all ranks, and those that are sent as one.

Names come from `named_parameters`, or are made of the group's and the parameter's number. Two optimizers may have equal
names (a GAN, an ensemble): each further one gets a suffix that counts them, the same on all ranks of a process set if
these build their optimizers in the same order. Each set counts for itself, since ranks outside may build none; each
init() begins anew, since ranks that come later have counted nothing; what was refused does not count.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any
from weakref import WeakKeyDictionary

import torch

from ...errors.codes import coded
from ...errors.user_warning import warn
from ...lifecycle.init import incarnations
from ...process_sets.process_set import ProcessSet

_used: WeakKeyDictionary[ProcessSet, tuple[int, dict[str, int]]] = WeakKeyDictionary()


def suffix_for(names: Iterable[str], process_set: ProcessSet) -> str:
    """What makes these names unlike those of earlier optimizers of this set."""
    incarnation, used = _used.get(process_set, (0, {}))
    if incarnation != incarnations():
        used = {}
    _used[process_set] = incarnations(), used  # how many optimizers have a parameter of that name
    names = list(names)
    earlier = max((used.get(name, 0) for name in names), default=0)
    used.update((name, earlier + 1) for name in names)
    return f"#{earlier + 1}" if earlier else ""


def numbered(pairs: Sequence[tuple[torch.Tensor, str]], process_set: ProcessSet) -> list[tuple[torch.Tensor, str]]:
    """The same with names unlike those of earlier optimizers of this set."""
    suffix = suffix_for([name for _, name in pairs], process_set)
    return [(parameter, name + suffix) for parameter, name in pairs]


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


def added_later(group: int, parameters: Sequence[torch.Tensor], suffix: str) -> list[tuple[torch.Tensor, str]]:
    """Names of a parameter group that comes after the optimizer was wrapped. suffix: of the optimizer; a rank may come
    to add the group after others have made more optimizers."""
    return [(parameter, f"noname.{group}.{i}#added{suffix}") for i, parameter in enumerate(parameters)]


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
