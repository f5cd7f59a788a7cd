"""A real sshd on each of the hosts of hosts.py, for launchers that start by ssh, and what is left on the hosts after.

    with Sshd(hosts) as sshd:
        Launch("-H", "nodeA:2,nodeB:2", *sshd.flags, "python", "train.py", under=hosts.within(0, ["--"]))

Keys, configuration and known hosts lie in the hosts' folder; the user's own are neither read nor written.
"""

import contextlib
import os
import shutil
import socket
import subprocess
import time
from pathlib import Path

import parts
import pytest
from hosts import NAMES
from hosts_shell import end

SECONDS = 30.0
_SSHD = """
HostKey {folder}/host_key
AuthorizedKeysFile {folder}/key.pub
PidFile none
PermitRootLogin yes
PasswordAuthentication no
KbdInteractiveAuthentication no
UsePAM no
StrictModes no
MaxStartups 100
"""
_SSH = """
IdentityFile {folder}/key
UserKnownHostsFile {folder}/known
"""
_START = """
mount -t tmpfs tmpfs /run && mkdir /run/sshd && { [ ! -f ~/.bashrc ] || mount --bind /dev/null ~/.bashrc; } &&
{ [ -z "$3" ] || mount -t tmpfs tmpfs "$3"; } && exec "$1" -D -e -f "$2"
"""


def missing():
    """Why there can be no sshd here, or None. Installs it where it may."""
    absent = [tool for tool, path in (("sshd", _program()), ("ssh", shutil.which("ssh"))) if path is None]
    return f"hosts with ssh need {', '.join(absent)}" if absent else None


def _program():
    return shutil.which("sshd") or parts.debian("sshd", "openssh-server", path="/usr/sbin:/sbin")


class Sshd:
    """`flags` make hvdlite-run use it. A context manager: afterwards no daemon is left."""

    def __init__(self, hosts):
        reason = missing()
        if reason is not None:
            pytest.skip(reason)
        self._hosts = hosts
        folder = Path(hosts.folder)
        for name, text in (("sshd_config", _SSHD), ("ssh_config", _SSH)):
            (folder / name).write_text(text.format(folder=folder))
        for name in ("host_key", "key"):
            if not (folder / name).exists():
                words = ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(folder / name)]
                subprocess.run(words, check=True, timeout=SECONDS)
        self.flags = ("--ssh-opt", f"-F {folder / 'ssh_config'}")
        self._daemons = {}

    def start(self, number, hide=""):
        """The daemon of a host. hide: a folder that is empty for who comes by ssh."""
        config = os.path.join(self._hosts.folder, "sshd_config")
        words = ["unshare", "-m", "sh", "-c", _START, "sh", _program(), config, str(hide)]
        quiet = {"stdin": subprocess.DEVNULL, "stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
        self._daemons[number] = self._hosts.popen(number, words, **quiet)
        until = time.monotonic() + SECONDS
        while not self._hosts.socket_on(number, self._answers):
            assert time.monotonic() < until and self._daemons[number].poll() is None, "sshd did not start"
            time.sleep(0.02)

    @staticmethod
    def _answers():
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", 22), timeout=SECONDS):
            return True
        return False

    def stop(self, number):
        """Ends the daemon of a host: ssh is refused there. Sessions go on."""
        end(self._daemons.pop(number))

    def __enter__(self):
        for number in range(self._hosts.count):
            self.start(number)
        return self

    def __exit__(self, *_):
        for number in list(self._daemons):
            self.stop(number)


def inhabitants(hosts, besides=("sshd", "unshare")):
    """{pid: command} of what runs on the hosts, their first processes and these names left out."""
    spaces = {os.readlink(f"/proc/{init}/ns/pid"): init for init in hosts._inits if os.path.exists(f"/proc/{init}/cwd")}
    found = {}
    for pid in filter(str.isdigit, os.listdir("/proc")):
        with contextlib.suppress(OSError):
            init = spaces.get(os.readlink(f"/proc/{pid}/ns/pid"))
            if init is None or int(pid) == init:
                continue
            if Path(f"/proc/{pid}/comm").read_text().strip() not in besides:
                command = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
                if command:  # no zombie
                    found[int(pid)] = f"{NAMES[hosts._inits.index(init)]}: {command}"
    return found


def empty_within(hosts, seconds):
    """Waits until nothing is left on any host; fails the test when that takes longer."""
    until = time.monotonic() + seconds
    while left := inhabitants(hosts):
        assert time.monotonic() < until, f"left after {seconds} s: {left}"
        time.sleep(0.05)
