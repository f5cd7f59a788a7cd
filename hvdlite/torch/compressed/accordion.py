"""Accordion: compress hard only where gradients change little.

S. Agarwal, H. Wang, K. Lee, S. Venkataraman, D. Papailiopoulos, "Accordion: Adaptive Gradient Communication via
Critical Learning Regime Identification", 2021. For each parameter the norms of its reduced gradient are added up over a
window of steps. The next window is critical, and compressed less, if the sum has changed by the threshold or more, or
the learning rate has fallen. Reduced gradients are the same on all ranks, and so are decisions.
"""

from __future__ import annotations

import zlib
from typing import TYPE_CHECKING, Any

import torch

from .power_sgd import PowerSGD, PowerSGDCompressor

if TYPE_CHECKING:
    from ..optimizer.reducer import Exchange


class Accordion:
    """Compression that changes between two ranks of PowerSGD, by how fast gradients change.

    Each parameter uses ``low`` in the first window of ``every`` steps, and after the learning rate has fallen. It also
    does after the sum of its gradients' norms over a window has changed by ``threshold`` of it. Else it uses ``high``.
    The rule is that of Agarwal et al., "Accordion" (2021), in whose experiments a window is ten epochs.

    Args:
        low (PowerSGD): little compression, a higher rank. Its other options hold for both.
        high (PowerSGD): much compression.
        threshold (float): change of the sum of norms, relative to the window before. Default: 0.5.
        every (int): steps of a window. Default: 500.

    Raises:
        TypeError: if ``low`` or ``high`` is not a ``PowerSGD``.
        ValueError: if ``high`` has not the smaller rank, and for a value that is too small.

    Example:
        >>> hvd.Accordion(low=hvd.PowerSGD(4), high=hvd.PowerSGD(1), every=200)
        Accordion(low=PowerSGD(rank=4, start_after=1000, least_gain=2), rank of high=1, threshold=0.5, every=200)
    """

    def __init__(self, low: PowerSGD, high: PowerSGD, threshold: float = 0.5, every: int = 500) -> None:
        if not isinstance(low, PowerSGD) or not isinstance(high, PowerSGD):
            raise TypeError(f"Accordion changes between two PowerSGD(...), not {low!r} and {high!r} [HVD208]")
        if not high.rank < low.rank:
            raise ValueError(
                f"Accordion: the rank of high ({high.rank}) must be below that of low ({low.rank}) [HVD208]"
            )
        if isinstance(threshold, bool) or not isinstance(threshold, (int, float)) or not threshold > 0:
            raise ValueError(f"Accordion(threshold={threshold!r}) must be a number above 0 [HVD208]")
        if isinstance(every, bool) or not isinstance(every, int) or every < 1:
            raise ValueError(f"Accordion(every={every!r}) must be a whole number of at least 1 [HVD208]")
        self.low, self.high, self.threshold, self.every = low, high, float(threshold), every

    def __repr__(self) -> str:
        return (
            f"Accordion(low={self.low!r}, rank of high={self.high.rank}, threshold={self.threshold:g}, "
            f"every={self.every})"
        )


class Regimes:
    """Which parameters are critical? Numbers only: sums of norms by key, and learning rates."""

    def __init__(self, threshold: float, every: int) -> None:
        self.threshold, self.every = threshold, every
        self.steps = 0
        self.sums: dict[Any, float] = {}
        self.before: dict[Any, float] = {}
        self.rates: dict[Any, float] = {}
        self.critical: dict[Any, bool] = {}

    def add(self, key: Any, norm: float) -> None:
        """Of this step's reduced gradient."""
        self.sums[key] = self.sums.get(key, 0.0) + norm

    def step(self, rates: dict[Any, float]) -> None:
        """A step is over, taken with these learning rates."""
        self.steps += 1
        if self.steps % self.every:
            return
        for key, total in self.sums.items():
            before, rate = self.before.get(key), rates.get(key, 0.0)
            falls = rate < self.rates.get(key, rate)
            changes = not before or abs(before - total) / before >= self.threshold
            self.critical[key] = falls or changes
            self.before[key], self.rates[key] = total, rate
        self.sums = {}


class AccordionCompressor(PowerSGDCompressor):
    """What `compression=Accordion(...)` is in an optimizer."""

    def __init__(self, accordion: Accordion) -> None:
        super().__init__(accordion.low)
        self.accordion = accordion
        self.regimes = Regimes(accordion.threshold, accordion.every)
        self._norms: dict[int, float] = {}  # of the round's reduced gradients

    def __repr__(self) -> str:
        return repr(self.accordion)

    def bind(self, exchange: Exchange) -> None:
        """It serves this optimizer."""
        super().bind(exchange)
        self._start = exchange.wire.start

    def setting(self) -> str:
        """With the windows."""
        levels = zlib.crc32(repr(sorted(self.ranks.items())).encode())
        return f"{super().setting()}, {self.accordion!r}, levels {levels:08x}"

    def begin(self) -> bool:
        """Whether this round is compressed. The round before is over."""
        compressed = super().begin()
        if self._norms:
            for number, norm in self._norms.items():
                self.regimes.add(number, norm)
            self._norms = {}
            self.regimes.step(self._rates())
            self._choose()
        return compressed

    def _choose(self) -> None:
        low, high = self.accordion.low.rank, self.accordion.high.rank
        self.ranks = {number: low if critical else high for number, critical in self.regimes.critical.items()}

    def _rates(self) -> dict[int, float]:
        optimizer: Any = self._start.optimizer() if self._start.optimizer is not None else None
        groups = [] if optimizer is None else optimizer.__dict__["param_groups"]
        rate_of = {id(each): float(group.get("lr", 0.0)) for group in groups for each in group["params"]}
        return {number: rate_of.get(id(each), 0.0) for number, each in enumerate(self._parameters)}

    def _finish(
        self, number: int, value: torch.Tensor, left: torch.Tensor, p: torch.Tensor, q: torch.Tensor, factor: float
    ) -> None:  # fmt: skip
        super()._finish(number, value, left, p, q, factor)
        norm = float(value.double().norm())
        self._norms[number] = norm if norm < float("inf") else 0.0

    def shared(self) -> dict[str, Any]:
        """With what the regimes are."""
        of_ranks = super().shared()
        kept = {key: value for key, value in vars(self.regimes).items() if key not in ("threshold", "every")}
        return {
            **of_ranks,
            "norms": dict(self._norms),
            "regimes": {key: value if key == "steps" else dict(value) for key, value in kept.items()},
        }

    def fits(self, shared: dict[str, Any]) -> bool:
        """With numbers for the regimes."""
        regimes, count = shared.get("regimes"), len(self._parameters)
        parts = {"norms": shared.get("norms"), **(regimes if isinstance(regimes, dict) else {})}
        if set(parts) != {"norms", "steps", "sums", "before", "rates", "critical"}:
            return False
        steps = parts.pop("steps")
        if type(steps) is not int or steps < 0 or not all(isinstance(part, dict) for part in parts.values()):
            return False
        entries = [entry for part in parts.values() for entry in part.items()]
        numbers = all(type(key) is int and 0 <= key < count and type(value) in (float, bool) for key, value in entries)
        return numbers and super().fits(shared)

    def take(self, shared: dict[str, Any]) -> None:
        """With what the regimes are."""
        super().take(shared)
        self.regimes = Regimes(self.accordion.threshold, self.accordion.every)
        for key, value in shared.get("regimes", {}).items():
            setattr(self.regimes, key, value if key == "steps" else dict(value))
        self._norms = dict(shared.get("norms", {}))
        self._choose()
