"""Writes what is made from the catalogue of errors: ERRORS.md, for readers, and csrc/ground/codes.h, for the core.

`make -C tests catalogue` runs it; tests/py/test_catalogue.py compares the files with what it would write.
A page for readers is ordered by family, each code with its cause and its remedy. The header has one macro per code, a
literal that stands before a format: `hvd_fail(error, HVD_EINVAL, HVD250 "...")`; ground/error.c brings it to the end.
"""

from __future__ import annotations

import sys
import textwrap
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from hvdlite import catalogue  # noqa: E402

PAGE, HEADER = ROOT / "ERRORS.md", ROOT / "csrc/ground/codes.h"

_HEAD = """# What the codes of errors mean

Every error and every warning of hvdlite that names a trouble ends with a code, `... [HVD301]`. It stands for a kind of
trouble, with one cause and one remedy; the text before it says which rank, which tensor, which value. An exception of
hvdlite's own classes has it as `error.code`. `hvdlite-run --explain HVD301` prints what stands here, without a network.

This page is written by `make -C tests catalogue` from [hvdlite/catalogue](hvdlite/catalogue/).
"""

_ESSAY = """/* codes.h - what stands before the text of every failure: its code in the catalogue.
 *
 * Written by `make -C tests catalogue` from hvdlite/catalogue/, where each code has its cause and its
 * remedy (ERRORS.md has the same for readers); a test compares. A format begins with one of these, as in
 * hvd_fail(error, HVD_EINVAL, HVD202 "..."), and error.c brings it to the end of the text: "... [HVD202]".
 * The codes of both Python and the core stand here, since some facts are found by either.
 */
#ifndef HVD_CODES_H
#define HVD_CODES_H

/* For a text that is no format: "..." HVD_ENDS(202). */
#define HVD_ENDS(number) " [HVD" #number "]"
"""


def _wrapped(text: str) -> str:
    return textwrap.fill(text, 120, break_long_words=False, break_on_hyphens=False)


def page() -> str:
    """ERRORS.md."""
    parts = [_HEAD]
    for family in catalogue.FAMILIES:
        listed = "\n".join(f"* [{row.code}](#{row.code.lower()}): {row.title}" for row in family.rows)
        parts.append(f"**HVD{family.number}xx: {family.title}**\n\n{listed}\n")
    for family in catalogue.FAMILIES:
        parts.append(f"## HVD{family.number}xx: {family.title}\n")
        for row in family.rows:
            parts.append(f"### {row.code}\n\n**{row.title}.** ({row.raises})\n")
            parts.append(_wrapped(f"*Cause:* {row.cause}") + "\n")
            parts.append(_wrapped(f"*Remedy:* {row.remedy}") + "\n")
            if row.example:
                parts.append(f"```\n{row.example} [{row.code}]\n```\n")
    return "\n".join(parts)


def header() -> str:
    """csrc/ground/codes.h."""
    parts = [_ESSAY]
    for family in catalogue.FAMILIES:
        defined = "\n".join(f'#define {row.code} "[{row.code}] "' for row in family.rows)
        parts.append(f"/* {family.title} */\n{defined}\n")
    return "\n".join([*parts, "#endif\n"])


def main() -> None:
    """Writes both."""
    PAGE.write_text(page(), encoding="utf-8")
    HEADER.write_text(header(), encoding="utf-8")


if __name__ == "__main__":
    main()
