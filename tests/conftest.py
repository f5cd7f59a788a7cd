"""Which tests run in one process, where several processes of tests run (pytest -n; tests/run does so), and which first.

A module's tests stay together, for its fixtures. So do those that want an MPI, for they sweep what MPIs of killed ranks
leave in /dev/shm; and those that want TensorFlow, which every rank anew is seconds to import. What has to come within a
second is marked `alone`: tests/run has it run when nothing else does.
"""

import functools
import re
from pathlib import Path

import pytest

HERE = Path(__file__).resolve().parent
# The longest.
FIRST = ("mpi", "tensorflow", "test_install", "test_soak", "test_benchmarks")
ALONE = re.compile(r"test_(deaths|chaos|bad_input|lives|store|mpi_lingers|stall\w*)$")


def pytest_configure(config):
    config.addinivalue_line("markers", "alone: has to come within a second, also on two cores")


@functools.cache
def group(file):
    """The name of those that run together."""
    name = Path(file).stem
    if name.startswith(("test_tf_", "test_keras")):
        return "tensorflow"
    return "mpi" if re.search(r"^(import|from) mpis\b", (HERE.parent / file).read_text(), re.MULTILINE) else name


@pytest.hookimpl(tryfirst=True)  # before pytest chooses by marks
def pytest_collection_modifyitems(items):
    for item in items:
        if ALONE.match(item.path.stem):
            item.add_marker("alone")

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
