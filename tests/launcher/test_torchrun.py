"""torchrun starts ranks, on one host and on two: they meet without a launcher of ours, and again after a restart."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from hosts import Hosts, needs_hosts

from hvdlite.errors import HvdInitError
from hvdlite.rendezvous import standalone_store
from hvdlite.rendezvous.discovery import Place

pytest.importorskip("torch")
PROGRAM = str(Path(__file__).resolve().parents[1] / "support/on_slurm.py")
TORCHRUN = [sys.executable, "-m", "torch.distributed.run"]
SECONDS = 240


@pytest.fixture
def environ(tmp_path):
    """A home without a key in it."""
    found = {name: value for name, value in os.environ.items() if not name.startswith(("HVDLITE_", "HOROVOD_"))}
    return {**found, "XDG_CONFIG_HOME": str(tmp_path), "OMP_NUM_THREADS": "1"}


def torchrun(words, environ):
    done = subprocess.run([*TORCHRUN, *words], env=environ, capture_output=True, text=True, timeout=SECONDS)
    return done.returncode, done.stdout + done.stderr


def test_ranks_meet_without_a_launcher_of_ours(environ, tmp_path):
    code, said = torchrun(["--standalone", "--nproc-per-node", "2", PROGRAM, "meet", "2"], environ)
    assert code == 0 and said.count("fine") == 2, said
    assert os.stat(tmp_path / "hvdlite" / "key").st_mode & 0o077 == 0


def test_a_lost_rank_0_is_named_and_a_restart_meets_anew(environ, tmp_path):
    """The store is kept by rank 0's keeper, which must outlive it, and be in nobody's way afterwards. Rank 1
    ignores the SIGTERM that torchrun sends as soon as it sees that rank 0 has ended: it says first who is lost."""
    script = tmp_path / "train.py"
    script.write_text(
        f"import os, signal, sys\nsys.path.insert(0, {os.path.dirname(PROGRAM)!r})\nimport on_slurm\n"
        "if os.environ['TORCHELASTIC_RESTART_COUNT'] != '0':\n    on_slurm.meet('2')\nelse:\n"
        "    signal.signal(signal.SIGTERM, signal.SIG_IGN)\n    on_slurm.die(0)\n"
    )
    words = ["--standalone", "--nproc-per-node", "2", "--max-restarts", "1", str(script)]
    code, said = torchrun(words, environ)
    assert code == 0 and said.count("fine") == 2 and "lost: barrier" in said and "rank 0 (pid " in said, said


@needs_hosts
def test_two_hosts(environ):
    words = ["--nnodes", "2", "--nproc-per-node", "2", "--master-addr", "10.77.0.11", "--master-port", "29511"]
    with Hosts(2) as hosts:
        jobs = []
        for node in range(2):
            command = [*TORCHRUN, *words, "--node-rank", str(node), PROGRAM, "meet", "2,2"]
            pipe = subprocess.PIPE
            jobs.append(hosts.popen(node, command, env=environ, stdout=pipe, stderr=subprocess.STDOUT, text=True))
        try:
            said = [job.communicate(timeout=SECONDS)[0] for job in jobs]
        finally:
            for job in jobs:
                job.kill()
                job.wait()
        assert [job.returncode for job in jobs] == [0, 0] and [each.count("fine") for each in said] == [2, 2], said


def test_a_place_without_an_address_is_an_error_that_names_it():
    place = Place(1, 2, 1, 2, 0, 1, "torchrun")
    with pytest.raises(HvdInitError, match="rank 1 of 2: torchrun's MASTER_ADDR=None and MASTER_PORT='5'"):
        standalone_store._torchrun(place, {"TORCHELASTIC_RUN_ID": "none", "MASTER_PORT": "5"}, None)
