"""`python -m hvdlite.as_horovod train.py ...`: a script written for Horovod, started by mpirun, srun or alone.

It becomes `python train.py ...` with the folder FRONT in PYTHONPATH, as under `hvdlite-run --as-horovod`. So the
script's own children (workers of a DataLoader) find hvdlite as `horovod`, too. Takes what Python takes: a script,
-m module or -c code.
"""

from __future__ import annotations

import os
import subprocess
import sys

from .. import config
from . import FRONT


def main() -> None:
    """Replaces this process. Ends it with 1 where there is no script."""
    if len(sys.argv) < 2:
        sys.exit("hvdlite: no script: python -m hvdlite.as_horovod train.py [HVD702]")
    config.write("PYTHONPATH", os.pathsep.join(filter(None, [FRONT, config.environ().get("PYTHONPATH")])))
    flags = subprocess._args_from_interpreter_flags()  # type: ignore[attr-defined]
    os.execv(sys.executable, [sys.executable, *flags, *sys.argv[1:]])


if __name__ == "__main__":
    main()
