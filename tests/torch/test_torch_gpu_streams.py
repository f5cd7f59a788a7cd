"""Gradients on GPUs that backward writes on several streams: each is sent behind the stream that it was written on; and
which streams wait for a collective, beside captures of CUDA graphs.

There is no GPU here: streams are numbers, the current one is a variable, and tensors of the CPU say that they lie on
one (gpus.py). Autograd and the optimizer's hooks are the real ones.
"""

import contextlib
from types import SimpleNamespace

import gpus
import pytest
import torch
from ranks import as_ranks

import hvdlite.torch as hvd
from hvdlite import _core
from hvdlite.as_horovod.small_functions import env
from hvdlite.torch.device import CudaDevice
from hvdlite.torch.optimizer import hooks


@pytest.fixture(scope="module", autouse=True)
def stub():
    gpus.build_stub()


class Stream:
    """Stands in for torch.cuda.Stream."""

    device = 0

    def __init__(self, cuda_stream):
        self.cuda_stream, self.waits_for = cuda_stream, []

    def wait_stream(self, other):
        self.waits_for.append(other.cuda_stream)


class Machine:
    """Streams that can be made the current one, and what is asked to be ready meanwhile."""

    def __init__(self):
        self.all = {number: Stream(number) for number in (0, 7, 8)}
        self.at, self.asked = 0, []

    @contextlib.contextmanager
    def on(self, stream):
        before, self.at = self.at, stream.cuda_stream
        yield
        self.at = before

    @contextlib.contextmanager
    def there(self, noter=hooks.Writers.noter):
        """Parameters lie on a GPU, and its streams are these."""
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(hooks, "_address", lambda device: self.at)
            patch.setattr(torch.cuda, "current_stream", lambda device: self.all[self.at])
            patch.setattr(torch.cuda, "stream", self.on)
            patch.setattr(gpus.Pretended, "ready", lambda device: (0, self.asked.append(self.at)))
            patch.setattr(hooks.Writers, "noter", lambda own, parameter, number: noter(own, OnGpu(), number))
            yield self


class OnGpu:
    is_cuda = True

    def get_device(self):
        return 0


class Written(torch.autograd.Function):
    """Backward of what is behind this runs on another stream."""

    @staticmethod
    def forward(ctx, value, machine, number):
        ctx.machine, ctx.number = machine, number
        return value.clone()

    @staticmethod
    def backward(ctx, gradient):
        ctx.machine.at = ctx.number
        return gradient, None, None


def backward_of(parameters, machine, written_on):
    """One pass, in which the gradient of each parameter is written on the stream beside it, and the caller's is 0."""
    machine.at = 0
    terms = [Written.apply(one, machine, number) for one, number in zip(parameters, written_on)]
    total = sum(term.sum() for term in terms)
    end = Written.apply(total, machine, 0)
    end.backward()
    machine.at = 0


def an_optimizer(parameters, **more):
    named = [(f"p{i}", one) for i, one in enumerate(parameters)]
    return hvd.DistributedOptimizer(torch.optim.SGD(parameters, 0.5), named, **more)


@as_ranks(2)
def test_a_gradient_is_sent_from_the_stream_on_which_it_was_written():
    """Also if it is sent by the hook of a parameter that has another one; and what is not under way when backward ends
    goes from the caller's, which has waited for all."""
    machine, written_on = Machine(), (0, 7, 0, 8, 7, 0)
    with gpus.on_gpus(hvd.rank()), machine.there(), env(HVDLITE_CHECK_START="off"):
        parameters = [torch.nn.Parameter(torch.ones(100) * i) for i in range(6)]
        optimizer = an_optimizer(parameters)
        for _ in range(4):  # with guards and without
            machine.asked.clear()
            backward_of(parameters, machine, written_on)
            assert machine.asked == list(reversed(written_on))
            optimizer.step()
            optimizer.zero_grad()
        assert not any(one.waits_for for one in machine.all.values())
        parameters[0].grad = torch.ones(100)
        machine.asked.clear()
        optimizer.step()
        assert machine.asked == [0] * 6
        hvd.barrier()
    assert [one[0].item() for one in parameters] == [i - 2.0 - 0.5 * (i == 0) for i in range(6)]


@as_ranks(2)
def test_gradients_that_travel_as_one_have_come_together():
    """In a group, and in the bucket of a comm hook: the current stream waits for those of others, each once."""
    machine = Machine()

    def reduce(_, bucket):
        return hvd.allreduce_async(bucket.buffer(), name=f"bucket.{bucket.index()}")

    with gpus.on_gpus(hvd.rank()), machine.there():
        for more in ({"groups": 1}, {}):
            parameters = [torch.nn.Parameter(torch.ones(10)) for _ in range(4)]
            optimizer = an_optimizer(parameters, **more)
            if not more:
                optimizer.register_comm_hook(None, reduce)
            machine.asked.clear()
            for one in machine.all.values():
                one.waits_for.clear()
            backward_of(parameters, machine, (0, 7, 7, 8))
            optimizer.step()
            assert set(machine.asked) == {0}
            assert sorted(machine.all[0].waits_for) == [7, 8] and not machine.all[7].waits_for
            assert all(one[0].item() == 0.5 for one in parameters)
        hvd.barrier()


@as_ranks(2)
def test_a_compressed_gradient_is_made_on_the_stream_on_which_it_was_written():
    machine, made = Machine(), []

    class Half(hvd.Compression.fp16):
        @staticmethod
        def compress(tensor):
            made.append(machine.at)
            return hvd.Compression.fp16.compress(tensor)

    with gpus.on_gpus(hvd.rank()), machine.there(), env(HVDLITE_CHECK_START="off"):
        parameters = [torch.nn.Parameter(torch.ones(10)) for _ in range(4)]
        optimizer = an_optimizer(parameters, compression=Half)
        backward_of(parameters, machine, (7, 0, 8, 0))
        optimizer.step()
    assert made == machine.asked == [0, 8, 0, 7]
    assert all(one[0].item() == 0.5 for one in parameters)


def test_a_parameter_of_the_cpu_notes_nothing():
    writers = hooks.Writers()
    assert writers.noter(torch.nn.Parameter(torch.ones(1)), 0) is None
    assert writers.elsewhere(0) is None
    writers.join([0])


class Streams:
    """Stands in for torch.cuda: each device has a current stream, a number; and one of them is being captured."""

    def __init__(self, monkeypatch, captured=None):
        self.device, self.current, self.recorded, self.waited = 0, {0: 10, 1: 20}, [], []
        put = monkeypatch.setattr
        put(torch.cuda, "device", self.on)
        put(torch.cuda, "stream", self.on_stream)
        put(torch.cuda, "is_current_stream_capturing", lambda: self.current[self.device] == captured)
        put(torch.cuda, "current_stream", lambda device: SimpleNamespace(cuda_stream=self.current[device.index]))
        put(torch.cuda, "Event", lambda: SimpleNamespace(cuda_event=77, record=self.recorded.append))
        put(_core, "behind", lambda native, stream: self.waited.append((native, stream)))
        put(_core, "fetch", lambda native, target, stream: self.waited.append((native, stream)))

    @contextlib.contextmanager
    def on(self, device):
        before, self.device = self.device, device.index
        yield
        self.device = before

    @contextlib.contextmanager
    def on_stream(self, stream):
        before, self.current[self.device] = self.current[self.device], stream.cuda_stream
        try:
            yield
        finally:
            self.current[self.device] = before


def test_a_capture_of_a_cuda_graph_is_refused_on_the_device_of_the_tensor(monkeypatch):
    Streams(monkeypatch, captured=20)
    ready = CudaDevice(0).ready()
    there = CudaDevice(1)
    for call in (there.ready, lambda: there.follow(5, ready), lambda: there.fetch(5, 0, ready)):
        with pytest.raises(hvd.HvdError, match="CUDA graph is being captured.*outside the capture"):
            call()


def test_a_capture_of_the_stream_that_a_collective_was_submitted_on_is_not_spoilt(monkeypatch):
    """By who waits for it on another one: the captured stream would have to wait as well. Afterwards it works."""
    captured = set()
    streams, device = Streams(monkeypatch), CudaDevice(0)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: streams.current[streams.device] in captured)
    ready = device.ready()
    captured.add(10)
    streams.current[0] = 11
    for call in (lambda: device.follow(5, ready), lambda: device.fetch(5, 0, ready)):
        with pytest.raises(hvd.HvdError, match="the stream of this collective is being captured.*after the capture"):
            call()
    assert not streams.waited and streams.current[0] == 11
    captured.clear()
    device.follow(5, ready)
    assert streams.waited == [(5, 11), (5, 10)]


def test_the_stream_on_which_copies_were_made_waits_for_the_collective_too(monkeypatch):
    streams, device = Streams(monkeypatch), CudaDevice(1)
    ready = device.ready()
    assert ready[0] == 77 and [one.cuda_stream for one in streams.recorded] == [20]
    device.follow(5, ready)
    assert streams.waited == [(5, 20)]
    streams.current[1] = 30
    device.follow(6, ready)
    device.fetch(7, 0, ready)
    assert streams.waited[1:] == [(6, 30), (6, 20), (7, 30), (7, 20)]
