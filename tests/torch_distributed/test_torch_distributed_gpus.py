"""Backend "hvdlite" takes tensors on GPUs, over a GPU that is none (gpus.py): which way they go, and that results are
right; and what a Work says of a device that is not done.
"""

import contextlib
import warnings
from types import SimpleNamespace

import gpus
import pytest
import test_torch_distributed as on_cpus
import torch
import torch.distributed as dist
from ranks import as_ranks

import hvdlite.torch as hvd
from hvdlite.torch.device import CudaDevice
from hvdlite.torch.distributed import group, send_recv, submission, tensors


@pytest.fixture(scope="module", autouse=True)
def stub():
    gpus.build_stub()


@contextlib.contextmanager
def on_gpu(index):
    """All tensors of process groups lie there, too."""
    device = gpus.Pretended(index)
    with gpus.on_gpus(index), pytest.MonkeyPatch.context() as patch:
        for module in (send_recv, submission, tensors):
            patch.setattr(module, "gpu_of", lambda given: device if given else None)
        patch.setattr(group.HvdProcessGroup, "_plain", lambda *_: False)
        yield device


def every_call():
    for test in ("reductions", "moves", "pairs", "ddp_trains_to_gloos_weights"):
        getattr(on_cpus, f"test_{test}").body()


@as_ranks(2, 3)
def test_every_call_goes_by_nccl():
    names = ("ncclAllReduce", "ncclReduceScatter", "ncclAllGather", "ncclSend", "ncclRecv", "ncclBroadcast")
    before, copies = [gpus.calls(name) for name in names], gpus.calls("cuMemcpyDtoH")
    with on_gpu(hvd.rank()), warnings.catch_warnings():
        warnings.filterwarnings("error", "hvdlite")
        every_call()
    assert all(gpus.calls(name) >= count + due for name, count, due in zip(names, before, (29, 2, 10, 10, 10, 11)))
    assert gpus.calls("cuMemcpyDtoH") == copies


@as_ranks(2)
def test_ranks_that_share_a_gpu_go_by_way_of_the_cpu():
    before, copies = gpus.calls("ncclAllReduce"), gpus.calls("cuMemcpyDtoH")
    with on_gpu(4), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        every_call()
    assert gpus.calls("ncclAllReduce") == before and gpus.calls("cuMemcpyDtoH") > copies + 50


@as_ranks(2)
def test_a_work_is_completed_when_the_device_is_done_and_each_wait_makes_its_stream_wait():
    over, waits = [], []
    event = SimpleNamespace(query=lambda: bool(over))
    with on_gpu(hvd.rank()) as device, on_cpus.backend("hvdlite"):
        device.completed, device.behind = lambda ready: event, waits.append
        work = dist.all_reduce(mine := torch.ones(2), async_op=True)
        assert work.wait() and waits == [event] and not work.is_completed() and not work.is_success()
        on_cpus.same(work.get_future().wait()[0], 2)
        assert len(waits) > 1
        over.append(True)
        assert work.is_completed() and work.is_success() and mine[0] == 2


def test_a_stream_on_which_copies_were_made_waits_until_they_were_read(monkeypatch):
    waits = []
    here = SimpleNamespace(cuda_stream=1, record_event=lambda: "read", wait_event=waits.append)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: here)
    assert CudaDevice(0).completed((0, (None, here))) == "read" and not waits
    CudaDevice(0).completed((0, (None, SimpleNamespace(cuda_stream=2, wait_event=waits.append))))
    assert waits == ["read"]


@as_ranks(1)
def test_one_group_has_both_devices_and_a_call_has_one():
    with on_cpus.backend("hvdlite"):
        world = dist.group.WORLD
        assert all(world._get_backend(torch.device(each)) is world for each in ("cpu", "cuda"))
        assert dist.Backend.default_device_backend_map["cuda"] == "nccl"
        with pytest.raises(ValueError, match=r"tensors on cpu and meta: move all to one device \[HVD203\]"):
            dist.all_gather_single(torch.empty(2, device="meta"), torch.empty(2))
