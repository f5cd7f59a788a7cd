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
    from verdict import CLAIMS, FAILED, PASS, Verdicts

    verdicts = Verdicts()
    assert verdicts.code(judges=False) == 0 and verdicts.code(judges=True) == 4
    for line in (
        "[0]<stdout>:PASS [small] 4 KB: 9 us, at most 12\n",
        "MISSED [step] 3.2 ms, at most 3.0\n",
        "PASS [step] 2.9 ms, at most 3.0\n",
        "PASS [nothing] that anybody claims\n",
        "nothing that is told\n",
    ):
        verdicts.heard(line)
    text = dict(zip(CLAIMS, verdicts.summary()))
    assert text["small"].startswith("PASS ") and text["small"].endswith("(4 KB: 9 us, at most 12)")
    assert text["step"].startswith("MISSED ") and "3.2 ms" in text["step"]
    silent = [claim for claim in CLAIMS if claim not in ("small", "step")]
    assert all(text[claim].startswith("DID NOT RUN ") for claim in silent)
    assert verdicts.code(judges=False) == 0 and verdicts.code(judges=True) == 1
    verdicts.note("sanitizer", FAILED, "exit code 9")
    assert verdicts.code(judges=False) == 1
    whole = Verdicts()
    for claim in CLAIMS:
        whole.note(claim, PASS, "")
    del whole.found["shared"]  # which a library may refuse
    assert whole.code(judges=True) == 0
    del whole.found["staged4"]
    assert whole.code(judges=True) == 4


def test_a_program_that_fails_or_takes_too_long_fails_its_claim(monkeypatch, capfd):
    import machine
    from verdict import FAILED, PASS

    here = machine.Machine("check.py")
    says = [sys.executable, "-c", "print('PASS [staged2] 2 ranks')"]
    monkeypatch.setattr(machine, "LAUNCH", says[2])
    here.ranks("staged2", 2)
    assert here.verdicts.found["staged2"] == (PASS, "2 ranks")
    monkeypatch.setattr(machine, "LAUNCH", "import sys; print('PASS [staged4] 4 ranks'); sys.exit(3)")
    here.ranks("staged4", 4)
    assert here.verdicts.found["staged4"][0] == FAILED
    monkeypatch.setattr(machine, "LIMIT_S", 0.3)
    assert here.ran("staged2", "sleeping", [sys.executable, "-c", "import time; time.sleep(600)"]) is None
    assert here.verdicts.found["staged2"] == (FAILED, "sleeping: not done in 0.3 s")


def test_a_death_is_told_by_who_lives(monkeypatch):
    import machine
    from verdict import FAILED

    here = machine.Machine(str(Path(machine.__file__).with_name("check.py")))
    here.death()  # without a GPU on the CPU
    verdict, text = here.verdicts.found["death"]
    assert verdict != FAILED and "from the death of rank 1 to rank 0's error: 0." in text or "MISSED" in verdict, text
    assert "abort" not in here.verdicts.found and "no communicator" in here.verdicts.why_not["abort"]
    monkeypatch.setattr(machine, "LAUNCH", "")
    here.verdicts.found.clear()
    here.death()
    assert here.verdicts.found["death"] == (FAILED, "rank 0 did not say when it heard, see above")


@pytest.mark.parametrize(
    ("says", "verdict"),
    [
        ("ranks 0 and 1 use the same GPU (device 0", None),
        ("NCCL 2.30.3 could not connect the ranks: invalid usage", None),
        ("AssertionError: wrong values", "FAILED"),
        ("NCCL 2.30.3 could not start a collective: invalid usage", "FAILED"),
        ("{WORKED}\nNCCL 2.30.3 could not connect the ranks: invalid usage", "FAILED"),
    ],
)
def test_only_what_nccl_refuses_excuses_ranks_that_share_a_gpu(monkeypatch, says, verdict):
    import machine

    here = machine.Machine("check.py")
    monkeypatch.setattr(torch.cuda.nccl, "version", lambda: (2, 30, 3))
    says = says.replace("{WORKED}", machine.WORKED)
    monkeypatch.setattr(machine, "LAUNCH", f"import sys; print({says!r}); sys.exit(1)")
    here.shared()
    assert here.verdicts.found.get("shared", (None,))[0] == verdict
    assert ("shared" in here.verdicts.why_not) == (verdict is None)
    assert here.verdicts.code(judges=True) == (4 if verdict is None else 1)


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
    from ways import Ways, judged

    kinds = {"float32": torch.float32, "int32": torch.int32, "float8_e5m2": torch.float8_e5m2}
    done = {}
    with gpus.on_gpus(hvd.rank()), Ways() as ways:
        for dtype, kind in kinds.items():
            for factor in (1.0, 2.0):
                name = f"{dtype}.{factor:g}"
                done[name] = dtype, "Sum", factor
                hvd.allreduce(torch.ones(3).to(kind), op=hvd.Sum, prescale_factor=factor, name=name)
        hvd.broadcast(torch.ones(3), 0, name="moved")
    by_cpu = "by way of the CPU: float8_e5m2.1, float8_e5m2.2, int32.2"
    assert judged(ways, done, 1, False) == (True, by_cpu)
    holds, text = judged(ways, done, 1, True)
    assert not holds and text.endswith("; and these, which NCCL computes: float8_e5m2.1 (allreduce)")
    holds, text = judged(ways, {**done, "float64.1": ("float64", "Sum", 1.0)}, 1, False)
    assert not holds and text == by_cpu + "; not seen: float64.1"
    ways.seen = [(name, kind, "cpu" if kind == "BROADCAST" else by) for name, kind, by in ways.seen]
    holds, text = judged(ways, done, 1, False)
    assert not holds and "which NCCL computes" in text and "moved" in text


@as_ranks(1, 2)
def test_figures_are_told_by_the_first_of_those_whom_nccl_joins():
    """Of models that are small enough for the stub, and PyTorch's own communication is on the CPU."""
    import figures
    import raw

    rank, size, told, before = hvd.rank(), hvd.size(), [], ctypes.c_void_p()
    stub = raw.described(ctypes.CDLL(str(gpus.STUB)))

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
        for blocking in (True, False):
            one = raw.Raw(stub, rank, size, lambda mine: hvd.broadcast_object(mine, 0), blocking)
            value = torch.ones(100)
            call = one.allreduce_of(value, gpus.a_stream())
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
