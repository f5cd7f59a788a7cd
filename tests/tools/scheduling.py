"""Scheduling of Python tests: which run in one process of several (pytest -n; tests/run does so), and which first.

A module's tests stay together, for its fixtures. Modules that start a Slurm stay together, as there is one at a time;
so do those whose ranks import TensorFlow, which takes seconds of a core in each process of tests. What is slow is
marked `long` (long.py has the reasons); `tests/run everything` runs it.
"""

import functools
import re
from pathlib import Path

import durations
import long
import pytest

ROOT = Path(__file__).resolve().parents[2]
# The longest, so that none of them runs by itself at the end.
FIRST = ["tensorflow", "slurm", "test_interrupted", "test_hosts_collectives", "test_launcher_mpi", "test_mpi_init"]
FIRST += ["test_mpi_hosts", "test_lifecycle", "test_mpi_votes", "test_stall", "test_soak", "test_launcher_rendezvous"]
FIRST += ["test_hosts_endings", "test_install", "test_hosts_hier", "test_deaths"]


def pytest_configure(config):
    config.addinivalue_line("markers", "long: slow by nature, not in the check of a commit")
    if not hasattr(config, "workerinput"):  # a process of pytest-xdist
        config.pluginmanager.register(durations.Durations(durations.OUT / "seconds.json"))


@functools.cache
def group(file):
    """The name of those that run together."""
    name, text = Path(file).stem, (ROOT / file).read_text()
    if re.search(r"^(import|from) slurm\b", text, re.MULTILINE):
        return "slurm"
    is_of_ranks = "as_ranks" in text and re.search("tensorflow|keras", text)
    return "tensorflow" if is_of_ranks or name.startswith(("test_tf_", "test_keras", "test_as_horovod")) else name


@pytest.hookimpl(tryfirst=True)  # before pytest chooses by marks
def pytest_collection_modifyitems(items):
    for item in items:
        if long.why(item.path.stem, item.name):
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
