"""`python -m hvdlite.launcher` is `hvdlite-run`."""

import sys

from .cli import main

sys.exit(main())
