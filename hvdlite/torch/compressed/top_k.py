"""Top-k: of each gradient only the elements of greatest magnitude travel, as indices and values.

With what is left kept on each rank and added to its next gradient (D. Alistarh et al., "The Convergence of Sparsified
Gradient Methods", 2018). Every rank gathers the pairs of all and adds them in rank order, so all get the same bits.
An index is an int32: it counts within a bucket, which has 25 MiB, or one gradient that is larger.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from ..optimizer.gradient_memory import gathered
from .carrier import Gradients
from .chain import Chain, nothing
from .residuals import Residuals

if TYPE_CHECKING:
    from ..optimizer.reducer import Exchange

_BUCKET_BYTES = 25 << 20


class TopK:
    """Compression of gradients to their greatest elements, for ``DistributedOptimizer``.

    Of each gradient, the ``density`` part of greatest magnitude travels, 8 bytes for an element, and at least one
    element. The rest is kept on each rank and added to its next gradient. Use it with several hosts: inside one host,
    gradients travel as they are.

    Args:
        density (float): part of the elements that travel, above 0 and below 1 / ranks. Default: 0.001.
        least_bytes (int): gradients of fewer bytes travel as they are. Default: 16384.

    Raises:
        ValueError: for an invalid value; when it is wrapped, also for a density of 1 / ranks or more.

    Example:
        >>> hvd.TopK(density=0.01)
        TopK(density=0.01, least_bytes=16384)
    """

    def __init__(self, density: float = 0.001, least_bytes: int = 16384) -> None:
        if isinstance(density, bool) or not isinstance(density, float) or not 0 < density < 1:
            raise ValueError(f"TopK(density={density!r}) must be a number between 0 and 1 [HVD208]")
        if isinstance(least_bytes, bool) or not isinstance(least_bytes, int) or least_bytes < 0:
            raise ValueError(f"TopK(least_bytes={least_bytes!r}) must be a whole number of at least 0 [HVD208]")
        self.density, self.least_bytes = density, least_bytes

    def __repr__(self) -> str:
        return f"TopK(density={self.density:g}, least_bytes={self.least_bytes})"


class TopKCompressor:
    """What `compression=TopK(...)` is in an optimizer."""

    exact_mean = False  # the result is not the mean of what the ranks give
    needs_all = True

    def __init__(self, spec: TopK) -> None:
        self.spec = spec
        self.residuals = Residuals()

    def __repr__(self) -> str:
        return repr(self.spec)

    def bind(self, exchange: Exchange) -> None:
        """It serves this optimizer. ValueError if all elements would take fewer bytes."""
        self.process_set = exchange.wire.process_set
        size = self.process_set.size()
        if self.spec.density * size >= 1 and size > 1:
            raise ValueError(
                f"compression={self!r}: with {size} ranks a density of {1 / size:.3g} or more sends more bytes than "
                "the whole gradient: give a smaller one [HVD208]"
            )

    def takes(self, parameter: torch.Tensor) -> bool:
        """Large enough."""
        return parameter.numel() > 0 and 4 * parameter.numel() >= self.spec.least_bytes

    def cap_bytes(self) -> int:
        """Of a bucket."""
        return _BUCKET_BYTES

    def setting(self) -> str:
        """What all ranks have in common."""
        return repr(self.spec)

    def begin(self) -> bool:
        """Every round is compressed."""
        self.residuals.begin()
        return True

    def shared(self) -> dict[str, Any]:
        """Nothing but residuals is kept."""
        return {}

    def fits(self, shared: dict[str, Any]) -> bool:
        """It is empty."""
        return not shared

    def take(self, shared: dict[str, Any]) -> None:
        """Nothing."""

    def job(self, gradients: Gradients) -> Chain:
        """One allgather of pairs."""
        counts = [value.numel() for value in gradients.values]
        flat = torch.cat(
            [
                value.reshape(-1) * gradients.prescale + self.residuals.of(number, value.numel())
                for number, value in zip(gradients.numbers, gradients.values)
            ]
        )
        places, at = [], 0
        for part in flat.split(counts):
            most = max(1, int(part.numel() * self.spec.density))
            places.append(part.abs().topk(most, sorted=False).indices + at)
            at += part.numel()
        chosen = torch.cat(places)
        pairs = torch.stack([chosen.to(torch.int32), flat[chosen].view(torch.int32)], 1)

        def send(_: Any) -> Any:
            return gathered(pairs, f"allreduce.{gradients.name}", self.process_set, gradients.priority)

        def finish(every: torch.Tensor) -> None:
            total = torch.zeros_like(flat)
            for one in every.split(len(chosen)):  # in rank order; no rank gives an element twice
                total[one[:, 0].long()] += one[:, 1].contiguous().view(torch.float32)
            left = flat.index_fill(0, chosen, 0.0)
            parts = zip(gradients.numbers, gradients.values, total.split(counts), left.split(counts))
            for number, value, part, rest in parts:
                value.copy_((part * gradients.factor).view_as(value))
                if bool(part.isfinite().all()):  # else some rank's gradient is not, and nothing of it is kept
                    self.residuals.put(number, rest.clone())

        return Chain([send], finish)

    def refusal(self, name: str) -> Any:
        """In the place of the pairs."""
        return gathered(nothing().to(torch.int32), f"allreduce.{name}", self.process_set)
