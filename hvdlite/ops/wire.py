"""The option `wire` (`hvdlite-run --wire int8`): the compression of optimizers whose script names none.

An optimizer asks once, when it is made. So a job can be tried with another compression, and its script stays as it is.
A script that gives `compression=Compression.none` cannot be told from one that gives nothing.
All ranks have the same option, which init compares. What each compressor does is in quantized.py and the adapters.
"""

from __future__ import annotations

import sys
from typing import Any

from .. import config
from .._core import lib
from .arguments import NoneCompressor

_announced = [False]  # whether this process has said what the option does


def wire_compression(compression: Any, Compression: Any) -> Any:
    """The compression of an optimizer. The first optimizer that the option changes is told on rank 0's stderr.

    Args:
        compression (Compressor): what the script gave. Only ``NoneCompressor``, the default, is replaced.
        Compression (class): ``hvd.Compression`` of the framework.

    Returns:
        Compressor: ``compression`` itself, or the compressor that the option names.
    """
    name = config.load().values["wire"] if compression is NoneCompressor else "none"
    if name == "none":
        return compression
    if not _announced[0] and (rank := lib.hvd_rank()) >= 0:  # before init() a process does not know who speaks
        _announced[0] = True
        if rank == 0:
            text = f"--wire {name}: gradients of optimizers whose script names no compression travel as {name}"
            print(f"hvdlite: {text}", file=sys.stderr, flush=True)
    return getattr(Compression, name)


__all__ = ["wire_compression"]
