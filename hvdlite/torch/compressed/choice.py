"""Choice of the carrier by an optimizer's `compression=`.

Beside a class of `compress` and `decompress`, that may be a value which compresses buckets: `Quantized`, or one of
the classes of this package. A carrier knows the optimizer, which chooses it here. So carriers are imported when one is
made. A value itself holds options only, and may be given to several optimizers: each makes a compressor of its own.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

from ...errors.codes import coded
from ...ops import Average, Sum
from ...ops.arguments import Quantized
from ...ops.wire import wire_compression
from ..compression import Compression

if TYPE_CHECKING:
    from ..optimizer.reducer import Exchange
    from .carrier import CompressedCarrier, Compressor

_SPECS = {"power_sgd": "PowerSGD", "top_k": "TopK", "accordion": "Accordion"}  # by module of this package


def of_job(compression: Any, op: Any, shard: Any) -> Any:
    """What the script gave, or what the job's option `wire` names, where an optimizer can have it."""
    return wire_compression(compression, Compression) if not shard and op in (Average, Sum) else compression


def in_buckets(compression: Any, op: int) -> bool:
    """Whether it compresses buckets. ValueError for an op that it cannot compress."""
    if isinstance(compression, Quantized):
        compression.refuse(op)
        return True
    if type(compression).__module__.removeprefix(f"{__package__}.") not in _SPECS:
        return False
    if op not in (Average, Sum):
        raise ValueError(coded("HVD208", f"compression={compression!r} needs op=hvd.Average or hvd.Sum"))
    return True


def carrier_of(compression: Any, exchange: Exchange) -> CompressedCarrier:
    """The carrier of an optimizer."""
    from .carrier import CompressedCarrier

    return CompressedCarrier(exchange, _compressor_of(compression))


def _compressor_of(compression: Any) -> Compressor:
    if isinstance(compression, Quantized):
        from .quantized import QuantizedCompressor

        return QuantizedCompressor(compression)
    module: Any = sys.modules[type(compression).__module__]
    made: Compressor = getattr(module, f"{type(compression).__name__}Compressor")(compression)
    return made
