"""--preload: a rank that is a fork of the process with the framework cannot be told from one that is executed.

A small agent starts the same ranks in both ways and reports their ends and their output, which must be equal. Jobs of
the launcher itself show what becomes of an import that fails or lasts, and one imports PyTorch.
"""

import json
import os
import signal
import subprocess
import sys
import time

import pytest
from launching import Launch, launch

from hvdlite.launcher.agent import preload

AGENT = """
import json, os, selectors, sys
from hvdlite.launcher.agent import preload, process

order = json.loads(sys.argv[1])
process.become_subreaper()
selector = selectors.DefaultSelector()
ranks, null = {}, os.open(os.devnull, os.O_RDWR)

def start_ranks(start):
    for each in order["ranks"]:
        ends = [os.pipe(), os.pipe()]
        environ = {**order["environ"], **each["environ"]}
        pid = start(order["command"], environ, order["cwd"], (null, *(end for _, end in ends)))
        ranks[pid] = [start.__name__, *(read for read, _ in ends)]
        for _, end in ends:
            os.close(end)

preload.Preload(selector).begin(order, -1, start_ranks)
while not ranks:
    for key, _ in selector.select():
        key.data()
for pid, (how, *pipes) in ranks.items():
    texts = [open(pipe).read().replace(str(pid), "PID") for pipe in pipes]
    print(json.dumps([how, process.exit_code(os.waitpid(pid, 0)[1]), *texts]))
"""
FACTS = """
'''Text.'''
import atexit, fake, inspect, json, os, pickle, signal, sys, threading, time
import __main__

class Mine:
    pass

def stream(s):
    kind = [s.encoding, s.errors, s.line_buffering, s.write_through, s.name, s.mode]
    return [*kind, s.seekable(), s.isatty(), s.fileno()]

facts = {
    "main": [sorted(vars(__main__)), __name__, __doc__, __file__, __spec__, str(type(__loader__)), str(__builtins__)],
    "sys": [sys.argv, sys.path, sys.orig_argv, sys.executable, str(sys.flags), sys.excepthook is sys.__excepthook__],
    "signals": [str(signal.getsignal(number)) for number in sorted(signal.valid_signals())],
    "streams": [*map(stream, (sys.stdin, sys.stdout, sys.stderr)), sys.stdout is sys.__stdout__],
    "descriptors": sorted(os.listdir("/proc/self/fd")),
    "process": [os.getcwd(), os.getsid(0) == os.getpid(), open("/proc/self/comm").read()],
    "environ": sorted(os.environ.items()),
    "threads": [threading.current_thread() is threading.main_thread(), threading.active_count()],
    "code": [inspect.currentframe().f_code.co_filename, inspect.getsource(Mine)],
    "pickle": type(pickle.loads(pickle.dumps(Mine()))) is Mine,
}
print(json.dumps(facts))
atexit.register(print, "at exit", flush=True)
threading.Thread(target=lambda: (time.sleep(0.1), print("thread"))).start()
"""
ENDS = """
import multiprocessing, os, signal, sys
import fake

def square(x):
    return x * x

def spawn():
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        print(pool.map(square, [1, 2, 3]))

def hook(kind, error, trace):
    print("own hook", kind.__name__, trace.tb_frame.f_code.co_name)

if __name__ == "__main__":
    exec(os.environ["END"])
"""
ENDINGS = (
    "sys.exit(3)",
    "sys.exit('text')",
    "1 / 0",
    "raise KeyboardInterrupt",
    "os.kill(os.getpid(), signal.SIGTERM)",
    "os._exit(7)",
    "sys.excepthook = hook; 1 / 0",
    "spawn()",
)
FAKE = "import sys\nprint('imported', flush=True)\nprint('warning', file=sys.stderr)\n"


def order_of(folder, script, *environs, names="fake", words=()):
    """For ranks that run this text, with these variables each."""
    (folder / "fake.py").exists() or (folder / "fake.py").write_text(FAKE)
    (folder / "script.py").write_text(script)
    environ = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "HVDLITE_PRELOAD": names}
    environ.pop("PYTHONUNBUFFERED", None)
    ranks = [{"rank": rank, "environ": environ} for rank, environ in enumerate(environs)]
    command = [sys.executable, *words, "script.py", "a", "-b"]
    return {"command": command, "cwd": str(folder), "environ": environ, "ranks": ranks, "pty": None, "bind": "none"}


def started(order):
    """([how, exit code, stdout, stderr] of each rank), and all of it."""
    done = subprocess.run([sys.executable, "-c", AGENT, json.dumps(order)], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


def both_ways(folder, script, *environs, **settings):
    """What ranks that are forked and ranks that are executed say, which must be the same. The former are returned."""
    forked = started(order_of(folder, script, *environs, **settings))
    assert [how for how, *_ in forked] == ["fork"] * len(environs)
    executed = started({**order_of(folder, script, *environs, **settings), "pty": (24, 80)})
    assert [how for how, *_ in executed] == ["start"] * len(environs)
    for (_, *one), (_, *other) in zip(forked, executed):
        assert one == other
    return [each for _, *each in forked]


@pytest.mark.parametrize("words", [(), ("-u",)])
def test_a_forked_rank_finds_what_an_executed_one_finds(tmp_path, words):
    for code, out, err in both_ways(tmp_path, FACTS, {"RANK": "0"}, {"RANK": "1"}, words=words):
        assert (code, err) == (0, "warning\n")
        assert out.startswith("imported\n") and out.endswith("thread\nat exit\n")


def test_a_forked_rank_ends_as_an_executed_one(tmp_path):
    ends = both_ways(tmp_path, ENDS, *({"END": end} for end in ENDINGS))
    codes = [3, 1, 1, -signal.SIGINT, -signal.SIGTERM, 7, 1, 0]
    assert [code for code, *_ in ends] == codes
    assert "fork_server" not in str(ends)
    assert ends[-1][1].endswith("\n[1, 4, 9]\n")


def test_random_numbers_differ(tmp_path):
    (tmp_path / "fake.py").write_text("import numpy.random")
    script = "import multiprocessing as m, numpy, random, fake\n"
    script += "print(random.random(), numpy.random.rand(), m.current_process().authkey)"
    one, other = (out for _, _, out, _ in started(order_of(tmp_path, script, {}, {}, names="fake,multiprocessing")))
    assert not set(one.split()) & set(other.split())


@pytest.mark.parametrize(
    "module",
    [
        "import nothing_like_it",
        "import os; os._exit(0)",
        "import threading, time; threading.Thread(target=time.sleep, args=(60,), daemon=True).start()",
        "import sys; sys.settrace(lambda *_: None)",
        "import json; open(__file__.replace('fake', 'json'), 'w')",
    ],
)
def test_what_must_not_be_forked_is_executed(tmp_path, module):
    (tmp_path / "fake.py").write_text(module)
    assert started(order_of(tmp_path, "print('runs')", {}, {})) == [["start", 0, "runs\n", ""]] * 2


@pytest.mark.parametrize(
    "script, wanted",
    [
        ("'''Text'''\nimport os, sys\nimport torch\n", "torch"),
        ("from __future__ import annotations\nfrom torch.utils.data import DataLoader\n", "torch"),
        ("import hvdlite.torch as hvd", "torch"),
        ("from hvdlite import torch as hvd", "torch"),
        ("import tensorflow as tf\nimport torch", ""),
        ("import os\nos.environ['OMP_NUM_THREADS'] = '4'\nimport torch\n", ""),
        ("from .a import torch", ""),
        ("import torch2", ""),
        ("def f():\n    import torch", ""),
        ("import torch\n1 +", ""),
    ],
)
def test_torch_is_preloaded_for_scripts_that_import_it_first(tmp_path, script, wanted):
    assert preload._wanted(order_of(tmp_path, script, {}, {}, names="auto")) == wanted


def test_what_python_prints_at_its_start_is_not_taken_for_an_import(tmp_path):
    (tmp_path / "sitecustomize.py").write_text("print('1', flush=True)")
    (tmp_path / "script.py").write_text("print('ran')")
    environ = {"PYTHONPATH": str(tmp_path), "HVDLITE_PRELOAD": "json"}
    code, out, _ = launch("-np", 2, sys.executable, tmp_path / "script.py", cold=True, **environ)
    assert code == 0 and out.count("ran") == 2 and out.count("stdout>:1") == 2, out


def test_a_module_beside_the_script_is_not_pythons_own(tmp_path):
    (tmp_path / "code.py").write_text("import os")
    assert preload._wanted(order_of(tmp_path, "import code\nimport torch", {}, {}, names="auto")) == ""
    assert preload._wanted(order_of(tmp_path, "import cmd\nimport torch", {}, {}, names="auto")) == "torch"


def test_other_commands_are_executed(tmp_path):
    order = order_of(tmp_path, "import torch", {}, {}, names="torch")
    (tmp_path / "python").write_text("#!/bin/sh\n")
    (tmp_path / "python").chmod(0o755)
    python, environ = sys.executable, order["environ"]
    assert preload._wanted(order) == "torch"
    assert preload._wanted({**order, "command": [os.path.basename(python), "script.py"]}) == "torch"
    for words in (
        ["./python", "script.py"],
        [python, "-m", "script"],
        [python, "-c", "1"],
        [python],
        [python, "no.py"],
    ):
        assert preload._wanted({**order, "command": words}) == "", words
    for other in ({"bind": "core"}, {"pty": (24, 80)}, {"ranks": order["ranks"][:1]}):
        assert preload._wanted({**order, **other}) == "", other
    assert preload._wanted({**order, "environ": {**environ, "HVDLITE_PRELOAD": "off"}}) == ""


@pytest.mark.parametrize("end", [signal.SIGTERM, signal.SIGKILL])
def test_an_import_that_lasts_holds_up_no_end(tmp_path, end):
    (tmp_path / "fake.py").write_text(f"import time\nopen({str(tmp_path / 'begun')!r}, 'w')\ntime.sleep(60)")
    (tmp_path / "script.py").write_text("import fake")
    with Launch("-np", 2, "--preload", "fake", sys.executable, tmp_path / "script.py", cold=True) as job:
        while not (tmp_path / "begun").exists():
            time.sleep(0.01)
        began = time.monotonic()
        job.send(end)
        assert job.wait() == (143 if end == signal.SIGTERM else -end)
        job.until_gone()
        assert time.monotonic() < began + 30


def test_ranks_report_an_import_that_fails(tmp_path):
    (tmp_path / "fake.py").write_text("import nothing_like_it")
    (tmp_path / "script.py").write_text("import fake")
    code, _, err = launch("-np", 2, "--preload", "fake", sys.executable, tmp_path / "script.py", cold=True)
    assert code == 1
    assert "No module named 'nothing_like_it'" in err and "fork_server" not in err


TORCH = """
import os, sys
import torch
import hvdlite.torch as hvd

if __name__ == "__main__":
    hvd.init()
    seed = torch.initial_seed()
    x = torch.ones(3, requires_grad=True)
    (x * (hvd.rank() + 1)).sum().backward()
    data = torch.utils.data.DataLoader(torch.arange(4), num_workers=1)
    seeds = hvd.allgather_object(seed)
    assert len(set(seeds)) == hvd.size()
    forked = "fork_server.py" in open("/proc/self/cmdline").read()
    print(forked, hvd.allreduce(x.grad, op=hvd.Sum).tolist(), sum(map(int, data)), torch.get_num_threads())
"""


def test_torch_is_imported_once(tmp_path):
    (tmp_path / "script.py").write_text(TORCH)
    words = ("--preload", "auto", sys.executable, tmp_path / "script.py")
    code, out, err = launch("-np", 2, *words, cold=True)
    line = "True [3.0, 3.0, 3.0] 6 1"
    assert (code, sorted(out.splitlines())) == (0, [f"[0]<stdout>:{line}", f"[1]<stdout>:{line}"]), err
