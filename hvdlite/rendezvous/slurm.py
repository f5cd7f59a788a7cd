"""Slurm's notation of nodes and tasks. Pure: for rank discovery and for the launcher.

`2(x3),1` are tasks on each node, `n[01-03,7],login` are the nodes' names, of which a name may have several brackets.
Both come from Slurm's own variables, so a text that cannot be read is an error that shows the variable; nothing is
guessed, and no text makes more than a million names.
"""

from __future__ import annotations

import re

from ..errors import HvdInitError

_MAX = 1_000_000
_COUNT = re.compile(r"(\d+)(?:\(x(\d+)\))?")
_PART = re.compile(r"[^\[\],\s]+|\[[^\[\]]*\]")


def tasks_per_node(text: str, variable: str = "SLURM_STEP_TASKS_PER_NODE") -> list[int]:
    """Slurm's `2(x3),1` as [2, 2, 2, 1]. Raises HvdInitError for anything else."""
    counts: list[int] = []
    for part in text.split(",") if text else []:
        match = _COUNT.fullmatch(part.strip())
        if match is None or int(match[2] or 1) > _MAX:
            raise HvdInitError(f"{variable}={text!r}: expected counts as in '2(x3),1'. [HVD105]")
        counts += [int(match[1])] * int(match[2] or 1)
    return counts


def nodes(text: str, variable: str = "SLURM_JOB_NODELIST") -> list[str]:
    """Slurm's `n[01-03,7],login` as ['n01', 'n02', 'n03', 'n7', 'login']. Raises HvdInitError for anything else."""
    names: list[str] = []
    for word in _words(text):
        made = [""]
        at = 0
        for match in _PART.finditer(word):
            if match.start() != at:
                break
            at = match.end()
            pieces = _range(match[0][1:-1]) if match[0].startswith("[") else [match[0]]
            if pieces is None or len(made) * len(pieces) > _MAX:
                at = -1
                break
            made = [begun + piece for begun in made for piece in pieces]
        if at != len(word) or not word:
            raise HvdInitError(f"{variable}={text!r}: expected names as in 'n[01-03,7],login'. [HVD105]")
        names += made
    return names


def _words(text: str) -> list[str]:
    """Split at the commas outside of brackets."""
    words, depth = [""], 0
    for character in text.strip():
        depth += (character == "[") - (character == "]")
        if character == "," and depth == 0:
            words.append("")
        else:
            words[-1] += character
    return words


def _range(text: str) -> list[str] | None:
    """`01-03,7` as its numbers, as wide as they were written; None for what is none."""
    pieces: list[str] = []
    for part in text.split(","):
        first, dash, last = part.partition("-")
        if not first.isdecimal() or (dash and not last.isdecimal()):
            return None
        end = int(last) if dash else int(first)
        if not 0 <= end - int(first) <= _MAX:
            return None
        pieces += [str(number).zfill(len(first)) for number in range(int(first), end + 1)]
    return pieces
