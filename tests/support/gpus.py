"""How is what happens on GPUs tested where there is none? With the stub of tests/stub, and CPU tensors that pretend.

`on_gpus()` lets the core take the stub for CUDA's driver and NCCL, and PyTorch's adapter say of every tensor that it
lies on a device. Device memory is the process's own there, so tensors can be looked at as ever.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import subprocess
import time
from pathlib import Path

import torch

from hvdlite import _core
from hvdlite._core import gpu_discovery

TESTS = Path(__file__).resolve().parent.parent
STUB = TESTS / "out/plain/tests/stub/libgpu.so"


def build_stub():
    """Builds it if it is not there. Before ranks are started."""
    subprocess.run(["make", "-s", "-C", str(TESTS), "stub"], check=True, timeout=300)


def calls(name):
    """How often this process has called a function of the stub."""
    return ctypes.CDLL(str(STUB)).stub_calls(name.encode())


@functools.cache
def a_stream():
    """A stream of the stub's, that stands in for the framework's."""
    stub, stream, ctx = ctypes.CDLL(str(STUB)), ctypes.c_void_p(), ctypes.c_void_p()
    assert stub.cuCtxPushCurrent_v2(ctypes.c_void_p(1)) == 0
    assert stub.cuStreamCreateWithPriority(ctypes.byref(stream), 1, -5) == 0
    stub.cuCtxPopCurrent_v2(ctypes.byref(ctx))
    return stream.value


def gate():
    """An event of the stub's that is reached when somebody opens it."""
    stub = ctypes.CDLL(str(STUB))
    stub.stub_gate.restype = ctypes.c_void_p
    return ctypes.c_void_p(stub.stub_gate())


@contextlib.contextmanager
def busy(index):
    """Device `index` of the stub has something to do until the end of the block, on a stream of its own."""
    stub, stream, before = ctypes.CDLL(str(STUB)), ctypes.c_void_p(), ctypes.c_void_p()
    assert stub.cuCtxPushCurrent_v2(ctypes.c_void_p(index + 1)) == 0
    assert stub.cuStreamCreateWithPriority(ctypes.byref(stream), 1, -5) == 0
    event = gate()
    assert stub.cuStreamWaitEvent(stream, event, 0) == 0
    stub.cuCtxPopCurrent_v2(ctypes.byref(before))
    try:
        yield
    finally:
        stub.stub_open_gate(event)


class Pretended:
    """A device that is none."""

    def __init__(self, index):
        self.number = index + 1

    def ready(self):
        return 0, None

    def follow(self, native, ready):
        _core.behind(native, a_stream())
        while (
            _core.lib.hvd_poll(native) == _core.lib.HVD_AGAIN
        ):  # what PyTorch does next with these tensors waits for no stream
            time.sleep(0.0001)

    def fetch(self, native, target, ready):
        _core.fetch(native, target, a_stream())
        assert ctypes.CDLL(str(STUB)).cuStreamSynchronize(ctypes.c_void_p(a_stream())) == 0

    def completed(self, ready):
        return None

    def found(self):
        return 0

    def near(self, tensor):
        return tensor.detach().clone()

    def far(self, tensor):
        return tensor.clone()


@contextlib.contextmanager
def on_gpus(index, named=True):
    """Every tensor of PyTorch lies on device `index`, until the end of the block; copies by `near` do not. named=False:
    the environment names the stub, and the core is told of it as of any other library."""
    from hvdlite.torch import adapter

    kind, submit = adapter.TorchAdapter, _core.submit
    view, form, home, device, here = kind.view, kind.form, kind.home, Pretended(index), []

    def near(tensor):
        here.append(Pretended.near(device, tensor))
        return here[-1]

    def pretend(self, tensor):
        seen = view(self, tensor)
        return seen if any(tensor is one for one in here) else seen._replace(device=device)

    def placed(*args, **more):
        """The stub's device memory is the CPU's: of a tensor that was handed over as one of the CPU nothing else
        tells."""
        kept = args[7] if isinstance(args[7], (tuple, list)) else [args[7]]
        there = [one for one in kept if isinstance(one, torch.Tensor) and not any(one is other for other in here)]
        assert more.get("device") == device.number or not there, f"{args[3]} was submitted without its device"
        return submit(*args, **more)

    device.near = near
    if named:
        _core.gpu_libraries(str(STUB), str(STUB))
    else:
        gpu_discovery.find()  # as torch/device.py does with the first tensor
    kind.view, kind.form, kind.home = pretend, lambda self, tensor: None, lambda self: device
    _core.submit = placed
    try:
        yield
    finally:
        kind.view, kind.form, kind.home = view, form, home
        _core.submit = submit
