"""What the catalogue says about one kind of trouble, and how a family's page is read.

A code stands for a kind of trouble with one cause and one remedy, not for a place in the sources: many places may share
one. Numbers that end in 01 to 49 were given for Python, 50 to 99 for the core; a fact that both tell has one code. A
code that has been released keeps its meaning; one that goes out of use is not given again.

A family is prose, so it is written as prose: a block per code, blocks parted by empty lines. The first line is the code
and its title; then come `raises:`, `cause:`, `remedy:` and perhaps `example:`, each of as many lines as it needs.
"""

from __future__ import annotations

from typing import NamedTuple

_PARTS = ("raises", "cause", "remedy", "example")


class Row(NamedTuple):
    """One code. All texts are plain sentences, with what is typed between backticks."""

    code: str  # "HVD301"
    title: str  # what has happened, without a full stop
    raises: str  # the classes of error by their names, or "a warning", "a line of hvdlite-run"
    cause: str
    remedy: str
    example: str = ""  # a text that ends with the code, without it


class Family(NamedTuple):
    """All codes of one hundred."""

    number: int  # 3: HVD300 to HVD399
    title: str
    rows: tuple[Row, ...]


def family(number: int, title: str, page: str) -> Family:
    """The family that a page tells. ValueError for a page that is not written as above."""
    return Family(number, title, tuple(map(_row, page.strip().split("\n\n"))))


def _row(block: str) -> Row:
    head, *lines = block.strip().split("\n")
    code, _, title = head.partition(" ")
    parts: dict[str, list[str]] = {}
    said: list[str] = []
    for line in lines:
        key, colon, rest = line.partition(": ")
        if colon and key in _PARTS and key not in parts:
            said = parts[key] = []
            line = rest
        said.append(line.strip())
    if tuple(parts) not in (_PARTS, _PARTS[:-1]):
        raise ValueError(f"{code}: has {', '.join(parts)}; it needs {', '.join(_PARTS)}, in this order [HVD901]")
    return Row(code, title, **{key: " ".join(words) for key, words in parts.items()})
