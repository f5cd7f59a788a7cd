"""How does a stage run its list of actions? `Pipeline` executes any list of ("F", k), ("B", k) and ("U", n).

    F  take the input of micro-batch k from the stage before (or from x), forward, send the output on (or make the loss)
    B  take its gradient from the stage behind, backward, send the input's gradient back
    U  update the weights with the gradients since the last update

The list comes from a pure function (schedule.py), so all stages' lists are checked together before anything runs, and
the runner looks ahead: what the next actions will receive is posted now and arrives while this one computes. Which
weights an action sees is the update policy's (weights.py), how tensors travel the edges' (edge.py), what an update does
besides stands in finish.py.

Micro-batches are numbered through the whole run, and backwards come in the order of the numbers: so gpipe, 1f1b and one
process that accumulates add gradients in one order, and agree bit by bit.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple, cast

import torch
from torch.func import functional_call
from torch.utils.checkpoint import checkpoint as recomputed

import hvdlite.torch as hvd

from .._warned import warn
from . import micro_batches
from . import schedule as schedules
from .checkpoint import Saved
from .edge import Edge, Look, looks_of
from .finish import Finish, digests, ties_of
from .settings import agree, check_parts, chosen, named, number_of
from .stage import as_arguments, in_flight
from .structure import copied, joined, put_together
from .weights import Place, Policy

_AHEAD = 2  # actions


class Flight(NamedTuple):
    """A micro-batch between its forward and its backward, with what its tensors looked like when they came and went."""

    inputs: list[torch.Tensor]  # from the stage before
    came: list[Look]
    outputs: list[torch.Tensor]
    gave: list[Look]


class Pipeline(Saved):
    """One stage of a pipeline over an axis of a mesh. All ranks must make it and call its methods, but for ``explain``.

    Schedules: ``"gpipe"`` (Huang et al., 2019) and ``"1f1b"`` (PipeDream-Flush; DAPPLE, Fan et al., 2021) drain between
    updates. ``"continuous"`` (PipeDream, Narayanan et al., 2019) does not, and needs another ``update`` than
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
        schedule (str or callable): ``"1f1b"`` (default), ``"gpipe"``, ``"continuous"``, or a function (stage, stages,
            micro_batches, batches) that returns a list of actions.
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
        clip: float | None = None, timeout: float | None = None, name: str | None = None,
        axes: tuple[str, str] = ("dp", "pp"), **options: Any
    ) -> None:  # fmt: skip
        data, axis = axes
        self._mesh, self._axes = mesh, axes
        self.module, self._loss = stage, cast(Callable[[Any, Any], torch.Tensor], loss)
        self.stage, self.stages = mesh.coordinate(axis), mesh.shape[axis]
        self.micro_batches = micro_batches = number_of(micro_batches)
        self.checkpoint, self.scaler = checkpoint, scaler
        self._line = mesh.group(axis)
        self._plan, policy = chosen(schedule, update, shapes, checkpoint)
        check_parts(stage, optimizer, loss, self.stage == self.stages - 1, lr_scheduler, clip, checkpoint)
        self._flushes = policy.flushes
        tied = list(tied)
        ties = ties_of(stage, mesh, axis, tied)
        together = bool(tied or scaler or clip)  # all stages make an update at one time
        scale = scaler and scaler.state_dict()
        said = (micro_batches, named(schedule), named(update), shapes, checkpoint, clip, scale)
        self.name = name = agree(said, name, digests(stage, ties), mesh.rank_at(**{axis: 0}))
        schedules.check(self._lists(), micro_batches=micro_batches, together=together)
        self._timeout, self._ahead = timeout, together and not self._flushes and micro_batches < self.stages
        steady = [] if self._flushes else self._plan(self.stage, self.stages, micro_batches, 2 * self.stages)
        place = Place(self.stage, self.stages, micro_batches, float(schedules.delay(steady)))
        self.weights = policy(stage, place, **options)
        every = {"step": micro_batches, "each": 1, "once": None}[shapes]
        device = next((p.device for p in stage.parameters()), torch.device("cpu"))
        pairs = mesh.pairs(axis)
        window = max(self.stages + 2, micro_batches)  # neighbours may take a mini-batch's parts in another order

        def edge(first: int, peer: int) -> Edge:
            rank = mesh.rank_at(**{axis: peer})
            return Edge(f"{name}.{first}-{first + 1}", rank, pairs[first], window, every, timeout, device)

        self._before = edge(self.stage - 1, self.stage - 1) if self.stage else None
        self._after = edge(self.stage, self.stage + 1) if self.stage < self.stages - 1 else None
        averaged = mesh.group(data) if mesh.shape.get(data, 1) > 1 else None
        model = [self._line, *(mesh.group(each) for each in mesh.shape if each not in axes)]
        self.finish = Finish(
            stage, optimizer, self.stage, averaged, model, ties, name, lr_scheduler, scaler, clip, timeout
        )
        self._batches, self._since = 0, 0  # mini-batches; how many when the pipeline was last empty
        self._live: dict[int, Flight] = {}
        in_flight[stage] = self._live
        self._data: dict[int, tuple[Any, Any]] = {}
        self._losses: dict[int, list[torch.Tensor]] = {}
        self._warned = self._broken = False
        self._left = [0]  # updates to come
        weakref.finalize(self, _left_behind, self._left, f"stage {self.stage} of {name!r}")
        self.peak_stash = 0
        self.actions: list[schedules.Action] | None = None  # a list here gets all that is executed

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
        if everywhere and self._ahead:
            raise ValueError(
                f"step(everywhere=True) with clip, tied or scaler needs at least as many micro-batches as stages, but "
                f"{self.micro_batches} < {self.stages}: the last stage makes update n before the loss of a later "
                "mini-batch, and the first stage after it. Read the loss on the last stage [HVD011]"
            )
        first = self._batches * self.micro_batches
        self._read(x, y, micro_batches.equal, first)
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
        mean = None if self._after else torch.stack(self._losses.pop(self._batches - 1)).sum() / self.micro_batches
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
        if not self._after:
            rows = sum(n for _, n in outputs)
            mean = torch.stack([loss * (n / rows) for loss, n in outputs]).sum()
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
        if self._after:
            return None
        return joined(outputs)

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
        timeline = schedules.check(lists, forward, backward)
        notes = [f"stash {stash}, weights {copy}" for stash, copy in zip(timeline.stash, copies)]
        if save is not None:
            title = f"{self.stages} stages, {self.micro_batches} micro-batches"
            Path(save).write_text(drawing.svg(lists, timeline, title, notes), encoding="utf-8")
        return drawing.text(lists, timeline, notes)

    # one micro-batch

    def _forward(self, k: int) -> None:
        values, inputs, looks, _ = self._inputs(k, self._before)
        leaves = self.weights.forward(k)
        out = self._computed(values, leaves)
        y = self._data.pop(k)[1]
        if self._after:
            given = self._after.copies(out)
            self._after.give(given, k, self.micro_batches)
            outputs = given.tensors
            self._warn(outputs, inputs)
        else:
            loss = self._loss(out, y)
            self._losses.setdefault(k // self.micro_batches, []).append(loss.detach().clone())
            loss = loss / self.micro_batches  # here, and nowhere else
            outputs = [self.scaler.scale(loss) if self.scaler else loss]
        self._live[k] = Flight(inputs, looks, outputs, looks_of(outputs))
        self.peak_stash = max(self.peak_stash, len(self._live))

    def _inputs(self, k: int, before: Edge | None) -> tuple[tuple[Any, ...], list[torch.Tensor], list[Look], int]:
        """The arguments that micro-batch k brings, those of its tensors that have come from the stage before, what
        these look like there, and into how many the mini-batch was cut."""
        if before is None:
            return as_arguments(self._data[k][0]), [], [], 0
        tensors, looks, form, count = before.take(k)
        grads = torch.is_grad_enabled()
        tensors = [t.requires_grad_(look.tracked and grads) for t, look in zip(tensors, looks)]
        return as_arguments(put_together(tensors, form)), tensors, looks, count

    def _computed(self, inputs: tuple[Any, ...], leaves: Any = None) -> Any:
        def run(*x: Any) -> Any:
            return self.module(*x) if leaves is None else functional_call(self.module, leaves, x)

        if self.checkpoint and torch.is_grad_enabled():
            return recomputed(run, *inputs, use_reentrant=False)
        return run(*inputs)

    def _warn(self, outputs: list[torch.Tensor], inputs: list[torch.Tensor]) -> None:
        """Of an output that does not learn, though something before it could. Masks and the like that travel beside
        one that learns are no reason."""
        if self._warned or not any(t.requires_grad for t in (*inputs, *self.module.parameters())):
            return
        if any(t.is_floating_point() for t in outputs) and not any(t.requires_grad for t in outputs):
            self._warned = True
            warn(
                f"stage {self.stage}'s output needs no gradient: the layers before it do not learn from it [HVD020]"
            )  # fmt: skip

    def _backward(self, k: int) -> None:
        inputs, came, outputs, gave = self._live.pop(k)
        found = list(zip(outputs, self._after.take_back(gave, k) if self._after else [None]))
        used = [(t, grad) for t, grad in found if t.requires_grad and (grad is not None or not self._after)]
        if used:
            with self.weights.backward(k):
                torch.autograd.backward([t for t, _ in used], [grad for _, grad in used])
        self.weights.collect(k)
        if self._before:
            self._before.give_back(inputs, came, k)

    def _update(self) -> None:
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

    def _settle(self) -> None:
        for edge in (self._before, self._after):
            if edge:
                edge.settle()

    def _execute(self, actions: list[schedules.Action]) -> None:
        self._usable()
        self._broken, self._left[0] = True, 0  # what raises does not ask for drain(), too
        actions = schedules.shifted(actions, self._since, self.micro_batches)
        for i, (what, k) in enumerate(actions):
            self._look_ahead(actions[i + 1 : i + 1 + _AHEAD])
            if what == "F":
                self._forward(k)
            elif what == "B":
                self._backward(k)
            else:
                self._update()
            if self.actions is not None:
                self.actions.append((what, k))
        self._broken, self._left[0] = False, self._batches - self.weights.version

    def _look_ahead(self, actions: list[schedules.Action]) -> None:
        """What later actions receive may come already."""
        for what, k in actions:
            if what == "F" and self._before:
                self._before.expect(k)
            elif what == "B" and self._after and k in self._live:
                self._after.expect_back(self._live[k].gave, k)

    def _read(self, x: Any, y: Any, cut: Callable[..., Any], first: int, needs_y: bool = True) -> int:
        """Keeps the parts of x and y that this stage reads, and says how many they are; 0: it reads none."""
        count = self.micro_batches
        xs = cut(x, count, "x, which the first stage reads,") if not self.stage else []
        ys = cut(y, count, "y, which the last stage reads,") if not self._after and needs_y else []
        if not self._flushes:  # what is in flight outlives the step, and the caller may fill its memory anew
            xs, ys = list(map(copied, xs)), list(map(copied, ys))
        for i in range(max(count if cut is micro_batches.equal else 0, len(xs), len(ys))):
            self._data[first + i] = xs[i] if xs else None, ys[i] if ys else None
        return max(len(xs), len(ys))

    @torch.no_grad()
    def _forward_only(self, x: Any, y: Any, call: str) -> list[tuple[Any, int]]:
        """(loss or output, rows) of each part, on the last stage."""
        self._usable()
        if self._live:
            raise ValueError(f"{call} while {len(self._live)} micro-batches are in flight: call drain() first [HVD015]")
        before, after = (edge.apart() if edge else None for edge in (self._before, self._after))
        count, results, k = self._read(x, y, micro_batches.nearly_equal, 0, call == "evaluate"), [], 0
        while True:
            values, _, _, told = self._inputs(k, before)
            if told and count and told != count:
                raise ValueError(
                    f"y has rows for {count} micro-batches, but x of the first stage has rows for {told} [HVD010]"
                )
            count = told or count
            out = self._computed(values)
            y = self._data.pop(k, (None, None))[1]
            if after:
                after.give(after.copies(out), k, count)
            elif call == "predict":  # copies, as layers may change theirs in their next forward
                results.append((copied(out), 0))
            else:
                results.append((self._loss(out, y), micro_batches.rows_of(y)))
            k += 1
            if k >= count:
                break
        if after:
            after.settle()
        return results

    def _everywhere(self, mean: torch.Tensor | None) -> torch.Tensor:
        """The last stage's, on all ranks of the line, as float64 on the CPU."""
        value = torch.zeros((), dtype=torch.float64) if mean is None else mean.detach().cpu().double()
        handle = hvd.broadcast_async(value, self._line.ranks[-1], name=f"{self.name}.loss", process_set=self._line)
        return hvd.synchronize(handle, timeout=self._timeout)


def _left_behind(left: list[int], who: str) -> None:
    """When a pipeline is gone, or the program ends."""
    if left[0]:
        warn(f"{who} ended with {left[0]} updates left: call drain() after the last step [HVD015]")
