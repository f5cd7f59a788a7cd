"""An elastic job on several hosts, over ssh: hosts that come, go, refuse and are lost, and links that are cut. Each job
ends as one process does that replays what was committed, bit by bit: its plane adds in the order of ranks.
"""

import contextlib
import json
import os
import re
import signal
import time
from pathlib import Path

import elastic_pipeline_job
import pytest
from elastic_jobs import ElasticJob, is_alive
from hosts import NAMES, PIDS, Hosts, needs_hosts
from hosts_sshd import empty_within, inhabitants
from ranks import everything

pytestmark = needs_hosts
LAST = {"epochs": 1000, "pause": 0.02}  # until told which epoch is the last


@pytest.fixture(scope="module")
def hosts():
    """Four of them: a host each that comes and that goes, while others stay."""
    with Hosts(4) as made:
        yield made


class HostsJob(ElasticJob):
    """An ElasticJob whose launcher is on a host. offered: what the discovery script says at first."""

    def __init__(self, folder, hosts, sshd, *flags, at=0, offered=None, plan=LAST, **environ):
        self.hosts = hosts
        if offered is not None:
            self.offer(folder, offered)
            flags = ("--host-discovery-script", f"cat {folder}/offered", *flags)
        environ = {"HVDLITE_PLANE": "p2p", **environ}
        self._outside = {}
        super().__init__(folder, *sshd.flags, *flags, plan=plan, under=hosts.within(at, ["--"]), **environ)

    @staticmethod
    def offer(folder, offered):
        """The script says this from now on."""
        (folder / "new").write_text(offered.replace(" ", "\n") + "\n")
        (folder / "new").rename(folder / "offered")

    def signal(self, pid, number):
        os.kill(self.outside(pid), number)

    def is_alive(self, pid):
        return is_alive(self.outside(pid))

    def outside(self, pid):
        """What a process of a host is called here, 0 if it is not there."""
        if pid not in self._outside:
            for status in Path("/proc").glob("[0-9]*/status"):
                with contextlib.suppress(OSError):
                    if re.search(rf"^NSpid:.*\t{pid}$", status.read_text(), re.MULTILINE):
                        self._outside[pid] = int(status.parent.name)
        return self._outside.get(pid, 0)

    def at(self):
        """{rank: host} of those that train."""
        return {rank: NAMES[pid // PIDS - 1] for pid, rank in self.training().items()}

    def until_at(self, *places):
        """Until a rank trains on each of these hosts and on no other."""
        while sorted(self.at().values()) != list(places):
            assert self.process.poll() is None, self.out
            time.sleep(0.02)
        self.until_training(len(places), self.newest())

    def last(self):
        """The epoch that it is in is the last; the job ends as if nothing had happened. Sizes that there were."""
        (self.folder / "last").touch()
        sizes = self.finish()
        empty_within(self.hosts, 10)
        return sizes


def agents(hosts, name):
    """A host's guard and agent, by their numbers here."""
    return [pid for pid, words in inhabitants(hosts).items() if words.startswith(name) and "remote.main" in words]


@pytest.mark.parametrize("first", [["nodeD"], *everything(["nodeA", "nodeB"])])
def test_hosts_come_and_go_also_that_of_the_launcher(tmp_path, hosts, sshd, first):
    offered = [":1 ".join([*names, ""]) for names in (first, NAMES[:4], ["nodeA", "nodeC", "nodeD"], NAMES[:3])]
    with HostsJob(tmp_path, hosts, sshd, "-np", str(len(first)), at=3, offered=offered[0]) as job:
        job.until_at(*first)
        job.offer(tmp_path, offered[1])
        job.until_at(*NAMES[:4])
        job.offer(tmp_path, offered[2])
        job.until_at("nodeA", "nodeC", "nodeD")
        job.until("this rank is removed: host nodeB is offered no more")
        while any(words.startswith("nodeB") for words in inhabitants(hosts).values()):
            assert job.process.poll() is None, job.out  # all of it ends long before the job
        job.offer(tmp_path, offered[3])
        job.until_at(*NAMES[:3])
        assert max(job.last()) == 4


def test_all_hosts_are_replaced_at_once_and_the_state_is_handed_over_first(tmp_path, hosts, sshd):
    """Also where the newcomer is lost before it has the state, and a host comes back before its rank has gone."""
    with HostsJob(tmp_path, hosts, sshd, "-np", "1", "--max-np", "1", at=3, offered="nodeA:1") as job:
        job.until_at("nodeA")
        job.offer(tmp_path, "nodeX:1")
        job.until(
            "stays until new ranks have the training state, at most 600 s (--elastic-timeout): fewer than --min-np 1"
        )
        job.offer(tmp_path, "nodeB:1")
        job.until_at("nodeB")
        job.offer(tmp_path, "nodeC:1")
        job.until("discovery script offers nodeC:1")
        job.offer(tmp_path, "nodeB:1")
        job.until_at("nodeB")
        assert set(job.last()) <= {1, 2}


@pytest.mark.parametrize("words", everything((), ("-H", "nodeA:1,nodeB:1,nodeC:1")))
def test_a_job_grows_to_a_host_that_has_refused(tmp_path, hosts, sshd, words):
    """A name that no server knows is looked up beside the job."""
    offered = None if words else "nodeA:1"
    words = (*words, "-np", "1", "--min-np", "1", "--blacklist-cooldown-range", "1", "2")
    with contextlib.ExitStack() as refused, HostsJob(tmp_path, hosts, sshd, *words, offered=offered) as job:
        sshd.stop(2)
        refused.callback(sshd.start, 2)
        job.until_training(1)
        job.offer(tmp_path, "nodeA:1 nodeB:1 nodeC:1 nodeX:1")
        job.until_at("nodeA", "nodeB")
        job.until("nodeC: ssh was refused: is sshd running there, at this port? (--ssh-port)")
        job.until("host nodeC gets no new rank for 1 s")
        refused.close()
        job.until_at("nodeA", "nodeB", "nodeC")
        if offered:
            job.until("host nodeX gets no new rank for ")
        assert job.last()[-1] == 3


@pytest.mark.parametrize("how", everything("killed", "silent"))
def test_a_host_is_lost_while_others_go_on_and_is_sent_for_again(tmp_path, hosts, sshd, how):
    words = ("-H", "nodeA:1,nodeB:1,nodeC:1", "--min-np", "1", "--blacklist-cooldown-range", "1", "2")
    words += ("--agent-timeout", "3") if how == "silent" else ()
    with (
        HostsJob(tmp_path, hosts, sshd, *words, at=3, HVDLITE_PEER_TIMEOUT="2") as job,
        contextlib.ExitStack() as mended,
    ):
        job.until_at("nodeA", "nodeB", "nodeC")
        if how == "killed":
            os.kill(max(agents(hosts, "nodeC")), signal.SIGKILL)
        else:
            hosts.cable(2, "down")
            mended.callback(hosts.cable, 2, "up")
        job.until("host nodeC is lost: ")
        job.until_at("nodeA", "nodeB")
        mended.close()
        job.until_at("nodeA", "nodeB", "nodeC")
        assert job.last() == [3, 2, 3]


@pytest.mark.parametrize("host", everything("nodeB"))
def test_a_pipeline_goes_on_when_a_host_with_two_stages_is_lost(tmp_path, hosts, sshd, host):
    """Its layers lie on the other host, too: the ranks that keep them are chosen by host."""
    plan = {"shapes": {4: [4, 1], 2: [2, 1]}, "pause": 0.02}
    words = ("-H", "nodeA:2,nodeB:2", "--min-np", "1", "--blacklist-cooldown-range", "1000", "1000")
    words += ("-x", f"PIPELINE={json.dumps(plan)}", "-x", "OMP_NUM_THREADS=1")
    program = str(Path(elastic_pipeline_job.__file__))
    with HostsJob(tmp_path, hosts, sshd, *words, at=3, program=program) as job:
        job.until_training(4, 6)
        os.kill(max(agents(hosts, host)), signal.SIGKILL)
        job.until(f"host {host} is lost: ")
        job.until_training(2, job.newest())
        (tmp_path / "last").touch()
        assert job.wait(60) == 0, job.out
        wrong, log = elastic_pipeline_job.differing(tmp_path, elastic_pipeline_job.Plan(**plan))
        assert not wrong and [(layout.pp, layout.dp) for _, layout in log] == [(4, 1), (2, 1)], job.out
        empty_within(hosts, 10)


def test_one_of_two_ranks_whose_link_is_cut_is_killed_and_the_others_go_on(tmp_path, hosts, sshd):
    words = ("-H", "nodeA:1,nodeB:1,nodeC:1", "--min-np", "1", "--blacklist-cooldown-range", "1000", "1000")
    words += ("-x", "HVDLITE_START_TIMEOUT=4")
    with HostsJob(tmp_path, hosts, sshd, *words, at=3, HVDLITE_PEER_TIMEOUT="1") as job:
        job.until_at("nodeA", "nodeB", "nodeC")
        hosts.cut(1, 2)
        try:
            job.until("though both are alive: the link between them is cut [HVD454]; hvdlite-run kills it")
            assert job.last() == [3, 2]
        finally:
            hosts.cut(1, 2, False)
