"""Broadcast of the start: all ranks get the weights and the optimizer state of the root.

`broadcast_parameters` overwrites tensors in place. `broadcast_optimizer_state` sends the root's state_dict: an object
with a placeholder for each tensor, then the tensors; the others load it. No step is taken to create state
that is not there yet, so parameters are never touched, and every optimizer works that has a state_dict.
`broadcast_state` does all of a training job in one call.

Before anything moves, all ranks compare what they are about to send: models that differ are an error that names what
differs, on all ranks, not a hang. Tensors of other devices travel by way of the CPU, dtypes that the core cannot reduce
(complex, other float8) as bytes: a broadcast needs no arithmetic.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import torch

from .. import _core
from ..errors import is_outcome
from ..ops import Handle
from ..ops.objects import allgather_object, broadcast_object
from ..process_sets.process_set import ProcessSet, global_process_set
from ..training.consistency import require_equal
from . import storage_check
from .compressed.residuals import without
from .ops import plain
from .parameter_names import labels_of, moved, remember

Named = list[tuple[str, torch.Tensor]]
zero_gradients = False  # as Horovod: an optimizer without state has zeros for gradients that are not there


class _Placeholder(NamedTuple):
    """Stands for a tensor in the structure that travels first."""

    number: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: str


class _Refused(NamedTuple):
    """Why the root cannot send its structure: all ranks raise it."""

    why: str


def broadcast_parameters(
    params: Mapping[str, torch.Tensor] | Iterable[torch.Tensor | tuple[str, torch.Tensor]],
    root_rank: int,
    process_set: ProcessSet = global_process_set,
) -> None:
    """Overwrite tensors on all ranks with the root's.

    All ranks of ``process_set`` must call it with the same names, shapes and dtypes; they compare these first. The
    dtype may be any, also one that collectives cannot reduce. Tensors on devices travel through host memory.

    Args:
        params (dict, or list of tensors or of (str, tensor)): usually ``model.state_dict()``.
        root_rank (int): global rank whose tensors are sent.
        process_set (ProcessSet): ranks that take part. Default: all ranks.

    Raises:
        HvdMismatchError: on all ranks, if they give different names, shapes, dtypes or roots.
        HvdPeerLostError: if a rank dies or leaves the job.
        HvdNotInitializedError: before ``init``.
        ValueError: if ``params`` holds anything but dense tensors, or a name twice; for a root outside ``process_set``,
            and on a rank outside it.
        TypeError: if ``root_rank`` or ``process_set`` has a wrong type.

    Example:
        >>> weights = {"weight": torch.tensor([1.0, 2.0]) * (hvd.rank() + 1)}
        >>> hvd.broadcast_parameters(weights, root_rank=0)
        >>> weights["weight"].tolist()
        [1.0, 2.0]
    """
    tensors = named_tensors(params)
    require_same("broadcast_parameters", tensors, process_set)
    _broadcast_tensors(tensors, root_rank, "broadcast_parameters", process_set)
    if any(name != str(i) for i, (name, _) in enumerate(tensors)):  # not a list without names
        remember(tensors)


def named_tensors(params: Any) -> Named:
    """What `broadcast_parameters` takes, as a list of (name, tensor). ValueError for anything else."""
    if isinstance(params, Mapping):
        named = list(params.items())
    elif isinstance(params, Iterable) and not isinstance(params, (str, bytes, torch.Tensor)):
        named = [item if isinstance(item, tuple) else (str(i), item) for i, item in enumerate(params)]
    else:
        raise ValueError(
            f"invalid params of type {type(params).__name__}: expected a state_dict or a list of tensors [HVD235]"
        )
    for pair in named:
        if len(pair) != 2 or not isinstance(pair[1], torch.Tensor):
            raise ValueError(
                f"invalid params: {pair[0]!r} is not a tensor: send other objects with hvd.broadcast_object [HVD235]"
            )
        if pair[1].layout is not torch.strided or pair[1].is_meta:
            raise ValueError(
                f"invalid params: {pair[0]!r} is a {pair[1].layout} tensor on device {pair[1].device} [HVD235]"
            )
        why = storage_check.wrapped(pair[1])
        if why is not None:
            raise ValueError(f"invalid params: {pair[0]!r} is {why} [HVD235]")
    names = [name for name, _ in named]
    twice = sorted({name for name in names if names.count(name) > 1}) if len(set(names)) < len(names) else []
    if twice:
        raise ValueError(f"invalid params: these names are not unique: {', '.join(map(str, twice))} [HVD235]")
    return named


def require_same(caller: str, named: Named, process_set: ProcessSet, advice: str = "Build the same model") -> None:
    """HvdMismatchError on all ranks unless all have tensors of the same names, shapes and dtypes, in whatever order."""
    mine = sorted((str(name), tuple(tensor.shape), str(tensor.dtype)) for name, tensor in named)
    require_equal(caller, mine, process_set, _shown, advice)


def _shown(entries: list[Any]) -> str:
    shown = ", ".join(f"{name} {list(shape)} {dtype.removeprefix('torch.')}" for name, shape, dtype in entries[:3])
    return shown + (f" and {len(entries) - 3} more" if len(entries) > 3 else "")


def _broadcast_tensors(named: Named, root_rank: int, prefix: str, process_set: ProcessSet) -> None:
    """In place, all at once. Raises the first failure when all have ended."""
    handles: list[tuple[Handle, torch.Tensor, torch.Tensor]] = []
    for name, tensor in named:
        carrier = _carrier(tensor.detach())
        handle = plain.broadcast_async_(carrier, root_rank, name=f"{prefix}.{name}", process_set=process_set)
        handles.append((handle, tensor, carrier))
    failure: Exception | None = None
    for handle, _, _ in handles:
        try:
            handle.wait()
        except Exception as error:
            if not is_outcome(error):
                raise
            failure = failure or error
    if failure is not None:
        raise failure
    for _, tensor, carrier in handles:
        if carrier.untyped_storage().data_ptr() != tensor.untyped_storage().data_ptr():
            with torch.no_grad():
                tensor.copy_(carrier.view(tensor.dtype).view(tensor.shape).to(tensor.device))


def _carrier(tensor: torch.Tensor) -> torch.Tensor:
    """What the core can move: the tensor itself, or a copy on the CPU, as bytes where it knows no such dtype."""
    known = str(tensor.dtype).removeprefix("torch.") in _core.DTYPES
    if tensor.is_cpu and known:
        return tensor
    tensor = tensor.cpu().contiguous() if not tensor.is_cpu else tensor.contiguous()
    return tensor if known else tensor.resolve_conj().view(-1).view(torch.uint8)


def broadcast_optimizer_state(
    optimizer: torch.optim.Optimizer,
    root_rank: int,
    model: Any = None,
    process_set: ProcessSet = global_process_set,
) -> None:
    """Give every rank the root's optimizer state and hyperparameters, with the same types and bits.

    All ranks of ``process_set`` must call it. Parameters do not change. State that the root does not have yet, before
    the first step, is empty on all ranks afterwards. Each parameter gets the state of the root's parameter of the same
    name. A checkpoint of an optimizer has no names; load it on the rank that saved it.

    Args:
        optimizer (torch.optim.Optimizer): the optimizer, distributed or not.
        root_rank (int): global rank whose state is sent.
        model (torch.nn.Module, dict or list of them, optional): names the parameters; a Module or its state_dict.
            Default: the names of ``DistributedOptimizer``, else those that ``broadcast_parameters`` was given before,
            or else the places in the optimizer.
        process_set (ProcessSet): ranks that take part. Default: all ranks.

    Raises:
        HvdMismatchError: on all ranks, if their optimizers have different parameter groups. For LBFGS, also if the
            parameters are in a different order.
        HvdPeerLostError: if a rank dies or leaves the job.
        HvdNotInitializedError: before ``init``.
        ValueError: if the root has state that cannot be sent, for a root outside ``process_set``, and on a rank outside
            it.
        TypeError: if ``optimizer`` is not a ``torch.optim.Optimizer``.

    Example:
        >>> weight = torch.nn.Parameter(torch.tensor([1.0]))
        >>> optimizer = torch.optim.SGD([weight], lr=0.1 * (hvd.rank() + 1))
        >>> hvd.broadcast_optimizer_state(optimizer, root_rank=1)
        >>> optimizer.param_groups[0]["lr"]
        0.2
    """
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise TypeError(
            f"broadcast_optimizer_state expects a torch.optim.Optimizer, not {type(optimizer).__name__} [HVD223]"
        )
    if hasattr(optimizer, "_hvd_shards"):
        from .optimizer.shard_state import broadcast_whole

        broadcast_whole(optimizer, root_rank, process_set)
        return
    caller = "broadcast_optimizer_state"
    labels, broadcast_labels = labels_of(optimizer, _several(model))
    if all(allgather_object(broadcast_labels is not None, f"{caller}.names", process_set)):
        labels = broadcast_labels or labels
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    advice = "Give the optimizer the same parameter groups, in the same order unless their parameters have names,"
    require_same(caller, list(zip(labels, parameters)), process_set, advice)
    theirs, state = broadcast_structure(
        lambda: (labels, without(optimizer.state_dict())), root_rank, caller, process_set
    )
    if not _core.is_root(root_rank):
        state = moved(state, theirs, labels)
        optimizer.load_state_dict(state)
        _exact(optimizer.state_dict()["state"], state["state"])
    if zero_gradients and not state["state"]:
        for parameter in parameters:
            if parameter.requires_grad and parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
    exchange = getattr(optimizer, "_hvd", None)
    if exchange is not None:
        exchange.levelled()


def broadcast_structure(mine: Any, root_rank: int, prefix: str, process_set: ProcessSet) -> Any:
    """The root's `mine()`; on other ranks made of what travelled, its tensors on the CPU."""
    is_root = _core.is_root(root_rank)
    tensors: list[torch.Tensor] = []
    structure = None
    if is_root:
        try:
            structure = _outline(mine(), tensors)
        except ValueError as error:
            structure = _Refused(str(error).removesuffix(" [HVD235]"))
    structure = broadcast_object(structure, root_rank, None, process_set)
    if isinstance(structure, _Refused):
        raise ValueError(f"{prefix}: rank {root_rank} cannot send its state: {structure.why} [HVD235]")
    if not is_root:
        _walk(structure, lambda placeholder: tensors.append(_blank(placeholder)))
    _broadcast_tensors([(str(i), tensor) for i, tensor in enumerate(tensors)], root_rank, prefix, process_set)
    return _walk(structure, lambda placeholder: tensors[placeholder.number])


def _outline(part: Any, tensors: list[torch.Tensor]) -> Any:
    """The structure with placeholders; its tensors are appended."""
    why = storage_check.wrapped(part) if isinstance(part, torch.Tensor) else None
    if why is not None:
        raise ValueError(f"a tensor of it is {why} [HVD235]")
    if isinstance(part, torch.Tensor) and part.layout is torch.strided:
        tensors.append(part.detach())
        stride = torch.empty_like(part, device="meta").stride()  # the same order of dimensions, without gaps
        return _Placeholder(len(tensors) - 1, tuple(part.shape), stride, str(part.dtype).removeprefix("torch."))
    if isinstance(part, dict):
        return {key: _outline(value, tensors) for key, value in part.items()}
    if isinstance(part, (list, tuple)) and not hasattr(part, "_fields"):
        return type(part)(_outline(value, tensors) for value in part)
    return part


def _walk(part: Any, visit: Any) -> Any:
    """The structure with every placeholder replaced by what `visit` makes of it."""
    if isinstance(part, _Placeholder):
        return visit(part)
    if isinstance(part, dict):
        return {key: _walk(value, visit) for key, value in part.items()}
    if isinstance(part, (list, tuple)) and not hasattr(part, "_fields"):
        return type(part)(_walk(value, visit) for value in part)
    return part


def _blank(placeholder: _Placeholder) -> torch.Tensor:
    return torch.empty_strided(placeholder.shape, placeholder.stride, dtype=getattr(torch, placeholder.dtype))


def _exact(loaded: Any, sent: Any) -> None:
    """Undo what load_state_dict does to dtypes: it casts state to the parameter's, and ranks would differ."""
    for key in sent if isinstance(sent, dict) else range(len(sent)):
        mine, roots = loaded[key], sent[key]
        if isinstance(roots, torch.Tensor):
            if mine.dtype != roots.dtype:
                loaded[key] = roots.to(mine.device)
        elif isinstance(roots, (dict, list)):
            _exact(mine, roots)


def broadcast_state(
    model: Any,
    optimizer: Any = None,
    scheduler: Any = None,
    scaler: Any = None,
    extra: Any = None,
    root_rank: int = 0,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """Give every rank all that a training job starts or resumes from, as the root has it.

    All ranks of ``process_set`` must call it with the same number of models, optimizers, schedulers and scalers. Each
    of these arguments may be None or a list.

    Args:
        model (torch.nn.Module or dict): its parameters, buffers and extra state; or a state_dict.
        optimizer (torch.optim.Optimizer, optional): as in ``broadcast_optimizer_state``.
        scheduler (object, optional): has ``state_dict`` and ``load_state_dict``.
        scaler (object, optional): has ``state_dict`` and ``load_state_dict``, such as a GradScaler.
        extra (object, optional): any object that can be pickled, such as the number of the epoch.
        root_rank (int): global rank whose state is sent. Default: 0.
        process_set (ProcessSet): ranks that take part. Default: all ranks.

    Returns:
        object: the root's ``extra``.

    Raises:
        HvdMismatchError: on all ranks, if they give different models, optimizers or numbers of objects.
        HvdPeerLostError: if a rank dies or leaves the job.
        HvdNotInitializedError: before ``init``.
        ValueError: if the root has state that cannot be sent, for a root outside ``process_set``, and on a rank outside
            it.
        TypeError: if ``scheduler`` or ``scaler`` has no state_dict, or an argument has a wrong type.

    Example:
        >>> model = torch.nn.Linear(2, 1)
        >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        >>> hvd.broadcast_state(model, optimizer, extra={"epoch": 3} if hvd.rank() == 0 else None)
        {'epoch': 3}
    """
    models, optimizers = _several(model), _several(optimizer)
    others = [*_several(scheduler), *_several(scaler)]
    for other in others:
        if not (hasattr(other, "state_dict") and hasattr(other, "load_state_dict")):
            raise TypeError(f"broadcast_state: {other!r} has no state_dict: pass it as extra [HVD235]")
    kinds = [("models", len(models)), ("optimizers", len(optimizers)), ("schedulers and scalers", len(others))]
    require_equal(
        "broadcast_state",
        kinds,
        process_set,
        lambda have: ", ".join(f"{n} {kind}" for kind, n in have),
        "Give the same",
    )
    for part in models:
        _broadcast_model(part, root_rank, process_set)
    for part in optimizers:
        broadcast_optimizer_state(part, root_rank, models, process_set)
    for part in others:
        state = broadcast_structure(part.state_dict, root_rank, "broadcast_state", process_set)
        if not _core.is_root(root_rank):
            part.load_state_dict(state)
    return broadcast_object(extra, root_rank, None, process_set)


def _several(part: Any) -> list[Any]:
    if part is None:
        return []
    return list(part) if isinstance(part, (list, tuple)) else [part]


def _broadcast_model(model: Any, root_rank: int, process_set: ProcessSet) -> None:
    if not isinstance(model, torch.nn.Module):
        broadcast_parameters(model, root_rank, process_set)
        return
    broadcast_parameters(module_tensors(model), root_rank, process_set)
    rest = {name: value for name, value in model.state_dict().items() if not isinstance(value, torch.Tensor)}
    if rest:  # as get_extra_state gave it; all ranks have the same modules, so all have it or none
        rest = broadcast_object(rest, root_rank, None, process_set)
        model.load_state_dict(rest, strict=False)


def module_tensors(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Every tensor of a module by name: its state_dict's, and buffers that are not saved."""
    tensors = {name: value for name, value in model.state_dict().items() if isinstance(value, torch.Tensor)}
    for name, buffer in model.named_buffers():
        tensors.setdefault(name, buffer)
    return tensors
