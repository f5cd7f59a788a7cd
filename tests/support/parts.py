"""Parts of the system that tests need: Debian packages and environments, installed where they are missing and may be.

Tests run in several processes at a time (tests/run), and neither dpkg nor a half-made environment bears two who
install: one does, the others wait and find what they need.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

SECONDS = 900.0


@contextlib.contextmanager
def alone() -> Iterator[None]:
    """Nobody else of this user installs meanwhile, on this machine."""
    with open(Path(tempfile.gettempdir()) / f"hvdlite-tests.{os.getuid()}.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def had(find: Callable[[], str | None], *packages: str) -> str | None:
    """What `find` finds, once these Debian packages are there if they can be had; or None."""
    if (found := find()) or os.geteuid() != 0 or shutil.which("apt-get") is None:
        return found
    with alone():
        if find() is None:
            quiet = "DEBIAN_FRONTEND=noninteractive apt-get install -qy --no-install-recommends"
            words = f"apt-get update -q && {quiet} {' '.join(packages)}"
            subprocess.run(["sh", "-c", words], capture_output=True, timeout=SECONDS)
    return find()


def debian(tool: str, *packages: str, path: str | None = None) -> str | None:
    """Where this program is, `had` from these packages."""
    return had(lambda: shutil.which(tool, path=path), *packages)


def python(*words: str) -> str | None:
    """Run `python -m words`; what went wrong, or None. To be called `alone`."""
    done = subprocess.run([sys.executable, "-m", *words], capture_output=True, text=True, timeout=SECONDS)
    if done.returncode == 0:
        return None
    return f"cannot be installed here: {' '.join(words)}: {done.stderr.strip().splitlines()[-1:]}"
