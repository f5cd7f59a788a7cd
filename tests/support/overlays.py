"""Libraries that a test needs and the environment of tests has not: each in a folder of its own, for PYTHONPATH.

uv is asked what an installation would bring beside what is there (so no second torch), and exactly that is put into a
folder of the cache, once; folders share files by links to uv's cache. What cannot be had is skipped, with the reason.
Only jobs that a test starts see the folder: `with_path` gives their environment.

    python tests/support/overlays.py    installs all of them; tests/tools/steps.py does so beside the C tests
"""

import functools
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import parts
import pytest

CACHE = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "hvdlite" / "overlays"
SECONDS = 900


LIBRARIES = {
    "dask": ("dask", "distributed"),
    "jax-oldest": ("jax==0.4.38", "jaxlib==0.4.38"),
    "jax-older": ("jax==0.6.2", "jaxlib==0.6.2"),
    "kubernetes": ("kubernetes-validate", "kubeflow-trainer-api", "kubeflow-training"),
    "ray": ("ray[train]",),
    "spark": ("py4j>=0.10.9.7,<0.10.9.10", "pyarrow", "pandas<3"),
    "trainers": ("lightning", "accelerate", "transformers"),
}


@functools.cache
def library(name):
    """The folder that has one of LIBRARIES beside the environment."""
    home = CACHE / f"{name}-{sys.version_info[0]}.{sys.version_info[1]}"
    with parts.alone():
        if home.exists():
            return home
        would = _run("uv", "pip", "install", "--python", sys.executable, "--dry-run", *LIBRARIES[name])
        pinned = re.findall(r"^ \+ (\S+==\S+)$", would, re.MULTILINE)
        half = home.with_name(f"{home.name}.half")  # what was cut off is begun anew
        shutil.rmtree(half, ignore_errors=True)
        _run("uv", "pip", "install", "-q", "--python", sys.executable, "--no-deps", "--target", str(half), *pinned)
        half.rename(home)
    return home


def pip(*words):
    _run("pip", *words)


def _run(*words):
    done = subprocess.run([sys.executable, "-m", *words], capture_output=True, text=True, timeout=SECONDS)
    if done.returncode:
        pytest.skip(f"cannot be installed here: {' '.join(words[-3:])}: {done.stderr.strip().splitlines()[-1:]}")
    return done.stderr  # of uv


def with_path(*folders, **more):
    """The environment of a job that imports from these folders, too; its first process writes their byte code."""
    path = os.pathsep.join([*map(str, folders), os.environ.get("PYTHONPATH", "")])
    environ = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    return {**environ, "PYTHONPATH": path.rstrip(os.pathsep), **more}


if __name__ == "__main__":
    for wanted in sorted(LIBRARIES.keys() - {"jax-older"}):  # which only tests/run everything wants
        library(wanted)
    import sparks  # which imports this module anew

    sparks.found()
