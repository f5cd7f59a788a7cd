"""`DiLoCo`: ranks make steps of their own, and average their progress every so often.

G are global weights, equal on all ranks; L are the weights that a rank trains. After `sync_every` steps a rank's outer
gradient is G - L. The average over the ranks is the gradient of an outer optimizer, which makes one step on G; then L
becomes G. With SGD of rate 1 as the outer optimizer G becomes the average of all L: that is LocalSGD (S. U. Stich,
2018, arXiv 1805.09767). DiLoCo is SGD with Nesterov momentum (A. Douillard et al., 2023, arXiv 2311.08105). In
Streaming DiLoCo (2025, arXiv 2501.18512) fragments of the model take turns, an average arrives some steps after it was
sent, and L becomes a mixture of both.

Hooks of the optimizer count its steps. Beside each fragment travel two numbers: whether the rank has trained it since
its last turn, which is its weight in the average, and whether it makes further steps. So a rank that has fewer steps
takes part in the others' turns in `finish` until no rank makes further steps, and adds nothing that would slow them.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable, Iterable
from time import perf_counter
from typing import Any, NamedTuple

import torch
from torch._compile import _disable_dynamo

from ... import _core, metrics
from ...errors import HvdStateError
from ...lifecycle.init import incarnations
from ...ops.arguments import NoneCompressor, Quantized
from ...ops.objects import broadcast_object
from ...process_sets.levels import levels_of, why_plain
from ...process_sets.process_set import ProcessSet, global_process_set
from ...training.consistency import require_equal
from ...training.digest import digest
from ..compression import Compression
from ..consistency import bits
from ..optimizer.factory import named, refuse_complex, refuse_wrappers, suffix_for
from ..optimizer.methods import Delta, Distributed
from .arguments import check, check_exchange, parts_of
from .fragment import Fragment
from .schedule import Schedule, cut
from .weight_sum import WeightSum


class _Sent(NamedTuple):
    """A turn in flight. flags: the sums of `moved` and `goes_on` over the ranks, then of buffers. weights: None, until
    they are sent."""

    moved: bool  # the rank has trained the fragment
    goes_on: bool  # it makes further steps
    flags: WeightSum
    weights: WeightSum | None

    def poll(self) -> None:
        self.flags.poll()
        if self.weights is not None:
            self.weights.poll()


_made: weakref.WeakSet[DiLoCo] = weakref.WeakSet()
_steps = itertools.count()


def nesterov(parameters: list[torch.nn.Parameter]) -> torch.optim.Optimizer:
    """The outer optimizer of DiLoCo."""
    return torch.optim.SGD(parameters, lr=0.7, momentum=0.9, nesterov=True)


class DiLoCo:
    """Training in which ranks communicate every ``sync_every`` steps only, for slow networks.

    The loop stays as it is: hooks of ``optimizer`` count its steps. Ranks must begin with equal weights. After
    ``sync_every`` steps the change that each rank has made is averaged over the ranks. It is the gradient of an outer
    optimizer, whose result all ranks continue with. The state of ``optimizer`` stays on its rank. Call ``finish`` when
    the loop ends, and before you compare or save weights that all ranks shall have in common.

    It is DiLoCo of A. Douillard et al. (2023, arXiv 2311.08105), with the fragments of Streaming DiLoCo (2025, arXiv
    2501.18512). A step that a GradScaler skips does not count. Ranks may make different numbers of steps, unless they
    have several ``DiLoCo``. ``hvd.join`` and ``hvd.uneven_inputs`` are not for it. In an elastic job, give it to
    ``hvd.elastic.TorchState`` as a keyword.

    Args:
        named_parameters (torch.nn.Module or iterable of (str, tensor)): a model or its ``named_parameters()``, with all
            parameters that ``optimizer`` trains. Others stay local. Of a model, float buffers such as BatchNorm's are
            averaged as well.
        optimizer (torch.optim.Optimizer): the inner optimizer. It may be a ``DistributedOptimizer`` with the process
            set of an island of ranks, which averages in each step.
        sync_every (int): steps between two exchanges of the same weights. Default: 100.
        outer (callable): a function of a list of parameters that returns the outer optimizer. It is called for each
            fragment. Default: SGD with rate 0.7 and Nesterov momentum 0.9.
        fragments (int): parts of the model that are exchanged in turn. It divides ``sync_every``. Default: 1.
        delay (int): steps that an exchange may take while the loop goes on, fewer than ``sync_every / fragments``. 0
            (default): the loop waits.
        alpha (float): with a ``delay``, a rank continues with alpha * global + (1 - alpha) * local weights. Default:
            0.5.
        compression (Compressor): form in which outer gradients travel, such as ``Compression.int4``. Default:
            ``Compression.none``.
        process_set (ProcessSet): ranks that exchange. On other ranks it does nothing. Default: all ranks.

    Attributes:
        wait_seconds (float): time that the loop has waited for exchanges, in seconds.

    Raises:
        HvdNotInitializedError: before ``init``.
        ValueError: if an argument has an invalid value, or ``named_parameters`` does not name a parameter.
        TypeError: if ``optimizer`` or ``process_set`` has a wrong type.

    Example:
        >>> model = torch.nn.Linear(1, 1, bias=False)
        >>> model.weight.data.fill_(0.0)
        tensor([[0.]])
        >>> optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        >>> trainer = hvd.DiLoCo(model, optimizer, sync_every=2, outer=lambda p: torch.optim.SGD(p, lr=1.0))
        >>> for step in range(2):
        ...     model.weight.grad = torch.full((1, 1), -1.0 - hvd.rank())
        ...     optimizer.step()
        >>> trainer.finish()
        >>> model.weight.item()
        3.0
    """

    _hvd_local_steps = True  # for hvdlite.torch.elastic

    def __init__(
        self, named_parameters: torch.nn.Module | Iterable[tuple[str, torch.Tensor]], optimizer: torch.optim.Optimizer,
        sync_every: int = 100, outer: Callable[[list[torch.nn.Parameter]], torch.optim.Optimizer] = nesterov,
        fragments: int = 1, delay: int = 0, alpha: float = 0.5, compression: Any = Compression.none,
        process_set: ProcessSet = global_process_set
    ) -> None:  # fmt: skip
        check(optimizer, sync_every, fragments, delay, alpha)
        check_exchange(compression, process_set)
        self._named, self._buffers = parts_of(named_parameters)
        self._model: Any = named_parameters if self._buffers else None
        named(optimizer, self._named)
        pairs = [(each, name) for name, each in self._named]
        refuse_wrappers(pairs)
        refuse_complex(pairs)
        self._optimizer, self._outer, self._alpha = optimizer, outer, float(alpha)
        self._compression, self._process_set = compression, process_set
        self._settings = [f"sync_every={sync_every}", f"fragments={fragments}", f"delay={delay}", f"alpha={alpha:g}"]
        self._settings += [f"compression={getattr(compression, '__name__', repr(compression))}"]
        self._settings += [f"buffer {name}" for name in self._buffers]
        self._schedule, self._sync_every = Schedule(sync_every, fragments, delay), sync_every
        self._fragments: list[Fragment] = []
        self._stepped = False  # since all ranks had the same buffers
        self._quiet = 0  # last turns in which no rank made further steps
        self._in_flight: dict[int, _Sent] = {}
        self._known_in: int | None = None  # the incarnation of the job in which ranks have compared their settings
        self.wait_seconds = 0.0
        self._name = "diloco" + suffix_for([f"diloco.{name}" for name, _ in self._named], process_set)
        self._before = self._last = next(_steps)  # of this process, of any DiLoCo: when its last two steps were made
        self._hook(optimizer)
        _made.add(self)

    def _hook(self, optimizer: Any) -> None:
        former = optimizer.__dict__.get("_hvd_local")
        if former is not None and (former._in_flight or former._schedule.moved):
            raise ValueError("this optimizer has a DiLoCo with steps that are not averaged: call its finish() [HVD223]")
        if former is not None:
            for hook in former._hooks:
                hook.remove()
            former._hooks = []
        optimizer.__dict__["_hvd_local"] = self
        self._hooks: list[Any] = []
        if self._process_set.included():
            self._hooks = [
                optimizer.register_step_pre_hook(self._before_step),
                optimizer.register_step_post_hook(self._after_step),
            ]

    @_disable_dynamo
    @torch.no_grad()
    def _before_step(self, optimizer: Any, *unused: Any) -> None:
        if isinstance(optimizer, Delta):
            raise ValueError("DiLoCo cannot count the steps of op=hvd.Adasum, use op=hvd.Average inside it [HVD048]")
        self._meet()
        for _, number in self._schedule.overdue():  # an interrupt has ended the wait; this step must not be overwritten
            self._arrive(number)

    @_disable_dynamo
    @torch.no_grad()
    def _after_step(self, optimizer: Any, *_: Any) -> None:
        if not isinstance(optimizer, Distributed):  # which counts its steps itself
            metrics.step(self)
        for sent in self._in_flight.values():
            sent.poll()
        overflow = getattr(optimizer, "found_inf", None)
        if overflow is not None and overflow.item():  # a fused optimizer, which leaves out what GradScaler tells it to
            return
        self._stepped, self._quiet = True, 0
        self._before, self._last = self._last, next(_steps)
        for what, number in self._schedule.after_step():
            if what == "send":
                self._send(number, True)
            else:
                self._arrive(number)

    @_disable_dynamo
    @torch.no_grad()
    def finish(self) -> None:
        """Average what is left, and give all ranks the same weights. All ranks must call it, at the end of their loops.

        Exchanges that are under way arrive, and the steps since the last one are exchanged. A rank that calls it early
        takes part in the exchanges of the others until all have called it. The training may go on afterwards.

        Raises:
            HvdMismatchError: if the ranks have different weights or settings from the beginning.
            HvdPeerLostError: if a rank dies or leaves the job.
            ValueError: if a parameter was frozen or is trained only since the first step. If this rank has several
                ``DiLoCo`` and other ranks make further steps.
        """
        if not self._hooks:
            return
        self._meet()
        stepped = self._stepped or bool(self._schedule.moved)
        for _, number in self._schedule.before_end():
            self._arrive(number)
        while self._quiet < len(self._fragments):
            number = self._schedule.next_at_end()
            self._send(number, False)
            if self._arrive(number):
                self._require_alone()
        for fragment in self._fragments:
            fragment.publish()
        if self._buffers:
            values = [torch.tensor([stepped], dtype=torch.float64), *self._buffers_to_send(stepped)]
            (weight,), *sums = WeightSum(values, f"{self._name}.buffers", NoneCompressor, self._process_set).wait()
            self._take_buffers(sums, weight.item(), 1.0)
        self._stepped, self._quiet = False, 0

    # Of a turn.

    def _send(self, number: int, goes_on: bool) -> None:
        self._require_same_parameters()
        moved = number in self._schedule.moved
        values = [torch.tensor([moved, goes_on], dtype=torch.float64)]
        if number == len(self._fragments) - 1:
            values += self._buffers_to_send(moved)
        flags = WeightSum(values, f"{self._name}.{number}.flags", NoneCompressor, self._process_set)
        self._in_flight[number] = _Sent(moved, goes_on, flags, None)
        self._schedule.sent(number)
        if moved:
            self._send_weights(number)

    def _send_weights(self, number: int) -> WeightSum:
        gradients = self._fragments[number].gradients(self._in_flight[number].moved)
        weights = WeightSum(gradients, f"{self._name}.{number}", self._compression, self._process_set)
        self._in_flight[number] = self._in_flight[number]._replace(weights=weights)
        return weights

    def _arrive(self, number: int) -> bool:
        """Wait for a turn, and make the outer step. Whether some rank makes further steps."""
        begun = perf_counter()
        sent = self._in_flight[number]
        counts, *buffers = sent.flags.wait()
        weight, goes_on = counts.tolist()
        sums = []
        if weight:  # if other ranks alone have trained it, zeros are sent now
            sums = (sent.weights or self._send_weights(number)).wait()
        self.wait_seconds += perf_counter() - begun
        if weight:
            mixed = self._alpha if self._schedule.delay and sent.goes_on else 1.0
            self._fragments[number].step(sums, weight)
            self._fragments[number].publish(mixed)
            self._take_buffers(buffers, weight, mixed)
        del self._in_flight[number]
        self._schedule.has_arrived(number)
        self._quiet = 0 if goes_on else self._quiet + 1
        return bool(goes_on)

    def _require_alone(self) -> None:
        """Others make further steps. They would wait for this rank in turns of another DiLoCo of the same loop."""
        beside = [each for each in _made if each is not self and each._hooks and each._last > self._before]
        if any(each._schedule.moved for each in beside):
            raise ValueError(
                f"rank {_core.rank()} is in finish() of one of several DiLoCo, and other ranks make further steps: "
                "with several, all ranks must make the same number of steps [HVD048]"
            )

    def _current_buffers(self) -> list[torch.Tensor]:
        """Looked up by name, since a module may replace them."""
        found = dict(self._model.named_buffers()) if self._buffers else {}
        return [found[name].detach() for name in self._buffers]

    def _buffers_to_send(self, moved: bool) -> list[torch.Tensor]:
        copies = [each.to("cpu", copy=True) for each in self._current_buffers()]  # beside the counts, in a group
        return copies if moved else [torch.zeros_like(each) for each in copies]

    def _take_buffers(self, sums: list[torch.Tensor], weight: float, alpha: float) -> None:
        for mine, total in zip(self._current_buffers(), sums):
            if weight:
                mine.lerp_(total.div_(weight).to(mine.device), alpha)

    def _require_same_parameters(self) -> None:
        trained = {id(each): name for part in self._fragments for name, each in zip(part.names, part.locals)}
        names = {id(each): name for name, each in self._named}
        for group in self._optimizer.param_groups:
            for each in group["params"]:
                if each.requires_grad != (id(each) in trained):
                    name = names.get(id(each), "that was added to the optimizer")
                    what = "is trained" if each.requires_grad else "is frozen"
                    raise ValueError(
                        f"rank {_core.rank()}: parameter {name} {what} since the first step with DiLoCo, which ranks "
                        "would do differently: call finish() on all ranks before the change, and make a new DiLoCo "
                        "after it [HVD048]"
                    )

    # Of the beginning.

    def _meet(self) -> None:
        """In a new job, or with new ranks: compare settings and global weights."""
        if self._known_in == incarnations():
            return
        self._begin()
        self._name = broadcast_object(self._name, self._process_set.ranks[0], "hvd.DiLoCo.name", self._process_set)
        shapes = [
            f"{name} {list(each.shape)} {each.dtype}"
            for part in self._fragments
            for name, each in zip(part.names, part.globals)
        ]
        blocks = (block for part in self._fragments for each in part.globals for block in _blocks(each))
        mine = [*self._settings, *shapes, f"weights with the checksum {digest(blocks).hex()[:8]}"]
        advice = "Make the same DiLoCo, and call hvd.broadcast_parameters before the first step,"
        require_equal("hvd.DiLoCo", mine, self._process_set, ", ".join, advice)
        if isinstance(self._compression, Quantized) and why_plain(self._process_set) is None:
            levels_of(self._process_set)  # opens sets now: later, ranks are at different steps
        self._schedule.load(self._schedule.state())
        self._in_flight.clear()
        self._known_in = incarnations()

    def _begin(self) -> None:
        if self._fragments:
            return
        inner = {id(each) for group in self._optimizer.param_groups for each in group["params"]}
        trained = [(name, each) for name, each in self._named if each.requires_grad and id(each) in inner]
        parts = self._schedule.fragments
        if len(trained) < parts:
            raise ValueError(f"fragments={parts}: only {len(trained)} parameters are trained [HVD048]")
        slices = cut([each.numel() for _, each in trained], parts)
        self._fragments = [Fragment(trained[part], self._outer) for part in slices]

    # Checkpoints.

    def state_dict(self) -> dict[str, Any]:
        """Return what all ranks have in common: global weights, outer optimizers and counts.

        Local weights and the inner optimizer have state_dicts of their own. An exchange that is under way is not part
        of it: its fragment is sent again after the next step of a training that loads it. Not a collective.

        Returns:
            dict: for ``load_state_dict``.
        """
        return {
            "schedule": self._schedule.state(),
            "names": [part.names for part in self._fragments],
            "weights": [[each.detach() for each in part.globals] for part in self._fragments],
            "outer": [part.outer.state_dict() for part in self._fragments],
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on from a state that ``state_dict`` has returned. All ranks must load the same one.

        Load the model and the inner optimizer as well. All ranks may load those of one rank.

        Args:
            state_dict (dict): the value of ``state_dict``, of this job or another one.

        Raises:
            HvdStateError: the parameters or fragments are others, or an exchange is under way.
        """
        if self._in_flight and self._known_in == incarnations():
            raise HvdStateError("an exchange of DiLoCo is under way: call finish() on all ranks first [HVD425]")
        if not {"schedule", "names", "weights", "outer"} <= {*state_dict}:
            raise HvdStateError("this is no state of a DiLoCo, which has schedule, names, weights and outer [HVD425]")
        if not state_dict["names"]:  # of one without steps
            self._fragments = []
            self._schedule.load(Schedule(self._sync_every, self._schedule.fragments, self._schedule.delay).state())
        else:
            self._begin()
            mine = [(name, each.shape) for part in self._fragments for name, each in zip(part.names, part.globals)]
            found = [list(map(tuple, zip(*each))) for each in zip(state_dict["names"], state_dict["weights"])]
            theirs = [(name, each.shape) for part in found for name, each in part]
            if mine != theirs or {len(found), len(state_dict["outer"])} != {len(self._fragments)}:
                raise HvdStateError(
                    f"this DiLoCo has {len(mine)} parameters in {len(self._fragments)} fragments, the state that it is "
                    f"to load has {len(theirs)} in {len(found)}, or other names or shapes [HVD425]"
                )
            for part, weights, outer in zip(self._fragments, state_dict["weights"], state_dict["outer"]):
                part.load(weights, outer)
            self._schedule.load(state_dict["schedule"])
        self._in_flight.clear()
        self._known_in = None


def _blocks(tensor: torch.Tensor) -> Any:
    found = bits(tensor)
    return found.blocks if found is not None else ()
