"""Command that runs a module of hvdlite in a new process, by this Python and without the current folder.

`python -m` and `python -c` look for modules in the current folder before all others, and `python ~/train.py` does not
look there at all. A job may be started in a folder where others may write (/tmp, scratch that a group shares): a
`selectors.py` that another user has left there would run as this user, with the job's secret at hand. So the folder is
taken off the path before anything is imported but `sys`, which lies in no folder. (`python -P` would do, from 3.11 on.)

Where the current folder is on the path for another reason (PYTHONPATH), it stays.
"""

from __future__ import annotations

import sys

WITHOUT_FOLDER = "import sys;sys.path[:1]==['']and sys.path.pop(0);"  # what a text for `python -c` begins with


def words(module: str, call: str = "main(sys.argv[1:])") -> list[str]:
    """The words of a process that calls this of the module and ends with what it returns; arguments may follow."""
    return [sys.executable, "-c", f"{WITHOUT_FOLDER}from {module} import main;sys.exit({call})"]
