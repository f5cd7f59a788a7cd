"""int8 and int4 in an optimizer: a bucket is one quantized sum, with a residual for each parameter.

The kernels write residuals when the first exchange of a bucket has succeeded. So a round that fails changes none.
Statistics of what was given and of what arrived come from the same pass over the data.

The compressor of an optimizer holds what the optimizer keeps between rounds, which the user's value, an option of
several optimizers perhaps, does not.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from ...ops.arguments import Quantized
from ...ops.quantized_sum import Member, QuantizedSum
from .carrier import Gradients
from .residuals import Residuals

if TYPE_CHECKING:
    from ..optimizer.reducer import Exchange


class QuantizedCompressor:
    """What `compression=Compression.int8` is in an optimizer."""

    exact_mean = True  # but for rounding
    needs_all = True

    def __init__(self, quantized: Quantized) -> None:
        self.quantized = quantized
        self.residuals = None if quantized.feedback is False else Residuals()
        self.stats: dict[int, Any] = {}  # by number of the parameter, of the last round

    def __repr__(self) -> str:
        return repr(self.quantized)

    def bind(self, exchange: Exchange) -> None:
        """It serves this optimizer."""
        self.exchange_set = exchange.wire.process_set

    def takes(self, parameter: torch.Tensor) -> bool:
        """Large enough."""
        return parameter.numel() > 0 and 4 * parameter.numel() >= self.quantized.least_bytes

    def cap_bytes(self) -> int:
        """Of a bucket."""
        return int(self.quantized.bucket_mb * (1 << 20))

    def setting(self) -> str:
        """Feedback is left out: it changes what a rank adds, not what travels."""
        return f"{self.quantized!r}(least_bytes={self.quantized.least_bytes}, bucket_mb={self.quantized.bucket_mb:g})"

    def shared(self) -> dict[str, Any]:
        """Nothing but residuals is kept."""
        return {}

    def fits(self, shared: dict[str, Any]) -> bool:
        """It is empty."""
        return not shared

    def take(self, shared: dict[str, Any]) -> None:
        """Nothing."""

    def begin(self) -> bool:
        """Every round is compressed."""
        if self.residuals is not None:
            self.residuals.begin()
        return True

    def job(self, gradients: Gradients) -> QuantizedSum:
        """The quantized sum of a bucket."""
        members, kept = [], []
        for number, value in zip(gradients.numbers, gradients.values):
            residual = 0
            if self.residuals is not None:
                kept.append(self.residuals.of(number, value.numel()))
                residual = kept[-1].data_ptr()
            members.append(Member(value.data_ptr(), value.data_ptr(), residual, value.numel()))
        return _Sum(self, gradients, members, kept)

    def refusal(self, name: str) -> QuantizedSum:
        """Sent at once."""
        return QuantizedSum(self.quantized.bits, [], name, self.exchange_set, None).refuse()


class _Sum(QuantizedSum):
    def __init__(
        self, compressor: QuantizedCompressor, gradients: Gradients, members: list[Member], kept: list[torch.Tensor]
    ) -> None:  # fmt: skip
        super().__init__(
            compressor.quantized.bits, members, gradients.name, compressor.exchange_set, (gradients.values, kept),
            gradients.prescale, gradients.factor, gradients.priority,
        )  # fmt: skip
        self._compressor, self._numbers = compressor, gradients.numbers

    def wait(self) -> _Sum:
        super().wait()
        self._compressor.stats.update(zip(self._numbers, self.stats()))
        return self
