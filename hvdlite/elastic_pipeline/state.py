"""PipelineState: how do stages, copies and micro-batches of a pipeline follow the ranks of an elastic job.

A commit keeps this rank's layers in host memory, named as in one process, and gives them to the ranks that keep copies
(holdings.py). Whenever ranks have met, `sync` goes on from a commit: rank 0 chooses the layout for the ranks that are
there, each layer travels from a rank that holds it to those that need it, and a new stage, optimizer and Pipeline
are made of them. The batch stays, and which rows a copy takes follows from the layout: so a replay in one process, from
`log`, has the same bits.

Ranks are numbered anew whenever they meet, so what counts is what each rank reports to hold, never where it was. The
last two commits are kept, since survivors differ by one at most. A commit has a token, the same on all ranks that made
it together. Until the first commit there are only seeds: each layer is made under a seed of its own, so first weights
do not depend on the layout and nothing travels.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Union

import torch

import hvdlite.torch as hvd

from ..elastic import checkpoint
from ..errors import HorovodInternalError, HvdStateError
from ..errors.codes import coded, uncoded
from ..lifecycle.init import incarnations
from ..parallel import Pipeline
from ..parallel.micro_batches import rows_of
from ..parallel.structure import put_together, taken_apart
from ..plan import Layer, PlanError, units
from ..plan.layers import read_profiles
from ..plan.layout import Layout, layout_for
from ..process_sets.process_set import host_of
from . import folder, recipe
from .exchange import Layers, exchanged, size_of
from .holdings import lost, moves, needed
from .recipe import OPTIMIZER, SEEDS, Commit

Profiles = Union[str, Path, Mapping[int, Sequence[Layer]]]


class _Start(NamedTuple):
    """What rank 0 sends: from what all go on, and with which layout. files: of a commit in a folder, else None.
    written: the token of the commit in the folder. job: all tokens of this job begin with it."""

    token: str
    shared: dict[str, Any]
    files: str | None
    written: str | None
    job: str
    profiles: Mapping[int, Sequence[Layer]]
    layout: Layout
    objects: dict[str, Any]


class PipelineState(folder.InFolder):
    """State of an elastic job that trains a pipeline, whose stages and copies follow the number of ranks.

    When ranks leave or come, the ranks that are there go on from the last commit with another number of stages, copies
    and micro-batches. Layers come from the memory of ranks that hold them. Ranks that no layout needs are spare: they
    keep copies of layers, and take part again when ranks change. The number of rows of a step never changes.

    The idea is Varuna's (Athlur et al., EuroSys 2022).

    Args:
        layers (list): functions without arguments that make one layer each. A stage may begin at any of them. Make
            devices, modes and hooks of a layer there. Each is called under a seed of its own.
        optimizer (callable): a function of parameters that returns a plain optimizer.
        loss (callable): a function of output and y that returns a scalar, as for ``parallel.Pipeline``.
        batch (int): the number of rows of a step, of all copies together.
        profile (str, Path or dict): the costs of layers by rows of a micro-batch: a file of ``hvdlite-plan profile
            --rows``, or the value of ``plan.profiles``. Only rank 0 reads the file.
        memory (str or float, optional): the memory of a rank, as ``"16GB"``. None: no limit.
        link (str): the rate between any two ranks. Default: ``"1GB/s"``.
        copies (int): how many ranks, and how many hosts if there are so many, hold each layer of a commit. Default: 2.
        shape (callable, optional): a function of the number of ranks that returns (stages, copies), or None for the
            fastest. Default: always the fastest.
        seed (int): of the first weights. Default: 0.
        lr_scheduler (callable, optional): a function of the optimizer that returns a scheduler, which is stepped after
            each update.
        tied (list): weights that are one, such as ``("table", ["0.weight", "7.weight"])``. The first gives the value.
        scaler (torch.amp.GradScaler, optional): as for ``parallel.Pipeline``.
        clip (float, optional): as for ``parallel.Pipeline``.
        count (callable, optional): as for ``parallel.Pipeline``.
        checkpoint (bool): compute activations again before backward, as for ``parallel.Pipeline``. Default: False.
        timeout (float, optional): seconds to wait for another stage. None: no limit.
        kwargs: objects that are kept as attributes, such as ``step=0``.

    Attributes:
        layout (Layout): ``pp``, ``dp``, ``rows``, ``micro_batches``, ``balance`` and ``ms``.
        log (list): (steps trained, layout) for each change of the layout.
        pipe, stage, optimizer: the pipeline of this rank and its parts. None on a spare rank.
        mesh (Mesh): of the ranks that train.

    Raises:
        ValueError: an argument is not valid.

    Example:
        >>> from hvdlite import plan
        >>> layers = [lambda: torch.nn.Linear(2, 2), lambda: torch.nn.Linear(2, 1)]
        >>> costs = plan.profiles(layers, torch.ones(4, 2), rows=[2, 4])
        >>> state = hvd.elastic.PipelineState(
        ...     layers, lambda parameters: torch.optim.SGD(parameters, lr=0.1), loss=torch.nn.functional.mse_loss,
        ...     batch=8, profile=costs, step=0)
        >>> @hvd.elastic.run
        ... def train(state):
        ...     while state.step < 3:
        ...         state.train(torch.ones(8, 2), torch.ones(8, 1))
        ...         state.step += 1
        ...         state.commit()
        ...     return state.step, len(state.log)
        >>> train(state)
        (3, 1)
    """

    layout: Layout | None = None
    mesh: hvd.Mesh | None = None
    stage: torch.nn.Module | None = None
    optimizer: Any = None
    pipe: Pipeline | None = None
    log: list[tuple[int, Layout]]

    def __init__(
        self, layers: Sequence[recipe.Made], optimizer: Callable[[Any], Any], *,
        loss: Callable[[Any, Any], torch.Tensor],
        batch: int, profile: Profiles, memory: str | float | None = None, link: str | float = "1GB/s", copies: int = 2,
        shape: Callable[[int], tuple[int, int] | None] | None = None, seed: int = 0,
        lr_scheduler: Callable[[Any], Any] | None = None, tied: Sequence[tuple[str, Sequence[str]]] = (),
        scaler: Any = None, clip: float | None = None, count: Callable[[Any], Any] | None = None,
        checkpoint: bool = False, timeout: float | None = None, **kwargs: Any
    ) -> None:  # fmt: skip
        settings = {"scaler": scaler, "clip": clip, "count": count, "checkpoint": checkpoint, "timeout": timeout}
        self._recipe = recipe.Recipe(layers, optimizer, loss, seed, lr_scheduler, tied, settings)
        self._batch, self._copies, self._shape = batch, copies, shape
        self._costs = units.ns_a_byte(link) / 1e6, float("inf") if memory is None else float(units.size_bytes(memory))
        for what, value in (("batch", batch), ("copies", copies)):
            if type(value) is not int or value < 1:
                raise ValueError(f"{what} must be a whole number of at least 1, not {value!r} [HVD011]")
        if taken := sorted(name for name in kwargs if name.startswith("_") or hasattr(type(self), name)):
            raise ValueError(f"PipelineState has a {taken[0]!r} of its own: give the object another name [HVD011]")
        self._profile = profile
        self._profiles: Mapping[int, Sequence[Layer]] | None = None  # that all ranks have in common
        self._kept = {}  # the last two
        self._job, self._uncommitted = "", 0  # steps
        self._meshes: dict[tuple[int, int, int], hvd.Mesh] = {}  # of this incarnation
        self._names: set[str] = set()  # of the stage, as its functions have made it
        # The first optimizer of a process imports for seconds: now, and not while the other ranks wait.
        torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.0)
        super().__init__(hvd.broadcast_object, hvd.rank, log=[], **kwargs)

    # what the training function calls

    def rows(self) -> slice | None:
        """Return the rows of a step that this rank's copy takes.

        Returns:
            slice or None: of the ``batch`` rows. None on a spare rank.
        """
        if self.pipe is None or self.layout is None or self.mesh is None:
            return None
        each = self._batch // self.layout.dp
        return slice(self.mesh.coordinate("dp") * each, (self.mesh.coordinate("dp") + 1) * each)

    def train(self, x: Any = None, y: Any = None, everywhere: bool = False) -> torch.Tensor | None:
        """Train on one batch. All ranks must call it. A spare rank returns at once.

        Args:
            x (torch.Tensor, tuple or dict): all ``batch`` rows of inputs, of which each copy takes its own. Or a
                function (first, last) that returns x and y of the rows from ``first`` up to ``last``. Only ranks of a
                first or last stage read rows.
            y (torch.Tensor, tuple or dict): all rows of targets.
            everywhere (bool): return the loss on all ranks. Default: False.

        Returns:
            torch.Tensor or None: the mean loss of all rows on the ranks of the last stage, None on the others.

        Raises:
            HvdPeerLostError: a rank has left or died. ``hvd.elastic.run`` catches it.
            ValueError: x or y has another number of rows than ``batch``.
        """
        loss, mine = None, self.rows()
        self._require_run("train")
        self._uncommitted += 1
        assert self.layout is not None and self.mesh is not None
        if self.pipe is not None and mine is not None:
            if self.mesh.coordinate("pp") in (0, self.layout.pp - 1):
                x, y = x(mine.start, mine.stop) if callable(x) else (self._part(x, mine, "x"), self._part(y, mine, "y"))
                for what, value in (("x", x), ("y", y)):
                    self._require_rows(value, mine.stop - mine.start, what)
            loss = self.pipe.step(x, y)
            if loss is not None and self.layout.dp > 1:
                loss = hvd.allreduce(loss, name="elastic_pipeline.loss", process_set=self.mesh.group("dp"))
        if everywhere:
            mean = None if loss is None else loss.cpu()
            loss = hvd.broadcast_object(mean, self.layout.pp - 1, "elastic_pipeline.mean")
        return loss

    def _part(self, value: Any, rows: slice, what: str) -> Any:
        self._require_rows(value, self._batch, what)
        tensors, form = taken_apart(value)
        return put_together([t[rows] for t in tensors], form)

    def _require_rows(self, value: Any, count: int, what: str) -> None:
        rows = rows_of(value, f"{what} of train()")
        if rows != count:
            raise ValueError(
                f"{what} has {rows} rows, but train() needs {count}: pass all {self._batch} rows of the batch, or a "
                "function (first, last) that returns x and y of these rows [HVD010]"
            )

    # what hvd.elastic calls

    def _form(self) -> dict[str, str]:
        made = f"{self._recipe.describe()}, batch {self._batch}, copies {self._copies}"
        return {**super()._form(), "pipeline": made}

    def _begin(self) -> None:
        super().save()  # what was set before the call outlasts a rank that is lost now
        if self.mesh is None:  # there is no pipeline yet
            return
        try:
            self._save_commit()
        except HorovodInternalError:
            if self._uncommitted:
                checkpoint.report(
                    "a rank was lost between two training functions: objects stay, but weights go back to the last "
                    f"commit, by {self._uncommitted} steps; commit before a training function returns"
                )
            raise

    def save(self) -> None:
        """Keep this rank's layers, and those of ranks that it keeps copies for. All ranks must call it."""
        self._require_run("commit")
        shared, layers = recipe.taken_apart(self._own(), self.stage)
        if self.optimizer is not None:
            shared[OPTIMIZER] = type(self.optimizer).__name__
        mine = self._job + os.urandom(8).hex(), self.optimizer is not None, shared
        everyone = hvd.allgather_object(mine, "elastic_pipeline.commit")
        token, _, shared = everyone[0]
        shared = next((each for _, learns, each in everyone if learns), shared)
        layers.update(self._copies_of_others(layers))
        earlier = {n: commit for n, commit in self._kept.items() if n == self._number - 1}
        self._kept = {**earlier, self._number: Commit(token, shared, layers)}
        self._uncommitted = 0
        super().save()

    def _own(self) -> dict[str, Any]:
        """All that the next step of this stage reads. HvdStateError for what another stage would not have."""
        if self.pipe is None or self.stage is None:
            return {}
        names = set(self.stage.state_dict())
        if differ := sorted(names ^ self._names):
            raise HvdStateError(
                f"{differ[0]!r} was {'added to' if differ[0] in names else 'removed from'} its layer after the layer "
                "was made, and would not be there when ranks change: let the function of the layer make it [HVD425]"
            )
        return self.pipe.state_dict()

    def _copies_of_others(self, layers: Layers) -> Layers:
        """What this rank keeps. The first copy gives for all."""
        needs, stages = self._needed(self._copies), self._needed(1)
        if needs == stages:
            return {}
        first = {layer: rank for rank in reversed(range(len(stages))) for layer in stages[rank]}
        to = [
            {layer: layers[layer] for layer in wanted if layer not in own and first[layer] == hvd.rank()}
            for wanted, own in zip(needs, stages)
        ]
        return exchanged(to, "elastic_pipeline.copies")

    def _needed(self, copies: int) -> list[list[int]]:
        assert self.layout is not None
        return needed(self.layout.balance, self.layout.dp, host_of or [0] * hvd.size(), copies)

    def _require_run(self, call: str) -> None:
        if self.mesh is None:
            raise HvdStateError(
                f"{call}() works within a function that hvd.elastic.run has made elastic: before it there is no "
                "pipeline [HVD425]"
            )

    def restore(self) -> None:
        """Set the objects to those of the last commit. ``sync`` makes the pipeline anew."""
        self.pipe = self.optimizer = self.stage = self.mesh = None
        super().restore()

    def sync(self) -> None:
        """Go on from the last commit with the ranks that are there. All ranks must call it.

        Raises:
            HvdPeerLostError: a rank has left or died. Commits stay as they were.
            HvdStateError: all ranks that held a layer are gone, and no folder has it.
            PlanError: no layout fits the memory or the batch. The text has the least memory that would do.
        """
        start = self._agreed_start()
        needs = self._needed(self._copies)
        layers = self._gathered(start, needs)
        if layers is None:
            return self.sync()  # from the folder
        # Kept before the pipeline is made: if a rank is lost then, others may have given up their old layers.
        self._kept[self._number] = Commit(start.token, start.shared, layers)
        self._build(start, layers)
        hvd.barrier()
        self._found = None
        if self._folder is not None:
            self._folder.current = start.token if start.files is not None else start.written
        for name, value in start.objects.items():
            setattr(self, name, value)
        self._uncommitted = 0
        self._record(start.shared.get("pipeline/batches", 0), start.layout)
        super().save()
        own = {layer: layers[layer] for layer in needs[hvd.rank()]} if start.token != SEEDS else {}
        self._kept = {self._number: Commit(start.token, start.shared, own)}

    def _record(self, steps: int, layout: Layout) -> None:
        before = [entry for entry in self.log if entry[0] < steps]
        self.log = before if before and before[-1][1][:5] == layout[:5] else [*before, (steps, layout)]
        if hvd.rank() == 0:
            spare = hvd.size() - layout.ranks
            more = f"; {spare} spare" if spare else ""
            checkpoint.report(f"{hvd.size()} rank{'s' * (hvd.size() > 1)}: {layout.describe()}{more}")

    def _agreed_start(self) -> _Start:
        """Rank 0's, on all ranks, as is its error."""
        start, error = None, None
        if hvd.rank() == 0:
            try:
                start = self._start()
            except Exception as problem:
                error = problem
        with checkpoint.named(start.objects if start is not None else {}):
            start, why = hvd.broadcast_object((start, error and f"{error}"), name="elastic_pipeline.start")
        if error is not None:
            raise error
        if start is None:
            raise PlanError(coded("HVD005", f"rank 0: {why}"))
        self._profiles, self.layout, self._job = start.profiles, start.layout, start.job
        return start

    def _start(self) -> _Start:
        if self._profiles is None:
            given = self._profile
            self._profiles = given if isinstance(given, Mapping) else read_profiles(given)
        if any(len(each) != len(self._recipe.layers) for each in self._profiles.values()):
            raise PlanError(
                f"the profile is not one of these {len(self._recipe.layers)} layers: measure them again [HVD005]"
            )
        shape = self._shape(hvd.size()) if self._shape is not None else None
        beta, memory = self._costs
        layout = layout_for(
            self._profiles, hvd.size(), self._batch, beta, memory, shape=None if shape is None else (shape[0], shape[1])
        )
        commit, found, files = self._kept.get(self._number), self._found, None
        if found is not None and self._folder is not None and found.token != SEEDS:
            files = self._folder.files(found.token)
        token, shared, *_ = found or commit or (SEEDS, {})
        written = self._folder.current if self._folder is not None else None
        objects = {name: getattr(self, name) for name in self._saved_state}
        job = self._job or os.urandom(4).hex()
        return _Start(token, shared, files, written, job, self._profiles, layout, objects)

    def _gathered(self, start: _Start, needs: list[list[int]]) -> Layers | None:
        """The layers that this rank has to have, and others. None: all are to go on from the folder."""
        commit, rank = self._kept.get(self._number), hvd.rank()
        if start.token == SEEDS:
            return {}
        if start.files is not None:
            return folder.read(start.files, needs[rank])
        held = commit.layers if commit is not None and commit.token == start.token else {}
        everyone = hvd.allgather_object({n: size_of(layer) for n, layer in held.items()}, "elastic_pipeline.held")
        sizes = {n: size for each in everyone for n, size in each.items()}
        if missing := lost(everyone, needs):
            self._go_back(missing)
            return None
        todo = moves(everyone, needs, sizes, host_of or [0] * hvd.size())
        to = [{n: held[n] for source, target, n in todo if (source, target) == (rank, r)} for r in range(hvd.size())]
        return {**held, **(exchanged(to, "elastic_pipeline.moves") if todo else {})}

    def _build(self, start: _Start, layers: Layers) -> None:
        """The ranks of the mesh call the same collectives in here."""
        layout = start.layout
        self.stage = self.optimizer = self.pipe = None
        key = incarnations(), layout.dp, layout.pp
        if key not in self._meshes:
            self._meshes = {old: mesh for old, mesh in self._meshes.items() if old[0] == key[0]}
            self._meshes[key] = hvd.Mesh(range(layout.ranks), dp=layout.dp, pp=layout.pp)
        self.mesh = self._meshes[key]
        if self.mesh.included():
            kept = None if start.token == SEEDS else (start.shared, layers)
            try:
                self.stage, self.optimizer, self.pipe = self._recipe.made(layout, self.mesh, kept)
            except ValueError as error:
                if start.files is None:
                    raise
                raise HvdStateError(f"{start.files} has another model: {uncoded(str(error))} [HVD425]") from error
            self._names = set(self.stage.state_dict())
