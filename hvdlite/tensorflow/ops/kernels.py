"""The ops of a graph: how the library with our kernels gets into TensorFlow, and its nodes into a graph.

The library (csrc/tensorflow) is opened by TensorFlow itself, once, when a graph first wants a collective; then it gets
the addresses of the core's functions. A program that stays eager never opens it.

Tensors on GPUs go by way of the CPU: TensorFlow copies them there and back.

`INFO` of the logger "hvdlite" says whether a waiting node keeps a thread: it does not where the standard library is
laid out as expected, which is tried out when the library is opened; else there is a warning.
"""

from __future__ import annotations

import ctypes
import functools
import logging
import struct
from pathlib import Path
from typing import Any, NamedTuple

import tensorflow as tf

from ... import _core
from ..adapter import DTYPES

_FUNCTIONS = (
    *("submit", "wait", "poll", "result", "forget"),
    *("rank", "size", "place", "abort", "step"),
)
_TF_DTYPES = 64
_NOTICE_S, _NOTICE_MOST_S = 1.0, 60.0
_PACKAGE = Path(__file__).resolve().parent.parent


class Library(NamedTuple):
    """The opened library: nodes are made with `ops`, its own functions called by `native`."""

    ops: Any
    native: ctypes.CDLL

    @property
    def asynchronous(self) -> bool:
        """Whether a node that waits for a collective leaves its thread to others."""
        return bool(self.native.hvd_tf_asynchronous(0))

    def flights(self, which: int = 0) -> int:
        """Collectives of graphs: 0, that exist now; 1, that were ever started; 2, most at once."""
        return int(self.native.hvd_tf_count(which))


def beside(handle: tf.Tensor) -> Any:
    """A context in which nodes are placed on the device of a collective's start."""
    return handle.graph.colocate_with(handle.op)


@functools.cache
def library() -> Library:
    """The library, opened at the first call. ImportError if it is not there or does not fit this TensorFlow."""
    found = sorted(_PACKAGE.glob("_kernels*.so"))
    if not found:
        raise ImportError(
            f"hvdlite in {_PACKAGE.parent} has no compiled ops for TensorFlow's graphs (hvdlite/tensorflow/_kernels): "
            "install hvdlite again [HVD808]"
        )
    ops = tf.load_op_library(str(found[0]))
    native = ctypes.CDLL(str(found[0]))
    native.hvd_tf_attach.restype = ctypes.c_char_p
    native.hvd_tf_count.restype = ctypes.c_int64
    functions = (ctypes.c_void_p * len(_FUNCTIONS))(*_core.addresses(*(f"hvd_{name}" for name in _FUNCTIONS)))
    dtypes = (ctypes.c_int * _TF_DTYPES)(*[-1] * _TF_DTYPES)
    for dtype, number in DTYPES.items():
        dtypes[dtype.as_datatype_enum] = number
    trouble = native.hvd_tf_attach(functions, len(_FUNCTIONS), dtypes, _TF_DTYPES)
    if trouble is not None:
        raise ImportError(
            f"TensorFlow {tf.__version__}: {trouble.decode()}. Collectives work outside of tf.function only "
            "(model.compile(run_eagerly=True)). [HVD808]"
        )
    native.hvd_tf_bound.argtypes = [ctypes.c_double]
    native.hvd_tf_bound.restype = None
    _core.follow(native.hvd_tf_bound)
    opened = Library(ops, native)
    log_how_it_waits(opened)
    return opened


def log_how_it_waits(opened: Library) -> None:
    """One line of the log."""
    log = logging.getLogger("hvdlite")
    if opened.asynchronous:
        log.info("TensorFlow %s: collectives of a graph wait without holding a thread", tf.__version__)
    else:
        log.warning(
            "TensorFlow %s: its std::function is not laid out as expected; collectives of a graph hold a thread while "
            "they wait, which is slower",
            tf.__version__,
        )


def bits(number: float) -> int:
    """A double as the int64 of its bits: attributes of nodes have single precision only."""
    return int(struct.unpack("<q", struct.pack("<d", number))[0])


def signed(number: int) -> int:
    """An unsigned 64-bit number as an attribute takes it."""
    return number - (1 << 64) if number >= 1 << 63 else number
