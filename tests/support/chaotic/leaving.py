"""Leaves a process, a file, a file in /dev/shm and, where nobody else can have done so, sockets: does `Watch` see them?

    python leaving.py FOLDER     prints "found"

The program of a test: it stands where trial.py does, alone if that may be. It takes away what it has left.
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import uuid
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from chaotic import left


def main(folder):
    if os.getpid() == 1:
        left.loopback_up()
    mark = uuid.uuid4().hex
    watch = left.Watch(mark, folder)
    assert watch.left(0) == []
    shared = Path("/dev/shm") / f"hvd-{mark}"
    with socket.socket(socket.AF_UNIX) as one, socket.create_server(("127.0.0.1", 0)):
        one.bind(f"\0hvd{mark}")
        sleeper = subprocess.Popen(["sleep", "60"], env={**os.environ, "CHAOS_MARK": mark})
        try:
            shared.touch()
            (Path(folder) / "temporary").touch()
            found = "\n".join(watch.left(0))
        finally:
            sleeper.kill()
            sleeper.wait()
            shared.unlink()
    (Path(folder) / "temporary").unlink()
    wanted = [f"process {sleeper.pid}", str(shared), "temporary file temporary"]
    wanted += [f"socket @hvd{mark}", "socket tcp"] if watch.alone else []
    assert all(each in found for each in wanted), found
    assert watch.left(5) == [], watch.left(0)
    print("found")


if __name__ == "__main__":
    main(sys.argv[1])
