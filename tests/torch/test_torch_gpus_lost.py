"""Memory of PyTorch's tensors on GPUs when the job has failed: while the device may be at it, nobody else gets it.

The GPU is none (gpus.py). It is kept busy, so that the end by force, which waits for all that runs there, lasts.
"""

import gc
import os
import signal
import subprocess
import sys
import time
import weakref
from pathlib import Path
from unittest import mock

import gpus
import numpy as np
import pytest
import torch
from ranks import Job, as_ranks, environment

import hvdlite.torch as hvd
from hvdlite import _core
from hvdlite._core import device


@pytest.fixture(scope="module", autouse=True)
def stub():
    gpus.build_stub()


def watched(*shape):
    """Ones, and who tells whether their memory is there: the array that it is of."""
    array = np.ones(shape, np.float32)
    return torch.from_numpy(array), weakref.ref(array)


def started(name, **more):
    """The handle of an allreduce of a tensor that nobody else has, and who tells whether its memory is there."""
    mine, memory = watched(1000)
    return hvd.allreduce_async_(mine, name=name, **more), memory


def said(do, *given, **named):
    """What the error says, of which nothing is kept."""
    try:
        do(*given, **named)
    except hvd.HvdError as error:
        return str(error)
    return ""


def loses_its_peer(folder):
    """The program of each of two ranks. Rank 1 dies when rank 0 has put on its device what waits there for rank 1; with
    rank 0's device busy beside that, the end of it by force lasts."""
    rank, launched = hvd.rank(), Path(folder) / "launched"
    with gpus.on_gpus(rank):
        hvd.allreduce(torch.ones(3), name="first")
        over = gpus.calls("aborts that have ended")
        if rank == 1:
            with mock.patch.object(gpus.Pretended, "ready", lambda self: (gpus.gate().value, None)):
                kept = started("synchronized"), started("dropped")
            while not launched.exists():
                time.sleep(0.01)
            os.kill(os.getpid(), signal.SIGKILL)
            del kept
        with gpus.busy(0):
            handle, one = started("synchronized")
            dropped, two = started("dropped")
            given = [watched(10), watched(20), watched(5, 2)]
            (*several, rows), others = map(list, zip(*given))
            del given
            handles = [
                handle,
                hvd.grouped_allreduce_async_(several, name="waits"),
                hvd.allgather_async(rows, name="rows"),
            ]
            for each in (handle, dropped):
                assert _core.within(each._pending[0].native, 60)
            launched.touch()
            while _core.failure_of_job() is None:
                time.sleep(0.01)
            del several, rows, handle, dropped, each
            while handles:
                assert "rank 1 " in said(hvd.synchronize, handles.pop())
            assert said(hvd.allreduce, torch.ones(1), name="later")  # sweeps what nobody waits for
            gc.collect()
            assert gpus.calls("aborts that have ended") == over, "the device is still busy"
            assert all(each() is not None for each in (one, two, *others)), "what is under way there was let go"
        while gpus.calls("aborts that have ended") == over:
            time.sleep(0.01)
        hvd.shutdown()
        gc.collect()
        assert not any(each() is not None for each in (one, two, *others)) and not device._risked
        print("it was held, and let go", flush=True)


LOSES = """
import sys
import ranks
import hvdlite.torch as hvd
from test_torch_gpus_lost import loses_its_peer
hvd.init()
loses_its_peer(sys.argv[1])
"""


def test_what_is_under_way_there_is_held_until_the_failed_job_has_closed(tmp_path):
    with Job(2, [sys.executable, "-c", LOSES, str(tmp_path)], "--failure-grace", "100") as job:
        assert job.wait(150) != 0, "rank 1 was killed"
        assert "it was held, and let go" in job.text(), job.text()


@as_ranks(2, deadline=120)
def test_nothing_is_held_of_what_has_failed_alone():
    with gpus.on_gpus(hvd.rank()):
        hvd.allreduce(torch.ones(3), name="first")
        mine, gone = watched(2 + hvd.rank())
        handle = hvd.allreduce_async_(mine, name="differs")
        del mine
        assert "differs" in said(hvd.synchronize, handle)
        del handle
        gc.collect()
        assert gone() is None and not device._risked
        hvd.barrier()


LEFT = """
import gc, time, weakref
import torch
import gpus
import hvdlite.torch as hvd
from hvdlite import _core
from test_torch_gpus_lost import said, started
hvd.init()
with gpus.on_gpus(0), gpus.busy(0):
    hvd.allreduce(torch.ones(3), name="first")
    handle, one = started("one")
    dropped, two = started("two")
    _core.lib.hvd_abort(0, _core.lib.HVD_EINTERNAL, b"it is enough")
    assert "enough" in said(hvd.allreduce, torch.ones(1), name="late")
    assert "enough" in said(hvd.synchronize, handle)
    hvd.shutdown()
    del handle, dropped
    for _ in range(2):
        gc.collect()
        assert one() is not None and two() is not None, "a device that hangs may yet write there"
        hvd.init()
        hvd.shutdown()
until = time.monotonic() + 60
while _core.lib.hvd_gpu_version(2) and time.monotonic() < until:  # it was much to do, and no more than that
    time.sleep(0.01)
with gpus.on_gpus(0):
    hvd.init()
    given = torch.ones(3)
    for name in ("again", "and once more"):
        assert hvd.allreduce(given, name=name, op=hvd.Sum).tolist() == [1, 1, 1]
    hvd.shutdown()
gc.collect()
assert one() is None and two() is None, "nothing runs any more"
print("held")
"""


def test_what_a_device_may_touch_is_held_until_it_comes_to_an_end_and_then_it_is_used_again():
    """In a process of its own, for it never forgets what hangs."""
    line, here = [sys.executable, "-c", LEFT], Path(__file__).parent
    done = subprocess.run(line, env=environment(), cwd=here, capture_output=True, text=True, timeout=120)
    assert done.stdout.strip() == "held", done.stderr


@as_ranks(1)
def test_what_a_failed_job_has_left_on_a_gpu_is_not_committed():
    """The sum that a lost rank has cut short: it is told by the next call only, which may be too late for a state."""
    model = torch.nn.Linear(2, 1, bias=False)
    state = hvd.elastic.TorchState(model=model, step=1)
    with pytest.MonkeyPatch.context() as patch:
        waits = []
        patch.setattr(torch.cuda, "is_available", lambda: True)
        patch.setattr(torch.cuda, "is_initialized", lambda: True)
        patch.setattr(torch.cuda, "synchronize", lambda: waits.append(1))
        with torch.no_grad():
            model.weight.fill_(3.0)
        state.step = 2
        state.commit()
        assert waits
        with torch.no_grad():
            model.weight.fill_(7.0)
        state.step = 3
        _core.lib.hvd_abort(0, _core.lib.HVD_EINTERNAL, b"it is enough")
        with pytest.raises(hvd.HvdError, match="enough"):
            hvd.barrier()  # the job knows it
        with pytest.raises(hvd.HvdError, match="enough"):
            state.commit()
        state.restore()
        assert model.weight.tolist() == [[3.0, 3.0]] and state.step == 2
    hvd.shutdown()
    hvd.init()
