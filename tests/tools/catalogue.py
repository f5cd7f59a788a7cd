"""Writes csrc/base/codes.h, the core's macros for the codes in hvdlite/ERRORS.md: `make -C tests codes`.

One macro per code, a literal that stands before a format: `hvd_fail(error, HVD_EINVAL, HVD250 "...")`; base/error.c
brings it to the end of the text. tests/errors/test_catalogue.py compares the file with what this would write.
"""

from __future__ import annotations

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from hvdlite.errors import catalogue  # noqa: E402

HEADER = ROOT / "csrc/base/codes.h"
_ESSAY = """/* codes.h - what stands before the text of every failure: its code.
 *
 * Written by `make -C tests codes` from hvdlite/ERRORS.md; a test compares. A format begins with one of these, as in
 * hvd_fail(error, HVD_EINVAL, HVD202 "..."), and error.c brings it to the end of the text: "... [HVD202]".
 */
#ifndef HVD_CODES_H
#define HVD_CODES_H

/* For a text that is no format: "..." HVD_ENDS(202). */
#define HVD_ENDS(number) " [HVD" #number "]"
"""


def header() -> str:
    """csrc/base/codes.h."""
    parts = [_ESSAY]
    for number, title in catalogue.FAMILIES.items():
        defined = "\n".join(f'#define {code} "[{code}] "' for code in catalogue.ROWS if code[3] == number)
        parts.append(f"/* {title} */\n{defined}\n")
    return "\n".join([*parts, "#endif\n"])


if __name__ == "__main__":
    HEADER.write_text(header(), encoding="utf-8")
