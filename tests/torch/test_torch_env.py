"""A program that knows torch.distributed alone, with its default env://, runs under hvdlite-run, on any hosts."""

import re
import socket
import sys

import pytest
from hosts import needs_hosts
from launching import Launch, free_port, launch

from hvdlite.launcher.agent import torch_environment

pytest.importorskip("torch")
GLOO = """
import os, torch, torch.distributed as dist
dist.init_process_group("gloo")
total = torch.ones(3)
dist.all_reduce(total)
told = [os.environ[name] for name in "RANK WORLD_SIZE LOCAL_RANK LOCAL_WORLD_SIZE MASTER_ADDR MASTER_PORT".split()]
assert (dist.get_rank(), dist.get_world_size()) == (int(told[0]), int(told[1])) and total[0] == int(told[1]), told
print("told", *told)
dist.destroy_process_group()
"""
AGAIN = "\nif os.environ['HVDLITE_RESTART_COUNT'] == '0':\n    raise SystemExit(3)"
OUTER = {"RANK": "7", "WORLD_SIZE": "9", "LOCAL_RANK": "3", "LOCAL_WORLD_SIZE": "4", "TORCHELASTIC_RUN_ID": "none"}


def told(job):
    return sorted(line.split() for line in re.findall(r">:told (.*)", job))


def test_gloo_meets_in_each_attempt_also_within_a_torchrun():
    """Whose store listens at its MASTER_PORT, and would make rank 0 a client."""
    with socket.create_server(("127.0.0.1", 0)) as theirs:
        port = str(theirs.getsockname()[1])
        outer = {**OUTER, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "TORCHELASTIC_USE_AGENT_STORE": "True"}
        code, out, err = launch("-np", 2, "--max-restarts", 1, sys.executable, "-c", GLOO + AGAIN, **outer)
    found = told(out)
    assert code == 0 and len(found) == 4, out + err
    assert {tuple(each[:5]) for each in found} == {(str(n), "2", str(n), "2", "127.0.0.1") for n in range(2)}, found
    assert port not in {each[5] for each in found}, found


@needs_hosts
def test_gloo_meets_on_the_host_of_rank_0_wherever_the_launcher_is(hosts, sshd):
    words = (*sshd.flags, "-H", "nodeB:2,nodeC:1", "-x", "GLOO_SOCKET_IFNAME=eth0", sys.executable, "-c", GLOO)
    with Launch(*words, under=hosts.within(0, ["--"])) as job:
        assert job.wait() == 0, job.out + job.err
    found = told(job.out)
    assert [each[:4] for each in found] == [["0", "3", "0", "2"], ["1", "3", "1", "2"], ["2", "3", "0", "1"]], found
    assert {each[4] for each in found} == {"10.77.0.12"} and len({each[5] for each in found}) == 1, found


def test_the_users_own_place_stays_where_it_is_whole():
    port = str(free_port())
    own = ("-x", "MASTER_ADDR=localhost", "-x", f"MASTER_PORT={port}")
    code, out, err = launch("-np", 2, *own, sys.executable, "-c", GLOO)
    assert code == 0 and [each[4:] for each in told(out)] == [["localhost", port]] * 2, out + err
    assert torch_environment.of_job({"MASTER_ADDR": "far"}, "10.0.0.1", 5)["MASTER_ADDR"] == "10.0.0.1"


def test_a_port_that_is_taken_at_any_address_is_not_chosen(monkeypatch):
    with socket.create_server(("127.0.0.2", 0)) as other:
        taken = other.getsockname()[1]
        monkeypatch.setattr(torch_environment, "_PORTS", (taken, taken + 1))
        assert torch_environment.free_port() not in (0, taken)
