"""How many files a process may open: the soft limit is raised as far as a job needs, and the hard one named."""

import resource
import subprocess
import sys

import pytest

ROOM = """
import resource, sys
from hvdlite.system import open_files as _files
resource.setrlimit(resource.RLIMIT_NOFILE, (100, {hard}))
try:
    _files.allow({more}, "rank 3", "for streams to {more} other ranks")
except Exception as error:
    print(type(error).__name__, error)
print(resource.getrlimit(resource.RLIMIT_NOFILE)[0])
"""


def told(more, hard):
    """What a fresh process says that may open 100 files, and raise that to `hard`."""
    if resource.getrlimit(resource.RLIMIT_NOFILE)[1] < hard:
        pytest.skip(f"fewer than {hard} files may be opened here")
    words = [sys.executable, "-c", ROOM.format(more=more, hard=hard)]
    done = subprocess.run(words, capture_output=True, text=True, timeout=60, check=True)
    return done.stdout.splitlines()


def test_the_soft_limit_grows_as_far_as_is_needed():
    (soft,) = told(1000, 4000)
    assert 1256 <= int(soft) <= 1300


def test_spare_files_may_be_fewer_where_the_hard_limit_is_near():
    assert told(900, 1000) == ["1000"]


def test_a_hard_limit_that_is_too_low_is_named_with_the_remedy():
    error, soft = told(1000, 600)
    assert error.startswith("HvdInitError rank 3 may open 600 files") and "for streams to 1000 other ranks" in error
    assert "ulimit -Hn" in error and soft == "100"
