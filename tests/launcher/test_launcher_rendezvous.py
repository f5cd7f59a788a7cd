"""The same command on every host, no ssh: who gets which rank, who shows what, and how all of them end."""

import os
import re
import signal
import socket
import sys

import pytest
from hosts import needs_hosts
from hosts_sshd import empty_within
from launching import Launch, free_port, launch
from ranks import everything

from hvdlite.launcher.control import registration

SECRET = "5e" * 32
TIMES = ("IDLE", "INTVL", "CNT")
AT = ("--rdzv-endpoint", "10.77.0.11:29400")


@pytest.fixture
def on(hosts):
    """`on(number, *words)` is the launcher of a host."""

    def start(number, *words, **settings):
        return Launch(*words, under=hosts.within(number, ["--"]), **{"HVDLITE_SECRET_KEY": SECRET, **settings})

    yield start
    empty_within(hosts, 10)


PLACE = "$(hostname) $RANK/$WORLD_SIZE $HVDLITE_LOCAL_RANK $HOROVOD_CROSS_RANK"
SHOW = ("sh", "-c", f"echo {PLACE} $MINE; exit $RANK")


@needs_hosts
def test_ranks_follow_the_numbers_of_the_nodes_and_all_end_with_the_same_code(on):
    words = ("--nnodes", 3, *AT, "--failure-grace", 20)
    third = on(2, *words, "--node-rank", 2, "--nproc-per-node", 2, *SHOW, MINE="c")
    second = on(1, *words, "--node_rank=1", *SHOW, MINE="b")
    first = on(0, *words, "--node-rank", 0, "--nproc_per_node", "1", *SHOW, MINE="a")
    with third as c, second as b, first as a:
        codes = a.wait(), b.wait(), c.wait()
    said = sorted(re.findall(r">:(.*)", a.out))
    assert said == ["nodeA 0/4 0 0 a", "nodeB 1/4 0 1 b", "nodeC 2/4 0 2 c", "nodeC 3/4 1 0 c"], a.err
    assert codes[0] in (1, 2, 3) and len(set(codes)) == 1, (codes, a.err)
    assert "hvdlite-run: rank" in a.err and not b.out and "Traceback" not in a.err + b.err + c.err


@needs_hosts
def test_a_signal_to_any_node_ends_the_job_and_a_node_without_its_launcher_ends_itself(on, hosts):
    words = (
        "--nnodes",
        2,
        *AT,
        "sh",
        "-c",
        "trap 'echo got it; exit 0' TERM; echo ready; while :; do sleep 0.05; done",
    )

    with on(1, *words) as b, on(0, *words) as a:
        a.until("ready", 2)
        os.kill(b.children()[0], signal.SIGTERM)
        assert (a.wait(), b.wait()) == (143, 143) and a.out.count("got it") == 2, a.err + b.err
    with on(1, *words) as b, on(0, *words) as a:
        a.until("ready", 2)
        os.kill(a.children()[0], signal.SIGKILL)
        assert b.wait() == 255 and "has ended" in b.err, b.err
        empty_within(hosts, 10)


@needs_hosts
def test_hosts_that_do_not_come_or_have_another_secret_are_told(on):
    words = ("--nnodes", 2, *AT, "--start-timeout", 2, "true")
    with on(1, *words, HVDLITE_SECRET_KEY="00" * 32) as b, on(0, *words) as a:
        assert a.wait() == 255 and "node 1: did not report within 2 s" in a.err, a.err
        assert b.wait() == 255 and b.err.endswith("--rdzv-id on all hosts [HVD111]\n"), b.err
        assert "hvdlite-run: refused 10.77.0.12: it has another secret (HVDLITE_SECRET_KEY)" in a.err, a.err
        assert a.err.endswith("than this host [HVD111]\n"), a.err
    words = ("--nnodes", 3, *words[2:])
    with on(1, "--node-rank", 1, *words) as b, on(2, "--node-rank", 1, *words) as c, on(0, *words) as a:
        assert a.wait() == 2 and re.search(r"node 1: two hosts report as this one \(node. and node.\)", a.err), a.err
        assert (b.wait(), c.wait()) == (255, 255)


@needs_hosts
@pytest.mark.parametrize("node", [2, *everything(1)])
def test_nodes_that_disagree_on_their_number_do_not_train(on, node):
    words = (*AT, "--start-timeout", 10, "echo", "trained")
    three, two = ("--nnodes", 3, "--node-rank", node), ("--nnodes", 2, "--node-rank", 0)
    with on(node, *three, *words) as other, on(0, *two, *words) as a:
        assert a.wait() == 2 and other.wait() == 255
        assert "was started with --nnodes 3, this host with --nnodes 2" in a.err, a.err
        assert "trained" not in a.out + other.out


TRY = "echo try $RANK $HVDLITE_RESTART_COUNT $(hostname) $MINE"
RETRY = f"{TRY}; [ $HVDLITE_RESTART_COUNT = 1 ] || [ $RANK = 0 ] || exit 5; exit 0"


@needs_hosts
def test_a_job_that_fails_is_started_again_on_all_nodes_by_exactly_the_same_command(on):
    words = ("--nnodes", 2, *AT, "-x", "MINE=x", "--max-restarts", 2, "sh", "-c", RETRY)
    with on(1, *words) as b, on(0, *words) as a:
        assert (a.wait(60), b.wait(60)) == (0, 0), a.err + b.err
    tries = sorted(re.findall(r"try (.*)", a.out))
    assert (
        tries == ["0 0 nodeA x", "0 1 nodeA x", "1 0 nodeB x", "1 1 nodeB x"] and a.err.count("restart 1 of 2") == 1
    ), a.err


@needs_hosts
def test_a_node_that_waits_for_the_next_attempt_ends_by_a_signal(on, hosts):
    words = ("--nnodes", 2, *AT, "--max-restarts", 5, "sh", "-c")
    with on(1, *words, "exit 5") as b, on(0, *words, "exit 0") as a:
        a.until("restart 1 of 5")
        os.kill(a.children()[0], signal.SIGKILL)  # nobody is left to report to
        os.kill(b.children()[0], signal.SIGTERM)
        assert b.wait() != 0
        empty_within(hosts, 10)


TOGETHER = """
import hvdlite.numpy as hvd, numpy as np, os
hvd.init()
place = hvd.rank(), hvd.local_rank(), hvd.local_size(), hvd.cross_rank(), hvd.cross_size()
print("sum", *place, int(hvd.allreduce(np.ones(9), op=hvd.Sum)[0]), flush=True)
"""


def test_two_nodes_on_one_machine_are_hosts_to_each_other():
    """As one tries out the lines of a job before there are hosts."""
    words = ("--nnodes", 2, "--nproc-per-node", 2, "--rdzv-endpoint", f"127.0.0.1:{free_port()}")
    settings = {"HVDLITE_SECRET_KEY": SECRET}
    program = (sys.executable, "-c", TOGETHER)
    with (
        Launch(*words, "--node-rank", 1, *program, **settings) as b,
        Launch(*words, "--node-rank", 0, *program, **settings) as a,
    ):
        assert (a.wait(), b.wait()) == (0, 0), a.err + b.err
    assert sorted(re.findall(r"sum (.*)", a.out)) == ["0 0 2 0 2 4", "1 1 2 0 2 4", "2 0 2 1 2 4", "3 1 2 1 2 4"]


def test_two_nodes_that_both_take_themselves_for_the_first_are_told_what_to_say():
    with socket.create_server(("127.0.0.1", 0)) as taken:
        words = ("--nnodes", 2, "--rdzv-endpoint", f"127.0.0.1:{taken.getsockname()[1]}", "true")
        code, _, err = launch(*words, HVDLITE_SECRET_KEY=SECRET)
    assert code == 1 and "if this is not the first node: --node-rank" in err, err


def test_a_silent_host_is_probed_as_long_as_was_asked_for():
    with socket.create_server(("127.0.0.1", 0)) as server, socket.create_connection(server.getsockname()) as sock:
        for silence in (1.0, 3.0, 60.0, 1e6):
            registration.keep_watch(sock, True, silence)
            asked = [sock.getsockopt(socket.IPPROTO_TCP, getattr(socket, f"TCP_KEEP{word}")) for word in TIMES]
            assert abs(asked[0] + asked[1] * asked[2] - silence) <= max(1.0, 0.05 * silence), (silence, asked)
            assert sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT) == 1000 * silence


def test_one_node_is_this_host():
    code, out, err = launch("--standalone", "--nnodes=1", "--nproc_per_node=2", "sh", "-c", "echo $RANK")
    assert code == 0 and sorted(re.findall(r">:(\d)", out)) == ["0", "1"], err
