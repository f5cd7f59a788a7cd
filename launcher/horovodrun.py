"""`horovodrun -np 4 python train.py`: hvdlite-run, for a script and a command line that were written for Horovod.

A user who moves from Horovod changes no line of a job's script. So this command is hvdlite-run with --as-horovod: it
gives `import horovod.torch` and the like to the ranks.

Where Horovod itself is installed, too, the command is Horovod's: whichever package came last has written it.
"""

from __future__ import annotations

import importlib.metadata
import sys

from . import cli


def main() -> int:
    """The exit code of the job."""
    try:
        importlib.metadata.version("horovod")
    except importlib.metadata.PackageNotFoundError:
        sys.argv[1:1] = ["--as-horovod"]
        return cli.main()
    from horovod.runner import launch

    launch.run_commandline()
    return 0
