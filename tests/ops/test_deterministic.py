"""HVDLITE_DETERMINISTIC=1 on every plane: other timing, other order and other buckets, and not one other bit.

Each job does its work in two lives (determined.py): threads and gradient hooks pause at random, tensors are submitted
in a random order and cut into other buckets, and a library between the core and the kernel (jitter.c) makes calls of
the engine late and cuts sends and receives short. The bits of both lives, of all ranks and of all planes must be one.
That they could be others, the last test shows.
"""

import re
import shutil
import subprocess
import sys
from importlib.util import find_spec

import mpis
import pytest
from ranks import HERE, Job, everything

PROGRAM = HERE / "determined.py"
SECONDS = 400
bits_of = {}  # by number of ranks: all planes add in rank order


@pytest.fixture(scope="module")
def jitter(tmp_path_factory):
    """The library for LD_PRELOAD."""
    compiler = shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
    if compiler is None:
        pytest.skip("no C compiler")
    library = tmp_path_factory.mktemp("jitter") / "jitter.so"
    words = [compiler, "-O2", "-shared", "-fPIC", "-o", str(library), str(HERE / "jitter.c"), "-ldl"]
    subprocess.run(words, check=True, timeout=60)
    return str(library)


def bits(size, plane, text):
    """What the ranks have said in their lives: one, or the test fails."""
    said = re.findall(rf"plane {plane} bits ([0-9a-f ]+)\.", text)
    assert len(said) == 2 * size, text
    assert len(set(said)) == 1, text
    return said[0]


@pytest.mark.parametrize(
    ("size", "plane", "hosts", "work"),
    [(3, "p2p", 1, ""), (4, "hier", 2, ""), *everything((3, "shm", 1, ""), (3, "p2p", 3, ""), (3, "shm", 1, "train"))],
    ids=str,
)
def test_two_lives_have_the_same_bits(jitter, size, plane, hosts, work):
    if work and (find_spec("torch") is None or find_spec("sklearn") is None):
        work = ""
    command = [sys.executable, str(PROGRAM), str(hosts), *([work] if work else [])]
    settings = {"LD_PRELOAD": jitter, "JITTER_CUT": "1", "JITTER_SEED": "5", "HVDLITE_PLANE": plane}
    with Job(size, ["env", *(f"{name}={value}" for name, value in settings.items()), *command],
             HVDLITE_DETERMINISTIC="1") as job:  # fmt: skip
        assert job.wait(SECONDS) == 0, job.text()
        found = bits(size, plane, job.text())
    assert bits_of.setdefault(size, found.split()[0]) == found.split()[0]


def test_two_lives_over_an_mpi_have_the_same_bits(jitter):
    settings = {"HVDLITE_PLANE": "mpi", "HVDLITE_DETERMINISTIC": "1"}
    code, said = mpis.run("mpich", 3, PROGRAM, "1", seconds=SECONDS, LD_PRELOAD=jitter, **settings)
    assert code == 0, said
    found = bits(3, "mpi", said)
    assert bits_of.setdefault(3, found) == found


def test_without_it_buckets_may_change_bits(jitter):
    """The test above can fail: an algorithm that adds along a ring, which the mode refuses to use."""
    command = ["env", f"LD_PRELOAD={jitter}", sys.executable, str(PROGRAM), "1"]
    with Job(3, command, HVDLITE_PLANE="p2p", HVDLITE_ALGO="ring") as job:
        assert job.wait(SECONDS) == 0, job.text()
        assert len(set(re.findall(r"bits ([0-9a-f]+)\.", job.text()))) == 2, job.text()
    with Job(3, [sys.executable, str(PROGRAM), "1"], HVDLITE_PLANE="p2p", HVDLITE_ALGO="ring",
             HVDLITE_DETERMINISTIC="1") as job:  # fmt: skip
        assert job.wait(SECONDS) != 0 and "ring" in job.text(), job.text()
