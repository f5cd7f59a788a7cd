"""Index of all messages of hvdlite, to find the code of a text that has lost it.

The messages are read from what is installed: literal texts that end with a code, in the sources beside this file, and
those of the core in its libraries. `nearest` compares words: a message counts by the share of its words that the given
text has, and rare words count more. Values (names, numbers) differ between runs and are in no literal text.
docs/_static/errors.js does the same for the site, with the messages that docs/_ext/pages.py writes there.
"""

from __future__ import annotations

import ast
import math
import re
from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Iterator, Sequence
from functools import cache
from importlib.util import find_spec
from pathlib import Path

_WORD = re.compile(r"[a-z][a-z_-]*[a-z]")
_AT_END = re.compile(r"(.*) \[(HVD\d{3})\]", re.DOTALL)
_IN_CORE = re.compile(rb"\[(HVD\d{3})\] ([^\0]{8,2000})\0|([^\0]{8,2000}) \[(HVD\d{3})\]\0")
_LEAST_WORDS, _LEAST_SHARE = 3, 0.5
_MANY_WORDS, _LEAST_SHARE_OF_MANY = 6, 0.35


@cache
def messages() -> list[tuple[str, str]]:
    """(code, text) of each message, without values."""
    launcher = find_spec("hvdlite.launcher")
    folders = [Path(__file__).parent.parent, *map(Path, (launcher and launcher.submodule_search_locations) or ())]
    found: set[tuple[str, str]] = set()
    for folder in folders:
        for path in folder.rglob("*.py"):
            text = path.read_text(encoding="utf-8")
            lines = [number for number, line in enumerate(text.split("\n"), 1) if "HVD" in line]
            found.update(_raised_texts(ast.parse(text), lines) if lines else ())
    for path in folders[0].rglob("*.so"):
        for code, text, ended, at_end in _IN_CORE.findall(path.read_bytes()):
            plain = re.sub(r"%[-+0-9.*]*(?:ll|[lzjh])?[a-zA-Z]", " ", (text or ended).decode(errors="replace"))
            found.add(((code or at_end).decode(), plain))
    return sorted(each for each in found if len(set(words(each[1]))) >= _LEAST_WORDS)


def nearest(text: str, known: Sequence[tuple[str, str]]) -> str | None:
    """The code of the message that a text, or one line of it, resembles most; None: it resembles none."""
    word_sets = [frozenset(words(message)) for _, message in known]
    seen = Counter(word for each in word_sets for word in each)
    weight = {word: math.log(1 + len(word_sets) / count) for word, count in seen.items()}
    best, code = 0.0, None
    for part in {text, *text.splitlines()}:
        own_words = set(words(part))
        for each, (its_code, _) in zip(word_sets, known):
            shared = each & own_words
            if len(shared) < _LEAST_WORDS:
                continue
            share = sum(map(weight.__getitem__, shared)) / sum(map(weight.__getitem__, each))
            score = share * share * sum(map(weight.__getitem__, shared))
            enough = _LEAST_SHARE if len(shared) < _MANY_WORDS else _LEAST_SHARE_OF_MANY
            if share >= enough and score > best:
                best, code = score, its_code
    return code


def words(text: str) -> list[str]:
    """What is compared of a text."""
    return _WORD.findall(text.lower())


def _raised_texts(node: ast.AST, lines: list[int]) -> Iterator[tuple[str, str]]:
    """The messages of a source: literals that end with a code or are given to coded(). lines: those with a code."""
    if isinstance(node, (ast.JoinedStr, ast.BinOp, ast.Constant)):
        found = _AT_END.fullmatch(_literal(node))
        if found:
            yield found[2], found[1]
            return
    if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "coded" and len(node.args) == 2:
        code, text = node.args[0], _literal(node.args[1])
        if isinstance(code, ast.Constant) and text.strip():
            yield str(code.value), text
    for child in ast.iter_child_nodes(node):
        first, last = getattr(child, "lineno", 0), getattr(child, "end_lineno", lines[-1])
        if bisect_left(lines, first) < bisect_right(lines, last):
            yield from _raised_texts(child, lines)


def _literal(node: ast.AST) -> str:
    """The text of an expression, without its values."""
    if isinstance(node, ast.Constant):
        return node.value if isinstance(node.value, str) else ""
    if isinstance(node, ast.JoinedStr):
        return "".join(_literal(part) if isinstance(part, ast.Constant) else " " for part in node.values)
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        return _literal(node.left) + _literal(node.right)
    return ""
