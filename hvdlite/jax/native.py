"""The FFI handler of compiled programs: how the library csrc/jax is loaded and registered with XLA.

It is loaded when a function with a collective is first traced, since only then XLA must know it; a program that stays
eager never loads it. It is told the core's functions, limits of time, and which process set has a number: numbers are
compiled into programs, and another set may get them later.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import itertools
import signal
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

import jax

from .. import _core
from ..lifecycle import init
from ..process_sets import process_set

TARGET = f"hvdlite_collective_{_core.VERSION}"  # a program may come from the cache of another version
ffi: Any = getattr(jax, "ffi", None) or import_module("jax.extend.ffi")  # it was there before JAX 0.5
ORDER = f"hvdlite_order_{_core.VERSION}"
_FUNCTIONS = (
    *("submit_many", "wait_many", "finish", "wait", "result", "forget"),
    *("abort", "rank", "size", "step", "dtype_bytes"),
)
_XLA_DTYPES = {
    1: "bool", 2: "int8", 3: "int16", 4: "int32", 5: "int64", 6: "uint8", 7: "uint16", 10: "float16", 11: "float32",
    12: "float64", 16: "bfloat16", 19: "float8_e5m2", 20: "float8_e4m3fn",
}  # fmt: skip
_serials: dict[int, int] = {}  # of process sets, by number: a number may mean another set later
_serial = itertools.count(1)


@functools.cache
def library() -> ctypes.CDLL:
    """The library, registered as a target of XLA's FFI. ImportError if it is not there."""
    found = sorted(Path(__file__).resolve().parent.glob("_handler*.so"))
    if not found:
        raise ImportError(
            "hvdlite has no compiled handler for JAX (hvdlite/jax/_handler): install hvdlite again [HVD808]"
        )
    native = ctypes.CDLL(str(found[0]))
    functions = (ctypes.c_void_p * len(_FUNCTIONS))(*_core.addresses(*(f"hvd_{name}" for name in _FUNCTIONS)))
    dtypes = (ctypes.c_int * 64)(*(_core.DTYPES.get(_XLA_DTYPES.get(n, ""), -1) for n in range(64)))
    if native.hvd_jax_attach(functions, len(_FUNCTIONS), dtypes, 64):
        raise ImportError(f"{found[0]} is of another version of hvdlite: install hvdlite again [HVD808]")
    native.hvd_jax_limit.argtypes = [ctypes.c_double]
    native.hvd_jax_limit.restype = None
    native.hvd_jax_calls.restype = ctypes.c_int64
    _core.follow(native.hvd_jax_limit)
    process_set.on_end(_forget)
    ffi.register_ffi_target(TARGET, ffi.pycapsule(native.hvd_jax_call), platform="cpu")
    if jax.__version_info__ >= (0, 5):
        ffi.register_ffi_target(ORDER, ffi.pycapsule(native.hvd_jax_order), platform="cpu")
    else:
        ffi.register_ffi_target(ORDER, ffi.pycapsule(native.hvd_jax_old_order), platform="cpu", api_version=0)
    _allow_effects()
    return native


def attend() -> None:
    """At each trace, since a script may change both: Ctrl-C ends a compiled function that waits, and a job ends after
    what was dispatched."""
    native = library()
    if callable(signal.getsignal(signal.SIGINT)):
        native.hvd_jax_watch()
    if drain not in init.closers:
        init.closers.append(drain)


def drain(failed: bool = False) -> Callable[[], None]:
    """What was dispatched and not looked at meets the other ranks before this one leaves; not in a job that has failed,
    where it fails by itself when the engine ends."""
    if not failed:
        try:
            jax.effects_barrier()
        except Exception:  # it is raised where the result is used; what has failed is not waited for again
            with contextlib.suppress(ImportError, AttributeError):
                import_module("jax._src.dispatch").runtime_tokens.clear()
    return lambda: None


def serial_of(number: int) -> int:
    """What identifies the process set that has this number now; 0 for the global one."""
    if number and number not in _serials:
        _serials[number] = next(_serial)
        library().hvd_jax_set(number, _serials[number])
    return _serials.get(number, 0)


def _forget(numbers: list[int]) -> None:
    for number in numbers:
        if _serials.pop(number, 0):
            library().hvd_jax_set(number, 0)


def _allow_effects() -> None:
    """jax.checkpoint refuses effects that are not in a list, as does custom_vjp before JAX 0.6, and there is no public
    way to add one."""
    for module in ("jax._src.ffi", "jax._src.extend.ffi"):
        try:
            effect, lists = import_module(module).FfiEffect, import_module("jax._src.effects")
            lists.remat_allowed_effects.add_type(effect)
            lists.custom_derivatives_allowed_effects.add_type(effect)
            return
        except (ImportError, AttributeError):
            pass  # then JAX says "Effects not supported in ..."
