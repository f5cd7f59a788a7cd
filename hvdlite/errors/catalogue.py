"""Catalogue of the codes that errors and warnings end with, read from ERRORS.md in the folder above.

ERRORS.md is the one place where codes are written: a section for each code with its title, what raises it, cause and
remedy. `hvdlite-run --explain HVD301`, or with a pasted message, prints a section; `make -C tests codes` writes
csrc/base/codes.h from them.
A released code keeps its meaning, and a number is never used again.
"""

from __future__ import annotations

import re
import textwrap
from pathlib import Path
from typing import NamedTuple

from . import message_index

_FAMILY = re.compile(r"^## HVD(\d)xx: (.+)$", re.MULTILINE)
_ROW = re.compile(
    r"^### (?P<code>HVD\d{3})\n\n\*\*(?P<title>[^\n]+)\.\*\* \((?P<raises>[^\n]+)\)\n\n\*Cause:\* (?P<cause>.+?)\n\n"
    r"\*Remedy:\* (?P<remedy>.+?)\n(?:\n```\n(?P<example>[^\n]+) \[(?P=code)\]\n```\n)?(?=\n#|\Z)",
    re.MULTILINE | re.DOTALL,
)


SHOWN_MAX = 3  # rows that some words mean, before only titles are listed


class Row(NamedTuple):
    """One code. The texts are plain sentences; what a user types stands between backticks."""

    code: str  # "HVD301"
    title: str  # what has happened, without a full stop
    raises: str  # the error classes, or "a warning", "a line of hvdlite-run"
    cause: str
    remedy: str
    example: str = ""  # an error text, without the code at its end


_PAGE = Path(__file__).resolve().parent.with_name("ERRORS.md").read_text(encoding="utf-8")
FAMILIES: dict[str, str] = dict(_FAMILY.findall(_PAGE))
ROWS: dict[str, Row] = {
    found["code"]: Row(*(" ".join((part or "").split()) for part in found.groups())) for found in _ROW.finditer(_PAGE)
}


def find(code: str) -> Row:
    """The row of a code, in any case, as a number or in brackets. ValueError for an unknown code."""
    full_code = code.strip().strip("[]").upper()
    full_code = f"HVD{full_code}" if full_code.isdecimal() and full_code.isascii() else full_code
    if full_code in ROWS:
        return ROWS[full_code]
    if not (full_code.startswith("HVD") and full_code.isascii() and full_code[3:].isdigit()):
        raise ValueError(f"{code[:40]!r} is not a code of hvdlite: codes look like HVD301 [HVD704]")
    near = min(ROWS, key=lambda each: abs(int(each[3:]) - int(full_code[3:12])))
    raise ValueError(f"there is no code {full_code[:40]}; the nearest is {near}: {ROWS[near].title} [HVD704]")


def meant(text: str) -> list[Row]:
    """The rows that a code, a pasted message or some words mean: by the codes in it (those in brackets first), else
    those that have all of its words, else by the nearest message. ValueError if there is none, or too many."""
    codes = re.findall(r"\[(HVD\d{3})\]", text) or [code.upper() for code in re.findall(r"(?i)\bHVD\d{3}\b", text)]
    found = [ROWS[code] for code in dict.fromkeys(codes) if code in ROWS]
    if found:
        return found
    if len(text.split()) < 2 and re.match(r"[\[\s]*(hvd|\d|$)", text, re.IGNORECASE):
        return [find(text)]
    words = text.lower().split()
    found = [row for row in ROWS.values() if all(word in " ".join(row).lower() for word in words)]
    if not found:
        code = message_index.nearest(text, message_index.messages())
        found = [ROWS[code]] if code in ROWS else []
    if not found:
        raise ValueError(
            f"{text[:40]!r} is not a code of hvdlite, and no message is like it: codes look like HVD301 [HVD704]"
        )
    if len(found) > SHOWN_MAX:
        listed = "".join(f"\n  {row.code}: {row.title}" for row in found)
        raise ValueError(f"{len(found)} codes have these words: give one of them, or more words{listed}\n [HVD704]")
    return found


def explained(row: Row, width: int = 96) -> str:
    """The row as a terminal shows it; ends with a newline."""
    lines = [f"{row.code}: {row.title}", f"({FAMILIES[row.code[3]]}; {row.raises})"]
    for head, text in (("Cause", row.cause), ("Remedy", row.remedy), ("Example", row.example)):
        if text:
            lines += ["", *textwrap.wrap(f"{head}: {text}", width, break_long_words=False, break_on_hyphens=False)]
    return "\n".join(lines) + "\n"
