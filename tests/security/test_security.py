"""What is protected: who listens where, what a job's secret is seen in, shared memory, process 1, ordinary users."""

import contextlib
import os
import re
import shutil
import signal
import socket
import stat
import subprocess
import sys
import time
from pathlib import Path

import pytest
from hosts import needs_hosts
from hosts_sshd import empty_within
from launching import RUN, SECONDS, Launch, launch

from hvdlite.errors import HvdInitError
from hvdlite.launcher.control import registration
from hvdlite.launcher.starters import ssh
from hvdlite.rendezvous import standalone_store

MEET = """
import hvdlite.numpy as hvd, numpy, os, sys
hvd.init()
hvd.allreduce(numpy.ones(1 << 18, numpy.float32))
print("met", os.environ["HVDLITE_SECRET_KEY"], flush=True)
sys.stdin.read() if hvd.rank() == 0 else hvd.barrier()
hvd.barrier() if hvd.rank() == 0 else None
"""
LISTEN = "0A"


def listeners(pids):
    """Addresses at which these processes listen for TCP, as text."""
    sockets = set()
    for pid in pids:
        with contextlib.suppress(OSError):
            for link in os.listdir(f"/proc/{pid}/fd"):
                with contextlib.suppress(OSError):
                    sockets.add(os.readlink(f"/proc/{pid}/fd/{link}"))
    found = set()
    for pid in pids:
        for table, family in (("tcp", socket.AF_INET), ("tcp6", socket.AF_INET6)):
            with contextlib.suppress(OSError):
                for row in Path(f"/proc/{pid}/net/{table}").read_text().splitlines()[1:]:
                    words = row.split()
                    if words[3] == LISTEN and f"socket:[{words[9]}]" in sockets:
                        packed = bytes.fromhex(words[1].partition(":")[0])
                        order = b"".join(packed[at : at + 4][::-1] for at in range(0, len(packed), 4))
                        found.add(socket.inet_ntop(family, order))
    return found


def opened(folder):
    """Files below a folder that others than their owner may read."""
    return [path for path in Path(folder).rglob("*") if path.is_file() and path.stat().st_mode & 0o077]


def test_a_job_of_one_host_listens_on_loopback_only():
    with Launch("-np", 2, "--stdin", 0, sys.executable, "-c", MEET, stdin=subprocess.PIPE) as job:
        job.until("met", 2)
        assert listeners([job.pid, *job.left()]) == {"127.0.0.1"}
        job.process.stdin.close()
        assert job.wait() == 0, job.err


@needs_hosts
def test_a_job_of_several_hosts_listens_where_they_meet_only(hosts, sshd):
    script = MEET.replace("sys.stdin.read()", "__import__('time').sleep(600)")
    words = ("-H", "nodeA:1,nodeB:1", *sshd.flags, sys.executable, "-c", script)
    with Launch(*words, under=hosts.within(0, ["--"])) as job:
        job.until("met", 2, seconds=120)
        found = listeners(job.left())
        assert found and found <= {hosts.ip(0), hosts.ip(1), "127.0.0.1"}, found
        job.send(signal.SIGKILL)
    empty_within(hosts, 15)


def test_each_job_has_a_secret_of_its_own_of_256_bits():
    secrets = []
    for _ in range(2):
        code, out, err = launch("-np", 2, "sh", "-c", "echo $HVDLITE_SECRET_KEY")
        found = set(re.findall(r"\b[0-9a-f]{64}\b", out))
        assert code == 0 and len(found) == 1, out + err
        secrets += found
    assert secrets[0] != secrets[1]


def test_the_secret_is_in_no_argument_list_no_log_no_file(tmp_path):
    home = tmp_path / "home"
    home.mkdir()
    words = ("-np", 2, "--stdin", 0, "--verbose", "--output-filename", tmp_path / "out", "-prefix-timestamp")
    script = MEET.replace('print("met", ', 'open(os.environ["TOLD"], "w").write(').replace(
        ", flush=True)", ')\nprint("met")'
    )
    told = tmp_path / "told"
    environ = {"HOME": str(home), "XDG_CACHE_HOME": str(home), "TMPDIR": str(home), "TOLD": str(told)}
    environ["PYTHONUNBUFFERED"] = "1"
    with Launch(*words, sys.executable, "-c", script, stdin=subprocess.PIPE, **environ) as job:
        job.until("]<stdout>:met", 2)  # --verbose says the command
        secret = told.read_text()
        shown = b"".join(Path(f"/proc/{pid}/cmdline").read_bytes() for pid in (job.pid, *job.left()))
        for pid in (job.pid, *job.left()):  # and who may look at the environments
            assert stat.S_IMODE(os.stat(f"/proc/{pid}/environ").st_mode) == 0o400
        job.process.stdin.close()
        assert job.wait() == 0, job.err
    told.unlink()
    assert len(bytes.fromhex(secret)) == 32
    assert secret.encode() not in shown and secret not in job.out + job.err
    for path in tmp_path.rglob("*"):
        assert not path.is_file() or secret.encode() not in path.read_bytes(), path
    assert not opened(home)


def test_a_dry_run_shows_no_secret():
    words = ("--dry-run", "--nnodes", 2, "--node-rank", 0, "--rdzv-endpoint", "127.0.0.1", "--nproc-per-node", 2, "env")
    code, out, err = launch(*words, HVDLITE_SECRET_KEY="5a" * 32)
    assert code == 0 and "HVDLITE_SECRET_KEY" in out and "5a5a" not in out + err, out + err
    assert "other hosts: 1 more join at 127.0.0.1:29400" in out, out
    code, out, err = launch("--dry-run", "-np", 2, "env", HVDLITE_SECRET_KEY="no key")
    assert "no key" not in out + err


def test_a_hosts_report_is_parsed_only_after_its_proof(monkeypatch):
    read = []
    monkeypatch.setattr(registration.json, "loads", lambda text: read.append(text))
    place = registration.Registration(bytes(32), "127.0.0.1")
    try:
        with socket.create_connection(place.address) as stranger:
            stranger.sendall(os.urandom(64) + b"\0\0\0\x0c\x01" + b'{"host": 1}')
            stranger.settimeout(0.05)
            end = time.monotonic() + SECONDS
            heard = None
            while heard != b"":
                assert time.monotonic() < end
                assert place.turn() == []
                with contextlib.suppress(TimeoutError, socket.timeout):
                    try:
                        heard = stranger.recv(4096)
                    except ConnectionResetError:
                        heard = b""
    finally:
        place.close()
    assert not read


def test_a_key_that_others_may_read_is_refused(tmp_path):
    environ = {"XDG_CONFIG_HOME": str(tmp_path)}
    key = standalone_store._secret(environ, 0, one_host=False)
    assert standalone_store._secret(environ, 0, one_host=False) == key and len(key) == 32
    path = tmp_path / "hvdlite" / "key"
    assert stat.S_IMODE(path.stat().st_mode) == 0o600 and not opened(tmp_path)
    for mode in (0o644, 0o620, 0o602):
        path.chmod(mode)
        with pytest.raises(HvdInitError, match="chmod 600"):
            standalone_store._secret(environ, 0, one_host=False)


def test_the_users_own_strictness_wins_over_ours():
    if shutil.which("ssh") is None:
        pytest.skip("there is no ssh here")
    for options, expected in (([], "accept-new"), (["-o StrictHostKeyChecking=yes"], "true")):
        way = ssh.Ssh(options=["-F /dev/null", *options])
        shown = subprocess.run([*way._words, "-G", "--", "a"], capture_output=True, text=True, timeout=SECONDS).stdout
        assert f"stricthostkeychecking {expected}\n" in shown, shown


def test_shared_memory_is_the_owners_and_has_no_name_once_all_have_mapped_it():
    script = """
import hvdlite.numpy as hvd, numpy, os
hvd.init()
hvd.allreduce(numpy.ones(1 << 18, numpy.float32))
hvd.barrier()
lines = [line.strip() for line in open("/proc/self/maps")]
maps = [line for line in lines if " rw-s " in line and ("memfd:hvdlite" in line or "/dev/shm/" in line)]
named = [line for line in maps if not line.endswith("(deleted)")]
modes = []
for fd in os.listdir("/proc/self/fd"):
    link = f"/proc/self/fd/{fd}"
    if os.path.lexists(link) and os.readlink(link).startswith("/dev/shm/"):
        modes.append(os.fstat(int(fd)).st_mode & 0o777)
print("maps", len(maps), "named", named, "open to others", [mode for mode in modes if mode & 0o077], flush=True)
hvd.barrier()
"""
    for kind in ("auto", "dev_shm"):
        code, out, err = launch("-np", 2, sys.executable, "-c", script, HVDLITE_SHARED_MEMORY=kind)
        found = re.findall(r"maps (\d+) named \[\] open to others \[\]", out)
        assert code == 0 and len(found) == 2 and min(map(int, found)) > 0, out + err


@pytest.fixture
def isolated():
    """Words that make a command process 1 of a container."""
    words = ["unshare", "--pid", "--fork", "--mount-proc", "--kill-child"]
    probe = subprocess.run([*words, "true"], capture_output=True, text=True)
    if probe.returncode:
        pytest.skip(f"no namespaces here: {probe.stderr.strip()}")
    return words


def inside(words, *command, **environ):
    done = subprocess.run(
        [*words, *command], capture_output=True, text=True, timeout=SECONDS * 4, env={**os.environ, **environ}
    )
    return done.returncode, done.stdout, done.stderr


ORPHANS = (
    "[ $RANK = 0 ] && { for i in 1 2 3 4 5 6 7 8; do setsid sh -c 'setsid true & exit 0' & done; wait; }; "
    "case \"$(tr '\\0' ' ' </proc/1/cmdline)\" in *hvdlite.launcher*) echo it is;; esac; exit $((RANK * 5))"
)


def test_as_process_1_of_a_container(isolated):
    code, out, err = inside(isolated, *RUN, "-np", "2", sys.executable, "-c", MEET.replace("sys.stdin.read()", "0"))
    assert code == 0 and out.count("met") == 2, out + err
    code, out, err = inside(isolated, *RUN, "-np", "2", "--failure-grace", "20", "sh", "-c", ORPHANS)
    assert code == 5 and out.count(">:it is\n") == 2, out + err
    assert re.search(r"rank 1 \(pid \d+\) exited with code 5", err), err


def test_signals_to_process_1_reach_the_ranks(isolated):
    script = "trap 'echo got it; exit 0' TERM; echo ready; while :; do sleep 0.05; done"
    with Launch("-np", 2, "sh", "-c", script, under=isolated) as job:
        job.until("ready", 2)
        os.kill(job.children()[0], signal.SIGTERM)
        assert job.wait() == 143 and job.out.count("got it") == 2, job.err


def test_orphans_of_a_container_are_reaped_by_process_1(isolated):
    """As in a container whose ranks start daemons that daemons of theirs leave behind."""
    script = (
        "import os, time\n"
        "for _ in range(5):\n"
        "    if os.fork() == 0:\n"
        "        os.setsid()\n"
        "        if os.fork() == 0: os.setsid(); os._exit(0)\n"
        "        os._exit(0)\n"
        "for _ in range(5): os.wait()\n"
        "end = time.monotonic() + 20\n"
        "def zombies():\n"
        "    found = 0\n"
        "    for pid in filter(str.isdigit, os.listdir('/proc')):\n"
        "        try: found += open(f'/proc/{pid}/stat').read().rpartition(')')[2].split()[0] == 'Z'\n"
        "        except OSError: pass\n"
        "    return found\n"
        "while zombies() and time.monotonic() < end: time.sleep(0.01)\n"
        "print('zombies', zombies())\n"
    )
    code, out, err = inside(isolated, *RUN, "-np", "1", sys.executable, "-c", script)
    assert code == 0 and "zombies 0" in out, out + err


SHOW = """
new=$(mktemp -d) && mount --bind "$2" $new && mount -t tmpfs -o mode=755 tmpfs "$1" && mkdir -p "$2" &&
mount --bind $new "$2" && umount $new && rmdir $new && shift 2 && exec "$@"
"""


def ordinary():
    """Words that make a command run as somebody who may nothing; skips where that cannot be, or Python is not his."""
    if os.geteuid() != 0:
        return []
    words = ["setpriv", "--reuid=65534", "--regid=65534", "--clear-groups", "--no-new-privs"]
    words += ["--inh-caps=-all", "--ambient-caps=-all", "--bounding-set=-all"]
    base = Path(sys.base_prefix)
    closed = next((each for each in reversed(base.parents) if not each.stat().st_mode & stat.S_IXOTH), None)
    if closed is not None:  # Python lies in a folder that is root's: shown in a tree of mounts of this test's own
        words = ["unshare", "-m", "sh", "-c", SHOW, "sh", str(closed), str(base), *words]
    code, _, err = inside(words, sys.executable, "-c", "import hvdlite.launcher, numpy")
    if code:
        pytest.skip(f"an ordinary user cannot run this Python: {err.strip().splitlines()[-1:]}")
    return words


def test_as_an_ordinary_user(tmp_path):
    tmp_path.chmod(0o777)
    words, segv = ordinary(), "setsid sleep 600 & kill -SEGV $$"
    environ = {"HOME": str(tmp_path), "TMPDIR": str(tmp_path)}
    script = MEET.replace("sys.stdin.read()", "0")
    code, out, err = inside(words, *RUN, "-np", "2", "--verbose", sys.executable, "-c", script, **environ)
    assert code == 0 and out.count("met") == 2, out + err
    with Launch("-np", 2, "--failure-grace", 0, "sh", "-c", segv, under=words, **environ) as job:
        assert job.wait() == 139 and not job.left(), job.out + job.err
    code, out, err = inside(words, *RUN, "doctor", **environ)
    assert code == 0 and "0 failures" in out, out + err
    body = "import hvdlite, os; print(hvdlite.run(os.geteuid, num_proc=2))"
    code, out, err = inside(words, sys.executable, "-c", body, **environ)
    user = 65534 if words else os.geteuid()
    assert code == 0 and f"[{user}, {user}]" in out, out + err
