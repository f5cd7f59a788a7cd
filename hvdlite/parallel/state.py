"""How is a model in parts saved, and loaded into other parts? As the state of one process, without a layout.

Parameters carry the dimension they are cut along as their attribute `cut`; layers carry their number in the whole list
of layers as their name. So a checkpoint has the names and shapes of the model in one process, and any (dp, pp, tp)
loads what any other has saved. It is put together tensor by tensor on one rank, where it must fit in the memory of the
host; the others hold a tensor at a time.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from typing import Any

import torch

import hvdlite.torch as hvd

from .stage import in_flight
from .tensor import part_of


def _tensors(stage: torch.nn.Module, optimizer: Any) -> Iterator[tuple[str, torch.Tensor, int | None]]:
    """(name, tensor, where it is cut) of all that this stage holds; the optimizer's state by the parameter's name."""
    if in_flight.get(stage):
        raise ValueError("a checkpoint needs a pipeline without micro-batches in flight: call drain() first [HVD015]")
    for name, p in stage.named_parameters(remove_duplicate=False):
        cut = getattr(p, "cut", None)
        yield name, p.detach(), cut
        for key, value in (optimizer.state.get(p, {}) if optimizer is not None else {}).items():
            if isinstance(value, torch.Tensor):
                if cut is not None and value.dim() and value.shape != p.shape:
                    raise ValueError(
                        f"{name!r} is split, but its state {key!r} in {type(optimizer).__name__}, "
                        f"{list(value.shape)}, has another shape: hvdlite cannot assemble the parts [HVD018]"
                    )
                yield f"optimizer/{name}/{key}", value.detach(), cut if value.shape == p.shape else None
    kept = stage.state_dict()
    for name, buffer in stage.named_buffers(remove_duplicate=False):
        if name in kept:
            yield name, buffer, None


def whole_state(
    stage: torch.nn.Module, mesh: hvd.Mesh, optimizer: Any = None, root_rank: int = 0,
    axes: tuple[str, str] = ("pp", "tp")
) -> dict[str, torch.Tensor] | None:  # fmt: skip
    """Gather the whole model on one rank, as the state of a model in one process. All ranks must call it.

    Names and shapes do not depend on the layout, so any layout can load it. It must fit the host memory of the root.
    Call ``Pipeline.drain`` before it.

    Args:
        stage (torch.nn.Module): this rank's part of the model.
        mesh (Mesh): the layout of the ranks.
        optimizer (torch.optim.Optimizer, optional): its state is included, as ``optimizer/<parameter>/exp_avg`` and so
            on.
        root_rank (int): the rank that gets the model. Default: 0.
        axes (tuple of str): the axes of stages and of cut layers. The mesh may lack them. Default: ``("pp", "tp")``.

    Returns:
        dict[str, torch.Tensor] or None: tensors in host memory on the root, None on the other ranks.

    Raises:
        HvdPeerLostError: a rank has left or died.
        ValueError: micro-batches are in flight, or a state of the optimizer has a shape that cannot be gathered.

    Example:
        >>> from hvdlite import parallel
        >>> mesh = hvd.Mesh(pp=2)
        >>> stage = parallel.split([torch.nn.Linear(1, 1), torch.nn.Linear(1, 1)], mesh, [1, 1])
        >>> sorted(parallel.whole_state(stage, mesh) or {})
        ['0.bias', '0.weight', '1.bias', '1.weight']  # rank 0
        []  # rank 1
    """
    mine = list(_tensors(stage, optimizer))
    lengths = {axis: mesh.shape[axis] for axis in axes if axis in mesh.shape}
    places = itertools.product(*map(range, lengths.values()))
    if root_rank not in {mesh.rank_at(**dict(zip(lengths, place))) for place in places}:
        return None  # a replica
    pp, tp = (mesh.group(axis) if axis in mesh.shape else None for axis in axes)
    here = [(name, t.dtype, t.dim()) for name, t, _ in mine]
    everyone = {hvd.rank(): here}
    if pp is not None:
        everyone = dict(zip(pp.ranks, hvd.allgather_object(here, name="whole", process_set=pp)))
    whole: dict[str, torch.Tensor] = {}
    for rank, told in everyone.items():
        for i, (name, dtype, dims) in enumerate(told):
            if rank == hvd.rank():
                tensor = _gathered(mine[i][1].cpu(), mine[i][2], tp, name)
                if rank == root_rank:
                    whole[name] = tensor.clone()
                elif pp is not None and root_rank in pp.ranks:
                    shape = torch.tensor([*tensor.shape, 1], dtype=torch.int64)
                    hvd.send(shape, root_rank, name=f"shape.{name}", process_set=pp)
                    hvd.send(tensor, root_rank, name=f"whole.{name}", process_set=pp)
            elif pp is not None and hvd.rank() == root_rank:
                shape = hvd.recv(torch.empty(dims + 1, dtype=torch.int64), rank, name=f"shape.{name}", process_set=pp)
                tensor = torch.empty(shape.tolist()[:-1], dtype=dtype)
                whole[name] = hvd.recv(tensor, rank, name=f"whole.{name}", process_set=pp)
    if pp is not None:  # one that has sent all and leaves the job would end what others of the line still send
        hvd.barrier(process_set=pp)
    return whole if hvd.rank() == root_rank else None


def _gathered(t: torch.Tensor, cut: int | None, tp: hvd.ProcessSet | None, name: str) -> torch.Tensor:
    if cut is None or tp is None:
        return t.contiguous()
    parts = hvd.allgather(t.transpose(0, cut).contiguous(), name=f"whole.{name}", process_set=tp)
    return parts.transpose(0, cut).contiguous()


def load_whole(
    stage: torch.nn.Module, whole: Mapping[str, torch.Tensor], mesh: hvd.Mesh | None = None, optimizer: Any = None,
    axis: str = "tp"
) -> None:  # fmt: skip
    """Load this rank's part of a whole model into its stage. It calls no collective.

    Args:
        stage (torch.nn.Module): this rank's part of the model.
        whole (dict[str, torch.Tensor]): the value of ``whole_state`` on the root, the same on all ranks.
        mesh (Mesh, optional): the layout of the ranks. None if nothing is cut.
        optimizer (torch.optim.Optimizer, optional): its state is loaded too.
        axis (str): the axis of cut layers. Default: ``"tp"``.

    Raises:
        ValueError: a name is missing, or a shape does not fit. Nothing is changed then.

    Example:
        >>> from hvdlite import parallel
        >>> layer = torch.nn.Linear(1, 1)
        >>> parallel.load_whole(layer, {"weight": torch.ones(1, 1), "bias": torch.zeros(1)})
        >>> layer.weight.tolist()
        [[1.0]]
    """
    tp = mesh.group(axis) if mesh is not None and axis in mesh.shape else None
    found = []
    for name, t, cut in _tensors(stage, None):
        if name not in whole:
            has = ", ".join(repr(known) for known in list(whole)[:4])
            raise ValueError(f"the checkpoint has no {name!r}; it has {has}, ... [HVD018]")
        value = _part(whole[name], cut, tp)
        if value.shape != t.shape:
            raise ValueError(
                f"{name!r} has shape {list(whole[name].shape)} in the checkpoint, of which this rank takes "
                f"{list(value.shape)}, but the model has {list(t.shape)} [HVD018]"
            )
        found.append((t, value))
    states = {} if optimizer is None else _states(stage, whole, tp, optimizer)
    with torch.no_grad():
        for t, value in found:
            t.copy_(value)
    for p, state in states.items():
        optimizer.state[p] = state


def _part(value: torch.Tensor, cut: int | None, tp: hvd.ProcessSet | None) -> torch.Tensor:
    if cut is None or tp is None:
        return value
    first, last = part_of(value.shape[cut], tp)
    return value.narrow(cut, first, last - first)


def _states(
    stage: torch.nn.Module, whole: Mapping[str, torch.Tensor], tp: Any, optimizer: Any
) -> dict[torch.Tensor, dict[str, Any]]:
    """The optimizer's state of each parameter that has one in the checkpoint; a stage may have none of them."""
    if not any(name.startswith("optimizer/") for name in whole):
        raise ValueError(
            "the checkpoint has no optimizer state: it was saved without an optimizer, or with a stateless one, such "
            "as SGD without momentum, which needs no loading [HVD018]"
        )
    on_device = {  # those that keep their count of steps beside the parameter, and not in the CPU's memory
        p for group in optimizer.param_groups if group.get("fused") or group.get("capturable") for p in group["params"]
    }
    states: dict[torch.Tensor, dict[str, Any]] = {}
    for name, p in stage.named_parameters():
        start = f"optimizer/{name}/"
        for full in (full for full in whole if full.startswith(start)):
            value, cut = whole[full], getattr(p, "cut", None)
            part = _part(value, cut, tp) if value.shape == whole[name].shape else value
            state = states.setdefault(p, {})
            state[full[len(start) :]] = part.to(p.device if part.dim() or p in on_device else "cpu", copy=True)
    return states
