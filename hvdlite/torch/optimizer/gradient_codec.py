"""Codec of gradients: compression and scaling before a gradient is sent, and after.

A `Wire` knows an optimizer's reduction: op, scales, compression, process set, weights. It starts the exchange of one
gradient or of a group, and gives back a `Flight`, whose `complete` waits and puts the result into `p.grad`. In the
plain case (dense, not compressed, not weighted) the gradient's own memory is reduced in place and nothing else is done,
unless somebody else has that memory, too, and may need what is in it until backward is over (`is_shared`): then a copy
travels, and comes back when the round completes. A tensor that was there a round before is safe: backward adds to it.

Sparse gradients travel as two allgathers, of indices and values, after duplicates have been added up on each rank. The
indices go under the name that the dense gradient would have, so that a rank which never saw this gradient, and
therefore takes it for dense, makes an error that names both kinds instead of a wait without end.

A gradient that was reduced in an earlier round of the same step and got more passes since is reduced once more. For an
average that is right as it is: the average of equal values is the value, so the earlier part is kept and the new part
averaged. A sum would count the earlier part size times; it is divided first (`again`). Min, Max and Product of such
a mixture mean nothing: that is an error.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

import torch

from ... import _core
from ..._core.request_batch import Sent
from ...errors import OUTCOMES, HvdError, is_outcome
from ...ops import Average, Sum
from ...ops.arguments import reduction
from ...process_sets.process_set import ProcessSet
from .. import storage_check
from ..ops import plain
from .averages import Shares, WeightedAverage
from .checks import Agreement, StartCheck
from .failed_backward import PRIORITY
from .gradient_memory import Both, GradientRun, gathered, is_shared, no_rows, sum_of_bits, written
from .hooks import Writers

_RUNS_KEPT = 64  # a graph that differs in each step makes others each time
_NARROW = (torch.float16, torch.bfloat16)


class Flight:
    """Gradients in flight together. `arrive` gets what the handle's wait returns, and once more if a signal
    handler's exception has come before it was done."""

    __slots__ = ("_arrive", "_handle", "each_alone", "numbers")

    def __init__(
        self, numbers: Sequence[int], handle: Any, arrive: Callable[[Any], Any] | None, each_alone: bool = False
    ) -> None:
        self.numbers = numbers
        self.each_alone = each_alone  # they have only been sent together
        self._handle, self._arrive = handle, arrive

    def start(self, quiet: bool) -> None:
        """Of what `prepare_all` has made: send it."""
        self._handle.start(quiet)

    def begun(self) -> bool:
        """Whether it has been sent."""
        return not isinstance(self._handle, Sent) or self._handle.begun()

    def failure(self) -> Exception | None:
        """Why it has failed, if it has by now."""
        try:
            if self._handle.done():
                self.complete()
        except Exception as error:
            return error
        return None

    def complete(self) -> None:
        """Wait, and put the result where it belongs. Raises why the exchange failed."""
        result = self._handle.wait()
        if self._arrive is not None:
            self._arrive(result)
            self._arrive = None


class Wire:
    """How the gradients of one optimizer travel."""

    def __init__(
        self, op: int | WeightedAverage, predivide: float, compression: Any, process_set: ProcessSet, suffix: str,
        bare: bool, sparse_as_dense: bool
    ) -> None:  # fmt: skip
        self.process_set, self.compression, self.sparse_as_dense = process_set, compression, sparse_as_dense
        self.weights = op if isinstance(op, WeightedAverage) else None
        self.op: int = Sum if isinstance(op, WeightedAverage) else op
        self.predivide = predivide
        self.uncompressed = bare
        self.suffix = suffix
        self.parameters: list[torch.Tensor] = []
        self.names: list[str] = []
        self.known_sparse: dict[int, int] = {}  # and how many of its dimensions are
        self.shares: Shares | None = None
        self.uneven = False  # ranks may have run out of data
        self.writers = Writers()
        if self.weights is not None:
            self.shares = Shares("optimizer.weight" + suffix, process_set, self.weights.current)
        self.agreement = Agreement(suffix, process_set)
        self.start = StartCheck(suffix, process_set)
        self.settings: dict[str, Any] = {}
        self.reporting: int | None = None  # in this round, the gradient that reports a step not taken (`Untaken`)
        self._runs: dict[tuple[int, ...], GradientRun] = {}
        self._stay: dict[int, weakref.ref[torch.Tensor]] = {}  # gradients of shared memory, as they were last sent
        self.refresh()

    def refresh(self) -> None:
        """Settings of an allreduce; they depend on the size, which another init() may have changed."""
        self._runs = {}
        op, prescale, postscale = self.op, 1.0, 1.0
        if self.predivide != 1.0:
            op, prescale, postscale = Sum, 1.0 / self.predivide, self.predivide / self.process_set.size()
        self.settings = {
            "op": op, "prescale_factor": prescale, "postscale_factor": postscale, "process_set": self.process_set
        }  # fmt: skip
        self.terms = reduction(None, op, prescale, postscale, self.process_set)  # the same, of a group

    def count_active(self, on: bool) -> None:
        """Divide averages by the ranks that still have data (`uneven_inputs`), or by all again."""
        self.uneven = on
        if self.weights is None and self.op == Average:
            name = "optimizer.active" + self.suffix
            self.shares = Shares(name, self.process_set, lambda: 1.0) if on else None

    def send(self, number: int) -> Flight:
        """Start the exchange of one gradient; zeros where backward did not reach it."""
        stream = self.writers.elsewhere(number)
        if stream is None:
            return self._send(number)
        with torch.cuda.stream(stream):
            return self._send(number)

    def _send(self, number: int) -> Flight:
        gradient = self._gradient(number)
        priority = PRIORITY if number == self.reporting else 0
        if gradient.layout is not torch.strided:
            return self._send_sparse(number, gradient, priority)
        settings = {**self.settings, "priority": priority} if priority else self.settings
        if self.uncompressed and self.shares is None and number not in self.known_sparse:
            arrive: Callable[[torch.Tensor], Any] | None = None
            mine = gradient
            if self.is_borrowed(number, gradient):
                mine, arrive = gradient.detach().clone(), gradient.copy_
            return Flight((number,), plain.allreduce_async_(mine, name=self.names[number], **settings), arrive)
        packed, unpack = self._pack(number, gradient)
        return Flight((number,), plain.allreduce_async_(packed, name=self.names[number], **settings), unpack)

    def prepare_all(self, numbers: tuple[int, ...]) -> Flight | None:
        """The exchange of several gradients in one call, each on its own. Its caller notes it, then starts it.

        None if one of them needs more than to be reduced where it lies.
        """
        if not self.uncompressed or self.shares is not None or self.known_sparse:
            return None
        if self.reporting is not None and self.reporting in numbers:
            return None
        run = self._runs.get(numbers)
        if run is None:
            run = self._new_run(numbers)
            if run is None:
                return None
        gradients = run.gradients()
        if gradients is None or (
            any(map(is_shared, gradients)) and any(map(self._will_be_borrowed, numbers, gradients))
        ):
            return None
        return Flight(numbers, run.prepare(gradients), lambda _: written(gradients), each_alone=True)

    def _will_be_borrowed(self, number: int, gradient: torch.Tensor) -> bool:
        known = self._stay.get(number)
        return is_shared(gradient) and (known is None or known() is not gradient)

    def is_borrowed(self, number: int, gradient: torch.Tensor) -> bool:
        """Whether this memory may be needed elsewhere until the round completes."""
        borrowed = self._will_be_borrowed(number, gradient)
        if borrowed:
            self._stay[number] = weakref.ref(gradient)
        return borrowed

    def _new_run(self, numbers: tuple[int, ...]) -> GradientRun | None:
        if len(self._runs) >= _RUNS_KEPT:
            self._runs.clear()
        members = [(self.names[number], self.parameters[number]) for number in numbers]
        run = GradientRun.of(members, self.settings)
        if run is not None:
            self._runs[numbers] = run
        return run

    def send_group(self, numbers: Sequence[int], name: str) -> Flight:
        """Start the exchange of several dense gradients as one."""
        self.writers.join(numbers)
        gradients = [self._gradient(number) for number in numbers]
        for number, gradient in zip(numbers, gradients):
            if gradient.layout is not torch.strided:
                raise ValueError(
                    f"the gradient of {self.names[number]!r} is sparse, and a group needs dense gradients: use "
                    "sparse_as_dense=True, or leave this parameter out of groups [HVD231]"
                )
        packed, unpack = zip(*[self._pack(*pair) for pair in zip(numbers, gradients)])

        def arrive(results: list[torch.Tensor]) -> None:
            for each, result in zip(unpack, results):
                each(result)

        terms = self.terms._replace(priority=PRIORITY) if self.reporting in numbers else self.terms
        return Flight(numbers, plain.reduced_async_(list(packed), name, terms), arrive)

    def is_sparse(self, number: int) -> bool:
        """Whether this gradient travels as indices and values."""
        gradient = self.parameters[number].grad
        return number in self.known_sparse or (gradient is not None and gradient.layout is not torch.strided)

    def fill(self, number: int) -> None:
        """Zeros where backward did not reach a gradient."""
        if self.parameters[number].grad is None:
            self._gradient(number)

    def _gradient(self, number: int) -> torch.Tensor:
        parameter = self.parameters[number]
        gradient = parameter.grad
        if gradient is None:
            dims = self.known_sparse.get(number)
            if dims is None or self.sparse_as_dense:
                gradient = torch.zeros_like(parameter, memory_format=torch.contiguous_format)
            else:
                gradient = no_rows(parameter, dims)
            parameter.grad = gradient
        if storage_check.overlaps(gradient):  # an expanded one, which nothing can be written to
            gradient = parameter.grad = gradient.contiguous()
        if gradient.layout is not torch.strided:
            self.known_sparse[number] = gradient.sparse_dim()
            if self.sparse_as_dense or self.uneven:  # a rank that has joined takes part in allreduces only
                gradient = parameter.grad.to_dense()  # type: ignore[union-attr]
        return gradient

    def _pack(self, number: int, gradient: torch.Tensor) -> tuple[torch.Tensor, Callable[[torch.Tensor], None]]:
        """What travels for a dense gradient, and what to do with the result."""
        dims = self.known_sparse.get(number)  # it was made dense to travel
        tensor = self._weighted(gradient.detach().clone() if self.is_borrowed(number, gradient) else gradient)
        packed, ctx = (tensor, None) if self.uncompressed else self.compression.compress(tensor)
        if not isinstance(packed, torch.Tensor):
            raise TypeError(
                f"{self.compression!r}.compress returned {type(packed).__name__} instead of a tensor [HVD208]"
            )

        shared: list[torch.Tensor] = []

        def unpack(result: torch.Tensor) -> None:
            out = result if self.uncompressed else self.compression.decompress(result, ctx)
            if self.shares is not None:
                if not shared or result is not gradient:
                    shared[:] = [self.shared(out)]
                out = shared[0]
            if out is not gradient:
                gradient.copy_(out)
            if dims is not None:
                self.parameters[number].grad = gradient.to_sparse(dims)

        return packed, unpack

    def _weighted(self, gradient: torch.Tensor) -> torch.Tensor:
        if self.shares is None:
            return gradient
        mine = self.shares.mine()
        if self.weights is None:
            return gradient
        return gradient.float().mul_(mine) if gradient.dtype in _NARROW else gradient * mine

    def shared(self, result: torch.Tensor) -> torch.Tensor:
        """The sum divided by the sum of weights; the average over all as one over active ranks. Nothing is changed in
        its place: a caller that is interrupted does it again."""
        assert self.shares is not None
        total = self.shares.total()
        if self.weights is not None:
            return result / total
        factor = self.process_set.size() / total
        return result if factor == 1.0 else result * factor

    def _send_sparse(self, number: int, gradient: torch.Tensor, priority: int) -> Flight:
        """Start the two allgathers of a sparse gradient."""
        name = self.names[number]
        if self.op not in (Average, Sum):
            raise ValueError(
                f"the gradient of {name!r} is sparse, and op={_core.op_name(self.op)} is undefined for it: use "
                "hvd.Average or hvd.Sum, or sparse_as_dense=True [HVD231]"
            )
        parameter = self.parameters[number]
        mine = gradient.coalesce()
        values = mine.values()
        if self.shares is not None:
            values = values * self.shares.mine()
        packed, ctx = (values, None) if self.uncompressed else self.compression.compress(values)
        rows = mine.indices().t().contiguous()
        handles = [
            gathered(rows, f"allreduce.{name}", self.process_set),
            gathered(packed.contiguous(), f"allgather.{name}.values", self.process_set, priority),
        ]

        def arrive(_: Any) -> None:
            indices, every = (handle.wait() for handle in handles)
            out = every if self.uncompressed else self.compression.decompress(every, ctx)
            if self.shares is not None:
                out = out / self.shares.total()
            elif self.op == Average:
                out = out / self.process_set.size()
            if parameter.grad is not None:
                parameter.grad = torch.sparse_coo_tensor(
                    indices.t(), out, gradient.shape, check_invariants=False
                ).coalesce()

        return Flight((number,), Both(handles), arrive)

    def again(self, numbers: Sequence[int]) -> None:
        """Make reduced gradients ready to be added to and reduced once more. HvdError where that has no meaning."""
        if self.weights is not None or self.op == Average:
            return
        reduced = [number for number in numbers if self.parameters[number].grad is not None]
        if not reduced:
            return
        if self.op != Sum:
            raise HvdError(
                f"the gradient of {self.names[reduced[0]]!r} already holds the result of op={_core.op_name(self.op)} "
                "over the ranks, and another backward pass would add to it: call step() or zero_grad() in between, "
                "or accumulate with backward_passes_per_step or no_sync() [HVD232]"
            )
        divided = set()
        for gradient in (self.parameters[number].grad for number in reduced):
            assert gradient is not None
            memory = gradient.data_ptr() if gradient.layout is torch.strided else id(gradient)
            if memory not in divided:  # two parameters may have one
                gradient.div_(self.process_set.size())
            divided.add(memory)

    def note_data(self, numbers: Sequence[int]) -> None:
        """These gradients are about to travel for the first time: are they those of the other ranks?"""
        for number in numbers:
            gradient = self.parameters[number].grad
            if gradient is not None:
                values = gradient if gradient.layout is torch.strided else gradient.coalesce().values()
                finite = bool(torch.isfinite(values).all())
                self.start.data.add(self.names[number], int(sum_of_bits(values) or 0), finite)

    def all_sent(self, silent: list[int]) -> None:
        """All gradients of the round are in flight, but for those that are not sent."""
        if not self.agreement.begun():
            self.agreement.send(silent, self.names, self.start.begin(self.parameters))

    def forget(self) -> None:
        """What a round has left that an error has ended is dropped."""
        for part in (self.shares, self.agreement):
            if part is not None:
                with suppress(*OUTCOMES):
                    part.close()

    def round_over(self) -> None:
        """All flights are complete."""
        if self.shares is not None:
            self.shares.close()
        try:
            if self.agreement.requested:
                self.start.compare(self.parameters, self.names)
        except Exception as error:
            if is_outcome(error):  # else a signal handler's: it is compared again
                self.agreement.close()
            raise
        self.agreement.close()
