"""Several hosts on one machine, for tests: namespaces with their own network, name, processes, /proc and /dev/shm.

    with Hosts(3) as hosts:
        hosts.run(1, ["hostname"])                  # on nodeB
        hosts.rate(1, "1gbit"); hosts.delay(1, 2.0); hosts.loss(1, 5); hosts.cable(1, "down"); hosts.kill(1)

Each host has eth0 with 10.77.0.11, .12, ... and fd77::11, ..., and a docker0 that has the same address on all of them,
as real hosts have it, to lead astray whoever guesses. A switch, a namespace too, holds the bridge between them. The
file system is shared, like NFS; process ids of host n count from (n + 1) * PIDS. Rates are limited by tc's token
bucket, packets lost by nft, delayed by delay.c.

Nothing can be left behind. Namespaces have no names: each lives as long as its first process, which ends when the pipe
from this process does, however this process ends; and with process 1 of a host the kernel kills all others.

It takes root, iproute2 and nftables; `missing` says why it cannot be, for a test to skip with.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import os
import shutil
import signal
import subprocess
import tempfile
import threading
import time
from pathlib import Path

import parts
import pytest

HERE = Path(__file__).resolve().parent
NAMES = [f"node{letter}" for letter in "ABCDEFGH"]
SECONDS = 30.0
PIDS = 100_000
_TOOLS = {"ip": "iproute2", "tc": "iproute2", "nft": "nftables", "unshare": "util-linux", "nsenter": "util-linux"}
_CLONE_NEWNET = 0x40000000

_HOST = """
mount --make-rprivate / && mount -t proc proc /proc && mount -t tmpfs tmpfs /dev/shm && chmod 1777 /dev/shm &&
mount --bind "$2" /etc/hosts && hostname "$1" && echo "$3" > /proc/sys/kernel/ns_last_pid && echo ready || exit 1
while read -r _; do :; done
"""
_SWITCH = "echo ready; while read -r _; do :; done"


@functools.lru_cache(None)
def missing():
    """Why there can be no hosts here, or None. Installs what is missing where it may."""
    if os.geteuid() != 0:
        return "several hosts on one machine need root"
    absent = [tool for tool, package in _TOOLS.items() if parts.debian(tool, package) is None]
    if absent:
        return f"several hosts on one machine need {', '.join(sorted(absent))}"
    tried = subprocess.run(["unshare", "-n", "-u", "-i", "-m", "-p", "--fork", "true"], capture_output=True, text=True)
    return f"no namespaces here: {tried.stderr.strip()}" if tried.returncode else None


needs_hosts = pytest.mark.skipif("__import__('hosts').missing() is not None", reason="no hosts here (hosts.missing)")


def _held(words):
    """A process that lives until its standard input ends, once it has said that it is ready."""
    process = subprocess.Popen(
        words,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        start_new_session=True,
        text=True,
    )
    said = process.stdout.readline()
    if said.strip() != "ready":
        rest = process.communicate(timeout=SECONDS)[0]
        raise RuntimeError(f"{words[:2]} said {said + rest!r}")
    return process


def _children(pid):
    return [int(word) for word in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


class Hosts:
    """`count` hosts on one switch. A context manager: afterwards nothing of them is left."""

    def __init__(self, count):
        reason = missing()
        if reason is not None:
            pytest.skip(reason)
        self.count = count
        self._ends = contextlib.ExitStack()
        self._delays = {}
        with contextlib.ExitStack() as undo:
            undo.callback(self._ends.close)
            self.folder = self._ends.enter_context(tempfile.TemporaryDirectory(prefix="hosts"))
            self._table = os.path.join(self.folder, "hosts")
            lines = ["127.0.0.1 localhost", *(f"{self.ip(n)} {NAMES[n]}" for n in range(count))]
            Path(self._table).write_text("\n".join(lines) + "\n")
            switch = self._ends.enter_context(_ended(_held(["unshare", "-n", "sh", "-c", _SWITCH])))
            self._switch = switch.pid
            self._ip(self._switch, "link add br0 type bridge", "link set br0 up", "link set lo up")
            self._ip(self._switch, "addr add 10.77.0.1/24 dev br0")
            self._inits = [self._start(number) for number in range(count)]
            undo.pop_all()

    @staticmethod
    def ip(number):
        """The address of a host."""
        return f"10.77.0.{11 + number}"

    @staticmethod
    def ip6(number):
        """Its IPv6 address."""
        return f"fd77::{11 + number}"

    def _start(self, number):
        words = ["unshare", "-n", "-u", "-i", "-m", "-p", "--fork", "--kill-child", "sh", "-c", _HOST, "sh"]
        outer = self._ends.enter_context(_ended(_held([*words, NAMES[number], self._table, str((number + 1) * PIDS)])))
        (init,) = _children(outer.pid)
        port, mac = f"sw{number}", f"02:00:0a:4d:00:{number:02x}"
        self._ip(self._switch, f"link add {port} type veth peer name eth0 address {mac} netns {init}")
        self._ip(self._switch, f"link set {port} master br0 up")
        self._ip(
            init,
            "link set lo up",
            f"addr add {self.ip(number)}/24 dev eth0",
            f"addr add {self.ip6(number)}/64 dev eth0 nodad",
            "link set eth0 up",
            "link add docker0 type bridge",
            "addr add 172.17.0.1/16 dev docker0",
            "link set docker0 up",
        )
        return init

    def _in_net(self, pid, *words):
        done = subprocess.run(["nsenter", "-t", str(pid), "-n", "--", *words], capture_output=True, text=True)
        if done.returncode:
            raise RuntimeError(f"{' '.join(words)}: {done.stderr.strip()}")

    def _ip(self, pid, *lines):
        batch = "\n".join(lines)
        words = ["nsenter", "-t", str(pid), "-n", "--", "ip", "-batch", "-"]
        done = subprocess.run(words, input=batch, capture_output=True, text=True)
        if done.returncode:
            raise RuntimeError(f"ip: {batch}: {done.stderr.strip()}")

    def within(self, number, words):
        """The command line that runs `words` on a host. The folder stays the same."""
        return [
            "nsenter",
            "-t",
            str(self._inits[number]),
            "-m",
            "-u",
            "-i",
            "-n",
            "-p",
            f"--wdns={os.getcwd()}",
            *words,
        ]

    def popen(self, number, words, **settings):
        """A process on a host, as subprocess.Popen makes it (its pid is that of nsenter, its parent, outside)."""
        return subprocess.Popen(self.within(number, ["--", *words]), **settings)

    def run(self, number, words, **settings):
        """What a command on a host says. CalledProcessError when it fails."""
        return subprocess.run(
            self.within(number, ["--", *words]), check=True, capture_output=True, text=True, timeout=SECONDS, **settings
        ).stdout

    def socket_on(self, number, make):
        """What `make()` returns, called by a thread that stands in the network of that host (None: of the switch)."""
        made = []

        def enter():
            libc = ctypes.CDLL(None, use_errno=True)
            pid = self._switch if number is None else self._inits[number]
            with open(f"/proc/{pid}/ns/net") as space:
                if libc.setns(space.fileno(), _CLONE_NEWNET):
                    made.append(OSError(ctypes.get_errno(), "setns"))
                    return
            try:
                made.append(make())
            except Exception as error:
                made.append(error)

        thread = threading.Thread(target=enter)
        thread.start()
        thread.join(SECONDS)
        if isinstance(made[0], Exception):
            raise made[0]
        return made[0]

    def rate(self, number, rate):
        """Limits what goes in and out of a host ("1gbit"); None: no limit."""
        for pid, device in ((self._switch, f"sw{number}"), (self._inits[number], "eth0")):
            with contextlib.suppress(RuntimeError):
                self._in_net(pid, "tc", "qdisc", "del", "dev", device, "root")
            if rate is not None:
                bucket = ["tbf", "rate", rate, "burst", "256kb", "latency", "50ms"]
                self._in_net(pid, "tc", "qdisc", "add", "dev", device, "root", *bucket)

    def loss(self, number, percent):
        """Loses so many of the packets that come to a host; 0: none."""
        with contextlib.suppress(RuntimeError):
            self._in_net(self._inits[number], "nft", "delete", "table", "inet", "loss")
        if percent:
            rule = f"iif eth0 numgen random mod 1000 < {int(percent * 10)} drop"
            rules = f"table inet loss {{ chain into {{ type filter hook input priority 0; {rule}; }}; }}"
            self._in_net(self._inits[number], "nft", rules)

    def cable(self, number, state):
        """Pulls ("down") or plugs in ("up") the cable of a host: no reset, no end of file, only silence."""
        self._ip(self._switch, f"link set sw{number} {state}")

    def cut(self, number, other, state=True, ports=()):
        """Drops all that comes to a host from another one, and back; state: False to end that. ports: only what comes
        to or from these."""
        for mine, theirs in ((number, other), (other, number)):
            table = f"cut{theirs}"
            with contextlib.suppress(RuntimeError):
                self._in_net(self._inits[mine], "nft", "delete", "table", "inet", table)
            if state:
                ends = [f"tcp {way}port {port}" for port in ports for way in "sd"] or [""]
                drops = "; ".join(f"ip saddr {self.ip(theirs)} {end} drop" for end in ends)
                rules = f"table inet {table} {{ chain into {{ type filter hook input priority 0; {drops}; }}; }}"
                self._in_net(self._inits[mine], "nft", rules)

    def delay(self, number, milliseconds):
        """Lets what goes in and out of a host arrive so much later, each way; 0: at once."""
        port, inner, outer = f"sw{number}", f"slow{number}", f"late{number}"
        relay = self._delays.pop(number, None)
        if relay is not None:
            relay.close()
            self._ip(self._switch, f"link del {inner}", f"link set {port} master br0")
        if milliseconds:
            program = _delay_program()
            self._ip(
                self._switch,
                f"link set {port} nomaster",
                f"link set {port} promisc on",
                f"link add {inner} type veth peer name {outer}",
                f"link set {inner} promisc on up",
                f"link set {outer} master br0 up",
            )
            words = ["nsenter", "-t", str(self._switch), "-n", "--", program, port, inner, str(milliseconds)]
            self._delays[number] = relay = contextlib.ExitStack()
            relay.enter_context(_ended(_held(words)))
            self._ends.push(relay)

    def kill(self, number):
        """Power off: all processes of the host die at once."""
        os.kill(self._inits[number], signal.SIGKILL)
        until = time.monotonic() + SECONDS
        while os.path.exists(f"/proc/{self._inits[number]}/cwd") and time.monotonic() < until:
            time.sleep(0.01)

    def close(self):
        """Ends all hosts."""
        self._ends.close()

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.close()


@contextlib.contextmanager
def _ended(process):
    """Ends the process that `_held` has started."""
    try:
        yield process
    finally:
        process.stdin.close()
        try:
            process.wait(5)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait(SECONDS)
        process.stdout.close()


@functools.lru_cache(None)
def _delay_program():
    """delay.c, compiled; skips the test where there is no compiler."""
    compiler = shutil.which("gcc") or shutil.which("cc")
    if compiler is None:
        pytest.skip("a delayed cable needs a C compiler")
    folder = HERE.parent / "out" / "hosts"
    folder.mkdir(parents=True, exist_ok=True)
    program = folder / f"delay{os.getpid()}"
    subprocess.run([compiler, "-O2", "-o", str(program), str(HERE / "delay.c")], check=True)
    os.replace(program, folder / "delay")
    return str(folder / "delay")
