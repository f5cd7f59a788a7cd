"""`horovod.runner` and below: what scripts ask the launcher's side for, which is their place before init().

The rank is looked for where init() will look, so that who reads it early and who asks hvd.rank() agree.
Starting ranks from Python is not there yet; the command is, as a function. There is no console script `horovodrun`,
which would take the place of one that is installed: say hvdlite-run --as-horovod.
"""

from __future__ import annotations

from .. import config, discovery
from ..built import gloo_built, run

__all__ = ["get_env_rank_and_size", "gloo_built", "run", "run_commandline"]


def get_env_rank_and_size() -> tuple[int, int]:
    """(rank, size) as the environment has it; (0, 1) without a launcher. HvdInitError if it contradicts itself."""
    place = discovery.discover(config.environ())
    return place.rank, place.size


def run_commandline() -> None:
    """`horovodrun` as a function: hvdlite-run with this process's arguments. Ends the process."""
    import sys
    from importlib import import_module

    sys.exit(import_module("hvdlite.launcher.cli").main())
