"""Where ranks share memory: memfds need no /dev/shm; where /dev/shm is forced and too small, the error says so."""

from __future__ import annotations

import subprocess
import sys

import pytest

SUM = """
import numpy, hvdlite as hvd
hvd.init()
big = hvd.allreduce(numpy.full(1 << 20, hvd.rank() + 1.0, dtype=numpy.float32), op=hvd.Sum)
assert big[0] == big[-1] == hvd.size() * (hvd.size() + 1) / 2
print("summed", flush=True)
"""


def run_with_dev_shm(size: str, *environment: str) -> subprocess.CompletedProcess[str]:
    """Two ranks in a mount namespace whose /dev/shm has `size`."""
    launch = ["env", *environment, sys.executable, "-m", "hvdlite.launcher", "-np", "2", sys.executable, "-c", SUM]
    mount = f'mount -t tmpfs -o size={size} tmpfs /dev/shm && exec "$@"'
    return subprocess.run(
        ["unshare", "--mount", "sh", "-c", mount, "sh", *launch], capture_output=True, text=True, timeout=60
    )


@pytest.fixture(scope="module", autouse=True)
def mount_namespaces() -> None:
    probe = subprocess.run(
        ["unshare", "--mount", "sh", "-c", "mount -t tmpfs -o size=1m tmpfs /dev/shm"], capture_output=True, text=True
    )
    if probe.returncode:
        pytest.skip(f"no mount namespace is to be had here: {probe.stderr.strip()}")


def test_a_dev_shm_of_one_megabyte_is_enough() -> None:
    done = run_with_dev_shm("1m")
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("summed") == 2


def test_dev_shm_serves_where_it_is_forced_and_large_enough() -> None:
    done = run_with_dev_shm("64m", "HVDLITE_SHARED_MEMORY=dev_shm")
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("summed") == 2


def test_a_forced_dev_shm_that_is_too_small_is_an_error_that_says_how_much_is_needed() -> None:
    done = run_with_dev_shm("1m", "HVDLITE_SHARED_MEMORY=dev_shm")
    assert done.returncode != 0
    assert "/dev/shm is too small" in done.stderr
    assert "MB more" in done.stderr and "--shm-size" in done.stderr


def test_too_few_descriptors_are_named_with_the_limit_that_is_needed() -> None:
    launch = [sys.executable, "-m", "hvdlite.launcher", "-np", "16", "sh", "-c", 'ulimit -n 40; exec "$@"', "sh"]
    done = subprocess.run([*launch, sys.executable, "-c", SUM], capture_output=True, text=True, timeout=100)
    assert done.returncode != 0
    assert "ulimit -n" in done.stderr


def test_a_wrong_value_names_variable_and_value() -> None:
    done = run_with_dev_shm("1m", "HVDLITE_SHARED_MEMORY=tape")
    assert done.returncode != 0
    assert "HVDLITE_SHARED_MEMORY" in done.stderr and "tape" in done.stderr
