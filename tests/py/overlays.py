"""Libraries that a test needs and the environment of tests has not: each in a folder of its own, for PYTHONPATH.

pip is asked what an installation would bring beside what is there (so no second torch), and exactly that is put into a
folder of the cache, once. What cannot be had is skipped, with the reason. Only jobs that a test starts see the folder:
`with_path` gives their environment.
"""

import functools
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import parts
import pytest

CACHE = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "hvdlite" / "overlays"
SECONDS = 900


@functools.cache
def library(name, *requirements):
    """The folder that has these beside the environment. name: of the folder."""
    home = CACHE / f"{name}-{sys.version_info[0]}.{sys.version_info[1]}"
    with parts.alone():
        if home.exists():
            return home
        report = _pip("install", "-q", "--dry-run", "--report", "-", *requirements)
        pinned = [
            f"{each['metadata']['name']}=={each['metadata']['version']}" for each in json.loads(report)["install"]
        ]
        half = home.with_name(f"{home.name}.half")  # what was cut off is begun anew
        shutil.rmtree(half, ignore_errors=True)
        _pip("install", "-q", "--no-deps", "--target", str(half), *pinned)
        half.rename(home)
    return home


def _pip(*words):
    done = subprocess.run([sys.executable, "-m", "pip", *words], capture_output=True, text=True, timeout=SECONDS)
    if done.returncode:
        pytest.skip(f"cannot be installed here: {' '.join(words[-3:])}: {done.stderr.strip().splitlines()[-1:]}")
    return done.stdout


def with_path(*folders, **more):
    """The environment of a job that imports from these folders, too."""
    path = os.pathsep.join([*map(str, folders), os.environ.get("PYTHONPATH", "")])
    return {**os.environ, "PYTHONPATH": path.rstrip(os.pathsep), **more}
