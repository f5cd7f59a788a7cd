"""What test_house.py asks about a C file, without a compiler: its opening comment, its includes, its functions.

The parser is small and honest rather than complete: it blanks comments and literals (newlines stay, so that line
numbers do), takes preprocessor lines out, and then a function is a brace that opens at depth zero behind a closing
parenthesis. `extern "C" {` is no depth. A #define is measured too, since code hides in macros as well.
"""

import re
from collections.abc import Iterator
from typing import NamedTuple

LITERAL = re.compile(r'/\*.*?\*/|//[^\n]*|"(?:\\.|[^"\\\n])*"|\'(?:\\.|[^\'\\\n])*\'', re.DOTALL)
DIRECTIVE = re.compile(r"^[ \t]*#(?:[^\n\\]|\\\n|\\.)*", re.MULTILINE)
TOKEN = re.compile(r"[A-Za-z_]\w*|[()]")


class Piece(NamedTuple):
    """A function or macro: its name, the line it starts on and how many lines it has."""

    name: str
    line: int
    lines: int


def _newlines(text: str) -> str:
    return re.sub(r"[^\n]", " ", text)


def blanked(text: str) -> str:
    """The code with comments and literals blanked; every line stays where it was."""
    return LITERAL.sub(lambda found: _newlines(found.group()), text)


def without_directives(code: str) -> str:
    """`blanked` code with preprocessor lines (and their continuations) blanked as well."""
    return DIRECTIVE.sub(lambda found: _newlines(found.group()), code)


def essay_lines(text: str) -> int:
    """Lines of the comment that the file opens with; 0 if it opens with anything else."""
    found = re.match(r"\s*(/\*.*?\*/|(?://[^\n]*\n)+)", text, re.DOTALL)
    return found.group(1).strip().count("\n") + 1 if found else 0


def includes(text: str) -> Iterator[str]:
    """Names as written, with their quotes or brackets."""
    commentless = re.sub(r"/\*.*?\*/", "", text, flags=re.DOTALL)
    for found in re.finditer(r'^[ \t]*#[ \t]*include[ \t]*("[^"]+"|<[^>]+>|\w+)', commentless, re.MULTILINE):
        yield found.group(1)


def identifiers(text: str) -> set:
    """Every identifier in the code, macros included, comments and literals not."""
    return set(re.findall(r"[A-Za-z_]\w*", blanked(text)))


def _function(code: str, start: int, end: int, close: int) -> "Piece | None":
    """code[start:end] is what stands before a brace at depth 0; None if that is no function's head."""
    head = code[start:end]
    stripped = head.strip()
    if not stripped.endswith(")") or "=" in stripped.split("(")[0]:
        return None
    name, word, depth = "?", "", 0
    for token in TOKEN.findall(stripped):
        if token == "(" and depth == 0 and not word.startswith("__"):
            name = word
        depth += {"(": 1, ")": -1}.get(token, 0)
        word = token
    first = start + len(head) - len(head.lstrip())
    return Piece(name, code.count("\n", 0, first) + 1, code.count("\n", first, close) + 1)


def functions(text: str) -> Iterator[Piece]:
    """The functions that the file defines, then the macros that take more than one line."""
    bare = blanked(text)
    code = without_directives(bare)
    depth, start, opened, head_end = 0, 0, 0, 0
    for found in re.finditer(r"[{};]", code):
        mark, at = found.group(), found.start()
        if mark == "{":
            if depth == 0 and re.fullmatch(r"\s*extern\s*", code[start:at]):
                start = at + 1  # extern "C" {
                continue
            if depth == 0:
                opened, head_end = start, at
            depth += 1
        elif mark == "}":
            depth -= 1
            if depth < 0:  # of extern "C"
                depth, start = 0, at + 1
            elif depth == 0:
                piece = _function(code, opened, head_end, at)
                if piece is not None:
                    yield piece
                start = at + 1
        elif depth == 0:
            start = at + 1
    for found in DIRECTIVE.finditer(bare):
        macro = re.match(r"[ \t]*#[ \t]*define[ \t]+(\w+)", found.group())
        if macro and "\n" in found.group():
            yield Piece(macro.group(1), bare.count("\n", 0, found.start()) + 1, found.group().count("\n") + 1)
