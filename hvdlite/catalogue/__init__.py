"""What does HVD301 mean? Every code that an error or a warning of hvdlite ends with, its cause and its remedy.

One module per family; a family is a hundred of numbers. From this table come ERRORS.md, the codes
of the core (csrc/ground/codes.h, by `make -C tests catalogue`) and what `hvdlite-run --explain HVD301` prints. Tests
find every place that raises, and fail if its text has no code, or one that is not here. Only who explains imports this
package: who raises writes the code at the end of its text (hvdlite/_coded.py).
"""

from __future__ import annotations

import textwrap

from . import arguments, disagree, inside, launching, limits, lost, meeting, options, planes
from .row import Family, Row

FAMILIES: tuple[Family, ...] = (
    meeting.FAMILY,
    arguments.FAMILY,
    disagree.FAMILY,
    lost.FAMILY,
    limits.FAMILY,
    planes.FAMILY,
    launching.FAMILY,
    options.FAMILY,
    inside.FAMILY,
)
ROWS: dict[str, Row] = {row.code: row for family in FAMILIES for row in family.rows}


def find(code: str) -> Row:
    """The row of a code, in any case, as a number or in brackets. ValueError for one that is not here."""
    wanted = code.strip().strip("[]").upper()
    wanted = f"HVD{wanted}" if wanted.isdecimal() and wanted.isascii() else wanted
    if wanted in ROWS:
        return ROWS[wanted]
    if not (wanted.startswith("HVD") and wanted.isascii() and wanted[3:].isdigit()):
        raise ValueError(f"{code[:40]!r} is no code of hvdlite: they look like HVD301 [HVD704]")
    near = min(ROWS, key=lambda each: abs(int(each[3:]) - int(wanted[3:12])))
    raise ValueError(f"there is no code {wanted[:40]}; the nearest is {near}: {ROWS[near].title} [HVD704]")


def explained(row: Row, width: int = 96) -> str:
    """What a terminal shows of a row; ends with a newline."""
    family = FAMILIES[int(row.code[3]) - 1]
    lines = [f"{row.code}: {row.title}", f"({family.title}; {row.raises})"]
    for head, said in (("Cause", row.cause), ("Remedy", row.remedy), ("Example", row.example)):
        if said:
            lines += ["", *textwrap.wrap(f"{head}: {said}", width, break_long_words=False, break_on_hyphens=False)]
    return "\n".join(lines) + "\n"
