"""`horovod` itself: the version whose surface this is, and `run`.

Scripts compare `horovod.__version__` to decide which arguments there are, so it is the release of Horovod whose
surface hvdlite has; hvdlite's own version is in `hvdlite.__version__`.
"""

from ..executors.run import run

__version__ = "0.28.1"

__all__ = ["run"]
