"""The functions that a training loop repeats, in C: ``allreduce_``, ``allreduce_async_`` and ``synchronize``.

csrc/python/fast_calls.c compares a call with those before it and submits the request that they made. For all
else it calls Python's own functions. This file gives it what it needs of Python, and decides where it is used: it
needs DLPack's table of C functions (PyTorch 2.9) and the GIL.

What a user sees are functions of Python that only name their arguments, so signatures, docstrings, pickling and
torch.compile are as ever.
"""

from __future__ import annotations

import ctypes
import functools
import sys
from typing import Any

import torch

from ... import _core
from ...ops import synchronize
from ...ops.fast_path import DirectHandle
from ...process_sets.process_set import global_process_set
from .. import storage_check


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


def _requests(ops: Any) -> Any:
    """Finds the request that a call of a function, by its number, made before; None: Python must run it."""

    def find(function: int, tensor: Any, *words: Any) -> Any:
        average, name, op, prescale, postscale, process_set, last = words
        key: tuple[Any, ...] = (name, average, op, op.__class__, prescale, postscale)
        if function == 1:
            key = (*key, last)  # its priority
        elif last is not None:  # its timeout
            return None
        request = ops._again(tensor, key, process_set)
        return None if request is None else (request, int(_core.ffi.cast("uintptr_t", request.native)))

    return find


def _in_c(ops: Any, own: tuple[Any, Any, Any], table: Any, increment_version: Any) -> Any:
    """The functions of csrc/python/fast_calls.c, which take all arguments by position."""
    allreduce_, allreduce_async_, _ = own

    def positional(tensor: Any, *words: Any) -> Any:
        return allreduce_(tensor, *words[:-1], timeout=words[-1])

    def positional_async(tensor: Any, *words: Any) -> Any:
        return allreduce_async_(tensor, *words[:-1], priority=words[-1])

    needs = (
        torch.Tensor, torch.nn.Parameter, positional, positional_async, synchronize, _requests(ops), _fits, _core.take,
        _wait, _error_of, _core.in_flight, _core.abandoned, _core.idle, DirectHandle, ops.adapter,
        _core.Flight, DirectHandle.__del__, increment_version, table,
    )  # fmt: skip
    made = ctypes.PyDLL(_core.EXTENSION).hvd_py_fast_calls
    made.restype, made.argtypes = ctypes.py_object, [ctypes.py_object]
    return made(needs)


def fast_calls(ops: Any) -> tuple[Any, Any, Any]:
    """allreduce_, allreduce_async_ and synchronize of these collectives: in C where that is possible.

    Args:
        ops: PyTorch's collectives.

    Returns:
        the three functions; those of Python where the version of PyTorch or Python lacks what C needs.
    """
    own = (ops.allreduce_, ops.allreduce_async_, synchronize)
    table = getattr(torch.Tensor, "__dlpack_c_exchange_api__", None)
    increment_version = getattr(torch._C, "_increment_version", None)
    if table is None or increment_version is None or not getattr(sys, "_is_gil_enabled", lambda: True)():
        return own
    try:
        fast, fast_async, fast_synchronize = _in_c(ops, own, table, increment_version)
    except ImportError:  # this Python or PyTorch is made otherwise
        return own

    def allreduce_(
        tensor: Any, average: Any = None, name: Any = None, op: Any = None, prescale_factor: Any = 1.0,
        postscale_factor: Any = 1.0, process_set: Any = global_process_set, *, timeout: Any = None
    ) -> Any:  # fmt: skip
        return fast(tensor, average, name, op, prescale_factor, postscale_factor, process_set, timeout)

    def allreduce_async_(
        tensor: Any, average: Any = None, name: Any = None, op: Any = None, prescale_factor: Any = 1.0,
        postscale_factor: Any = 1.0, process_set: Any = global_process_set, *, priority: Any = 0
    ) -> Any:  # fmt: skip
        return fast_async(tensor, average, name, op, prescale_factor, postscale_factor, process_set, priority)

    def finish(handle: Any, timeout: Any = None) -> Any:
        return fast_synchronize(handle) if timeout is None else synchronize(handle, timeout)

    shown: tuple[Any, Any, Any] = (allreduce_, allreduce_async_, finish)
    for function, mine in zip(shown, own):
        functools.update_wrapper(function, mine)
        function.__module__, function.__qualname__ = "hvdlite.torch", mine.__name__
    return shown
