"""`import horovod` where this folder is in front of the path: makes way for the package of hvdlite.as_horovod."""

import hvdlite.as_horovod  # noqa: F401  (puts itself into sys.modules under this module's name)
