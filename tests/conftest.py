"""Which tests run in one process, where several processes of tests run (pytest -n; tests/run does so), and which first.

A module's tests stay together, for its fixtures. So do those that want an MPI, for they sweep what MPIs of killed ranks
leave in /dev/shm. What is slow by nature is marked `long` (steps.py has the reasons); `tests/run everything` runs it.
"""

import functools
import re
import shutil
from pathlib import Path

import callgraph
import durations
import pytest
from steps import LONG

HERE = Path(__file__).resolve().parent
# The longest.
FIRST = ("mpi", "test_install", "test_soak", "test_benchmarks")


def pytest_configure(config):
    config.addinivalue_line("markers", "long: slow by nature, not in the check of a commit")
    if not hasattr(config, "workerinput"):  # a process of pytest-xdist
        config.pluginmanager.register(durations.Durations(durations.OUT / "seconds.json"))


@pytest.fixture(scope="session")
def symbols():
    """{source: (defined external names, undefined names)} of csrc/, as the C tests build it."""
    if not shutil.which("nm") or not shutil.which("make"):
        pytest.skip("nm and make are needed to look at symbols")
    return callgraph.symbols(HERE.parent, sorted((HERE.parent / "csrc").rglob("*.c")))


@functools.cache
def group(file):
    """The name of those that run together."""
    name = Path(file).stem
    return "mpi" if re.search(r"^(import|from) mpis\b", (HERE.parent / file).read_text(), re.MULTILINE) else name


@pytest.hookimpl(tryfirst=True)  # before pytest chooses by marks
def pytest_collection_modifyitems(items):
    for item in items:
        if LONG.get(item.path.stem) or LONG.get(f"{item.path.stem}::{item.name.split('[')[0]}"):
            item.add_marker("long")

    def place(item):
        found = group(item.nodeid.split("::")[0])
        return FIRST.index(found) if found in FIRST else len(FIRST)

    items.sort(key=place)


@pytest.hookimpl(optionalhook=True)  # without pytest-xdist there is no such hook
def pytest_xdist_make_scheduler(config, log):
    from xdist.scheduler import LoadScopeScheduling

    class Together(LoadScopeScheduling):
        def _split_scope(self, nodeid):
            return group(nodeid.split("::")[0])

    return Together(config, log)
