"""The functions that a training loop repeats, in C: ``allreduce_``, ``allreduce_async_`` and ``synchronize``.

csrc/python/fast_calls.c compares a call with those before it and submits the request that they made. For all
else it calls Python's own functions. This file gives it what it needs of Python, and decides where it is used: it
needs DLPack's table of C functions (PyTorch 2.9) and the GIL.

The functions are builtins then. They keep the signatures and docstrings of Python's.
"""

from __future__ import annotations

import ctypes
import inspect
import sys
from typing import Any

import torch

from ... import _core
from ...ops import synchronize
from ...ops.fast_path import DirectHandle
from ...process_sets.process_set import ProcessSet, global_process_set
from .. import storage_check

_WORDS = ("average", "name", "op", "prescale_factor", "postscale_factor", "process_set")


def _wait(flight: _core.Flight) -> None:
    """As Request.run goes on with a request that is still in flight."""
    try:
        error = flight.wait()
    except BaseException:  # a signal handler's
        _core.abandoned.append(flight)
        raise
    flight.complete()
    if error is not None:
        raise error


def _error_of(code: int, text: bytes) -> Exception:
    return _core.error_for(code, text.decode("utf-8", "replace"))


def _fits(tensor: torch.Tensor) -> bool:
    return not tensor.is_nested and not tensor.is_neg() and storage_check.fits(tensor, tensor.data_ptr())


def _documented(function: Any) -> bytes:
    """The docstring of a builtin, which begins with its signature: a default that is no literal is shown as `...`."""
    signature = inspect.signature(function)
    bare = [
        each.replace(annotation=each.empty, default=... if isinstance(each.default, ProcessSet) else each.default)
        for each in signature.parameters.values()
    ]
    text = str(signature.replace(parameters=bare, return_annotation=signature.empty)).replace("Ellipsis", "...")
    return f"{function.__name__}{text}\n--\n\n{inspect.getdoc(function)}".encode()


def fast_calls(ops: Any) -> tuple[Any, Any, Any]:
    """allreduce_, allreduce_async_ and synchronize of these collectives: in C where that is possible.

    Args:
        ops: PyTorch's collectives.

    Returns:
        the three functions; those of Python where the version of PyTorch or Python lacks what C needs.
    """
    own = (ops.allreduce_, ops.allreduce_async_, synchronize)

    def find(function: int, names: tuple[str, ...] | None, *given: Any) -> Any:
        count = len(given) - len(names or ())
        words = dict(zip(_WORDS, given[1:count]), **dict(zip(names or (), given[count:])))
        if words.pop("timeout", None) is not None:
            return None
        process_set = words.pop("process_set", global_process_set)
        op = words.get("op")
        key: tuple[Any, ...] = (
            words.get("name"), words.get("average"), op, op.__class__,
            words.get("prescale_factor", 1.0), words.get("postscale_factor", 1.0),
        )  # fmt: skip
        if function == 1:
            key = (*key, words.get("priority", 0))
        request = ops._again(given[0], key, process_set)
        return None if request is None else (request, int(_core.ffi.cast("uintptr_t", request.native)))

    table = getattr(torch.Tensor, "__dlpack_c_exchange_api__", None)
    increment_version = getattr(torch._C, "_increment_version", None)
    if table is None or increment_version is None or not getattr(sys, "_is_gil_enabled", lambda: True)():
        return own
    needs = (
        torch.Tensor, torch.nn.Parameter, *own, find, _fits, _core.take, _wait, _error_of, _core.in_flight,
        _core.abandoned, DirectHandle, ops.adapter, increment_version, table, tuple(map(_documented, own)),
        "hvdlite.torch",
    )  # fmt: skip
    made = ctypes.PyDLL(_core.EXTENSION).hvd_py_fast_calls
    made.restype, made.argtypes = ctypes.py_object, [ctypes.py_object]
    return made(needs)  # type: ignore[no-any-return]
