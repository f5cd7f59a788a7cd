"""Executor of a stage: `Pipeline` runs any list of ("F", k), ("B", k) and ("U", n).

F and B are a micro-batch's forward and backward through the layers (chunk.py), U an update with the gradients since the
last one. The list comes from a pure function (schedule.py), so all stages' lists are checked together before anything
runs, and the runner looks ahead: what the next actions will receive is posted now and arrives while this one computes.
Which weights an action sees is the update policy's (weights.py). What an update does besides is in optimizer_step.py.

Micro-batches are numbered through the whole run, and backwards come in the order of the numbers: so gpipe, 1f1b and one
process that accumulates add gradients in one order, and agree bit by bit.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, cast
from weakref import WeakSet

import torch

import hvdlite.torch as hvd

from .. import metrics
from ..errors.user_warning import warn
from . import micro_batches
from . import schedule as schedules
from .checkpoint import Saved
from .chunk import Chunk
from .optimizer_step import StageUpdate, digests, ties_of
from .settings import agree, check_parts, chosen, named, number_of, same_start
from .stage import chunks_on
from .stage_link import Edge
from .structure import copied, joined
from .weights import Policy, StagePosition

_AHEAD = 2  # actions


class Pipeline(Saved):
    """One stage of a pipeline over an axis of a mesh. All ranks must make it and call its methods, but for ``explain``.

    The first copy's weights become those of all copies on the data axis.

    Schedules: ``"gpipe"`` (Huang et al., 2019) and ``"1f1b"`` (PipeDream-Flush; DAPPLE, Fan et al., 2021) drain between
    updates. So does ``"interleaved"`` (Narayanan et al., 2021), whose stages have several chunks of layers: it is idle
    for less time. ``"continuous"`` (PipeDream, Narayanan et al., 2019) does not, and needs another ``update`` than
    ``"flush"``.

    ``peak_stash`` and ``weights.peak`` count the most activations and copies of weights that were kept here.
    ``finish.norm`` is the norm of the last gradient before it was clipped.

    Args:
        stage (torch.nn.Module): this rank's layers, from ``split``.
        optimizer (torch.optim.Optimizer, optional): a plain optimizer of its parameters. The pipeline averages
            gradients over the data axis. None for a stage without parameters.
        mesh (Mesh): the layout of the ranks.
        loss (callable): a function of output and y that returns a scalar. It is called on the last stage only.
        micro_batches (int): the number of parts into which ``step`` cuts a mini-batch.
        schedule (str or callable): ``"1f1b"`` (default), ``"gpipe"``, ``"interleaved"``, ``"continuous"``, or a
            function (stage, stages, micro_batches, batches) that returns a list of actions.
        update (str or class): ``"flush"`` (default). With ``"continuous"``: ``"stash"``, ``"vertical"``, ``"2bw"``,
            ``"pipemare"`` or a class of your own.
        checkpoint (bool): compute activations within the stage again before backward, and do not keep them. Default:
            False.
        shapes (str): when shapes are exchanged: ``"step"`` (default), once per mini-batch; ``"each"``, for every
            micro-batch; ``"once"``.
        tied (list): weights that stages share, such as ``("table", {0: "0.weight", 3: "3.weight"})``.
        lr_scheduler (optional): stepped after each update.
        scaler (torch.amp.GradScaler, optional): scales the loss.
        clip (float, optional): the largest norm of the gradient of the whole model.
        count (callable, optional): a function of y that returns how many of its values count, such as ``lambda y: (y !=
            -100).sum()``. ``loss`` then returns a sum, which is divided by this number for the whole mini-batch of all
            copies. None: ``loss`` returns a mean, and all micro-batches count alike.
        timeout (float, optional): seconds to wait for another stage. None: no limit.
        name (str, optional): of its messages. None: a new one.
        axes (tuple of str): the axes of data and of stages. Default: ``("dp", "pp")``.
        options: arguments of ``update``; for ``"pipemare"`` decay and anneal.

    Raises:
        HvdMismatchError: on all ranks, if their settings differ.
        ValueError: the settings do not go together.

    Example:
        >>> from hvdlite import parallel
        >>> mesh = hvd.Mesh(pp=2)
        >>> layers = [torch.nn.Linear(1, 1, bias=False), torch.nn.Linear(1, 1, bias=False)]
        >>> stage = parallel.split(layers, mesh, [1, 1])
        >>> sgd = torch.optim.SGD(stage.parameters(), lr=0.1)
        >>> pipe = parallel.Pipeline(stage, sgd, mesh, torch.nn.functional.mse_loss, micro_batches=2)
        >>> pipe.step(torch.zeros(2, 1), torch.ones(2, 1), everywhere=True).item()
        1.0
    """

    def __init__(
        self, stage: torch.nn.Module, optimizer: torch.optim.Optimizer | None, mesh: hvd.Mesh,
        loss: Callable[[Any, Any], torch.Tensor] | None, micro_batches: int, schedule: str | schedules.Plan = "1f1b",
        update: str | Callable[..., Policy] = "flush", *, checkpoint: bool = False, shapes: str = "step",
        tied: Iterable[tuple[str, Mapping[int, str]]] = (), lr_scheduler: Any = None, scaler: Any = None,
        clip: float | None = None, count: Callable[[Any], Any] | None = None, timeout: float | None = None,
        name: str | None = None, axes: tuple[str, str] = ("dp", "pp"), **options: Any
    ) -> None:  # fmt: skip
        data, axis = axes
        self._mesh, self._axes = mesh, axes
        self.module, self._loss = stage, cast(Callable[[Any, Any], torch.Tensor], loss)
        self.stage, self.stages = mesh.coordinate(axis), mesh.shape[axis]
        self.micro_batches = micro_batches = number_of(micro_batches)
        self.scaler, self._count = scaler, count
        self._line = mesh.group(axis)
        self.chunks = len(getattr(stage, "lengths", ())) or 1
        self._plan, policy = chosen(schedule, update, shapes, checkpoint, self.chunks, micro_batches, self.stages)
        self._first, self._last = self.stage == 0, self.stage == self.stages - 1
        check_parts(stage, optimizer, loss, self._last, lr_scheduler, clip, checkpoint)
        self._flushes = policy.flushes
        tied = list(tied)
        ties = ties_of(stage, mesh, axis, tied)
        together = bool(tied or scaler or clip)  # all stages make an update at one time
        settings = (micro_batches, named(schedule), named(update), shapes, checkpoint, clip, bool(count), self.chunks)
        self.name = name = agree(
            (*settings, scaler and scaler.state_dict()), name, digests(stage, ties), mesh.rank_at(**{axis: 0}),
            mesh.process_set,
        )  # fmt: skip
        schedules.check(self._lists(), micro_batches=micro_batches, together=together, chunks=self.chunks)
        self._timeout = timeout
        self._loss_is_late = together and not self._flushes and micro_batches < self.stages
        steady = [] if self._flushes else self._plan(self.stage, self.stages, micro_batches, 2 * self.stages)
        position = StagePosition(self.stage, self.stages, micro_batches, float(schedules.delay(steady)))
        self.weights = policy(stage, position, **options)
        every = {"step": micro_batches, "each": 1, "once": None}[shapes]
        self._chunks = self._connected(mesh, axis, every, timeout, checkpoint)
        averaged = mesh.group(data) if mesh.shape.get(data, 1) > 1 else None
        if averaged is not None:
            same_start(stage, averaged)
        model = [self._line, *(mesh.group(each) for each in mesh.shape if each not in axes)]
        self.finish = StageUpdate(
            stage, optimizer, self.stage, averaged, model, ties, name, lr_scheduler, scaler, clip, timeout
        )
        self._batches, self._since = 0, 0  # mini-batches; how many when the pipeline was last empty
        chunks_on.setdefault(stage, WeakSet()).update(self._chunks)
        self._x: dict[int, Any] = {}
        self._y: dict[int, Any] = {}
        self._losses: dict[int, list[torch.Tensor]] = {}  # by mini-batch
        self._shares: dict[int, Any] = {}  # what they are divided by
        self._broken = False
        self._left = [0]  # updates to come
        weakref.finalize(self, _left_behind, self._left, f"stage {self.stage} of {name!r}")
        self.peak_stash = 0
        self.actions: list[schedules.Action] | None = None  # a list here gets all that is executed

    def _connected(
        self, mesh: hvd.Mesh, axis: str, every: int | None, timeout: float | None, checkpoint: bool
    ) -> list[Chunk]:
        """The chunks of this stage, with edges to their neighbours in the model."""
        device = next((p.device for p in self.module.parameters()), torch.device("cpu"))
        window = max(self.stages + 2, self.micro_batches)  # neighbours may take a mini-batch's parts in another order
        pairs = mesh.pairs(axis)

        def edge(first: int, peer: int) -> Edge | None:
            """Between the chunks first and first + 1 of the model, with the neighbour on a stage."""
            if not 0 <= first < self.stages * self.chunks - 1:
                return None
            rank, at = mesh.rank_at(**{axis: peer % self.stages}), first % self.stages
            group = pairs[at] if at < self.stages - 1 else self._line
            return Edge(f"{self.name}.{first}-{first + 1}", rank, group, window, every, timeout, device)

        found = []
        for number in range(self.chunks):
            at = number * self.stages + self.stage
            ends = edge(at - 1, self.stage - 1), edge(at, self.stage + 1)
            found.append(Chunk(self.module, number if self.chunks > 1 else None, *ends, checkpoint))
        return found

    # what users call

    def step(self, x: Any = None, y: Any = None, everywhere: bool = False) -> torch.Tensor | None:
        """Train on one mini-batch. The first stage reads ``x``, the last one ``y``.

        With a continuous schedule, backwards and updates of this mini-batch may run within later steps.

        Args:
            x (torch.Tensor, tuple or dict, optional): rows of inputs. The values of a tuple are arguments of the first
                layer.
            y (torch.Tensor, tuple or dict, optional): rows of targets.
            everywhere (bool): return the loss on all ranks of the line of stages. Default: False.

        Returns:
            torch.Tensor or None: the mean loss on the last stage, None on the others.

        Raises:
            HvdPeerLostError: a rank has left or died.
            HvdTimeoutError: another stage did not answer within ``timeout``.
            ValueError: the rows cannot be cut into micro-batches, or gradients are off.
        """
        if not torch.is_grad_enabled():
            raise ValueError("step() computes gradients: call it outside torch.no_grad() [HVD011]")
        if everywhere and self._loss_is_late:
            raise ValueError(
                f"step(everywhere=True) with clip, tied or scaler needs at least as many micro-batches as stages, but "
                f"{self.micro_batches} < {self.stages}: the last stage makes update n before the loss of a later "
                "mini-batch, and the first stage after it. Read the loss on the last stage [HVD011]"
            )
        first = self._batches * self.micro_batches
        self._read(x, y, micro_batches.equal, first)
        if self._last:
            self._shares[self._batches] = self._share(first)
        self._batches += 1
        if self._flushes:
            self._since = self._batches - 1
            plan = self._plan(self.stage, self.stages, self.micro_batches, 1)
        else:
            nth = self._batches - 1 - self._since
            plan = schedules.part(self.stage, self.stages, self.micro_batches, nth)
        self._execute(plan)
        if self._flushes:
            self._settle()  # or a rank whose script ends here would take with it what it still sends
        metrics.step(self)
        mean = None
        if self._last:
            n = self._batches - 1
            mean = torch.stack(self._losses.pop(n)).sum() / self._shares.pop(n)
        return self._everywhere(mean) if everywhere else mean

    def drain(self) -> None:
        """Run the backwards and updates that are left, so that nothing is in flight.

        Call it before evaluation, before a checkpoint and at the end.
        """
        if not self._flushes:
            batches = self._batches - self._since
            self._execute(schedules.rest(self.stage, self.stages, self.micro_batches, batches))
            self._since = self._batches  # what follows fills the pipeline anew
            self.weights.restart(self._batches * self.micro_batches)
        self._settle()

    def evaluate(self, x: Any = None, y: Any = None, everywhere: bool = False) -> torch.Tensor | None:
        """Return the mean loss of any number of rows, forward only, with the newest weights.

        Whether modules are in train or eval mode is up to the caller.

        Args:
            x (torch.Tensor or tuple, optional): rows of inputs, read by the first stage.
            y (torch.Tensor or tuple, optional): rows of targets, read by the last stage.
            everywhere (bool): return the loss on all ranks of the line of stages. Default: False.

        Returns:
            torch.Tensor or None: the mean loss on the last stage, None on the others.

        Raises:
            ValueError: micro-batches are in flight; call ``drain`` first.
        """
        outputs = self._forward_only(x, y, "evaluate")
        mean = None
        if self._last:
            total = sum(n for _, n in outputs)
            mean = torch.stack([loss / total if self._count else loss * (n / total) for loss, n in outputs]).sum()
        return self._everywhere(mean) if everywhere else mean

    def predict(self, x: Any = None) -> Any:
        """Return the model's output for all rows, forward only.

        Args:
            x (torch.Tensor or tuple, optional): rows of inputs, read by the first stage.

        Returns:
            torch.Tensor, tuple or None: the output on the last stage, None on the others.

        Raises:
            ValueError: micro-batches are in flight; call ``drain`` first.
        """
        outputs = [out for out, _ in self._forward_only(x, None, "predict")]
        return joined(outputs) if self._last else None

    @property
    def schedule(self) -> list[schedules.Action]:
        """This stage's list for one mini-batch."""
        return self._plan(self.stage, self.stages, self.micro_batches, 1)

    def explain(self, save: str | None = None, forward: Any = 1, backward: Any = 2) -> str:
        """Draw the lists of all stages, with makespan, busy share, and what each keeps. Nothing runs.

        Args:
            save (str, optional): a file that gets the drawing as SVG.
            forward (float or list): time of a forward, for all stages or one for each. Default: 1.
            backward (float or list): time of a backward, for all stages or one for each. Default: 2.

        Returns:
            str: the drawing as text.

        Raises:
            OSError: the file cannot be written.
        """
        from . import drawing

        lists, place = self._lists(), self.weights.place
        copies = [self.weights.copies(place._replace(stage=stage), actions) for stage, actions in enumerate(lists)]
        timeline = schedules.check(lists, forward, backward, chunks=self.chunks)
        notes = [f"stash {stash}, weights {copy}" for stash, copy in zip(timeline.stash, copies)]
        if save is not None:
            title = f"{self.stages} stages, {self.micro_batches} micro-batches"
            Path(save).write_text(drawing.svg(lists, timeline, title, notes, self.chunks), encoding="utf-8")
        return drawing.text(lists, timeline, notes, self.chunks)

    # one action

    def _forward(self, k: int, chunk: Chunk) -> None:
        x = self._x.pop(k, None) if chunk.before is None else None

        def loss_of(out: Any) -> torch.Tensor:
            loss, n = self._loss(out, self._y.pop(k)), k // self.micro_batches
            self._losses.setdefault(n, []).append(loss.detach().clone())
            loss = loss / self._shares[n]  # here, and nowhere else
            return self.scaler.scale(loss) if self.scaler else loss

        chunk.forward(k, x, self.micro_batches, self.weights.forward(k), loss_of)
        self.peak_stash = max(self.peak_stash, self._in_flight())

    def _share(self, first: int) -> Any:
        """By what the losses of a mini-batch are divided: its micro-batches, or the values that count on a copy, on
        average over copies, as gradients are."""
        if self._count is None:
            return self.micro_batches
        mine = sum(float(self._count(self._y[first + i])) for i in range(self.micro_batches))
        if self.finish.data is None:
            return mine
        return self.finish.added(
            torch.tensor(mine, dtype=torch.float64), f"{self.name}.count", self.finish.data, hvd.Average
        ).item()

    def _backward(self, k: int, chunk: Chunk) -> None:
        chunk.backward(k, self.weights.backward(k))
        self.weights.collect(k)

    def _update(self) -> None:
        self.weights.gradients()
        self.finish.exchange()
        self.weights.update(self.finish.step)

    # lists of actions

    def _lists(self) -> list[list[schedules.Action]]:
        """Of all stages, for one mini-batch, or for as many as show how a continuous schedule goes on."""
        batches = 1 if self._flushes else 1 + -(-2 * self.stages // self.micro_batches)
        return [self._plan(stage, self.stages, self.micro_batches, batches) for stage in range(self.stages)]

    def _usable(self) -> None:
        if self._broken:
            raise ValueError(
                f"stage {self.stage}: an earlier step raised an error, so the stages of this pipeline no longer "
                "agree: load a checkpoint into a new pipeline [HVD015]"
            )
        if any(chunk.live for chunk in chunks_on[self.module] if chunk not in self._chunks):
            raise ValueError(
                f"stage {self.stage}: another pipeline of this stage has micro-batches in flight: call its drain() "
                "first [HVD015]"
            )

    def _settle(self) -> None:
        for chunk in self._chunks:
            chunk.settle()

    def _in_flight(self) -> int:
        return sum(len(chunk.live) for chunk in self._chunks)

    def _execute(self, actions: list[schedules.Action]) -> None:
        self._usable()
        self._broken, self._left[0] = True, 0  # what raises does not ask for drain(), too
        actions = schedules.shifted(actions, self._since, self.micro_batches * self.chunks)
        for i, (what, unit) in enumerate(actions):
            for later, other in actions[i + 1 : i + 1 + _AHEAD]:  # what they receive may come already
                k, c = divmod(other, self.chunks)
                self._chunks[c].expect(later, k)
            k, c = divmod(unit, self.chunks)
            if what == "F":
                self._forward(k, self._chunks[c])
            elif what == "B":
                self._backward(k, self._chunks[c])
            else:
                self._update()
            if self.actions is not None:
                self.actions.append((what, unit))
        self._broken, self._left[0] = False, self._batches - self.weights.version

    def _read(self, x: Any, y: Any, cut: Callable[..., Any], first: int, needs_y: bool = True) -> int:
        """Keeps the parts of x and y that this stage reads, and says how many they are; 0: it reads none."""
        count = self.micro_batches
        xs = cut(x, count, "x, which the first stage reads,") if self._first else []
        ys = cut(y, count, "y, which the last stage reads,") if self._last and needs_y else []
        if not self._flushes:  # what is in flight outlives the step, and the caller may fill its memory anew
            xs, ys = list(map(copied, xs)), list(map(copied, ys))
        self._x.update(enumerate(xs, first))
        self._y.update(enumerate(ys, first))
        return max(len(xs), len(ys))

    @torch.no_grad()
    def _forward_only(self, x: Any, y: Any, call: str) -> list[tuple[Any, Any]]:
        """Of each part on the last stage: (output, 0), or (loss, its weight)."""
        self._usable()
        if self._in_flight():
            raise ValueError(
                f"{call} while {self._in_flight()} micro-batches are in flight: call drain() first [HVD015]"
            )
        count, results = self._read(x, y, micro_batches.nearly_equal, 0, call == "evaluate"), list[tuple[Any, Any]]()
        for chunk in [chunk.apart() for chunk in self._chunks]:
            k, more = 0, True
            while more:
                out, parts = chunk.without_graph(k, self._x.pop(k, None) if chunk.before is None else None, count)
                if parts and count and parts != count:
                    raise ValueError(
                        f"y has rows for {count} micro-batches, but x of the first stage has rows for {parts} [HVD010]"
                    )
                count = parts or count
                if chunk.after is None and call == "predict":  # copies, as layers may change theirs later
                    results.append((copied(out), 0))
                elif chunk.after is None:
                    part = self._y.pop(k)
                    results.append((self._loss(out, part).clone(), (self._count or micro_batches.rows_of)(part)))
                k += 1
                more = k < count
            chunk.settle()
        return results

    def _everywhere(self, mean: torch.Tensor | None) -> torch.Tensor:
        """The last stage's, on all ranks of the line, as float64 on the CPU."""
        value = torch.zeros((), dtype=torch.float64) if mean is None else mean.detach().cpu().double()
        handle = hvd.broadcast_async(value, self._line.ranks[-1], name=f"{self.name}.loss", process_set=self._line)
        return hvd.synchronize(handle, timeout=self._timeout)


def _left_behind(left: list[int], name: str) -> None:
    """When a pipeline is freed, or the program ends."""
    if left[0]:
        warn(f"{name} ended with {left[0]} updates left: call drain() after the last step [HVD015]")
