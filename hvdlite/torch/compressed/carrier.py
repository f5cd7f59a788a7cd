"""Carrier of compressed gradients, whose buckets take several collectives each.

Which gradients travel together, and when do the further collectives of a bucket go? A compressor makes a `Job` of
each bucket: a chain of collectives, of which the next goes when the one before has ended. That is looked at whenever
a gradient becomes ready, so chains overlap with backward. Who waits for one bucket goes on with all of them, step by
step, else their latencies would add up.

The layout must be the same on all ranks. It holds the gradients that some rank has sent in the round before, which
the ranks agree on in each round (`checks.Agreement`), in the reverse order of the parameters. A bucket always has all
its members: zeros stand for what is frozen on this rank. Parameters that are new travel as they are for a round, and
so do all in the first round of a job, on one host, and with ranks that are out of data.
"""

from __future__ import annotations

import sys
import zlib
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import torch

from ... import _core
from ...errors import HvdError
from ...lifecycle.init import incarnations
from ...ops import Sum
from ...process_sets.levels import why_plain
from ..ops import plain
from ..optimizer.buckets import Carrier, EachAlone
from ..optimizer.checks import SETTING
from ..optimizer.failed_backward import PRIORITY
from ..optimizer.gradient_codec import Flight
from ..optimizer.gradient_memory import written
from .residuals import Residuals, saved_name

if TYPE_CHECKING:
    from ..optimizer.reducer import Exchange

_MB = 1 << 20
_DTYPES = (torch.float32, torch.float16, torch.bfloat16)


class Job(Protocol):
    """A bucket's collectives. Everything may be repeated after a signal handler has raised."""

    stage: int  # of the collective in flight: a number that all ranks have in common, and that grows

    def step(self, block: bool = True) -> bool:
        """Send the first collective, or the next one if the one in flight has ended, or must be waited for. False:
        nothing was done. Raises nothing."""
        ...

    def done(self) -> bool:
        """Whether it is over; sends what can be sent without waiting."""
        ...

    def wait(self) -> Any:
        """Until it is over. Raises why it has failed."""
        ...


class Gradients(NamedTuple):
    """A bucket as a compressor gets it."""

    place: int
    name: str
    numbers: Sequence[int]
    values: Sequence[torch.Tensor]  # float32, contiguous, in the CPU's memory; overwritten by the results
    prescale: float
    factor: float  # of the sum, to make the result
    priority: int


class Compressor(Protocol):
    """How gradients are compressed."""

    residuals: Residuals | None
    needs_all: bool  # its collectives do not end where a rank has joined

    def bind(self, exchange: Exchange) -> None:
        """It serves this optimizer. ValueError for what cannot be."""
        ...

    def takes(self, parameter: torch.Tensor) -> bool:
        """Whether gradients of this parameter, of a float dtype, shall be compressed. The same on all ranks."""
        ...

    def cap_bytes(self) -> int:
        """Greatest size of a bucket."""
        ...

    def begin(self) -> bool:
        """A round begins. False: it travels as it is. The same on all ranks."""
        ...

    def job(self, gradients: Gradients) -> Job:
        """The collectives of a bucket; nothing is sent yet."""
        ...

    def refusal(self, name: str) -> Any:
        """What ends the job of a bucket on all ranks, where this one has no gradients: it is sent, and has `wait`."""
        ...

    def setting(self) -> str:
        """What all ranks must have in common in this round."""
        ...

    def shared(self) -> dict[str, Any]:
        """What is saved beside residuals, and is the same on all ranks."""
        ...

    def fits(self, shared: dict[str, Any]) -> bool:
        """Whether this is what `shared` has returned, of such parameters. It comes from a file, which may be any."""
        ...

    def take(self, shared: dict[str, Any]) -> None:
        """What `shared` has returned; nothing: begin anew."""
        ...


class CompressedCarrier(Carrier):
    """Gradients that a compressor takes travel in its buckets, others as they are."""

    compresses = True

    def __init__(self, exchange: Exchange, compressor: Compressor) -> None:
        super().__init__(exchange)
        self.compressor, self.plain = compressor, EachAlone(exchange)
        self.layout: list[list[int]] = []
        self.bucket_of: dict[int, int] = {}
        self.begun = False  # the round
        self.sent: dict[int, Any] = {}  # by bucket, the job
        self.counts = {"overlapped": 0, "late": 0}  # buckets whose last collective was sent in backward, or after it
        self._waits: dict[int, set[int]] = {}
        self._basis: Any = None
        self._announced = False
        self._agreed = False  # the ranks may have compressed in this round
        compressor.bind(exchange)
        exchange.wire.agreement.setting = self._setting

    def _setting(self) -> str:
        """What all ranks must have in common before they compress."""
        order = zlib.crc32("\n".join(self.exchange.wire.names).encode())
        return f"{self.compressor.setting()}, parameters in the order {order:08x}"

    # Of a round.

    def _begin(self) -> None:
        if self.begun:
            return
        wire, agreement = self.exchange.wire, self.exchange.wire.agreement
        why = why_plain(wire.process_set)
        if why is not None and not self._announced:
            self._announced = True
            if _core.rank() == wire.process_set.ranks[0]:
                line = f"compression={self.compressor!r}: {why}, so gradients travel as they are"
                print(f"hvdlite: {line}", file=sys.stderr, flush=True)
        known = agreement.incarnation == incarnations() and agreement.counted
        basis: Any = None
        self._agreed = bool(why is None and known)
        if why is None and known and not wire.uneven and self.compressor.begin():
            basis = known, tuple(agreement.silent)
        if basis != self._basis:
            self.layout = [] if basis is None else self._laid_out(known, set(agreement.silent))
            self.bucket_of = {number: index for index, numbers in enumerate(self.layout) for number in numbers}
            self._basis = basis  # last: an exception may come in between, and all of it is done again
        self._waits = {index: set(filter(self._travels, numbers)) for index, numbers in enumerate(self.layout)}
        self.sent, self.begun = {}, True

    def _laid_out(self, known: int, silent: set[int]) -> list[list[int]]:
        wire, layout, held = self.exchange.wire, list[list[int]](), 0
        cap = min(_MB, self.compressor.cap_bytes())
        for number in reversed(range(min(known, len(wire.parameters)))):
            parameter = wire.parameters[number]
            size = 4 * parameter.numel()
            if number in silent or parameter.dtype not in _DTYPES or wire.is_sparse(number):
                continue
            if not self.compressor.takes(parameter):
                continue
            if not layout or held + size > cap:
                cap = self.compressor.cap_bytes() if layout else cap
                layout.append([])
                held = 0
            layout[-1].append(number)
            held += size
        return layout

    def _travels(self, number: int) -> bool:
        parameter = self.exchange.wire.parameters[number]
        return parameter.requires_grad or parameter.grad is not None

    def _alone(self, number: int) -> bool:
        """It is in no bucket, or its bucket has gone: backward has reached it once more."""
        index = self.bucket_of.get(number)
        return index is None or self._gone(index)

    def _gone(self, index: int) -> bool:
        """Whether this bucket has been sent, or refused. An exception may come when only its flight is known."""
        return index in self.sent or self.layout[index][0] in self.exchange.in_flight

    def ready(self, number: int) -> None:
        self.all_ready((number,), False)

    def all_ready(self, numbers: Sequence[int], quiet: bool) -> None:
        self._begin()
        alone = [number for number in numbers if self._alone(number)]
        if alone:
            self.plain.all_ready(alone, quiet)
        for number in numbers:
            index = self.bucket_of.get(number)
            if index is not None and not self._gone(index):
                self._waits[index].discard(number)
                if not self._waits[index]:
                    self._send(index)
        for job in self.sent.values():
            job.done()

    def rest(self) -> None:
        self._begin()
        for index in range(len(self.layout)):
            if not self._gone(index):
                self._send(index)
        for job in self.sent.values():
            self.counts["overlapped" if job.done() else "late"] += 1

    def over(self) -> None:
        self.begun = False

    def take_back(self, number: int) -> None:
        index = self.bucket_of.get(number)
        if index is not None and not self._gone(index):
            self._waits[index].add(number)

    def differ(self, names: Sequence[str]) -> None:
        """The ranks differ in their compression: an error on all of them. No rank may wait for buckets of its own."""
        if self._agreed and any(name.startswith(SETTING) for name in names):
            self.exchange.in_flight.clear()

    def settled(self, lacking: Sequence[int]) -> None:
        wire = self.exchange.wire
        if self.layout and self.compressor.needs_all and wire.agreement.present < wire.process_set.size():
            self.exchange.in_flight.clear()  # no rank may wait for these
            raise HvdError(
                f"a rank has called hvd.join(), which compression={self.compressor!r} does not support: put the loop "
                "into `with hvd.uneven_inputs(optimizer):` instead [HVD229]"
            )
        alone = [number for number in lacking if number not in self.bucket_of]
        if alone:
            self.plain.all_ready(alone, True)

    def at_once(self, numbers: Sequence[int]) -> Sequence[int]:
        self._begin()
        held = {number for index, members in enumerate(self.layout) if not self._gone(index) for number in members}
        return sorted(held.union(numbers))  # also those of buckets that are frozen on this rank

    def skip(self, numbers: Sequence[int]) -> Iterable[tuple[Sequence[int], list[Any]]]:
        yield from super().skip([number for number in numbers if number not in self.bucket_of])
        for index in sorted({self.bucket_of[number] for number in numbers if number in self.bucket_of}):
            if not self._gone(index):
                self.sent[index] = refusal = self.compressor.refusal(self._name(index))
                yield self.layout[index], [refusal]

    def forget(self) -> None:
        self.layout, self.bucket_of, self._basis, self.begun = [], {}, None, False
        self.sent.clear()

    # Residuals.

    @property
    def keeps(self) -> bool:  # type: ignore[override]
        """Whether the compressor keeps residuals."""
        return self.compressor.residuals is not None

    def scaled_by(self, scaler: Any) -> None:
        """A GradScaler has multiplied the loss."""
        if self.compressor.residuals is not None and hasattr(scaler, "get_scale"):
            self.compressor.residuals.scaled_by(scaler.get_scale)

    def _named(self, number: int) -> str:
        return saved_name(self.exchange.wire.names[number])

    def kept(self) -> dict[str, Any]:
        """For a state_dict."""
        assert self.compressor.residuals is not None
        return self.compressor.residuals.state(repr(self.compressor), self._named, self.compressor.shared())

    def keep(self, state: Any) -> None:
        """What `kept` has returned, or None."""
        assert self.compressor.residuals is not None
        sizes = {self._named(n): (n, each.numel()) for n, each in enumerate(self.exchange.wire.parameters)}
        fits = self.compressor.fits
        like = self.compressor.residuals.load(state, repr(self.compressor), sizes, fits)
        self.compressor.take(state["shared"] if like else {})

    def collect(self, root_rank: int) -> None:
        """The sum of the ranks' residuals goes to one of them; zeros stay on the others."""
        residuals, wire = self.compressor.residuals, self.exchange.wire
        assert residuals is not None
        for number, parameter in enumerate(wire.parameters):
            if parameter.dtype not in _DTYPES or not self.compressor.takes(parameter):
                continue
            name = f"residual.{wire.names[number]}"
            mine = residuals.of(number, parameter.numel())
            total = plain.reduce(mine, root_rank, Sum, name, process_set=wire.process_set)
            residuals.put(number, total if _core.rank() == root_rank else torch.zeros_like(mine))

    # Of a bucket.

    def _name(self, index: int) -> str:
        names, numbers = self.exchange.wire.names, self.layout[index]
        return names[numbers[0]] + (f" and {len(numbers) - 1} more" if len(numbers) > 1 else "")

    def _send(self, index: int) -> None:
        wire, numbers = self.exchange.wire, self.layout[index]
        wire.writers.join(numbers)
        values, arrivals = [], []
        for number in numbers:
            value, written_back = self._value(number)
            values.append(value)
            arrivals.append(written_back)
        settings, size = wire.settings, wire.process_set.size()
        prescale, factor = settings["prescale_factor"], settings["postscale_factor"]
        if wire.shares is not None:
            prescale *= wire.shares.mine()
        elif settings["op"] == wire.op and wire.op != _core.OPS["sum"]:
            factor /= size
        priority = PRIORITY if wire.reporting in numbers else 0
        job = self.compressor.job(Gradients(index, self._name(index), numbers, values, prescale, factor, priority))

        def take(_: Any) -> None:
            for arrive in arrivals:
                arrive()

        flight = Flight(numbers, _BucketWait(self, job), take)
        self.exchange.in_flight.update(dict.fromkeys(numbers, flight))
        self.sent[index] = job
        job.step(block=False)

    def _value(self, number: int) -> tuple[torch.Tensor, Callable[[], Any]]:
        """What travels of a gradient, which the result overwrites, and what is to be done with that then."""
        wire = self.exchange.wire
        parameter = wire.parameters[number]
        if not self._travels(number):
            nothing = torch.zeros(parameter.shape)

            def given() -> None:
                if number not in wire.agreement.silent:  # other ranks have sent it
                    parameter.grad = self._result(nothing).to(parameter.device, parameter.dtype).view(parameter.shape)

            return nothing, given
        wire.fill(number)
        gradient: Any = parameter.grad
        plain = gradient.dtype == torch.float32 and gradient.device.type == "cpu" and gradient.is_contiguous()
        if plain and wire.shares is None and not wire.is_borrowed(number, gradient):
            return gradient.detach(), lambda: written([gradient])
        copy = torch.empty(gradient.shape)
        copy.copy_(gradient.detach())
        return copy, lambda: gradient.copy_(self._result(copy))

    def _result(self, total: torch.Tensor) -> torch.Tensor:
        return total if self.exchange.wire.shares is None else self.exchange.wire.shared(total)


class _BucketWait:
    """What a flight waits for: the job of a bucket, while those of all buckets go on."""

    def __init__(self, carrier: CompressedCarrier, job: Job) -> None:
        self.carrier, self.job = carrier, job

    def done(self) -> bool:
        return self.job.done()

    def wait(self) -> Any:
        jobs = [self.job, *self.carrier.sent.values()]
        while not self.job.done():
            # Of those in the earliest stage on any rank, each rank has sent the collective: so one of them ends.
            unfinished = [job for job in jobs if not job.done()]
            min(unfinished or jobs, key=lambda job: job.stage).step()
        return self.job.wait()
