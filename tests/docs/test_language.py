"""Pages, error codes, docstrings of public names and messages are plain English: language.py has the rules."""

import ast
import re
from pathlib import Path

import language
import pages
import pytest

ROOT = Path(__file__).resolve().parents[2]
TEXTS = [*pages.PAGES, "hvdlite/ERRORS.md", "launcher/README.md", "tests/README.md"]
TEXTS += [str(path.relative_to(ROOT)) for path in sorted((ROOT / "examples").rglob("*.md"))]
MESSAGE = re.compile(r"\[HVD\d{3}\]")


@pytest.mark.parametrize("page", TEXTS)
def test_pages_are_plain(page):
    text = (ROOT / page).read_text(encoding="utf-8")
    wrong = [f"over {language.WORDS} words: {each}" for each in language.too_long(text)] + language.retired(text)
    assert not wrong, f"{page}:\n" + "\n".join(wrong)


def messages(path):
    """The texts of a Python file that have a code: values in an f-string count as one word."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    parts = {id(part) for node in ast.walk(tree) if isinstance(node, ast.JoinedStr) for part in node.values}
    for node in ast.walk(tree):
        if isinstance(node, ast.JoinedStr):
            text = "".join(str(p.value) if isinstance(p, ast.Constant) else "VALUE" for p in node.values)
        elif isinstance(node, ast.Call) and getattr(node.func, "id", "") == "coded" and len(node.args) > 1:
            text = "[HVD000]" + "".join(
                str(part.value) if isinstance(part, ast.Constant) else "VALUE"
                for part in getattr(node.args[1], "values", [node.args[1]])
            )
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in parts:
            text = node.value
        else:
            continue
        if MESSAGE.search(text) and "\n\n" not in text:
            yield node.lineno, MESSAGE.sub("", text)


def test_messages_are_plain():
    wrong = []
    for path in [*(ROOT / "hvdlite").rglob("*.py"), *(ROOT / "launcher").rglob("*.py")]:
        for line, text in messages(path):
            where = f"{path.relative_to(ROOT)}:{line}"
            clauses = text.replace(": ", ".\n\n")  # what failed: what to do
            wrong += [f"{where}: {each}" for each in language.too_long(clauses) + language.retired(text)]
    assert not wrong, f"{len(wrong)}\n" + "\n".join(wrong)
