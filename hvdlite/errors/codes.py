"""Codes at the end of texts: add one, read one. All that errors and warnings need of the catalogue.

Every trouble that hvdlite tells ends with its code, `... [HVD301]`, which stands in hvdlite/ERRORS.md with its cause
and its remedy. Most texts have it written at their end; `coded` is for those that may end with one already, as they
quote another error: that one is nearer to the cause, so it stays, and no text has two. Nothing is loaded here, since
errors are made on every floor.
"""

from __future__ import annotations

import re


def code_of(text: str) -> str | None:
    """The code that a text ends with, "HVD301", or None."""
    end = text.rstrip()[-8:]
    return end[1:7] if len(end) == 8 and end[:4] == "[HVD" and end[4:7].isdigit() and end[7] == "]" else None


def uncoded(text: str) -> str:
    """The text without the code at its end: to be quoted in the middle of another."""
    return text if code_of(text) is None else text.rstrip()[: -len("[HVD301]")].rstrip()


def coded(code: str, text: str) -> str:
    """The text with this code at its end, unless it ends with one already."""
    return text if code_of(text) else f"{text} [{code}]"


def ending(code: str, text: str, room: int) -> bytes:
    """The text in UTF-8, cut to `room` bytes, with one code at its end: the first that stands anywhere in it, else this
    one. For a user's words, which may quote an error of ours in their middle."""
    found = re.search(r" \[(HVD\d{3})\]", text)
    last = f" [{found[1] if found else code}]".encode()
    rest = re.sub(r" \[HVD\d{3}\]", "", text).encode("utf-8", "replace")
    return rest[: room - len(last)].decode("utf-8", "ignore").encode() + last
