"""Checkpoint of a pipeline: all that its next step reads, in two forms.

The part of a rank has what lies there, and fits the same layout only. The whole has the names of one process, on one
rank, and fits any layout. Both are the names of state.py, and beside them:

    pipeline/batches                 mini-batches so far; the numbers of micro-batches follow from them
    pipeline/update                  the numbers of the update policy, and pipeline/update/NAME/PARAMETER
    pipeline/lr_scheduler            its state; what it has for each group of the optimizer stands
    pipeline/lr_scheduler/PARAMETER  with the parameters of that group, since another layout has other groups
    pipeline/scaler                  the GradScaler's state
    pipeline/random                  torch's generators: of a place in the mesh, so of no use in another one
    pipeline/layout                  in a part

Nothing is changed on any rank before all have found that it fits.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

import torch

import hvdlite.torch as hvd

from ..errors.user_warning import warn
from . import weights
from .checkpoint_values import alike, exchanged, plain
from .optimizer_step import StageUpdate
from .state import Item, apply, assembled, changes, item, items, of_group, part

_ENTRY = "pipeline/lr_scheduler/{}"
# Lists of torch's schedulers with a value for each group.
_BY_GROUP = {"base_lrs", "_last_lr", "lr_lambdas", "max_lrs", "base_momentums", "max_momentums"}


class Saved:
    """The four methods of a Pipeline."""

    module: torch.nn.Module
    finish: StageUpdate
    weights: weights.Policy
    scaler: Any
    micro_batches: int
    _mesh: hvd.Mesh
    _axes: tuple[str, str]
    _flushes: bool
    _batches: int
    _since: int
    _timeout: float | None
    _broken: bool
    _usable: Callable[[], None]

    def state_dict(self) -> dict[str, Any]:
        """Return this rank's part of all that the next step reads. All ranks must call it, after ``drain``.

        It has the weights and buffers, the state and hyperparameters of the optimizer, the scheduler of learning rates,
        the scaler, the numbers of the update policy and the state of torch's random generators. The state of Python's
        and NumPy's generators and the place in the data are yours to save. Tensors are not copied: write them to a file
        before the next step. ``torch.load(file, weights_only=True)`` reads it.

        Returns:
            dict: tensors and plain values by name.

        Raises:
            ValueError: on all ranks, if micro-batches are in flight or a value cannot be saved.

        Example:
            >>> torch.save(pipe.state_dict(), f"part{hvd.rank()}.pt")
        """
        found: dict[str, Any] = {}

        def made() -> None:
            found.update((name, value) for name, value, _ in self._items())
            found.update(self._shared(), **{"pipeline/random": _random(), "pipeline/layout": self._layout()})

        exchanged(made, "part", self._mesh.process_set, self._timeout)
        return found

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load the part that this rank saved with ``state_dict``. All ranks must call it.

        Args:
            state (dict): the value of ``state_dict`` on the rank at the same place of the same mesh.

        Raises:
            ValueError: on all ranks, if the layout or the model differs on one of them. Nothing is changed then.

        Example:
            >>> pipe.load_state_dict(torch.load(f"part{hvd.rank()}.pt", weights_only=True))
        """

        def fits() -> None:
            saved = state.get("pipeline/layout", {})
            for what, here in self._layout().items():
                if saved.get(what) != here:
                    raise ValueError(
                        f"the part was saved with the {what} {saved.get(what)}, but this rank has {here}: give each "
                        "rank its own part, or use whole_state and load_whole for another layout [HVD018]"
                    )

        self._load(state, None, fits)
        _set_random(state["pipeline/random"])

    def whole_state(self, root_rank: int = 0) -> dict[str, Any] | None:
        """Gather on one rank all that the next step reads, for any layout. All ranks must call it, after ``drain``.

        It has what ``parallel.whole_state`` gathers, and besides the scheduler of learning rates, the scaler, the
        numbers of the update policy and the random generators of all places. ``torch.load(file, weights_only=True)``
        reads it.

        Args:
            root_rank (int): the rank that gets it. Default: 0.

        Returns:
            dict or None: tensors in host memory and plain values on the root, None on the other ranks.

        Raises:
            HvdPeerLostError: a rank has left or died.
            ValueError: on all ranks, if micro-batches are in flight, a value cannot be saved, or the schedulers or
                scalers of stages differ.

        Example:
            >>> whole = pipe.whole_state()
            >>> if hvd.rank() == 0:
            ...     torch.save(whole, "whole.pt")
        """

        def own_part() -> Any:
            for _ in self._items():  # what cannot be saved is refused on all ranks
                pass
            return self._shared(), _random(), self.finish.optimizer is not None

        everyone = exchanged(own_part, "whole", self._mesh.process_set, self._timeout)
        ranks = self._mesh.process_set.ranks
        learning = [(rank, each) for rank, (each, _, learns) in zip(ranks, everyone) if learns]
        shared = _agreed(learning) or everyone[0][0]
        whole = assembled(self._items, self._mesh, root_rank, (self._axes[1], self._cut()), self._timeout)
        if whole is not None:
            states = [random for _, random, _ in everyone]
            whole.update(shared, **{"pipeline/random": {"mesh": dict(self._mesh.shape), "states": states}})
        return whole

    def load_whole(self, whole: Mapping[str, Any]) -> None:
        """Load this rank's part of what ``whole_state`` has gathered in any layout. All ranks must call it.

        Random generators go on where the mesh has the same shape; otherwise they stay as they are, with a warning.

        Args:
            whole (dict): the value of ``whole_state`` on the root, the same on all ranks.

        Raises:
            ValueError: on all ranks, if it does not fit on one of them. Nothing is changed then.

        Example:
            >>> pipe.load_whole(torch.load("whole.pt", weights_only=True, mmap=True))
        """
        cut = self._cut()
        self._load(whole, self._mesh.group(cut) if cut in self._mesh.shape else None)
        random = whole.get("pipeline/random")
        if random is None:  # left out on purpose
            return
        if list(random["mesh"].items()) == list(self._mesh.shape.items()):
            _set_random(random["states"][self._mesh.process_set.rank()])
        else:
            warn(
                f"the checkpoint has the random numbers of the mesh {random['mesh']}, and this one is "
                f"{dict(self._mesh.shape)}: they begin anew; seed them, as parallel.seeded does [HVD018]"
            )

    # what a checkpoint has

    def _layout(self) -> dict[str, Any]:
        coordinates = {axis: self._mesh.coordinate(axis) for axis in self._mesh.shape}
        layers = [name for name, _ in self.module.named_children()]
        return {"mesh": dict(self._mesh.shape), "place in the mesh": coordinates, "layers": layers}

    def _cut(self) -> str:
        """The axis over which tensors are cut."""
        others = [axis for axis in self._mesh.shape if axis not in self._axes]
        return others[0] if len(others) == 1 else "tp"

    def _empty(self) -> None:
        self._usable()
        if not self._flushes and self._since != self._batches:
            raise ValueError("a checkpoint while updates are left: call drain() first, on all ranks [HVD015]")

    def _items(self) -> Iterator[Item]:
        """What differs between stages, by the names of parameters."""
        self._empty()
        yield from items(self.module, self.finish.optimizer)
        names = {id(p): name for name, p in self.module.named_parameters()}
        if self.finish.lr_scheduler is not None:
            _, lists = self._schedule()
            for i, group in enumerate(self.finish.optimizer.param_groups):
                for name in (names[id(p)] for p in group["params"] if id(p) in names):
                    yield _ENTRY.format(name), {at: values[i] for at, values in lists.items()}, None
        for key, values in _numbers(self.weights).items():
            for name, value in values.items() if isinstance(values, dict) else ():
                if name not in self.weights.params:
                    raise ValueError(f"the update's {key!r} has {name!r}, which is no parameter of the stage [HVD018]")
                yield item(f"pipeline/update/{key}/{name}", value, self.weights.params[name], f"{key!r} of {name!r}")

    def _shared(self) -> dict[str, Any]:
        """What all stages have alike. Of values by parameter, that there are some."""
        numbers = _numbers(self.weights).items()
        return {
            "pipeline/batches": self._batches,
            "pipeline/lr_scheduler": None if self.finish.lr_scheduler is None else self._schedule()[0],
            "pipeline/scaler": plain(self.scaler.state_dict(), "scaler") if self.scaler else None,
            "pipeline/update": {
                key: {} if isinstance(value, dict) else plain(value, f"the update's {key!r}") for key, value in numbers
            },
        }

    def _schedule(self) -> tuple[dict[str, Any], dict[str, list[Any]]]:
        """The state of the scheduler without its lists by group, and these by their place in it."""
        scheduler, lists = self.finish.lr_scheduler, dict[str, list[Any]]()
        if not hasattr(scheduler, "state_dict"):
            raise ValueError(
                f"lr_scheduler is a {type(scheduler).__name__} without state_dict(): give it this method and "
                "load_state_dict(), or step it yourself [HVD018]"
            )
        state = plain(scheduler.state_dict(), "lr_scheduler")
        for holder, key, at in list(_lists_in(state)):
            lists[at], holder[key] = list(holder[key]), None
        groups = len(self.finish.optimizer.param_groups) if self.finish.optimizer is not None else 0
        for at, values in lists.items():
            if len(values) != groups:
                raise ValueError(
                    f"lr_scheduler's {at!r} has {len(values)} values for {groups} groups of the stage's optimizer: "
                    "make the scheduler of this optimizer, after its last group was added [HVD018]"
                )
        return state, lists

    # loading

    def _load(
        self, saved: Mapping[str, Any], tp: hvd.ProcessSet | None, fits: Callable[[], None] = lambda: None
    ) -> None:
        found: list[Callable[[], Any]] = []

        def checked() -> None:
            self._empty()
            if not isinstance(saved, Mapping) or "pipeline/batches" not in saved:
                raise ValueError(
                    f"the checkpoint (a {type(saved).__name__}) has no 'pipeline/batches', so no method of a Pipeline "
                    "has made it: load the value of parallel.whole_state with parallel.load_whole [HVD018]"
                )
            fits()
            found.extend(changes(self.module, saved, tp, self.finish.optimizer))
            found.extend(self._changes(saved, tp))

        exchanged(checked, "load", self._mesh.process_set, self._timeout)
        self._broken = True  # what fails now has changed a part
        exchanged(lambda: apply(found), "loaded", self._mesh.process_set, self._timeout)
        self._broken = False
        self._batches = self._since = saved["pipeline/batches"]
        self.weights.restart(self._batches * self.micro_batches)

    def _changes(self, saved: Mapping[str, Any], tp: hvd.ProcessSet | None) -> Iterator[Callable[[], Any]]:
        scheduler, optimizer = self.finish.lr_scheduler, self.finish.optimizer
        for what, here in (("scaler", self.scaler and self.scaler.state_dict()), ("lr_scheduler", scheduler)):
            if bool(saved[f"pipeline/{what}"]) != bool(here) and (what == "scaler" or optimizer is not None):
                one, other = ("the pipeline", "the checkpoint") if here else ("the checkpoint", "the pipeline")
                raise ValueError(
                    f"{one} has the setting {what!r}, but {other} has not: make the pipeline with the same settings, "
                    "or load weights and optimizer only, with parallel.load_whole [HVD018]"
                )
        if self.scaler and saved["pipeline/scaler"]:
            yield partial(self.scaler.load_state_dict, saved["pipeline/scaler"])
        if scheduler is not None:
            yield partial(scheduler.load_state_dict, self._schedule_of(saved))
        numbers, here = dict(saved["pipeline/update"]), _numbers(self.weights)
        if numbers.keys() != here.keys():
            raise ValueError(
                f"the checkpoint has {sorted(numbers)} of its update, but {type(self.weights).__name__} needs "
                f"{sorted(here)}: use the same update, or load weights and optimizer only, with parallel.load_whole "
                "[HVD018]"
            )
        for key in (key for key, value in here.items() if isinstance(value, dict)):
            start = f"pipeline/update/{key}/"
            numbers[key] = {}
            for name, p in self.weights.params.items():
                if start + name in saved:
                    value = saved[start + name]
                    cut = getattr(p, "cut", None) if isinstance(value, torch.Tensor) and value.dim() else None
                    numbers[key][name] = part(value, cut, tp)
        yield partial(self.weights.load, numbers)

    def _schedule_of(self, saved: Mapping[str, Any]) -> Any:
        """The state of the scheduler as it stood, with lists for the groups of this layout."""
        state, (own, lists) = plain(saved["pipeline/lr_scheduler"], "lr_scheduler"), self._schedule()
        if state is None or _kind(state) != _kind(own):
            raise ValueError(
                f"lr_scheduler is a {type(self.finish.lr_scheduler).__name__} with {sorted(own)}, but the checkpoint's "
                f"has {sorted(state or ())}: use the same one, with the same schedulers in it [HVD018]"
            )
        for i, group in enumerate(self.finish.optimizer.param_groups):
            for at, value in of_group(self.module, saved, group, _ENTRY).items():
                lists[at][i] = value
        for holder, key, at in _lists_in(state):
            holder[key] = lists[at]
        return state


def _lists_in(value: Any, at: str = "") -> Iterator[tuple[dict[str, Any], str, str]]:
    """(what holds it, its key there, its place in the whole state) of each list by group."""
    for key, each in value.items() if type(value) is dict else enumerate(value) if isinstance(value, list) else ():
        if key in _BY_GROUP:
            yield value, key, f"{at}{key}"
        else:
            yield from _lists_in(each, f"{at}{key}/")


def _kind(state: dict[str, Any]) -> list[Any]:
    """What distinguishes schedulers: their keys, and those of the schedulers within."""
    return [sorted(state), *map(_kind, state.get("_schedulers", ()))]


def _numbers(policy: weights.Policy) -> dict[str, Any]:
    """The policy's. ValueError for a class of the user's that has some and does not say which."""
    own: Any = type(policy)
    ours: Any = next(each for each in own.__mro__ if each.__module__ == weights.__name__)
    if own.state is ours.state or own.load is ours.load:
        more = vars(policy).keys() - vars(ours(torch.nn.Module(), policy.place)).keys()
        if more:
            raise ValueError(
                f"the update {own.__qualname__} has {sorted(more)[0]!r}, which {ours.__name__} does not save: give it "
                "state() and load(state) [HVD018]"
            )
    return policy.state()


def _agreed(stages: list[tuple[int, dict[str, Any]]]) -> dict[str, Any] | None:
    """What is the same on all ranks that have an optimizer."""
    for rank, each in stages[1:]:
        for name, first in stages[0][1].items():
            other = each[name]
            if alike(first, other):
                continue
            differ = sorted(set(first) & set(other)) if isinstance(first, dict) and isinstance(other, dict) else []
            where = [repr(key) for key in differ if not alike(first[key], other[key])] or ["it"]
            raise ValueError(
                f"{name.partition('/')[2]} differs between stages: {where[0]} is another on rank {rank} than on rank "
                f"{stages[0][0]}. Use the same on all stages, or save parts with state_dict [HVD018]"
            )
    return stages[0][1] if stages else None


def _random() -> dict[str, torch.Tensor]:
    """The states of torch's default generators."""
    cpu = {"cpu": torch.get_rng_state()}
    return {**cpu, "cuda": torch.cuda.get_rng_state()} if torch.cuda.is_available() else cpu


def _set_random(saved: Mapping[str, torch.Tensor]) -> None:
    torch.set_rng_state(saved["cpu"].cpu())
    if "cuda" in saved and torch.cuda.is_available():
        torch.cuda.set_rng_state(saved["cuda"].cpu())
