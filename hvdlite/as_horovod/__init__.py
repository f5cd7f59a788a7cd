"""`import horovod` means hvdlite: for scripts that are written for Horovod and shall not be changed.

    hvdlite-run -np 2 --as-horovod python train.py     the launcher puts the folder FRONT into PYTHONPATH
    mpirun -np 2 python -m hvdlite.as_horovod train.py the same for any other launcher, and for one process
    import hvdlite.as_horovod                          the same by a line in front of `import horovod`

Every module here is made of names of hvdlite's own modules (names.py says which), the same objects and not copies: an
exception raised by hvdlite is caught under Horovod's name, and a DistributedOptimizer is one in both. Without the flag
or the import nothing named horovod is to be seen, and a Horovod that is installed is untouched.
"""

from __future__ import annotations

import os

from .finder import install

FRONT = os.path.join(os.path.dirname(os.path.abspath(__file__)), "front")  # the launcher knows this place, too

install(FRONT)
