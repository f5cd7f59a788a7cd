"""However ranks are started, init_process_group("hvdlite") meets; and it costs `import torch` next to nothing."""

import os
import shutil
import subprocess
import sys

import pytest
from hosts import Hosts, needs_hosts
from launching import launch

torch = pytest.importorskip("torch")
BODY = """
import sys, torch, torch.distributed as dist
assert "hvdlite._core" not in sys.modules
{imports}
dist.init_process_group("hvdlite"{more})
dist.all_reduce(mine := torch.ones(2))
assert mine.tolist() == [dist.get_world_size()] * 2
if {hvd}:
    import hvdlite.torch as hvd
    assert hvd.allreduce(mine, op=hvd.Sum).tolist() == [4.0, 4.0]
dist.destroy_process_group()
print("fine")
"""
GROUPS = """
first = dist.get_rank() % 2
across = dist.new_group([first, first + 2], use_local_synchronization=True)
dist.all_reduce(mine := torch.full((100_000,), dist.get_rank()), group=across)
print(f"across {mine[0].item():.0f}\\n", end="")  # in one write
dist.destroy_process_group()
"""
IMPORT = "import hvdlite.torch.distributed"
ASKS = hasattr(torch, "_import_device_backends")  # from 2.5 on torch asks the installed package


def body(**given):
    return BODY.format(**{"imports": "" if ASKS else IMPORT, "more": "", "hvd": False, **given})


@pytest.mark.parametrize(
    "given", [{"hvd": True}, {"imports": IMPORT}, {"imports": "import hvdlite.torch.distributed; hvdlite.init()"}]
)
def test_under_hvdlite_run(given):
    code, out, err = launch("-np", 2, sys.executable, "-c", body(**given))
    assert code == 0 and out.count("fine") == 2, err


def started(*words, **environ):
    clean = {name: value for name, value in os.environ.items() if not name.startswith(("HVDLITE_", "OMPI_"))}
    environ = {**clean, "OMP_NUM_THREADS": "1", **environ}
    done = subprocess.run(words, env=environ, capture_output=True, text=True, timeout=240, cwd="/")  # no sources near
    return done.returncode, done.stdout, done.stderr


def test_under_torchrun(tmp_path):
    (tmp_path / "train.py").write_text(body(hvd=True))
    words = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(tmp_path / "train.py"))
    code, out, err = started(sys.executable, *words)
    assert code == 0 and out.count("fine") == 2, err


RESTARTED = """
import os, signal, time, torch, torch.distributed as dist
{imports}
first, rank = os.environ["TORCHELASTIC_RESTART_COUNT"] == "0", int(os.environ["RANK"])
time.sleep(0 if first or rank else 0.5)  # rank 1 looks for rank 0 before that has come
dist.init_process_group("hvdlite")
dist.all_reduce(mine := torch.ones(2), group=dist.new_group([0, 1]))
if first and rank == 0:
    os.kill(os.getpid(), signal.SIGKILL)
dist.all_reduce(mine)
print("fine")
"""


def test_a_restart_meets_over_the_store_of_the_attempt_before(tmp_path):
    (tmp_path / "train.py").write_text(RESTARTED.format(imports="" if ASKS else IMPORT))
    words = ("--standalone", "--nproc-per-node", "2", "--monitor-interval", "0.1", "--max-restarts", "1")
    code, out, err = started(sys.executable, "-m", "torch.distributed.run", *words, str(tmp_path / "train.py"))
    assert code == 0 and out.count("fine") == 2 and "[HVD153]" not in err, err


@needs_hosts
def test_on_two_hosts(tmp_path):
    """Streams join the hosts, also in a group of a rank of each."""
    groups = "\nimport torch, torch.distributed as dist\ndist.init_process_group('hvdlite')\n" + GROUPS
    (tmp_path / "train.py").write_text(body() + groups)
    words = ["--nnodes", "2", "--nproc-per-node", "2", "--master-addr", "10.77.0.11", "--master-port", "29512"]
    environ = {**os.environ, "OMP_NUM_THREADS": "1"}
    with Hosts(2) as hosts:
        jobs = []
        for node in range(2):
            command = [sys.executable, "-m", "torch.distributed.run", *words, "--node-rank", str(node)]
            more = {"env": environ, "stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True, "cwd": "/"}
            jobs.append(hosts.popen(node, [*command, str(tmp_path / "train.py")], **more))
        said = [job.communicate(timeout=240)[0] for job in jobs]
        assert [each.count("fine") for each in said] == [2, 2] and "across 2" in said[0] and "across 4" in said[1], said


def test_under_mpirun():
    if shutil.which("mpirun") is None:
        pytest.skip("there is no mpirun")
    program = body(more=', init_method="hvdlite://"')
    more = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    words = ("--oversubscribe", "-np", "2", sys.executable, "-c", program)
    code, out, err = started("mpirun", *words, **more)
    assert code == 0 and out.count("fine") == 2, err


def test_a_torch_that_is_too_old_is_told_so(monkeypatch):
    from hvdlite import _torch_backend
    from hvdlite.errors import HvdInitError

    monkeypatch.setattr(torch, "__version__", "2.1.2")
    with pytest.raises(HvdInitError, match="2.2 or later"):
        _torch_backend.create(None)
