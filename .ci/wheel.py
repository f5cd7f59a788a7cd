"""Builds the portable wheel that a release carries, and proves that it is one.

    python .ci/wheel.py                    # for x86-64, into dist/
    python .ci/wheel.py --arch aarch64     # cross-compiled, audited, not run

What a release needs: users without a compiler, on any Linux since 2014, with any Python from 3.9 on. So the extension
is compiled by the zig compiler (a wheel from the package index, no container) against the symbol versions of glibc
2.17: a newer call of the C library fails here, at build time. The wheel is made from the source distribution, so that
one is proved as well; auditwheel must find it consistent with manylinux2014 or older; and every Python found on this
machine installs it into a fresh environment and reduces an array on two ranks. Tools live in .venv-wheel/, which may be
deleted.
"""

import argparse
import os
import re
import resource
import shutil
import subprocess
import sys
import tarfile
import tempfile
import time
import venv
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
TOOLS = ROOT / ".venv-wheel"
GLIBC = (2, 17)  # manylinux2014
SIZE_MAX, SECONDS_MAX = 3 << 19, 60
OLDEST, NEWEST = (3, 9), (3, 14)
PROGRAM = """
import numpy as np, hvdlite as hvd
hvd.init()
result = hvd.allreduce(np.full(1000, hvd.rank() + 1.0), op=hvd.Sum)
assert hvd.size() == 2 and np.all(result == 3.0), (hvd.size(), result)
hvd.shutdown()
"""


def run(*command: object, **options: object) -> str:
    """Standard output of a command; its whole output, and our end, if it fails."""
    done = subprocess.run([str(word) for word in command], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, **options)
    text = done.stdout.decode(errors="replace")
    if done.returncode:
        raise SystemExit(f"{text}\nfailed ({done.returncode}): {' '.join(map(str, command))}")
    return text


def processor_seconds() -> float:
    """Of all children that have ended."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def tools() -> Path:
    """The Python of an environment that holds what building takes."""
    python = TOOLS / "bin/python"
    if not python.exists():
        venv.create(TOOLS, with_pip=True)
    run(python, "-m", "pip", "install", "-q", "setuptools>=77", "wheel", "cffi>=1.16", "ziglang", "auditwheel")
    return python


def build(python: Path, arch: str, into: Path) -> Path:
    """The wheel, compiled from the unpacked source distribution."""
    environment = dict(os.environ)
    compiler = f"{python} -m ziglang cc -target {arch}-linux-gnu.{GLIBC[0]}.{GLIBC[1]}"
    environment.update(
        CC=compiler,
        LDSHARED=f"{compiler} -shared -s",  # Python's own would leave a path of this machine in the extension
        LDFLAGS="",
        CFLAGS="-g0",
        # Python's headers say the same on both 64-bit architectures, so those of this machine serve.
        _PYTHON_HOST_PLATFORM=f"linux-{arch}",
        ZIG_GLOBAL_CACHE_DIR=str(TOOLS / "zig"),
        ZIG_LOCAL_CACHE_DIR=str(TOOLS / "zig"),
    )
    run(python, "setup.py", "-q", "sdist", "-d", into, cwd=ROOT)
    (archive,) = into.glob("*.tar.gz")
    with tarfile.open(archive) as packed:
        packed.extractall(into)
    (source,) = (path for path in into.iterdir() if path.is_dir())
    command = [python, "-m", "pip", "wheel", "-q", "--no-build-isolation", "--no-deps", "-w", into, source]
    run(*command, env=environment)
    (wheel,) = into.glob("*.whl")
    return wheel


def audit(python: Path, wheel: Path, arch: str) -> Path:
    """Check against the policy, then say so in the name; the path of the renamed wheel."""
    text = " ".join(run(python, "-m", "auditwheel", "show", wheel).split())
    found = re.search(rf'consistent with the following platform tag: "manylinux_(\d+)_(\d+)_{arch}"', text)
    if found is None or tuple(map(int, found.groups())) > GLIBC:
        raise SystemExit(f"auditwheel does not find the wheel portable:\n{text}")
    with zipfile.ZipFile(wheel) as packed:
        extension = packed.read("hvdlite/_cffi.abi3.so")
    for path in (sys.base_prefix, str(ROOT), tempfile.gettempdir()):
        if path.encode() + b"/" in extension:
            raise SystemExit(f"the extension names a path of this machine: {path}")
    print(f"auditwheel: manylinux_{found.group(1)}_{found.group(2)}_{arch}")
    tag = f"manylinux_{GLIBC[0]}_{GLIBC[1]}_{arch}.manylinux2014_{arch}"
    name = run(python, "-m", "wheel", "tags", "--remove", "--platform-tag", tag, wheel).split()[-1]
    return wheel.parent / name


def pythons() -> "dict[tuple[int, int], str]":
    """The interpreters on this machine that the wheel should serve, one of each version."""
    folders = [Path(folder) for folder in os.get_exec_path()] + sorted(Path.home().glob(".pyenv/versions/*/bin"))
    found: dict = {}
    for path in [Path(sys.executable)] + [p for f in folders for p in sorted(f.glob("python3*"))]:
        if not re.fullmatch(r"python3?(\.\d+)?", path.name) or not os.access(path, os.X_OK):
            continue
        asked = "import sys, venv, ensurepip; print(*sys.version_info[:2], sys.implementation.name)"
        done = subprocess.run([path, "-c", asked], capture_output=True, text=True)
        version = tuple(map(int, done.stdout.split()[:2]))
        if done.returncode == 0 and "cpython" in done.stdout and OLDEST <= version <= NEWEST:
            found.setdefault(version, str(path))
    return dict(sorted(found.items()))


def serve(wheel: Path, python: str) -> str:
    """Two ranks of this Python reduce an array with the wheel, in an environment of their own."""
    with tempfile.TemporaryDirectory() as folder:
        run(python, "-m", "venv", folder)
        own = Path(folder) / "bin"
        run(own / "python", "-m", "pip", "install", "-q", wheel)
        started = time.perf_counter()
        run(own / "hvdlite-run", "-np", "2", own / "python", "-c", PROGRAM, cwd=folder, timeout=120)
        return f"two ranks agree ({time.perf_counter() - started:.1f} s)"


def main() -> None:
    parser = argparse.ArgumentParser(description="Build, audit and try the portable wheel.")
    parser.add_argument("--arch", choices=["x86_64", "aarch64"], default="x86_64")
    args = parser.parse_args()
    python = tools()
    (ROOT / "dist").mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        started, worked = time.perf_counter(), processor_seconds()
        wheel = build(python, args.arch, Path(folder))
        seconds, worked = time.perf_counter() - started, processor_seconds() - worked
        wheel = audit(python, wheel, args.arch)
        final = ROOT / "dist" / wheel.name
        shutil.copy(wheel, final)
    size = final.stat().st_size
    print(f"{final.relative_to(ROOT)}: {size / 1024:.0f} KiB, built in {seconds:.0f} s ({worked:.0f} s of work)")
    if size > SIZE_MAX or worked > SECONDS_MAX:  # work, so that a busy machine is no reason to fail
        raise SystemExit(f"a wheel may have {SIZE_MAX >> 10} KiB and take {SECONDS_MAX} s")
    if args.arch != os.uname().machine:
        print(f"not run: this machine is {os.uname().machine}")
        return
    for version, path in pythons().items():
        print(f"Python {version[0]}.{version[1]}: {serve(final, path)}", flush=True)


if __name__ == "__main__":
    main()
