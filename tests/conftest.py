"""Fixtures of the Python tests: the ranks of a module, and the check that nothing is left behind.

Test modules import `ranks` and other helpers by name, so support/ is on the path. What tests leave behind is looked at
after every module, where it can still be told who did it.
"""

import os
import shutil
import signal
import sys
import time
from pathlib import Path

import pytest

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent
sys.path.remove(str(HERE))  # pytest puts it there; with tests/torch on it, a torch that is not installed would be found
sys.path[:0] = [str(HERE / "support"), str(HERE / "tools")]
os.environ.setdefault("OMP_NUM_THREADS", "1")  # tests run side by side: threads that spin would take each other's time
for number in (signal.SIGINT, signal.SIGHUP):  # nohup and a shell's background ignore them, and jobs would inherit that
    if signal.getsignal(number) is signal.SIG_IGN:
        signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)

import callgraph  # noqa: E402  (after the path is set)
import ranks  # noqa: E402
import warm  # noqa: E402
from hosts import Hosts  # noqa: E402
from hosts_sshd import Sshd  # noqa: E402
from slurm import Slurm  # noqa: E402

pytest_plugins = ("scheduling",)


@pytest.fixture(scope="session")
def symbols():
    """{source: (defined external names, undefined names)} of csrc/, as the C tests build it."""
    if not shutil.which("nm") or not shutil.which("make"):
        pytest.skip("nm and make are needed to look at symbols")
    return callgraph.symbols(
        ROOT, sorted(path for path in (ROOT / "csrc").rglob("*.c") if path.parent.name != "python")
    )


@pytest.fixture(scope="session")
def all_ranks():
    """The ranks that stay from module to module."""
    pools = ranks.Ranks()
    yield pools
    pools.close()
    warm.close()


@pytest.fixture(scope="module")
def ranks_of_module(all_ranks, request):
    """The ranks that `as_ranks` runs bodies on."""
    fresh = getattr(request.module, "FRESH_RANKS", False)
    if fresh:
        all_ranks.close()
    yield all_ranks
    all_ranks.end_module(fresh)


@pytest.fixture(scope="module")
def hosts():
    """Three hosts of the module's own."""
    with Hosts(3) as made:
        yield made


@pytest.fixture(scope="module")
def sshd(hosts):
    """An sshd on each of them."""
    with Sshd(hosts) as made:
        yield made


@pytest.fixture(scope="module")
def slurm():
    """A Slurm on two hosts of its own."""
    with Hosts(2) as made, Slurm(made) as running:
        yield running


@pytest.fixture(scope="module", autouse=True)
def nothing_is_left(all_ranks):
    """No module leaves a file in /dev/shm or a child of this process. Files of jobs that other processes of tests start
    just now are there for a moment."""
    before = set(os.listdir("/dev/shm"))
    yield
    until = time.monotonic() + 5
    left = {name for name in os.listdir("/dev/shm") if "hvd" in name} - before
    while left and time.monotonic() < until:
        time.sleep(0.02)
        left &= set(os.listdir("/dev/shm"))
    assert not left, f"left in /dev/shm: {sorted(left)}"
    children = {int(pid) for pid in Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()}
    left = ranks.gone((children | warm.forked()) - all_ranks.pids())
    assert not left, f"children left: {sorted(left)}"
