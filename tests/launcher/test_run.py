"""hvdlite.run: results by rank, exceptions with the remote traceback, whoever calls, and nothing left of the job."""

import contextlib
import inspect
import io
import os
import re
import signal
import subprocess
import sys
import textwrap
import threading
import time

import launching
import pytest
from ranks import everything
from relaying import turning

import hvdlite
from hvdlite.executors import run
from hvdlite.launcher import function_server

SECONDS = 300
HOROVODS = (
    "func args kwargs num_proc min_num_proc max_num_proc slots reset_limit cooldown_range hosts hostfile "
    "host_discovery_script start_timeout ssh_port ssh_identity_file disable_cache output_filename verbose use_gloo "
    "use_mpi mpi_args network_interface network_interfaces executable np min_np max_np"
)


@pytest.fixture(autouse=True)
def deadline():
    """Calls in this process have one, too."""

    def late(*_):
        raise TimeoutError(f"no end within {SECONDS} s")

    before = signal.signal(signal.SIGALRM, late)
    signal.alarm(SECONDS)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)


def script(*words, **settings):
    """(exit code, stdout, stderr) of a Python that calls run."""
    done = subprocess.run([sys.executable, *words], capture_output=True, text=True, timeout=SECONDS, **settings)
    return done.returncode, done.stdout, done.stderr


def sums(value, *more, scale=1.0):
    import numpy

    import hvdlite.numpy as hvd

    hvd.init()
    summed = hvd.allreduce(numpy.full(4, value, numpy.float32), op=hvd.Sum)
    print("said by", hvd.rank())
    return hvd.rank(), float(summed[0]) * scale, more, os.environ["HVDLITE_SIZE"]


def test_the_signature_is_horovods():
    parameters = inspect.signature(hvdlite.run).parameters
    assert list(parameters) == HOROVODS.split()
    defaults = {name: each.default for name, each in parameters.items() if name != "func"}
    assert defaults.pop("args") == () and defaults.pop("num_proc") == 1 and set(defaults.values()) == {None}


def test_results_come_by_rank_and_output_is_seen(capsys):
    assert hvdlite.run(sums, (2,), {"scale": 0.5}, num_proc=3) == [(rank, 3.0, (), "3") for rank in range(3)]
    said = capsys.readouterr()
    assert sorted(re.findall(r"^\[(\d)\]<stdout>:said by (\d)$", said.out, re.MULTILINE)) == [(r, r) for r in "012"]
    assert hvdlite.run(lambda: os.getpid()) != [os.getpid()]


def test_large_arguments_and_results_arrive_whole():
    import numpy

    given = numpy.arange(3 << 20, dtype=numpy.float64)
    for got in hvdlite.run(lambda array: array[::-1], [given], num_proc=2):
        assert (got == given[::-1]).all()


def test_a_call_from_a_thread_with_a_stdout_that_is_no_file(monkeypatch):
    shown, found = io.StringIO(), []
    monkeypatch.setattr(sys, "stdout", shown)
    thread = threading.Thread(target=lambda: found.append(hvdlite.run(sums, (1, "x"), num_proc=2)))
    thread.start()
    thread.join(SECONDS)
    assert found == [[(0, 2.0, ("x",), "2"), (1, 2.0, ("x",), "2")]]
    assert shown.getvalue().count("said by") == 2


def test_functions_of_an_interpreter_and_of_a_script_travel(tmp_path):
    lines = "import hvdlite\nfactor = 3\ndef f(x):\n    return x * factor\n\n"
    lines += "print('made', hvdlite.run(f, (7,), num_proc=2))\n"
    code, out, err = script("-i", input=lines)
    assert code == 0 and "made [21, 21]" in out, err
    (tmp_path / "beside.py").write_text("def g(x):\n    return x + 1\n")
    path = tmp_path / "script.py"
    path.write_text(f"import beside\n{lines}print(hvdlite.run(beside.g, (1,)))\n")
    code, out, err = script(str(path), cwd="/")
    assert code == 0 and "made [21, 21]" in out and "[2]\n" in out, err


def failing(how):
    import hvdlite.numpy as hvd

    class Odd(Exception):  # cannot be made from its args
        def __init__(self, one, two):
            super().__init__(f"{one} and {two}")

    hvd.init()
    if hvd.rank() == 1:
        if how == "raise":
            raise KeyError("absent")
        if how == "odd":
            raise Odd("salt", "pepper")
        if how == "segfault":
            os.kill(os.getpid(), signal.SIGSEGV)
        if how == "exit":
            sys.exit(37)
        if how == "leave":
            os._exit(0)
        if how == "result":
            return threading.Lock()
    hvd.barrier()


@pytest.mark.parametrize(
    "how, code, cause, says",
    [
        ("raise", 1, KeyError, r"rank 1 \(.+, pid \d+\) raised KeyError: 'absent'\n\nTraceback .*in failing\n"),
        ("result", 1, TypeError, r"rank 1 .* raised TypeError: the result, a lock, cannot be sent"),
        ("segfault", 139, type(None), r"rank 1 \(.+, pid \d+\) ended without an answer; .* code 139, SIGSEGV"),
        *everything(
            ("odd", 1, type(None), r"rank 1 \(.+, pid \d+\) raised Odd: salt and pepper\n\nTraceback "),
            ("exit", None, SystemExit, r"rank 1 \(.+, pid \d+\) raised SystemExit: 37"),
            ("leave", None, type(None), r"rank 1 \(.+, pid \d+\) ended without an answer; the job ended with code \d+"),
        ),
    ],
)
def test_a_failure_names_its_rank_and_has_its_traceback(how, code, cause, says, capsys):
    with pytest.raises(hvdlite.HvdRunError) as caught:
        hvdlite.run(failing, (how,), num_proc=3)
    error = caught.value
    assert error.rank == 1 and isinstance(error, RuntimeError) and type(error.__cause__) is cause
    assert re.match(says, str(error), re.DOTALL), str(error)
    assert "hvdlite/executors/worker.py" not in str(error) or how == "result"
    assert error.exit_code == code or code is None
    said = capsys.readouterr().err
    assert how != "raise" or re.search(r"rank 1 .* raised KeyError: 'absent' \(test_run.py:\d+\)", said), said
    assert "Traceback" not in said, said  # which is in the error


@pytest.mark.parametrize(
    "words, error, says",
    [
        ({"func": 5}, TypeError, "needs a function, not int"),
        ({"args": (threading.Lock(),)}, TypeError, "arguments cannot be sent"),
        ({"num_proc": 0}, ValueError, "num_proc=0"),
        ({"num_proc": 2.0}, ValueError, "num_proc=2.0"),
        ({"hosts": "a:1", "hostfile": "b"}, ValueError, "exclude each other"),
        ({"use_gloo": True, "use_mpi": True}, ValueError, "exclude each other"),
        ({"mpi_args": "-x"}, ValueError, "needs use_mpi"),
        ({"hosts": "a b:c"}, ValueError, "is not a host"),
        ({"hosts": "localhost:1", "num_proc": 2}, ValueError, r"more processes \(2\)"),
        ({"hostfile": "/not/there"}, ValueError, "hostfile /not/there: No such file"),
        ({"hosts": "no-such-host.invalid:2", "num_proc": 2}, ValueError, "no-such-host.invalid"),
    ],
)
def test_what_cannot_be_is_refused_before_anything_starts(words, error, says, monkeypatch):
    monkeypatch.setattr(run._Call, "_attend", None)
    with pytest.raises(error, match=says):
        hvdlite.run(**{"func": sums, **words})


def test_a_job_that_cannot_start_says_what_the_launcher_said():
    with pytest.raises(hvdlite.HvdRunError, match="code 127\nhvdlite-run: /not/python: command not found") as caught:
        hvdlite.run(sums, executable="/not/python")
    assert caught.value.rank is None and caught.value.exit_code == 127


def test_the_old_name_of_num_proc():
    with pytest.warns(DeprecationWarning, match="num_proc"):
        assert len(hvdlite.run(int, np=2)) == 2


def variables():
    return {name: value for name, value in os.environ.items() if name.startswith(("HVDLITE_", "HOROVOD_"))}


def test_ranks_find_what_they_find_under_hvdlite_run():
    own = {"HVDLITE_STORE_PORT", "HVDLITE_SECRET_KEY", "HVDLITE_JOB_ID"}
    (found,) = hvdlite.run(variables)
    code, out, _ = launching.launch("-np", 1, "env")
    expected = dict(re.findall(r"^((?:HVDLITE|HOROVOD)_\w+)=(.*)$", out, re.MULTILINE))
    for name in (
        "HVDLITE_TEST_MARK",
        "HVDLITE_FAILURE_GRACE",
        "HVDLITE_TRACE_DIR",
        "HVDLITE_PRELOAD",
    ):  # of launching.py
        expected.pop(name)
    assert code == 0 and own <= set(found) == set(expected)
    assert {name: found[name] for name in set(found) - own} == {name: expected[name] for name in set(found) - own}


def seen_secrets():
    """Keys of the call that this rank can see, but for those in memory and in /proc/self/environ."""
    shown = b"".join(_words())
    with open("/proc/self/environ", "rb") as file:
        (key,) = re.findall(function_server.KEY.encode() + rb"=([0-9a-f]{64})", file.read())
    return function_server.KEY in os.environ, key in shown, key.decode()


def _words():
    for name in filter(str.isdigit, os.listdir("/proc")):
        with contextlib.suppress(OSError), open(f"/proc/{name}/cmdline", "rb") as file:
            yield file.read()


def test_the_key_of_a_call_is_in_no_argument_list_and_no_environment_that_is_shown(capsys):
    first, second = (hvdlite.run(seen_secrets, verbose=1)[0] for _ in range(2))
    assert first[:2] == second[:2] == (False, False) and first[2] != second[2]
    said = capsys.readouterr()
    assert "HVDLITE_RANK=0" in said.err and first[2] not in said.err + said.out


def test_horovod_run_is_the_same_and_its_ranks_have_the_alias():
    body = """
    import hvdlite.as_horovod, horovod, horovod.runner
    assert horovod.run is horovod.runner.run
    def f():
        import horovod
        return horovod.__version__
    print(horovod.run(f, num_proc=2, use_gloo=True, disable_cache=True))
    """
    code, out, err = script("-c", textwrap.dedent(body))
    assert code == 0 and out == "['0.28.1', '0.28.1']\n", err


HANG = """
import hvdlite, time
def f():
    print("ready", flush=True)
    time.sleep(600)
try:
    hvdlite.run(f, num_proc=2)
except KeyboardInterrupt:
    print("interrupted", flush=True)
"""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_a_caller_that_is_ended_leaves_nothing(number):
    with Caller(HANG) as caller:
        caller.until("ready", 2)
        caller.send(number)
        code = caller.wait(30)
        caller.until_gone()
        assert ("interrupted" in caller.out and code == 0) if number == signal.SIGINT else code == -number


class Caller(launching.Launch):
    """A script in the place of hvdlite-run."""

    def __init__(self, body, **environ):
        launching_run, launching.RUN = launching.RUN, [sys.executable, "-c", body]
        try:
            super().__init__(**environ)
        finally:
            launching.RUN = launching_run


def test_a_desk_serves_only_who_proves_the_key_and_each_rank_once():
    import socket

    from hvdlite.executors import worker
    from hvdlite.launcher.control import registration

    key, call = os.urandom(32), os.urandom(5 << 19)

    def came(rank, with_key=key):
        return registration.report(
            place.address, with_key, {"rank": rank, "pid": 5, "host": "h"}, time.monotonic() + 30
        )

    with turning(function_server.FunctionServer(key, "127.0.0.1", 3, call)) as (place, _):
        noise = socket.create_connection(place.address)
        noise.sendall(os.urandom(4096))
        with pytest.raises(registration.ReportError, match="another secret"):
            came(0, bytes(32))
        links = {rank: came(rank) for rank in (0, 1, 2)}
        for rank in (0, 7, -1, "x", None):  # has come already, or cannot be
            with came(rank)[0] as stranger:
                stranger.settimeout(30)
                assert stranger.recv(1) == b""
        for rank, kind, body in ((1, function_server.RETURNED, b"y" * 3000000), (0, 9, b"")):
            link, session = links[rank]
            link.settimeout(30)
            assert worker._fetched(link, session) == call
            for frame in function_server.frames(session, kind, body):
                link.sendall(frame)
            assert link.recv(1) == b""  # served
            link.close()
        noise.close()
        link, session = links[2]
        link.sendall(next(function_server.frames(session, function_server.RETURNED, b"half"))[:-1])
        link.shutdown(socket.SHUT_WR)
        link.close()
        while len(place.answers) < 3:
            time.sleep(0.01)
    told = [(each.rank, each.kind, len(each.body)) for each in place.answers[:2]]
    assert told == [(1, function_server.RETURNED, 3000000), (0, 0, 0)]
    assert place.answers[2][:2] == (2, 0) and b"the connection ended within frame 1" in place.answers[2].body
    assert place.answers[0].who == "(h, pid 5)"


def test_a_notebook_shows_output_and_gets_results():
    nbclient = pytest.importorskip("nbclient")
    nbformat = pytest.importorskip("nbformat")
    pytest.importorskip("ipykernel")
    cells = (
        "import hvdlite, os\nfactor = 10",
        "def f(x):\n    import hvdlite as hvd\n    hvd.init()\n    print('in', hvd.rank())\n"
        "    return hvd.rank() * factor + x",
        "hvdlite.run(f, (1,), num_proc=2)",
        "def g():\n    raise LookupError('not here')\nhvdlite.run(g, num_proc=2)",
    )
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(cell) for cell in cells])
    nbclient.NotebookClient(notebook, timeout=SECONDS, allow_errors=True).execute()
    shown, failed = notebook.cells[2].outputs, notebook.cells[3].outputs
    assert [each.data["text/plain"] for each in shown if each.output_type == "execute_result"] == ["[1, 11]"]
    said = "".join(each.text for each in shown if each.output_type == "stream" and each.name == "stdout")
    assert sorted(said.splitlines()) == ["[0]<stdout>:in 0", "[1]<stdout>:in 1"]
    (error,) = [each for each in failed if each.output_type == "error"]
    assert error.ename == "HvdRunError" and re.match(r"rank [01] \(.+\) raised LookupError: not here", error.evalue)
