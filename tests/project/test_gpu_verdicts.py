"""What tests/gpu/run says of a machine: every claim of issue 5 has a verdict, and what did not run is no pass."""

import ctypes
import os
import subprocess
import sys
from pathlib import Path
from unittest import mock

import gpus
import pytest
import torch
from ranks import as_ranks

import hvdlite.torch as hvd

sys.path.append(str(Path(__file__).resolve().parent.parent / "gpu"))


@pytest.fixture(scope="module", autouse=True)
def stub():
    gpus.build_stub()


def test_each_claim_has_the_worst_verdict_that_was_heard_and_a_silent_one_did_not_run():
    from machine import CLAIMS, FAILED, MISSED, NOT_RUN, PASS, REFUSABLE, Machine

    here = Machine()
    assert here.code(judges=False) == 0 and here.code(judges=True) == 4
    here.heard("[0]<stdout>:PASS [small] 4 KB: 9 us, at most 12\n")
    here.heard("MISSED [step] 3.2 ms, at most 3.0\n")
    here.heard("PASS [step] 2.9 ms, at most 3.0\n")
    here.heard("PASS [nothing] that anybody claims\n")
    text = dict(zip(CLAIMS, here.summary()))
    assert text["small"].startswith(PASS) and text["small"].endswith("(4 KB: 9 us, at most 12)")
    assert text["step"].startswith(MISSED) and "3.2 ms" in text["step"]
    assert sum(one.startswith(NOT_RUN) for one in text.values()) == len(CLAIMS) - 2
    assert here.code(judges=False) == 0 and here.code(judges=True) == 1
    here.note("step", FAILED, "exit code 9")
    assert here.code(judges=False) == 1
    here.found = dict.fromkeys(set(CLAIMS) - set(REFUSABLE), (PASS, ""))
    assert here.code(judges=True) == 0


@pytest.mark.parametrize(
    ("says", "verdict"),
    [
        ("PASS [shared] 2 ranks", "FAILED"),  # and then the exit code
        ("NCCL 2.30.3 could not connect the ranks: invalid usage", None),
        ("NCCL has added up over ranks that share a GPU: could not connect the ranks: invalid usage", "FAILED"),
        ("AssertionError: wrong values", "FAILED"),
    ],
)
def test_a_program_that_fails_fails_its_claim_but_where_nccl_refuses_ranks_that_share_a_gpu(monkeypatch, says, verdict):
    import machine

    here = machine.Machine()
    monkeypatch.setattr(machine, "LAUNCH", f"import sys; print({says!r}); sys.exit(1)")
    for part, *job in machine.jobs(1, (2, 30, 3)):
        if part == "shared":
            here.job(*job)
    assert here.found.get("shared", (None,))[0] == verdict
    assert ("shared" in here.why_not) == (verdict is None)


def test_a_death_is_told_by_who_lives_and_what_lasts_too_long_is_ended(monkeypatch):
    import machine

    here = machine.Machine()
    here.death()  # without a GPU on the CPU
    verdict, text = here.found["death"]
    assert verdict != "FAILED" and "from the death of rank 1 to rank 0's error: 0." in text or "MISSED" in verdict, text
    assert "abort" not in here.found and "no communicator" in here.why_not["abort"]
    monkeypatch.setattr(machine, "LIMIT_S", 0.3)
    monkeypatch.setattr(machine, "LAUNCH", "import time; time.sleep(600)")
    here.job(("staged2",), 2, "", {}, "")
    assert here.found["staged2"] == ("FAILED", "2 ranks : not done in 0.3 s")


def test_what_a_machine_lacks_is_said_before_anything_is_built(tmp_path):
    """Not a traceback of the build."""
    folder = tmp_path / "cffi.py"
    folder.write_text("raise ImportError('there is none')")
    program = Path(__file__).resolve().parent.parent / "gpu" / "run"
    environ = {**os.environ, "PYTHON": sys.executable, "PYTHONPATH": str(tmp_path)}
    done = subprocess.run([program], env=environ, stdout=subprocess.PIPE, text=True, timeout=100)
    assert done.returncode == 77 and "cffi cannot be imported (there is none): PYTHONPATH may" in done.stdout


@as_ranks(1)
def test_a_dtype_that_nccl_has_and_that_went_by_the_cpu_is_named():
    """What the core's timeline says of the stub's NCCL, which is too old to add float8."""
    from check import carried, lost

    kinds = {"float32": torch.float32, "int32": torch.int32, "float8_e5m2": torch.float8_e5m2}
    done, seen = {}, []
    with gpus.on_gpus(hvd.rank()), carried(seen):
        for dtype, kind in kinds.items():
            for factor in (1.0, 2.0):
                name = f"{dtype}.{factor:g}"
                done[name] = dtype, "Sum", factor
                hvd.allreduce(torch.ones(3).to(kind), op=hvd.Sum, prescale_factor=factor, name=name)
        hvd.broadcast(torch.ones(3), 0, name="moved")
    assert lost(seen, done, False) == [] and lost(seen, done, True) == ["float8_e5m2.1"]
    assert lost(seen, {**done, "float64.1": ("float64", "Sum", 1.0)}, False) == ["float64.1"]  # it is not seen
    assert len(lost([(name, "cpu") for name, _ in seen], done, False)) == 4  # also what is moved


@as_ranks(1, 2)
def test_figures_are_told_by_the_first_of_those_whom_nccl_joins():
    """Of models that are small enough for the stub, and PyTorch's own communication is on the CPU."""
    import figures
    import raw

    rank, size, told, before = hvd.rank(), hvd.size(), [], ctypes.c_void_p()
    stub = ctypes.CDLL(str(gpus.STUB))

    def finished():
        assert stub.cuStreamSynchronize(ctypes.c_void_p(gpus.a_stream())) == 0

    def a_model(layers, width):
        return torch.nn.Sequential(torch.nn.Linear(width, 4), torch.nn.ReLU(), torch.nn.Linear(4, 1))

    times = dict.fromkeys(("SMALL_TIMES", "GROUP_TIMES", "STEP_TIMES"), 3)
    here = {"DEVICE": "cpu", "BACKEND": "gloo", "RESNET_ELEMENTS": 1610, "finished": finished, "a_model": a_model}
    here |= {"stream": gpus.a_stream, "overlap": lambda: told.append("overlap"), **times}
    here["tell_most"] = lambda claim, what, value, limit, unit: told.append(claim)
    assert stub.cuCtxPushCurrent_v2(ctypes.c_void_p(rank + 1)) == 0
    with gpus.on_gpus(rank), mock.patch.multiple(figures, **here), mock.patch.object(raw, "library", lambda: stub):
        value = torch.ones(100)
        call = raw.allreduce_of(stub, rank, size, lambda mine: hvd.broadcast_object(mine, 0), value, gpus.a_stream())
        for step in range(1, 5):
            call()
            finished()
            assert value.tolist() == [size**step] * 100
        figures.figures("one" if size == 1 else "several")
    stub.cuCtxPopCurrent_v2(ctypes.byref(before))
    assert told == ([["small", "step", "overlap"], ["small2", "step2"]][size - 1] if rank == 0 else [])


@as_ranks(1)
def test_the_optimizer_whose_steps_are_timed_sends_what_one_of_several_ranks_sends():
    from figures import a_step, ours_of

    model, given = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Linear(4, 1)), torch.ones(2, 3)
    with gpus.on_gpus(0):
        before = gpus.calls("ncclAllReduce")
        step = a_step(model, ours_of(model), given)
        for _ in range(3):
            step()
        assert gpus.calls("ncclAllReduce") >= before + 3
    assert hvd.size() == 1
