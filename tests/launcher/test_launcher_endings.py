"""How ranks and what they start may end, in real jobs: exit handlers, processes left behind. The table of times is in
test_launcher_ending.py."""

import re
import subprocess
import sys

import pytest
from launching import Launch, launch
from ranks import everything

PYTHON = (sys.executable, "-u", "-c")

LEAVES = """
import atexit, os, signal, sys, threading, time
folder, leaves, fails = sys.argv[1:]
rank = int(os.environ["RANK"])
def wait(name):
    until = time.monotonic() + 9
    while not os.path.exists(f"{folder}/{name}") and time.monotonic() < until: time.sleep(0.01)
def write(name):
    open(f"{folder}/{name}", "w").close()
def upload():
    write("leaves")
    wait("stopped")  # by then SIGTERM has gone out
    write("uploaded")
if rank == 0:
    atexit.register(upload)  # before init, so it runs after hvdlite has left
import numpy as np
import hvdlite as hvd
hvd.init()
hvd.barrier()
if rank == 0:
    exec(leaves)
elif rank == 1:
    wait("leaves")
    exec(fails)
else:
    signal.signal(signal.SIGTERM, lambda *_: (write("stopped"), os._exit(9)))
    while True: time.sleep(0.01)
"""
LAST = "atexit.unregister(upload); atexit.register(upload)"  # after init: it runs before hvdlite has left
WAYS = [
    ("sys.exit(0)", "raise ValueError('mine')", 1, "raised ValueError: mine"),
    ("hvd.shutdown(); upload(); atexit.unregister(upload)", "os.kill(os.getpid(), 9)", 137, "killed by SIGKILL"),
    ("", "hvd.allreduce(np.ones(3))", 1, "exited with code 1: rank 0 left the job"),
    (LAST, "raise ValueError('mine')", 1, "raised ValueError: mine"),
    *everything(
        ("", "sys.exit(3)", 3, "called sys.exit(3)"),
        ("threading.Thread(target=time.sleep, args=[99], daemon=True).start()", "os._exit(4)", 4, "exited with code 4"),
    ),
]


@pytest.mark.parametrize(("leaves", "fails", "code", "says"), WAYS)
def test_a_rank_that_has_left_may_finish_its_exit_handlers(leaves, fails, code, says, tmp_path):
    words = ("-np", 3, "--failure-grace", 0.1, "--term-grace", 0.1, *PYTHON, LEAVES, tmp_path, leaves, fails)
    ended, _, err = launch(*words)
    assert ended == code and (tmp_path / "uploaded").exists(), err
    last = [line for line in err.splitlines() if line.startswith("hvdlite-run: rank")]
    assert len(last) == 1 and re.match(rf"hvdlite-run: rank 1 \(pid \d+\) .*{re.escape(says)}", last[0]), err


@pytest.mark.parametrize("leaves", ["nohup sleep 600 >&- 2>&- &", "(sh -c 'sleep 600; :' &) &"])
def test_a_process_that_ends_with_its_rank_is_named_first(leaves):
    with Launch("-np", 2, "sh", "-c", f"[ $RANK = 1 ] && {{ {leaves} }}; setsid true & exit 0") as job:
        code = job.wait()
        job.until_gone()  # `true` has its own session, so the job does not end it
    err = job.err
    told = (
        r"hvdlite-run: ranks have ended and left processes running, which hvdlite-run ends: pid \d+ \((.*)\) of rank 1;"
    )
    assert code == 0 and "sleep 600" in re.match(told, err)[1] and err.count("pid") == 1, err


WRAPPED = [
    (("timeout", "60"), b"data\n", True),
    (("nice", "timeout", "60"), b"", False),
    (("sh", "-ec", '"$0" "$@"; exit $?'), b"data\n", True),
    (("sh", "-c", 'read line; "$0" "$@"; exit $?'), b"data\nmore\n", False),
    (("sh", "{job}"), b"data\n", True),
    (("sh", "{loop}"), b"data\nmore\n", False),
    (("sh", "-s"), b"RUN -np 1 true\nexit 0\n", False),
]


@pytest.mark.parametrize(("wrapper", "data", "told"), WRAPPED)
def test_data_that_no_rank_has_read_is_told_behind_wrappers_too(wrapper, data, told, tmp_path):
    (tmp_path / "job").write_text('"$@"\nexit $?\n')
    (tmp_path / "loop").write_text('while read -r line; do "$@"; exit $?; done\n')
    under = [word.format(job=tmp_path / "job", loop=tmp_path / "loop") for word in wrapper]
    words = () if "-s" in wrapper else ("-np", 1, "true")
    with Launch(*words, stdin=subprocess.PIPE, under=under, cold=True) as job:
        job.process.stdin.write(data.replace(b"RUN", b'"$@"'))
        job.process.stdin.close()
        assert job.wait() == 0 and ("HVD703" in job.err) == told, job.err


def test_what_stands_on_the_screen_is_not_shown_again(tmp_path):
    """Errors without a traceback, of ranks that write side by side."""
    (tmp_path / "wrong.py").write_text("def f(:\n")
    code, _, err = launch("-np", 2, sys.executable, tmp_path / "wrong.py", cold=True)
    assert code == 1 and err.count("def f(:") == 2, err
