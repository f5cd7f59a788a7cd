"""How hosts are started, with a program in the place of ssh that runs the far side here; and who may report."""

import os
import resource
import socket
import sys
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
from launching import launch

from hvdlite.launcher.agent import rank_environment
from hvdlite.launcher.control import registration
from hvdlite.launcher.starters import ssh, starter
from hvdlite.security import connection_limits, handshake

SECRET = bytes(range(32))
FAR = ("--network-interface", "lo", "-H", "far-away:2")


@pytest.fixture
def stand_in(tmp_path, monkeypatch):
    """`stand_in(script)`: what runs as ssh; $far is the command for the other host, $count how often ssh ran before."""

    def make(script):
        program = tmp_path / "ssh"
        count = f'cd {tmp_path}; count=$(ls | grep -c ran); : > ran$count; cd "$OLDPWD"'
        program.write_text(f"#!/bin/sh\n{count}\nfor far; do :; done\n{script}\n")
        program.chmod(0o755)
        monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")

    return make


def test_a_connection_that_is_refused_is_tried_again_and_a_wrong_key_is_not(stand_in, tmp_path):
    stand_in('[ $count -gt 0 ] || { echo "ssh: connect to host: Connection refused" >&2; exit 255; }; eval "$far"')
    code, out, err = launch(*FAR, "sh", "-c", "echo here $RANK")
    assert code == 0 and out.count("here") == 2 and (tmp_path / "ran1").exists(), err
    stand_in('echo "nobody@far-away: Permission denied (publickey)." >&2; exit 255')
    code, out, err = launch(*FAR, "sh", "-c", "echo here")
    assert code == 255 and not out and "far-away: ssh does not let you in" in err, err
    assert (tmp_path / "ran2").exists() and not (tmp_path / "ran3").exists()
    stand_in('echo "ssh: connect to host: Connection refused" >&2; exit 255')
    code, out, err = launch(*FAR, "sh", "-c", "echo here")
    assert code == 255 and not out and "far-away: ssh was refused" in err, err
    assert (tmp_path / "ran5").exists() and not (tmp_path / "ran6").exists()  # three attempts


def test_at_most_32_sessions_are_under_way_at_once(stand_in, tmp_path):
    """Each says how many have begun when there are 32 and a second has passed; the first one does before any ends."""
    began = f"cd {tmp_path}; : > began.$$; until [ $(ls began.* | wc -l) -ge 32 ]; do sleep 0.2; done; sleep 1"
    stand_in(f'{began}; ls began.* | wc -l > seen.$$; echo "Permission denied (publickey)." >&2; exit 255')
    code, _, err = launch(*FAR[:2], "-H", ",".join(f"far-away-{number}:1" for number in range(36)), "true")
    assert code == 255 and err.count("ssh does not let you in") == 36, err
    assert min(int(seen.read_text()) for seen in tmp_path.glob("seen.*")) == 32
    assert len(list(tmp_path.glob("began.*"))) == 36


def test_another_version_and_a_missing_package_are_told(stand_in):
    older = "s/from hvdlite.launcher import remote/import hvdlite;hvdlite.__version__=repr(9);&/"
    stand_in(f'eval "$(echo "$far" | sed "{older}")"')
    code, out, err = launch(*FAR, "true")
    assert code == 1 and "far-away: has hvdlite 9, this host" in err, err
    stand_in('eval "$(echo "$far" | sed "s/from hvdlite/from hvdlite_not_there/")"')
    code, out, err = launch(*FAR, "true")
    assert code == 1 and "the Python there has no hvdlite: install it" in err, err


def test_words_after_the_job_has_begun_are_shown_with_the_name_of_the_host(stand_in):
    stand_in('(sleep 0.5; echo "a word of the host" >&2) & eval "$far"; code=$?; wait; exit $code')
    code, _, err = launch(*FAR, "sleep", 2)
    assert code == 0 and "far-away: a word of the host" in err, err


BEHIND = """
import os, pty, sys
pid, terminal = pty.fork()
if pid == 0:
    job = os.fork()
    if job == 0:
        os.setpgid(0, 0)
        os.execvp(sys.argv[1], sys.argv[1:])
    os._exit(os.waitstatus_to_exitcode(os.waitpid(job, 0)[1]))
while True:
    try:
        said = os.read(terminal, 4096)
    except OSError:
        break
    os.write(1, said)
sys.exit(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
"""


def test_rank_0_elsewhere_reads_nothing_of_a_terminal_that_is_not_ours(stand_in):
    """In the background of a terminal stdin is at its end at once."""
    stand_in('eval "$far"')
    words = ("--network-interface", "lo", "-H", "far-away:1", "--stdin", 0, "sh", "-c", "wc -l")
    code, out, _ = launch(*words, under=(sys.executable, "-c", BEHIND))
    assert code == 0 and out.strip() == "0", out


def test_what_is_true_of_one_host_only_stays_there():
    kept = {"PATH": "/bin", "HVDLITE_ALGO": "ring", "PMIX": "x", "LANG": "C"}
    stays = dict.fromkeys(
        ["SSH_AUTH_SOCK", "SLURM_PROCID", "OMPI_X", "PMI_RANK", "DISPLAY", "CUDA_VISIBLE_DEVICES"], "1"
    )
    stays["BASH_FUNC_module%%"] = "() { :; }"
    assert rank_environment.forwarded({**kept, **stays}) == kept
    assert rank_environment.forwarded({**kept, **stays}, also=["DISPLAY"]) == {**kept, "DISPLAY": "1"}


def test_errors_of_ssh_have_remedies():
    way = ssh.Ssh(2222, "key", ["-o A=b"])
    (session,) = way.sessions([(3, "a")])
    words = session.words[: session.words.index("--")]
    assert session.hosts == [3] and words[-4:] == ["-p", "2222", "-i", "key"]
    assert words[:4] == ["ssh", "-T", "-o", "A=b"]  # the first that ssh is told counts
    assert {"BatchMode=yes", "ConnectTimeout=10", "ServerAliveInterval=5", "ServerAliveCountMax=2"} < set(words)
    assert "StrictHostKeyChecking=accept-new" in words and not any("UserKnownHosts" in word for word in words)
    assert session.words[-1].startswith("exec ") and starter.BOOT.split(";")[0] in session.words[-1]
    assert way.again(255, "kex_exchange_identification: read: Connection reset by peer")
    assert not way.again(255, "Host key verification failed.") and not way.again(1, "Connection refused")
    assert "ssh host key" in way.remedy("a", 255, "Host key verification failed.")
    assert way.remedy("a", 7, "").endswith("code 7 and said nothing")


def _proved(place, sock):
    """The session of a connection after the handshake."""
    me = handshake.Connector(SECRET, handshake.REPORT, handshake.ends_of(sock, connects=True))
    sock.sendall(me.answer(_until(place, lambda: sock.recv(handshake.GREETING_BYTES))))
    return me.session(_until(place, lambda: sock.recv(handshake.VERDICT_BYTES)))


def test_only_who_proves_the_secret_reports():
    place = registration.Registration(SECRET, "127.0.0.1")
    try:
        noise = socket.create_connection(place.address)
        noise.sendall(b"GET / HTTP/1.0\r\n\r\n" * 8)
        silent = socket.create_connection(place.address)
        talker = socket.create_connection(place.address)
        talker.sendall(_proved(place, talker).pack(registration.HELLO, b"x" * (registration.HELLO_MAX + 1)))  # too long
        known = socket.create_connection(place.address)
        known.sendall(_proved(place, known).pack(registration.HELLO, b'{"host": 4}'))
        arrivals = []
        end = time.monotonic() + 20
        while not arrivals:
            arrivals = place.turn()
            assert time.monotonic() < end
        assert [arrival.hello for arrival in arrivals] == [{"host": 4}]
        arrivals[0].sock.close()
        for sock in (noise, silent, talker, known):
            sock.close()
    finally:
        place.close()


def test_strangers_are_dropped_by_time_and_number(monkeypatch):
    monkeypatch.setattr(connection_limits, "STRANGERS_MAX", 3)
    place = registration.Registration(SECRET, "127.0.0.1")
    try:
        crowd = []
        for _ in range(5):
            crowd.append(socket.create_connection(place.address))
            greeting = _until(place, lambda: crowd[-1].recv(handshake.GREETING_BYTES))
            assert len(greeting) == handshake.GREETING_BYTES
        assert [_until(place, lambda one=one: one.recv(1)) for one in crowd[:2]] == [b"", b""]  # the oldest make room
        assert len(place._strangers) == 3
        for stranger in place._strangers:
            assert 0 < stranger.deadline - time.monotonic() <= 5.0
            stranger.deadline = time.monotonic()
        place.turn()
        assert not place._strangers and [one.recv(1) for one in crowd[2:]] == [b""] * 3
        for one in crowd:
            one.close()
    finally:
        place.close()


def test_without_descriptors_nothing_spins_and_a_stranger_makes_room():
    place = registration.Registration(SECRET, "127.0.0.1")
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        first, second = (socket.create_connection(place.address) for _ in range(2))
        resource.setrlimit(resource.RLIMIT_NOFILE, (first.fileno(), hard))  # below what is open: no more can be
        began, turns = time.monotonic(), 0
        while time.monotonic() < began + 1:
            assert place.turn() == []
            turns += 1
        assert turns <= 21 and not place._strangers
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        for each in (first, second):
            assert len(_until(place, lambda one=each: one.recv(handshake.GREETING_BYTES))) == handshake.GREETING_BYTES
            each.close()
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        place.close()


def _until(place, receive):
    """What `receive`, which may wait, gives while `place` turns."""
    with ThreadPoolExecutor(1) as pool:
        got = pool.submit(receive)
        end = time.monotonic() + 20
        while not got.done() and time.monotonic() < end:
            place.turn()
        return got.result(0)
