"""Which code blocks has a page, and what does each promise?

The info string of a fence says what a test does with it:

    ```python                     runs on two ranks; the blocks of a page share their names
    ```python file=train.py       is written to the page's folder
    ```diff file=b.py from=a.py   its new side is written; its old side is a.py
    ```console                    `$ command` runs in that folder; its output has the lines below it (`...`: any text)
    ```console dry: REASON        hvdlite-run's own flags are read, nothing is started
    ```yaml                       is parsed, as json, toml and sh are
    ```text                       is no code
    ```LANGUAGE skip: REASON      is not run
"""

from __future__ import annotations

import importlib.util
import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[2]
FENCE = re.compile(r"^( *)(`{3,}|:{3,})([^\n`]*)\n(.*?)^\1\2 *$", re.MULTILINE | re.DOTALL)
PAGES = sorted(str(path.relative_to(ROOT)) for path in [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")])
PARSED = ("yaml", "json", "toml", "sh", "ini")


class Block(NamedTuple):
    page: str
    line: int
    language: str
    said: str  # the rest of the info string
    text: str

    @property
    def skipped(self) -> str:
        """The reason, where it gives one."""
        return self.said.partition("skip:")[2].strip()

    def word(self, key: str) -> str:
        found = re.search(rf"\b{key}=(\S+)", self.said)
        return found.group(1) if found else ""

    def side(self, mark: str) -> str:
        """Of a diff: the lines that have `mark` or are the same on both sides."""
        return "".join(line[1:] + "\n" for line in self.text.splitlines() if line[:1] in (mark, " ") or not line)


def blocks(page: str) -> list[Block]:
    """In order, without directives (their names are in braces) and comments."""
    text = (ROOT / page).read_text(encoding="utf-8")
    text = re.sub(r"<!--.*?-->", lambda found: "\n" * found.group().count("\n"), text, flags=re.DOTALL)
    made = []
    for found in FENCE.finditer(text):
        indent, _, words, body = found.groups()
        language, _, said = words.strip().partition(" ")
        if language.startswith("{"):
            continue
        body = re.sub(rf"^{indent}", "", body, flags=re.MULTILINE)
        made.append(Block(page, text.count("\n", 0, found.start()) + 2, language, said, body))
    return made


def in_ranks(page: str) -> list[Block]:
    """What the kept ranks run: Python without a file."""
    return [b for b in blocks(page) if b.language in ("python", "diff") and not b.skipped and not b.word("file")]


def frameworks(page: str) -> bool:
    """Do the ranks of this page need TensorFlow or Keras?"""
    return any(re.search(r"tensorflow|keras", block.text) for block in in_ranks(page))


def runs_here(page: str) -> bool:
    """Is JAX installed, where blocks of the page need it?"""
    needed = any("hvdlite.jax" in block.text for block in blocks(page))
    return not needed or importlib.util.find_spec("jax") is not None


def run_in_rank(page: str) -> None:
    """Runs the blocks of a page on this rank, in the current folder."""
    names = {"__name__": "__main__"}
    for block in in_ranks(page):
        text = block.side("+") if block.language == "diff" else block.text
        exec(compile("\n" * (block.line - 1) + text, page, "exec"), names)


def in_folder(page: str) -> list[Block]:
    """What is written and run in the page's folder."""
    return [
        b
        for b in blocks(page)
        if not b.skipped and (b.word("file") or (b.language == "console" and "dry:" not in b.said))
    ]


def commands(block: Block) -> list[tuple[str, list[str]]]:
    """(command, expected lines) of a console block."""
    made: list[tuple[str, list[str]]] = []
    for line in block.text.replace("\\\n", " ").splitlines():
        if line.startswith("$ "):
            made.append((re.sub(r"\s+#\s.*", "", line[2:]), []))
        elif line.strip():
            made[-1][1].append(line)
    return made


def output_lacks(expected: list[str], output: str) -> list[str]:
    """The expected lines that no line of the output is."""
    said = {line.rstrip() for line in output.splitlines()}
    patterns = {line: re.compile(".*".join(map(re.escape, line.rstrip().split("...")))) for line in expected}
    return [line for line, pattern in patterns.items() if not any(map(pattern.fullmatch, said))]


def parse(block: Block) -> None:
    """Raises what the parser of the language raises."""
    if block.language == "json":
        json.loads(block.text)
    elif block.language == "yaml":
        import yaml

        list(yaml.safe_load_all(block.text))
    elif block.language == "sh":
        subprocess.run(["bash", "-n"], input=block.text, text=True, check=True, capture_output=True)
    elif block.language == "toml" and sys.version_info >= (3, 11):
        import tomllib

        tomllib.loads(block.text)


def read_flags(block: Block) -> None:
    """The flags of each `hvdlite-run` in a dry block. Raises the launcher's UsageError."""
    from hvdlite.launcher import cli

    for command, _ in commands(block):
        words = shlex.split(command)
        while words and re.fullmatch(r"[A-Z_]+=.*", words[0]):
            words.pop(0)
        if words[:1] == ["hvdlite-run"]:
            cli._parsed(words[1:])


def path_with_programs() -> str:
    """PATH, with this environment's programs first."""
    return os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])
