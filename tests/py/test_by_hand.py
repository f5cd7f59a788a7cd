"""Variables alone start a job: ranks that no launcher has started, as operators of Kubernetes and scripts do."""

import hmac
import os
import subprocess
import sys
from pathlib import Path

import pytest

from hvdlite import _secret
from hvdlite.discovery import BY_HAND, Place
from hvdlite.links import rendezvous

PROGRAM = [sys.executable, str(Path(__file__).resolve().parent / "on_slurm.py"), "meet", "2"]
PORT = str(20000 + os.getpid() % 9000)
SECONDS = 120


def whole(rank, port=PORT):
    return {"RANK": str(rank), "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}


def pods(rank):
    master = {"PET_MASTER_ADDR": "localhost", "PET_MASTER_PORT": PORT}
    return {"PET_NNODES": "2", "PET_NODE_RANK": str(rank), "PET_NPROC_PER_NODE": "1", **master}


def own(rank):
    return {"HVDLITE_RANK": str(rank), "HVDLITE_SIZE": "2", "HVDLITE_STORE_ADDR": "127.0.0.1"}


def indexed(rank):
    return {"JOB_COMPLETION_INDEX": str(rank), "HVDLITE_SIZE": "2", "HVDLITE_STORE_ADDR": "127.0.0.1"}


def start(home, *places, program=PROGRAM):
    """Processes with these variables, and no other that a launcher sets."""
    kept = {name: value for name, value in os.environ.items() if name in ("PATH", "HOME", "PYTHONPATH", "LANG")}
    kept.update(XDG_CONFIG_HOME=str(home), OMP_NUM_THREADS="1")
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    return [subprocess.Popen(program, env={**kept, **place}, **pipes) for place in places]


def ends(ranks):
    try:
        said = [rank.communicate(timeout=SECONDS)[0] for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()
    return [rank.returncode for rank in ranks], said


@pytest.mark.parametrize("told", [whole, pods, own, indexed])
def test_two_processes_form_one_job(told, tmp_path):
    codes, said = ends(start(tmp_path, told(0), told(1)))
    assert codes == [0, 0] and [each.count("fine") for each in said] == [1, 1], said


def test_a_second_job_at_the_same_port_is_refused_and_the_first_goes_on(tmp_path):
    """Its rank 1 might else train with rank 0 of the first."""
    (first,) = start(tmp_path, whole(0))
    step, _ = rendezvous._by_hand(Place(0, 2, None, None, None, None, BY_HAND), whole(0), None)
    key = _secret.of_user({"XDG_CONFIG_HOME": str(tmp_path)}, one_host=True)
    secret = hmac.digest(key, step.encode(), "sha256")
    rendezvous._seek(1, "127.0.0.1", rendezvous._ports(step, secret), secret, SECONDS, {})  # until the first is there
    codes, said = ends(start(tmp_path, {**whole(0), "HVDLITE_START_TIMEOUT": "1"}))
    assert codes == [1] and "another job of 2 ranks already uses 127.0.0.1" in said[0] and "[HVD116]" in said[0], said
    codes, said = ends([first, *start(tmp_path, whole(1))])
    assert codes == [0, 0], said
