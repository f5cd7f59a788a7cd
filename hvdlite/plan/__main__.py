"""`python -m hvdlite.plan`: hvdlite-plan where the program is not on the path."""

import sys

from .cli import main

sys.exit(main())
