"""Pipeline and tensor parallelism for models that do not fit one process: `from hvdlite import parallel`.

A pipeline cuts a model's layers into stages, one rank (or group of ranks) each; tensor parallelism cuts a layer's
weights over ranks. Both take their ranks from an axis of a `hvd.Mesh`, and a third axis stays for data parallelism:

    mesh = hvd.Mesh(dp=-1, pp=2, tp=2)
    stage = parallel.split(layers, mesh, parallel.partition(costs, 2))
    pipe = parallel.Pipeline(stage, optimizer, mesh, loss, micro_batches=4)
    mean = pipe.step(x, y)

Everything here needs PyTorch, but for `schedule` (what a stage does in which order, as a list), `balance` and
`planned`. Names are imported when they are used.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .balance import partition
    from .layers import ColumnLinear, RowLinear, SequenceParallel, VocabEmbedding, parallelize, vocab_cross_entropy
    from .planned import planned
    from .profile import profile
    from .random import seeded
    from .runner import Pipeline
    from .stage import split
    from .state import load_whole, whole_state
    from .tensor import (
        copy_to,
        finish_switch,
        from_sequence,
        gather_from,
        reduce_from,
        split_to,
        start_switch,
        switch_axis,
        to_sequence,
    )

_NAMES = {
    "balance": ("partition",),
    "layers": ("ColumnLinear", "RowLinear", "SequenceParallel", "VocabEmbedding", "parallelize", "vocab_cross_entropy"),
    "planned": ("planned",),
    "profile": ("profile",),
    "random": ("seeded",),
    "runner": ("Pipeline",),
    "stage": ("split",),
    "state": ("load_whole", "whole_state"),
    "tensor": (
        "copy_to", "finish_switch", "from_sequence", "gather_from", "reduce_from", "split_to", "start_switch",
        "switch_axis", "to_sequence",
    ),
}  # fmt: skip
_MODULE_OF = {name: module for module, names in _NAMES.items() for name in names}

__all__ = [
    "ColumnLinear",
    "Pipeline",
    "RowLinear",
    "SequenceParallel",
    "VocabEmbedding",
    "copy_to",
    "finish_switch",
    "from_sequence",
    "gather_from",
    "load_whole",
    "parallelize",
    "partition",
    "planned",
    "profile",
    "reduce_from",
    "seeded",
    "split",
    "split_to",
    "start_switch",
    "switch_axis",
    "to_sequence",
    "vocab_cross_entropy",
    "whole_state",
]


def __getattr__(name: str) -> Any:
    if name not in _MODULE_OF:
        raise AttributeError(f"module 'hvdlite.parallel' has no attribute {name!r}")
    value = getattr(import_module(f".{_MODULE_OF[name]}", __name__), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
