"""Sum of tensors over the ranks that is in flight while a training loop goes on.

`Compression.int8` and `int4` sum by a chain of collectives (hvdlite.ops.quantized_sum), of which `poll` sends the next
one; so their sum goes on whenever the loop looks. On one host they travel as they are. Other compressions are casts
around one collective. No residuals are kept: what rounding has lost is lost, since the weights that follow are the same
on all ranks and do not have it. A sum of all ranks' values, and not their average, because their weights may differ.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from ...ops import Sum
from ...ops.arguments import NoneCompressor, Quantized
from ...ops.quantized_sum import Member, QuantizedSum
from ...process_sets.levels import why_plain
from ...process_sets.process_set import ProcessSet
from ..ops import plain


class WeightSum:
    """The sum of some tensors over the ranks of a set, begun. It may overwrite them."""

    def __init__(self, tensors: Sequence[torch.Tensor], name: str, compression: Any, process_set: ProcessSet) -> None:
        self._quantized: QuantizedSum | None = None
        self._results: list[torch.Tensor] = []
        if isinstance(compression, Quantized):
            if why_plain(process_set) is None:
                self._results = [each.to("cpu", torch.float32).contiguous() for each in tensors]
                members = [Member(each.data_ptr(), each.data_ptr(), 0, each.numel()) for each in self._results]
                self._quantized = QuantizedSum(compression.bits, members, name, process_set, self._results).begin()
                return
            compression = NoneCompressor
        self._compression = compression
        sent = [compression.compress(each) for each in tensors]
        self._contexts = [context for _, context in sent]
        values = [each for each, _ in sent]
        self._handle = plain.grouped_allreduce_async_(values, name=name, op=Sum, process_set=process_set)

    def poll(self) -> None:
        """Send what can be sent without waiting."""
        if self._quantized is not None:
            self._quantized.done()

    def wait(self) -> list[torch.Tensor]:
        """The sums. Raises what a collective raises, and may be called again after a signal handler has raised."""
        if self._quantized is not None:
            self._quantized.wait()
        elif not self._results:
            self._results = [self._compression.decompress(*each) for each in zip(self._handle.wait(), self._contexts)]
        return self._results
