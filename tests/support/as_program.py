"""A test file as a program of ranks: `as_program.py FILE WORDS...` runs its part below `if __name__ == "__main__"`.

The file imports helpers by name, and this program lies beside them.
"""

import runpy
import sys

if __name__ == "__main__":
    sys.argv = sys.argv[1:]
    runpy.run_path(sys.argv[0], run_name="__main__")
