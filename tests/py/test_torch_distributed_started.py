"""However ranks are started, init_process_group("hvdlite") meets; and it costs `import torch` next to nothing."""

import os
import shutil
import subprocess
import sys

import pytest
from launching import launch

pytest.importorskip("torch")
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
IMPORT = "import hvdlite.torch.distributed"


def body(**given):
    return BODY.format(**{"imports": "", "more": "", "hvd": False, **given})


@pytest.mark.parametrize(
    "given", [{"hvd": True}, {"imports": IMPORT}, {"imports": "import hvdlite.torch; hvdlite.torch.init()"}]
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


def test_under_mpirun():
    if shutil.which("mpirun") is None:
        pytest.skip("there is no mpirun")
    program = body(more=', init_method="hvdlite://"')
    more = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    words = ("--oversubscribe", "-np", "2", sys.executable, "-c", program)
    code, out, err = started("mpirun", *words, **more)
    assert code == 0 and out.count("fine") == 2, err


def test_a_torch_that_is_too_old_is_told_so(monkeypatch):
    import torch

    from hvdlite import _torch_backend
    from hvdlite.errors import HvdInitError

    monkeypatch.setattr(torch, "__version__", "2.1.2")
    with pytest.raises(HvdInitError, match="2.2 or later"):
        _torch_backend.create(None)
