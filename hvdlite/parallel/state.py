"""State of a divided model in the form of one process, saved and loaded under any division.

Parameters carry the dimension they are cut along as their attribute `cut`; layers carry their number in the whole list
of layers as their name. So a checkpoint has the names and shapes of the model in one process, and any (dp, pp, tp)
loads what any other has saved. It is put together tensor by tensor on one rank, where it must fit in the memory of the
host; the others hold a tensor at a time.

An optimizer's groups differ between layouts, so each parameter has the hyperparameters of its group, and a group takes
those that its parameters have in the checkpoint.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from typing import Any, Optional

import torch
from torch.nn.modules.module import _EXTRA_STATE_KEY_SUFFIX

import hvdlite.torch as hvd

from ..errors.user_warning import warn
from ..torch.adapter import DTYPES
from .checkpoint_values import alike, exchanged, plain
from .stage import chunks_on
from .tensor import part_of

Item = tuple[str, Any, Optional[int]]  # name, tensor or plain value, where it is cut
GROUP = "optimizer/{}/param_groups"  # a parameter's hyperparameters
# What a new run decides anew: a group's members, and by which code a step is computed.
_OWN = {"params", "param_names", "capturable", "differentiable", "foreach", "fused"}


def items(stage: torch.nn.Module, optimizer: Any) -> Iterator[Item]:
    """All that this stage holds; the optimizer's state and hyperparameters by the parameter's name."""
    if any(chunk.live for chunk in chunks_on.get(stage, ())):
        raise ValueError("a checkpoint needs a pipeline without micro-batches in flight: call drain() first [HVD015]")
    groups = {} if optimizer is None else _hyperparameters(stage, optimizer)
    for name, p in stage.named_parameters(remove_duplicate=False):
        yield name, p.detach(), getattr(p, "cut", None)
        for key, value in (optimizer.state.get(p, {}) if optimizer is not None else {}).items():
            what = f"{name!r}: its state {key!r} in {type(optimizer).__name__}"
            yield item(f"optimizer/{name}/{key}", value, p, what)
        if p in groups:
            yield GROUP.format(name), groups[p], None
    kept = stage.state_dict()
    for name, buffer in stage.named_buffers(remove_duplicate=False):
        if name in kept:
            yield name, buffer, None
    for name in _with_extra_state(stage):
        yield name, kept[name] if isinstance(kept[name], torch.Tensor) else plain(kept[name], name), None


def item(name: str, value: Any, p: torch.Tensor, what: str) -> Item:
    """A value that belongs to a parameter: cut like it, if it has its shape."""
    if not isinstance(value, torch.Tensor):
        return name, plain(value, what), None
    cut = getattr(p, "cut", None)
    if cut is not None and value.dim() and value.shape != p.shape:
        raise ValueError(
            f"{what} has the shape {list(value.shape)}, but its parameter is split and has another one: hvdlite cannot "
            "assemble the parts [HVD018]"
        )
    return name, value.detach(), cut if value.shape == p.shape else None


def _hyperparameters(stage: torch.nn.Module, optimizer: Any) -> dict[torch.Tensor, dict[str, Any]]:
    """Of each parameter. ValueError for what belongs to none, and would be lost."""
    cls, known = type(optimizer).__name__, {id(p) for p in stage.parameters()}
    more: list[Any] = [
        f"state of a tensor {list(key.shape)}" if isinstance(key, torch.Tensor) else key
        for key, state in optimizer.state.items() if id(key) not in known and state
    ]  # fmt: skip
    more = more or sorted(optimizer.state_dict().keys() - {"state", "param_groups"})
    more += [
        f"a parameter of shape {list(p.shape)}" for group in optimizer.param_groups for p in group["params"]
        if id(p) not in known and p.requires_grad
    ]  # fmt: skip
    if more:
        raise ValueError(
            f"{cls} has {more[0]!r}, which belongs to no parameter of this stage: save it yourself, and pass the plain "
            "optimizer of the stage's parameters [HVD018]"
        )
    found = {}
    for i, group in enumerate(optimizer.param_groups):
        values = {key: plain(group[key], f"param_groups[{i}][{key!r}] of {cls}") for key in group if key not in _OWN}
        found.update(dict.fromkeys(group["params"], values))
    return found


def _with_extra_state(stage: torch.nn.Module) -> dict[str, torch.nn.Module]:
    """Modules that keep more than tensors, by the name of that in a state_dict."""
    return {
        f"{prefix}.{_EXTRA_STATE_KEY_SUFFIX}".lstrip("."): module for prefix, module in stage.named_modules()
        if type(module).get_extra_state is not torch.nn.Module.get_extra_state
    }  # fmt: skip


def whole_state(
    stage: torch.nn.Module, mesh: hvd.Mesh, optimizer: Any = None, root_rank: int = 0,
    axes: tuple[str, str] = ("pp", "tp")
) -> dict[str, Any] | None:  # fmt: skip
    """Gather the whole model on one rank, as the state of a model in one process. All ranks must call it.

    Names and shapes do not depend on the layout, so any layout can load it. It must fit the host memory of the root.
    Call ``Pipeline.drain`` before it. ``Pipeline.whole_state`` has more: all that the next step reads.

    Args:
        stage (torch.nn.Module): this rank's part of the model.
        mesh (Mesh): the layout of the ranks.
        optimizer (torch.optim.Optimizer, optional): its state is included, as ``optimizer/<parameter>/exp_avg`` and so
            on, and the hyperparameters of each parameter's group, as ``optimizer/<parameter>/param_groups``.
        root_rank (int): the rank that gets the model. Default: 0.
        axes (tuple of str): the axes of stages and of cut layers. The mesh may lack them. Default: ``("pp", "tp")``.

    Returns:
        dict or None: tensors in host memory and plain values on the root, None on the other ranks.

    Raises:
        HvdPeerLostError: a rank has left or died.
        ValueError: micro-batches are in flight, or a state of the optimizer or of a module cannot be saved.

    Example:
        >>> from hvdlite import parallel
        >>> mesh = hvd.Mesh(pp=2)
        >>> stage = parallel.split([torch.nn.Linear(1, 1), torch.nn.Linear(1, 1)], mesh, [1, 1])
        >>> sorted(parallel.whole_state(stage, mesh) or {})
        ['0.bias', '0.weight', '1.bias', '1.weight']  # rank 0
        []  # rank 1
    """
    return assembled(lambda: items(stage, optimizer), mesh, root_rank, axes)


def assembled(
    make: Callable[[], Iterable[Item]], mesh: hvd.Mesh, root_rank: int, axes: tuple[str, str],
    timeout: float | None = None
) -> dict[str, Any] | None:  # fmt: skip
    """What make yields on all stages, on the root. A call of all ranks."""
    lengths = {axis: mesh.shape[axis] for axis in axes if axis in mesh.shape}
    coordinates = itertools.product(*map(range, lengths.values()))
    if root_rank not in {mesh.rank_at(**dict(zip(lengths, each))) for each in coordinates}:
        return None  # a replica
    pp, tp = (mesh.group(axis) if axis in mesh.shape else None for axis in axes)
    mine: list[Item] = []

    def described() -> list[tuple[str, Any, Any]]:
        found: list[tuple[str, Any, Any]] = []
        for name, t, cut in make():
            if not isinstance(t, torch.Tensor):
                found.append((name, None, t))
            elif t.is_complex():  # travels as pairs
                found.append((name, t.dtype, t.dim() + 1))
                t = torch.view_as_real(t.resolve_conj())
            elif t.dtype in DTYPES:
                found.append((name, t.dtype, t.dim()))
            else:
                raise ValueError(f"{name!r} has the dtype {t.dtype}, which cannot be gathered: save parts [HVD018]")
            mine.append((name, t, cut))
        return found

    everyone = (
        {hvd.rank(): described()} if pp is None else dict(zip(pp.ranks, exchanged(described, "whole", pp, timeout)))
    )
    whole: dict[str, Any] = {}
    for rank, entries in everyone.items():
        for i, (name, dtype, dims) in enumerate(entries):
            if dtype is None:
                whole[name] = dims  # a plain value, which has come with the names
            elif rank == hvd.rank():
                tensor = _gathered(mine[i][1].cpu(), mine[i][2], tp, name)
                if rank == root_rank:
                    whole[name] = _from_pairs(tensor.clone(), dtype)
                elif pp is not None and root_rank in pp.ranks:
                    shape = torch.tensor([*tensor.shape, 1], dtype=torch.int64)
                    hvd.send(shape, root_rank, name=f"shape.{name}", process_set=pp)
                    hvd.send(tensor, root_rank, name=f"whole.{name}", process_set=pp)
            elif pp is not None and hvd.rank() == root_rank:
                shape = hvd.recv(torch.empty(dims + 1, dtype=torch.int64), rank, name=f"shape.{name}", process_set=pp)
                tensor = torch.empty(shape.tolist()[:-1], dtype=torch.empty(0, dtype=dtype).real.dtype)
                whole[name] = _from_pairs(hvd.recv(tensor, rank, name=f"whole.{name}", process_set=pp), dtype)
    if pp is not None:  # one that has sent all and leaves the job would end what others of the line still send
        hvd.barrier(process_set=pp)
    return whole if hvd.rank() == root_rank else None


def _from_pairs(t: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Complex numbers have travelled as pairs."""
    return torch.view_as_complex(t) if dtype.is_complex else t


def _gathered(t: torch.Tensor, cut: int | None, tp: hvd.ProcessSet | None, name: str) -> torch.Tensor:
    if cut is None or tp is None:
        return t.contiguous()
    parts = hvd.allgather(t.transpose(0, cut).contiguous(), name=f"whole.{name}", process_set=tp)
    return parts.transpose(0, cut).contiguous()


def load_whole(
    stage: torch.nn.Module, whole: Mapping[str, Any], mesh: hvd.Mesh | None = None, optimizer: Any = None,
    axis: str = "tp"
) -> None:  # fmt: skip
    """Load this rank's part of a whole model into its stage. It calls no collective.

    Args:
        stage (torch.nn.Module): this rank's part of the model.
        whole (dict): the value of ``whole_state`` on the root, the same on all ranks.
        mesh (Mesh, optional): the layout of the ranks. None if nothing is cut.
        optimizer (torch.optim.Optimizer, optional): its state and hyperparameters are loaded too.
        axis (str): the axis of cut layers. Default: ``"tp"``.

    Raises:
        ValueError: a name is missing, a shape does not fit, or parameters of one group of the optimizer have other
            hyperparameters in the checkpoint. Nothing is changed then.

    Example:
        >>> from hvdlite import parallel
        >>> layer = torch.nn.Linear(1, 1)
        >>> parallel.load_whole(layer, {"weight": torch.ones(1, 1), "bias": torch.zeros(1)})
        >>> layer.weight.tolist()
        [[1.0]]
    """
    tp = mesh.group(axis) if mesh is not None and axis in mesh.shape else None
    apply(changes(stage, whole, tp, optimizer))


@torch.no_grad()
def apply(steps: Iterable[Callable[[], Any]]) -> None:
    for step in steps:
        step()


def changes(
    stage: torch.nn.Module, whole: Mapping[str, Any], tp: hvd.ProcessSet | None, optimizer: Any
) -> list[Callable[[], Any]]:  # fmt: skip
    """What is to be done to load it, once all of it is known to fit. tp: None if nothing is cut, here or there."""
    found: list[Callable[[], Any]] = []
    extra = _with_extra_state(stage)
    for name, t, cut in items(stage, None):
        if name in extra:
            if name in whole:
                found.append(partial(extra[name].set_extra_state, plain(whole[name], name)))
            else:
                warn(f"the checkpoint has no {name!r}: the module keeps its own [HVD018]")
            continue
        if name not in whole:
            has = ", ".join(repr(known) for known in list(whole)[:4])
            raise ValueError(f"the checkpoint has no {name!r}; it has {has}, ... [HVD018]")
        value = part(whole[name], cut, tp)
        if value.shape != t.shape:
            raise ValueError(
                f"{name!r} has shape {list(whole[name].shape)} in the checkpoint, of which this rank takes "
                f"{list(value.shape)}, but the model has {list(t.shape)} [HVD018]"
            )
        found.append(partial(t.copy_, value))  # t and value are detached
    return found if optimizer is None else found + _of_optimizer(stage, whole, tp, optimizer)


def part(value: torch.Tensor, cut: int | None, tp: hvd.ProcessSet | None) -> torch.Tensor:
    """This rank's."""
    if cut is None or tp is None:
        return value
    first, last = part_of(value.shape[cut], tp)
    return value.narrow(cut, first, last - first)


def _of_optimizer(
    stage: torch.nn.Module, whole: Mapping[str, Any], tp: hvd.ProcessSet | None, optimizer: Any
) -> list[Callable[[], Any]]:  # fmt: skip
    """Its groups, and the state of each parameter that has one in the checkpoint; a stage may have none of them."""
    if not any(name.startswith("optimizer/") for name in whole):
        raise ValueError(
            "the checkpoint has no optimizer state: it was saved without an optimizer, or by an older hvdlite with a "
            "stateless one, such as SGD without momentum, which needs no loading [HVD018]"
        )
    if not any(name.endswith("/param_groups") for name in whole):
        warn(
            "the checkpoint has no hyperparameters (an older hvdlite wrote it): the optimizer keeps its own learning "
            "rate, which a scheduler may have changed before it was saved [HVD018]"
        )
    on_device = {  # those that keep their count of steps beside the parameter, and not in the CPU's memory
        p for group in optimizer.param_groups if group.get("fused") or group.get("capturable") for p in group["params"]
    }
    found: list[Callable[[], Any]] = []
    for name, p in stage.named_parameters():
        start, group, state = f"optimizer/{name}/", GROUP.format(name), {}
        for full in (full for full in whole if full.startswith(start) and full != group):
            key, value = full[len(start) :], whole[full]
            if isinstance(value, torch.Tensor):
                mine = part(value, getattr(p, "cut", None) if value.dim() else None, tp)
                state[key] = mine.to("cpu" if key == "step" and p not in on_device else p.device, copy=True)
            else:
                state[key] = plain(value, full)
        if state:
            found.append(partial(optimizer.state.__setitem__, p, state))
        elif group in whole:  # it had none when it was saved
            found.append(partial(optimizer.state.pop, p, None))
    for each in optimizer.param_groups:
        found += [partial(_set, each, key, value) for key, value in of_group(stage, whole, each, GROUP).items()]
    return found


def of_group(stage: torch.nn.Module, whole: Mapping[str, Any], group: dict[str, Any], entry: str) -> dict[str, Any]:
    """What the parameters of a group have in the checkpoint, under the names that entry makes of theirs. Nothing for a
    group of parameters that are not there: it keeps its own. ValueError where they differ."""
    names = {id(p): name for name, p in stage.named_parameters()}
    first, values, nothing = "", dict[str, Any](), object()
    for name in (names[id(p)] for p in group["params"] if id(p) in names):
        other = whole.get(entry.format(name))
        if other is None:
            continue
        first, values = (first, values) if first else (name, other)
        for key in {**values, **other}:
            if not alike(values.get(key, nothing), other.get(key, nothing)):
                raise ValueError(
                    f"{first!r} and {name!r} are in one group of the optimizer, but in the checkpoint {key!r} is "
                    f"{values.get(key)!r} for the first and {other.get(key)!r} for the second: put them in two groups "
                    "[HVD018]"
                )
    return values


def _set(group: dict[str, Any], key: str, value: Any) -> None:
    """A rate that the new run has as a tensor stays one. A new one, since groups may share the one they began with."""
    now, new = group.get(key), plain(value, key)
    if isinstance(now, torch.Tensor) and isinstance(new, (int, float, torch.Tensor)):
        new = torch.as_tensor(new, dtype=now.dtype, device=now.device)
    group[key] = new
