"""Variables alone start a job: ranks that no launcher has started, as operators of Kubernetes and scripts do."""

import hmac
import os
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest
from hosts import Hosts, needs_hosts
from storing import SECRET, served

from hvdlite.errors import HvdInitError
from hvdlite.rendezvous import standalone_store
from hvdlite.rendezvous.discovery import BY_HAND, Place, discover
from hvdlite.security import job_secret

PROGRAM = [sys.executable, str(Path(__file__).resolve().parents[1] / "support/on_slurm.py"), "meet", "2"]
PORT = str(20000 + os.getpid() % 9000)
SECONDS = 120
BACKEND = """import torch, torch.distributed as dist, hvdlite.torch.distributed
dist.init_process_group("hvdlite")
dist.all_reduce(torch.ones(3))
print("fine")
dist.destroy_process_group()"""


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


def on_hosts(hosts, home, *places, program=(*PROGRAM[:-1], "1,1")):
    """The same on the hosts 0, 1, ..., which share a home."""
    environ = {name: value for name, value in os.environ.items() if name in ("PATH", "HOME", "PYTHONPATH", "LANG")}
    environ.update(XDG_CONFIG_HOME=str(home), OMP_NUM_THREADS="1", HVDLITE_START_TIMEOUT="20")
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    return [hosts.popen(host, program, env={**environ, **place}, **pipes) for host, place in enumerate(places)]


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
    step, _ = standalone_store._by_hand(Place(0, 2, None, None, None, None, BY_HAND), whole(0), None)
    key = job_secret.of_user({"XDG_CONFIG_HOME": str(tmp_path)}, one_host=True)
    secret = hmac.digest(key, step.encode(), "sha256")
    standalone_store._seek(
        1, "127.0.0.1", standalone_store._ports(step, secret), secret, SECONDS, {}, ""
    )  # until the first is there
    codes, said = ends(start(tmp_path, {**whole(0), "HVDLITE_START_TIMEOUT": "1"}))
    assert codes == [1] and "rank 0 of 2: another rank 0 already uses 127.0.0.1" in said[0] and "[HVD116]" in said[0], (
        said
    )
    codes, said = ends([first, *start(tmp_path, whole(1))])
    assert codes == [0, 0], said


@needs_hosts
def test_rank_0_may_know_its_host_as_localhost(tmp_path):
    """And the others by its name; of IPv4 and IPv6. All that rank 0 tells of itself leads to it."""
    with Hosts(2) as hosts:
        for here, there in (("localhost", "10.77.0.11"), ("0.0.0.0", "nodeA"), ("::1", "fd77::11")):
            jobs = on_hosts(hosts, tmp_path, {**whole(0), "MASTER_ADDR": here}, {**whole(1), "MASTER_ADDR": there})
            codes, said = ends(jobs)
            assert codes == [0, 0] and [each.count("fine") for each in said] == [1, 1], said
        torchruns = {"TORCHELASTIC_RUN_ID": "none", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
        codes, said = ends(
            on_hosts(hosts, tmp_path, whole(0) | torchruns, {**whole(1), "MASTER_ADDR": "nodeA"} | torchruns)
        )
        assert codes == [0, 0], said


@needs_hosts
def test_so_it_may_for_the_backend_of_torch(tmp_path):
    """Where torch's own store is the meeting."""
    pytest.importorskip("torch")
    places = {**whole(0), "MASTER_ADDR": "localhost"}, {**whole(1), "MASTER_ADDR": "nodeA"}
    with Hosts(2) as hosts:
        codes, said = ends(on_hosts(hosts, tmp_path, *places, program=(sys.executable, "-c", BACKEND)))
        assert codes == [0, 0] and [each.count("fine") for each in said] == [1, 1], said


@pytest.mark.parametrize(
    ("change", "ip"),
    [
        ({}, standalone_store._EVERYWHERE),
        ({"MASTER_ADDR": "127.0.1.1"}, standalone_store._EVERYWHERE),
        ({"LOCAL_WORLD_SIZE": "2"}, "127.0.0.1"),
        ({job_secret.POD: "10.0.0.1"}, "127.0.0.1"),  # no other pod can have the key
    ],
)
def test_the_store_is_open_to_other_hosts_only_where_ranks_may_be_there(change, ip, monkeypatch, tmp_path):
    seen, environ = [], whole(0) | {"XDG_CONFIG_HOME": str(tmp_path)} | change
    monkeypatch.setattr(
        standalone_store, "_keep_alone", lambda _, ip, *__: seen.append(ip) or {"address": ip, "port": 1}
    )
    monkeypatch.setattr(standalone_store, "_known", {})
    values = {"store_addr": None, "store_port": None, "secret_key": None, "start_timeout": 1.0}
    assert standalone_store.found(discover(environ), environ, values)["store_addr"] == "127.0.0.1" and seen == [ip]


def test_a_second_rank_0_on_another_host_hears_of_the_first():
    with served(2) as store:
        ip, port = store.address
        standalone_store._refuse_second(ip, ip, port, SECRET)  # its own host
        with pytest.raises(HvdInitError, match=rf"{ip} is another host, .* a RANK .*\[HVD118\]"):
            standalone_store._refuse_second(ip, "10.0.0.1", port, SECRET)


def test_ranks_that_disagree_hear_which_variable_to_look_at(tmp_path):
    of_three = {"WORLD_SIZE": "3", "HVDLITE_START_TIMEOUT": str(SECONDS)}
    (first,) = start(tmp_path, whole(0) | of_three)
    twins = start(tmp_path, whole(1) | of_three, whole(1) | of_three)
    try:
        codes, said = ends(start(tmp_path, whole(1), whole(1, "9") | {"HVDLITE_START_TIMEOUT": "1"}))
        assert codes == [1, 1] and "says 2 ranks, but this job has 3: give all" in said[0], said
        assert re.search("no store .* has RANK=1, WORLD_SIZE=2, MASTER_ADDR=127.0.0.1, MASTER_PORT=9 ", said[1]), said
        while all(twin.poll() is None for twin in twins):
            time.sleep(0.02)
    finally:
        first.kill()
        _, said = ends(twins)
        ends([first])
    assert any("its own RANK [HVD118]" in each for each in said), said


def test_a_name_that_cannot_be_looked_up_is_refused_at_once():
    for node in (".train", "a..b", "a" * 64):
        with pytest.raises(HvdInitError, match=r"is not the name of a host .*: set MASTER_ADDR .*\[HVD116\]"):
            standalone_store._check_name(node)
    for node in ("localhost", "pod-0.train.", "10.0.0.1", "fe80::1%eth0", "bücher"):
        standalone_store._check_name(node)
