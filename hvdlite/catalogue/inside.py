"""HVD9xx: Inside hvdlite.

Each block is a code: its title, what raises it, cause and remedy (row.py says how a page is read). What Python tells
comes first, then what the core tells. Tests find the texts with these codes, and fail if a code is not here or a row
is not used.
"""

from .row import family

_PYTHON = """
HVD901 A mistake in hvdlite itself
raises: AssertionError, ValueError
cause: Something that hvdlite believes to be always true was not.
remedy: This is a bug of hvdlite, not of your script. Please report it with the whole text, the version (`hvdlite-run
--version`) and, if there is one, the flight record (`hvd.dump_trace()`).
"""

# From 950 on, what the core tells.
_CORE = """
HVD951 No memory
raises: MemoryError
cause: The rank that is named could not get memory from the system.
remedy: Start fewer ranks on the host, use smaller batches or a smaller `HVDLITE_FUSION_THRESHOLD`, and check `ulimit
-v` and the limit of the container.

HVD952 The engine's thread cannot be started
raises: HvdInitError
cause: The system refused one more thread.
remedy: Check `ulimit -u` and the limit of tasks of the container or of systemd (`TasksMax`).
"""

FAMILY = family(9, "Inside hvdlite", _PYTHON + _CORE)
