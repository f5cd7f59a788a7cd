"""hvdlite on Ray: ranks in actors of a cluster that is there already.

    from hvdlite.ray import RayExecutor            # Horovod's surface: start, run, execute, shutdown
    from hvdlite.ray.train import HvdliteTrainer   # a trainer of Ray Train

Both need the extra hvdlite[ray]. Guide: docs/guides/ray.md.
"""

from .executor import RayExecutor, Settings

__all__ = ["RayExecutor", "Settings"]
