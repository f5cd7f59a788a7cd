"""A real Slurm on the hosts of hosts.py: slurmctld on nodeA and a slurmd on each, for `srun` from nodeA.

    with Slurm(hosts) as slurm:
        slurm.srun(["--mpi=pmix", "-N2", "-n4"], [sys.executable, "train.py"])

It is the distribution's Slurm without munge (whoever reaches its ports is believed: these hosts reach nobody else), and
without cgroups. All that it writes lies in the hosts' folder; its daemons end with this, or with their hosts.
"""

import os
import re
import shutil
import subprocess
import time
import uuid
from pathlib import Path

import launching
import parts
import pytest
from hosts import NAMES
from hosts_shell import end

SECONDS = 60.0
_PACKAGES = ("slurmctld", "slurmd", "slurm-client", "slurm-wlm-plugins")
_CONF = """
ClusterName=test
SlurmctldHost=nodeA
SlurmUser=root
SlurmdUser=root
AuthType=auth/none
CredType=cred/none
SlurmctldPidFile={folder}/ctld.pid
SlurmdPidFile={folder}/d.%n.pid
SlurmctldLogFile={folder}/ctld.log
SlurmdLogFile={folder}/d.%n.log
StateSaveLocation={folder}/ctl
SlurmdSpoolDir={folder}/spool.%n
SwitchType=switch/none
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SchedulerParameters=sched_interval=1,batch_sched_delay=0,sched_min_interval=0
MpiDefault=none
ReturnToService=2
SlurmdParameters=config_overrides
KillWait=3
SlurmdTimeout=60
InactiveLimit=0
SrunPortRange=60001-60100
PropagateResourceLimits=NONE
{nodes}
PartitionName=main Nodes={names} Default=YES MaxTime=INFINITE State=UP
"""


def pmix():
    """The file that --mpi=pmix opens, or None. Debian has this name of it in a package for developers only."""
    return parts.had(lambda: next(map(str, Path("/usr").glob("lib*/*/libpmix.so")), None), "libpmix-dev")


def missing():
    """Why there can be no Slurm here, or None. Installs it where it may."""
    parts.debian("slurmctld", *_PACKAGES)
    pmix()  # its daemons look once, when they begin
    absent = [tool for tool in ("slurmctld", "slurmd", "srun", "sinfo") if shutil.which(tool) is None]
    return f"no Slurm here: {', '.join(absent)} not found" if absent else None


class Slurm:
    """Up when the constructor returns. A context manager."""

    def __init__(self, hosts, cpus=4):
        reason = missing()
        if reason is not None:
            pytest.skip(reason)
        self._hosts, self._daemons = hosts, []
        self._folder = Path(hosts.folder) / "slurm"
        (self._folder / "ctl").mkdir(parents=True)
        names = NAMES[: hosts.count]
        nodes = "\n".join(f"NodeName={name} CPUs={cpus} RealMemory=1000 State=UNKNOWN" for name in names)
        conf = _CONF.format(folder=self._folder, nodes=nodes, names=",".join(names))
        (self._folder / "slurm.conf").write_text(conf)
        (self._folder / "cgroup.conf").write_text("CgroupAutomount=no\nConstrainCores=no\n")
        own = self._folder / "own"  # not the same on each host, unlike /tmp
        own.mkdir()
        (self._folder / "mpi.conf").write_text(f"PMIxCliTmpDirBase={own}\n")
        try:
            for number in range(hosts.count):
                hosts.run(number, ["mount", "-t", "tmpfs", "tmpfs", str(own)])
            self._daemon(0, "slurmctld", "-D", "-c")
            for number, name in enumerate(names):
                self._daemon(number, "slurmd", "-D", "-N", name)
            self._until_idle(hosts.count)
        except BaseException:
            self.close()
            raise

    def environ(self, **more):
        """For the commands of Slurm."""
        inherited = {key: value for key, value in os.environ.items() if not key.startswith(("SLURM_", "HVDLITE_"))}
        inherited.update(launching.NO_RECORDS)
        return {**inherited, "SLURM_CONF": str(self._folder / "slurm.conf"), "TMPDIR": self._hosts.folder, **more}

    def _daemon(self, number, *words):
        with open(self._folder / f"{words[0]}.{number}.out", "wb") as output:
            quiet = {"stdin": subprocess.DEVNULL, "stdout": output, "stderr": subprocess.STDOUT}
            self._daemons.append(self._hosts.popen(number, words, env=self.environ(), start_new_session=True, **quiet))

    def _until_idle(self, count):
        until = time.monotonic() + SECONDS
        while True:
            words = self._hosts.within(0, ["--", "sinfo", "-h", "-N", "-o", "%t"])
            said = subprocess.run(words, env=self.environ(), capture_output=True, text=True, timeout=SECONDS)
            if said.stdout.split().count("idle") == count:
                return
            if time.monotonic() > until:
                logs = "\n".join(f"{path.name}: {path.read_text()[-1500:]}" for path in self._folder.glob("*.[lo]*"))
                raise RuntimeError(f"Slurm does not come up: {said.stdout}{said.stderr}\n{logs}")
            time.sleep(0.1)

    def srun(self, options, program, seconds=300, kill=True, **environ):
        """(exit code, output) of a program that srun starts on nodeA. kill: the others when one fails."""
        return self.run(["srun", f"-K{int(kill)}", *options, *map(str, program)], seconds, **environ)

    def sbatch(self, words, seconds=120, **environ):
        """The exit code of a job, once it is over (sbatch --wait would look every 10 s). None: it was queued again, and
        is taken away."""
        code, said = self.run(["sbatch", "--parsable", *words], seconds, left=True, **environ)
        assert code == 0, said
        until = time.monotonic() + seconds
        while True:
            _, shown = self.run(["scontrol", "show", "job", said.strip()])
            if "Reason=BeginTime" in shown:  # Slurm lets it wait for two minutes, and for a reason
                self.run(["scancel", said.strip()])
                return None
            state = re.search(r"JobState=(\w+)", shown)
            if state and state[1] not in ("PENDING", "CONFIGURING", "RUNNING", "COMPLETING", "SIGNALING"):
                return int(re.search(r" ExitCode=(\d+):", shown)[1])
            assert time.monotonic() < until, f"no end within {seconds} s: {shown}"
            time.sleep(0.1)

    def run(self, command, seconds=300, left=False, **environ):
        """(exit code, output) of a command of Slurm on nodeA. left: whether something of it may go on."""
        mark = uuid.uuid4().hex
        words = self._hosts.within(0, ["--", *command])
        pipes = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
        given = self.environ(HVDLITE_TEST_MARK=mark, **environ)
        process = subprocess.Popen(words, env=given, start_new_session=True, **pipes)
        try:
            said, _ = process.communicate(timeout=seconds)
        except subprocess.TimeoutExpired:
            end(process)
            said, _ = process.communicate(timeout=SECONDS)
            pytest.fail(f"no end within {seconds} s of {command[0]}:\n{said.decode(errors='replace')}", pytrace=False)
        until = time.monotonic() + SECONDS
        while not left and launching.marked(mark):
            assert time.monotonic() < until, f"left by {command[0]}: {launching.marked(mark)}"
            time.sleep(0.05)
        return process.returncode, said.decode(errors="replace")

    def close(self):
        """Ends the daemons; what they have started ends with its host."""
        for process in reversed(self._daemons):
            end(process)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.close()
