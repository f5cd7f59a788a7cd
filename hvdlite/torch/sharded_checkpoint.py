"""`save_sharded` and `load_sharded`: a checkpoint of model and optimizer that each rank writes its own part of.

Ranges of elements are saved, so any number of ranks loads it, with or without `shard=True`. What is not cut (counters
of steps, options, buffers, other parameters, `extra`) is in one file of the first rank, which `torch.load` reads with
`weights_only=True`, so that it runs no code. `training.checkpoint_folder` has the format of the files.

If a rank fails, all raise its error, and nothing is changed: each part of the work ends with an exchange of outcomes.
"""

from __future__ import annotations

import contextlib
import io
import os
from collections import deque
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from .. import _core
from ..errors import HvdError
from ..errors.codes import code_of, uncoded
from ..errors.user_warning import warn
from ..ops.objects import allgather_object
from ..process_sets.process_set import global_process_set
from ..training import checkpoint_folder as files
from ..training.checkpoint_folder import Entry, Manifest
from .optimizer.cut_trial import is_cut
from .optimizer.shard_state import meet

_NOT_OPTIONS = "params", "param_names"
_MARKERS = {"save_sharded": torch.int8, "load_sharded": torch.int16}  # state_dict() has uint8


def save_sharded(
    folder: str | os.PathLike[str], model: torch.nn.Module, optimizer: torch.optim.Optimizer, extra: Any = None
) -> None:
    """Write a checkpoint of model and optimizer, of which each rank writes its own share.

    All ranks of the optimizer's process set must call it. A rank writes the parameters and the state that it owns, and
    needs memory for one tensor. Without ``shard=True`` the first rank writes all. The folder must be on a file system
    that all ranks share. An older checkpoint of that name is whole until the new one takes its place.

    Args:
        folder (str or path): where the checkpoint will be. Beside it ``<folder>.draft`` and ``<folder>.old`` are used.
        model (torch.nn.Module): the model. The first rank writes its buffers, and parameters that ``optimizer`` lacks.
        optimizer (torch.optim.Optimizer): what ``hvd.DistributedOptimizer`` returned. With one rank any optimizer.
        extra (object, optional): more to keep, such as an epoch or a scheduler's state. Only tensors and plain Python
            objects are kept; that of the first rank counts.

    Raises:
        OSError: on all ranks, if one cannot write. It names rank and file; the older checkpoint stays.
        ValueError: on all ranks, if ``extra`` has an object that ``torch.load(weights_only=True)`` refuses. Or the
            folder has other files, or is not on a shared file system.
        HvdMismatchError: if another rank goes on with its training loop instead.
        TypeError: if ``model`` or ``optimizer`` has a wrong type.

    Example:
        >>> import tempfile
        >>> model = torch.nn.Linear(2, 1)
        >>> optimizer = hvd.DistributedOptimizer(torch.optim.Adam(model.parameters()), shard=True)
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     folder = hvd.broadcast_object(folder, root_rank=0)  # one for all ranks
        ...     hvd.save_sharded(f"{folder}/saved", model, optimizer, extra={"epoch": 3})
        ...     hvd.load_sharded(f"{folder}/saved", model, optimizer)
        {'epoch': 3}
    """
    job, begun = _Job("save_sharded", model, optimizer, folder), ""
    try:
        begun = job.agreed("begin", lambda: job.begin(extra) if job.first else "")[0]
        parts = job.agreed("share", lambda: job.write_share(begun))
        job.agreed("finish", lambda: job.finish(begun, parts, extra) if job.first else None)
    except Exception:
        if job.first and begun:
            with contextlib.suppress(OSError, ValueError):
                files.require_own(job.folder, begun)
                files.remove(files.draft_of(job.folder))
        raise


def load_sharded(folder: str | os.PathLike[str], model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> Any:
    """Load what ``save_sharded`` wrote, on any number of ranks, with or without ``shard=True``.

    All ranks of the optimizer's process set must call it. Each rank reads its own share, and checks what it reads. The
    model and the optimizer are changed only after all ranks have read without an error. Training then goes on with the
    same bits as without interruption. Averaged gradients that wait for a step are dropped by a sharded optimizer.

    Args:
        folder (str or path): folder of the checkpoint.
        model (torch.nn.Module): a model with the same parameters and buffers.
        optimizer (torch.optim.Optimizer): an optimizer of the same class and groups. Make late groups by
            ``add_param_group`` first.

    Returns:
        object: the ``extra`` that was saved.

    Raises:
        ValueError: on all ranks, if the folder is damaged or incomplete, or is of another model or optimizer. It names
            the file; nothing was changed.
        HvdMismatchError: if another rank goes on with its training loop instead.
        TypeError: if ``model`` or ``optimizer`` has a wrong type.

    Example:
        >>> model = torch.nn.Linear(2, 1)
        >>> optimizer = hvd.DistributedOptimizer(torch.optim.Adam(model.parameters()), shard=True)
        >>> try:
        ...     hvd.load_sharded("/no/such/folder", model, optimizer)
        ... except ValueError as error:
        ...     print("there is no such folder" in str(error))
        True
    """
    job = _Job("load_sharded", model, optimizer, folder)
    if len(set(job.agreed("read", job.read))) > 1:
        raise ValueError(
            f"load_sharded: ranks have read different checkpoints from {job.folder}: the folder must be on a file "
            "system that all ranks share. Nothing was changed [HVD427]"
        )
    job.apply()
    return job.rest["extra"]


class _Held(NamedTuple):
    """What a rank has of a parameter. made: what its optimizer steps on, and knows state by."""

    name: str
    begin: int
    end: int
    made: torch.Tensor


class _Job:
    """The ranks of an optimizer, in a call; and what this one does."""

    def __init__(self, caller: str, model: Any, optimizer: Any, folder: Any) -> None:
        if not isinstance(model, torch.nn.Module) or not isinstance(optimizer, torch.optim.Optimizer):
            found = f"{type(model).__name__} and {type(optimizer).__name__}"
            raise TypeError(f"{caller} takes a folder, a torch.nn.Module and an optimizer, not {found} [HVD427]")
        exchange: Any = getattr(optimizer, "_hvd", None)
        if _core.size() > 1 and exchange is None:
            raise ValueError(
                f"{caller}: this optimizer shares its updates with no other rank: give what hvd.DistributedOptimizer "
                "returned, on the ranks of its process set, and not with op=hvd.Adasum. Save an optimizer of one rank "
                "by torch.save(optimizer.state_dict(), file) [HVD427]"
            )
        self.caller, self.model, self.optimizer = caller, model, optimizer
        self.exchange, self.shards = exchange, getattr(optimizer, "_hvd_shards", None)
        self.folder = os.path.realpath(os.fspath(folder))
        self.process_set = global_process_set if exchange is None else exchange.wire.process_set
        self.first = self.process_set.rank() == 0
        self.groups: list[dict[str, Any]] = optimizer.__dict__["param_groups"]
        self.state = optimizer.state if self.shards is None else self.shards.inner.state
        self.parameters: list[torch.Tensor] = [each for group in self.groups for each in group["params"]]
        self.names = self._names()  # by the id of a parameter
        self.parts: list[tuple[_Held, torch.Tensor, dict[str, Any] | None]] = []  # values and state that were read
        if self.shards is not None:
            what = f"{caller} of a sharded optimizer needs every rank, so all ranks must call it. Another rank is "
            meet(self.shards, _MARKERS[caller], what + "in another part of its script")

    def _names(self) -> dict[int, str]:
        """The user's names; the place in the optimizer for what has none."""
        names = {id(parameter): name for name, parameter in self.model.named_parameters()}
        wrapped = getattr(self.optimizer, "_hvd_names", {})
        found = {
            id(each): names.get(id(each)) or wrapped.get(each) or f"noname.{g}.{i}"
            for g, group in enumerate(self.groups)
            for i, each in enumerate(group["params"])
        }
        self.shapes = {found[id(each)]: each.shape for each in self.parameters}
        self.group_of = {found[id(each)]: group for group in self.groups for each in group["params"]}
        return found

    def agreed(self, part: str, action: Callable[[], Any]) -> list[Any]:
        """What each rank's action returns. The first failure of a rank, on all ranks."""
        mine, why, result = None, None, None
        try:
            result = action()
        except BaseException as error:  # of any class, also an interrupt: the others wait
            kind = next((one for one in (HvdError, OSError, ValueError) if isinstance(error, one)), None)
            mine, why = error, (kind or HvdError, str(error) if kind else f"{type(error).__name__}: {error}")
        replies = allgather_object((why, result), f"{self.caller}.{part}", self.process_set)
        if mine is not None and not isinstance(mine, Exception):
            raise mine
        for rank, (why, _) in zip(self.process_set.ranks, replies):
            if why is not None:
                rest = "The checkpoint from before stays" if self.caller == "save_sharded" else "Nothing was changed"
                code = code_of(why[1]) or "HVD427"
                raise why[0](f"{self.caller}: rank {rank}: {uncoded(why[1])}. {rest} [{code}]") from mine
        return [result for _, result in replies]

    def held(self) -> list[_Held]:
        """This rank's pieces; all parameters, if it is not sharded."""
        if self.shards is None:
            return [_Held(self.names[id(each)], 0, each.numel(), each) for each in self.parameters]
        self.shards.prepare()
        names = [self.names[id(each)] for each in self.exchange.wire.parameters]
        pieces = self.shards.pieces.items()
        return [_Held(names[piece.number], piece.begin, piece.end, made) for (_, piece), made in pieces]

    def state_of(self, made: torch.Tensor) -> dict[str, Any]:
        """The state of a piece or parameter."""
        return self.state.get(made, {}) if self.shards is None else self.shards.state_of(made)

    def rest_of_model(self) -> dict[str, Any]:
        """Buffers, parameters of others, and what a module adds to its state_dict."""
        state = self.model.state_dict(keep_vars=True)
        return {key: value for key, value in state.items() if id(value) not in self.names}

    def options(self) -> list[dict[str, Any]]:
        """Of the groups."""
        return [{key: each for key, each in group.items() if key not in _NOT_OPTIONS} for group in self.groups]

    def begin(self, extra: Any) -> str:
        """An empty draft, made by the first rank."""
        objects = {key: each for key, each in self.rest_of_model().items() if not isinstance(each, torch.Tensor)}
        for what, value in (("extra", extra), ("the model's state", objects), ("param_groups", self.options())):
            _require_plain(what, value)
        return files.begin(self.folder)

    def write_share(self, begun: str) -> tuple[list[Entry], dict[str, dict[str, Any]]]:
        """Write what this rank owns: the entries, and the state that is not cut, by parameter."""
        files.require_seen(self.folder, begun, self.process_set.ranks[0])
        entries, whole = list[Entry](), dict[str, dict[str, Any]]()
        owners = self.process_set.ranks[:1] if self.shards is None else self.shards.process_set.ranks
        held = (
            self.held() if self.process_set.ranks[0] in owners and _core.rank() in owners else []
        )  # one group is enough
        if not held:
            return entries, whole
        name = f"share-{self.process_set.rank()}-of-{self.process_set.size()}.bin"
        verdict = None if self.shards is None else self.shards.verdict
        with files.written(os.path.join(files.draft_of(self.folder), name)) as file:
            for each in held:
                cut = {"": each.made}
                for key, value in self.state_of(each.made).items():
                    if isinstance(value, torch.Tensor) and is_cut(key, value, each.made.shape, verdict):
                        cut[key] = value
                    else:
                        whole.setdefault(each.name, {})[key] = _on_host(value)
                for key, value in cut.items():
                    files.add(file, entries, (each.name, key, each.begin, each.end, _dtype(value)), _raw(value))
        return entries, whole

    def finish(self, begun: str, parts: list[tuple[list[Entry], dict[str, dict[str, Any]]]], extra: Any) -> None:
        """The rest and the manifest, by the first rank."""
        state: dict[str, dict[str, Any]] = {}
        for _, whole in parts:
            for name, kept in whole.items():
                state.setdefault(name, {}).update(kept)
        _require_plain("the optimizer's state", state)
        model = {key: _on_host(value) for key, value in self.rest_of_model().items()}
        with files.written(os.path.join(files.draft_of(self.folder), files.REST)) as file:
            torch.save({"model": model, "state": state, "options": self.options(), "extra": extra}, file)
        files.finish(self.folder, begun, self.about(), [entry for theirs, _ in parts for entry in theirs])

    def about(self) -> dict[str, Any]:
        """What must be the same at a load."""
        return {
            "optimizer": type(self.optimizer).__name__,
            "parameters": [[self.names[id(each)], list(each.shape), _dtype(each)] for each in self.parameters],
            "groups": [[self.names[id(each)] for each in group["params"]] for group in self.groups],
        }

    def read(self) -> int:
        """Read all that this rank needs, and change nothing. Return the checksum of the manifest."""
        place = files.found(self.folder)
        if place != self.folder and self.first:
            warn(f"{self.folder} is not there: a save was interrupted. {place} is loaded, the one before [HVD427]")
        manifest = Manifest(place)
        manifest.require_same(self.about())
        self.rest = self._read_rest(manifest)
        offloads = self.shards is not None and self.shards.offload is not None
        for each in self.held():
            state = self._read_state(manifest, each)
            values = _tensor(manifest, each, "")
            self.parts.append((each, values, None if offloads else state))  # which has no room for all of it
        self.manifest = manifest
        return manifest.crc

    def _read_state(self, manifest: Manifest, each: _Held) -> dict[str, Any]:
        kept = self.rest["state"].get(each.name, {})
        state = {key: self._share(key, one, each) if torch.is_tensor(one) else one for key, one in kept.items()}
        for key in filter(None, manifest.keys[each.name]):
            values = _tensor(manifest, each, key)
            state[key] = torch.empty_like(each.made, dtype=values.dtype).copy_(values.view(each.made.shape))
        return state

    def _share(self, key: str, value: torch.Tensor, each: _Held) -> torch.Tensor:
        """A tensor of the state that was not cut."""
        if self.shards is not None and self.shards.is_cut(key, value, self.shapes[each.name]):
            value = value.reshape(-1)[each.begin : each.end]
        group = self.group_of[each.name]
        on_host = key == "step" and not (group.get("capturable") or group.get("fused"))  # as torch itself keeps it
        return value.clone() if on_host else value.to(each.made.device, copy=True)

    def _read_rest(self, manifest: Manifest) -> dict[str, Any]:
        path = manifest.rest_path()
        try:
            rest = torch.load(path, map_location="cpu", weights_only=True)
            fits = all(isinstance(rest[key], dict) for key in ("model", "state")) and "extra" in rest
            fits = fits and all(isinstance(each, dict) for each in (*rest["options"], *rest["state"].values()))
        except Exception as error:
            raise ValueError(f"{path} cannot be read: {type(error).__name__}: {error}") from error
        if not fits or len(rest["options"]) != len(self.groups):
            raise ValueError(f"{path} does not have what save_sharded writes")
        for number, (those, these) in enumerate(zip(rest["options"], self.options())):
            if those.keys() != these.keys():
                raise ValueError(f"{path}: group {number} has the options {sorted(those)}, and here {sorted(these)}")
        theirs, ours = rest["model"], self.rest_of_model()
        for name in [*theirs, *ours]:
            saved, here = (_form(one[name]) if name in one else "not" for one in (theirs, ours))
            if saved != here:
                raise ValueError(f"{path}: {name!r} is {saved} there, and {here} in this model")
        return rest

    def apply(self) -> None:
        """Change the model and the optimizer. What is not on this rank comes from the others."""
        with torch.no_grad():
            self.state.clear() if self.shards is None else self.shards.drop_state()
            for each, values, state in self.parts:
                each.made.copy_(values.view(each.made.shape))
                found = self._read_state(self.manifest, each) if state is None else state
                if found and self.shards is not None:
                    self.shards.set_state(each.made, found)
                elif found:
                    self.state[each.made] = found
            for group, options in zip(self.groups, self.rest["options"]):
                group.update(options)
            whole = self.model.state_dict()
            whole.update(self.rest["model"])
            self.model.load_state_dict(whole)
            if self.shards is not None:
                self.shards.publish(deque(at for at, bucket in enumerate(self.shards.carrier.buckets) if bucket.total))
                self.shards.drop()
                self.shards.loaded = None
        if self.exchange is not None:
            self.exchange.levelled()
            self.exchange.wire.start.ask()  # compare the ranks once more


def _dtype(value: torch.Tensor) -> str:
    return str(value.dtype).removeprefix("torch.")


def _on_host(value: Any) -> Any:
    return value.detach().cpu() if isinstance(value, torch.Tensor) else value


def _form(value: Any) -> str:
    return f"{list(value.shape)} {_dtype(value)}" if isinstance(value, torch.Tensor) else "no tensor"


def _raw(value: torch.Tensor) -> memoryview:
    """Its bytes, in the order of its elements."""
    flat: Any = value.detach().cpu().contiguous().view(-1)
    return memoryview(flat.view(torch.uint8).numpy()) if flat.numel() else memoryview(b"")


def _tensor(manifest: Manifest, each: _Held, key: str) -> torch.Tensor:
    """What this rank holds of the values ("") or of a state, in one dimension."""
    ranges = manifest.ranges[each.name, key]
    data = manifest.read(each.name, key, each.begin, each.end)
    dtype = getattr(torch, ranges[0].dtype) if ranges else each.made.dtype
    return torch.frombuffer(data, dtype=dtype) if data else torch.empty(0, dtype=dtype)


def _require_plain(what: str, value: Any) -> None:
    """ValueError that names what in it `torch.load(weights_only=True)` does not read."""
    try:
        torch.save(value, file := io.BytesIO())
        file.seek(0)
        torch.load(file, weights_only=True)
        return
    except Exception:
        inside = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, each in inside:
        _require_plain(f"{what}[{key!r}]", each)
    why = "which torch.load(weights_only=True) does not read: keep tensors, numbers, texts, lists and dicts"
    raise ValueError(f"{what} is {type(value).__name__}, {why}")
