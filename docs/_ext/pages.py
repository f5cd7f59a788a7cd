"""Directives and roles of our own: parts of pages that are made from the sources, so that they cannot be out of date.

```{options} engine               a table of hvdlite/config/options.py: one scope
```{flags} hvdlite-run            the output of --help-all, or --help
```{errors}                       hvdlite/ERRORS.md, with a search box above it
```{names} hvdlite.torch          public names of a module, each with its docstring
```{summary}                      a table of all names that the page lists so, each with its first sentence
```{drawing} floors               a picture of drawings.py
{repo}`examples/train.py`         a file of the repository, copied beside the site
"""

from __future__ import annotations

import importlib
import inspect
import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

from docutils import nodes
from docutils.statemachine import StringList
from sphinx import addnodes
from sphinx.util.docutils import SphinxDirective, SphinxRole

import drawings
from hvdlite import config
from hvdlite.errors import message_index

ROOT = Path(__file__).resolve().parents[2]
SEARCH = """
<p><input id="hvd-search" type="search" placeholder="HVD450, or the message" aria-label="Search errors">
<span id="hvd-found"></span></p>
<script type="application/json" id="hvd-messages">{messages}</script>
<script src="_static/errors.js" defer></script>
"""


class Made(SphinxDirective):
    """A directive whose content is Markdown that `text` returns."""

    optional_arguments = 1
    final_argument_whitespace = True
    has_content = True

    def text(self) -> str:
        raise NotImplementedError

    def run(self) -> list[nodes.Node]:
        self.env.note_dependency(__file__)
        parent = nodes.section()
        self.state.nested_parse(
            StringList(self.text().splitlines(), source="made"),
            0,
            parent,
            match_titles=True,
        )
        return parent.children


class Names(Made):
    """Each name of a module that the content lists: its docstring, or for a constant what stands behind its colon."""

    required_arguments = 1
    optional_arguments = 0

    def text(self) -> str:
        try:
            module = importlib.import_module(self.arguments[0])
        except ModuleNotFoundError as error:
            return f"This build lacks `{error.name}`: install it to see these names."
        parts = []
        for line in self.content:
            words, _, meaning = line.partition(": ")
            for name in words.split():
                thing = getattr(module, name)
                full = f"{self.arguments[0]}.{name}"
                if meaning:
                    parts.append(f".. py:data:: {full}\n\n   {meaning}\n")
                elif inspect.isclass(thing) and issubclass(thing, BaseException):
                    parts.append(f".. autoexception:: {full}\n")
                elif inspect.isclass(thing):
                    members = "" if name == "Compression" else "   :members:\n"  # its members are classes
                    parts.append(f".. autoclass:: {full}\n{members}")
                else:
                    parts.append(f".. autofunction:: {full}\n")
        return "\n".join(["```{eval-rst}", *parts, "```"])


class Summary(Made):
    """What the page has: a table for each section with names, which link down."""

    LISTED = re.compile(r"^## ([^\n]+)|^```{names} ([\w.]+)\n(.*?)^```", re.M | re.S)

    def text(self) -> str:
        page = self.env.doc2path(self.env.docname)
        parts, title = [], ""
        for heading, module, lines in self.LISTED.findall(Path(page).read_text(encoding="utf-8")):
            if heading:
                title = heading
                continue
            try:
                found = importlib.import_module(module)
            except ModuleNotFoundError:  # Names reports it
                continue
            title = title.replace("`", "``") or f"``{module}``"
            parts.append(f".. list-table:: {title}\n   :class: summary\n   :widths: auto\n")
            for line in lines.splitlines():
                words, _, meaning = line.partition(": ")
                for name in words.split():
                    about = meaning or inspect.getdoc(getattr(found, name)) or ""
                    parts.append(f"   * - :py:obj:`{name} <{module}.{name}>`\n     - {_first_sentence(about)}")
            parts.append("")
            title = ""
        return "\n".join(["```{eval-rst}", *parts, "```"])


def _first_sentence(text: str) -> str:
    """Of a docstring. A point inside of code, or one that no space follows, ends no sentence."""
    paragraph = " ".join(text.partition("\n\n")[0].split())
    return re.match(r"(?:``.*?``|.)*?(?:\.(?= |$)|$)", paragraph).group()  # type: ignore[union-attr]


class Options(Made):
    """A table of the options of one scope: engine, launcher or rank."""

    def text(self) -> str:
        rows = ["| variable, flag, Horovod's name | meaning |", "| --- | --- |"]
        for option in config.OPTIONS:
            if option.scope != self.arguments[0]:
                continue
            names = (option.variable, option.flag, option.alias_variable)
            first = "<br>".join(f"`{name}`" for name in names if name)
            meaning = option.help.replace("|", "\\|")
            if option.default_text is not None:
                meaning += f" Default: `{option.default_text}`."
            rows.append(f"| {first} | {meaning} |")
        return "\n".join(rows)


class Flags(Made):
    """What a program prints with --help-all if it has that, else with --help."""

    def text(self) -> str:
        mains = {
            "hvdlite-run": "launcher.cli:main",
            "hvdlite-trace": "trace.cli:main",
            "hvdlite-plan": "plan.cli:main",
            "hvdlite-aggregator": "aggregation.aggregator_main:command",
        }
        program, *words = self.arguments[0].split()
        words.append("--help-all" if program == "hvdlite-run" else "--help")
        module, _, main = mains[program].partition(":")
        code = f"import sys; from hvdlite.{module} import {main} as main; sys.argv[0] = {program!r}; main()"
        done = subprocess.run(
            [sys.executable, "-I", "-c", code, *words],
            capture_output=True,
            text=True,
            env={"COLUMNS": "78"},
        )
        if done.returncode:
            raise self.error(f"{program} {' '.join(words)}: {done.stderr}")
        return f"````text\n{done.stdout}````"


class Errors(Made):
    """All codes of hvdlite/ERRORS.md. Examples are messages, not Python."""

    def text(self) -> str:
        page = ROOT / "hvdlite/ERRORS.md"
        self.env.note_dependency(str(page))
        codes = "## " + page.read_text(encoding="utf-8").partition("\n## ")[2]
        return re.sub(r"^```\n(.*?)^```$", r"```text\n\1```", codes, flags=re.M | re.S)


class Search(SphinxDirective):
    """A box that filters the sections below it; errors.js does that."""

    def run(self) -> list[nodes.Node]:
        known = json.dumps(message_index.messages(), separators=(",", ":")).replace("</", "<\\/")
        return [nodes.raw("", SEARCH.format(messages=known), format="html")]


class Drawing(SphinxDirective):
    """A picture of drawings.py, by its name."""

    required_arguments = 1

    def run(self) -> list[nodes.Node]:
        self.env.note_dependency(drawings.__file__)
        svg = getattr(drawings, self.arguments[0])()
        return [nodes.raw("", f'<div class="wide">{svg}</div>', format="html")]


class Repo(SphinxRole):
    """A file of the repository: a link to a copy. A folder: its name."""

    def run(self) -> tuple[list[nodes.Node], list[nodes.system_message]]:
        path = ROOT / self.text
        if not path.exists():
            return [], [self.inliner.reporter.error(f"the repository has no {self.text}", line=self.lineno)]
        literal = nodes.literal("", self.text)
        if path.is_dir():
            return [literal], []
        up = "../" * (self.env.docname.count("/") + 1)
        return [addnodes.download_reference("", "", literal, reftype="download", reftarget=up + self.text,
                                            refdoc=self.env.docname, refdomain="", refexplicit=False)], []  # fmt: skip


def for_torch(
    app: Any,
    what: str,
    name: str,
    thing: Any,
    options: Any,
    lines: list[str],
) -> None:
    """The collectives of NumPy and PyTorch are one function with one text, whose arrays are tensors there."""
    if name.startswith("hvdlite.torch."):
        lines[:] = [line.replace("np.array(", "torch.tensor(") for line in lines]


def setup(app: Any) -> dict[str, Any]:
    made = {
        "names": Names,
        "summary": Summary,
        "options": Options,
        "flags": Flags,
        "errors": Errors,
        "search": Search,
        "drawing": Drawing,
    }
    for name, directive in made.items():
        app.add_directive(name, directive)
    app.add_role("repo", Repo())
    app.connect("autodoc-process-docstring", for_torch, priority=400)  # before napoleon
    return {"parallel_read_safe": True, "parallel_write_safe": True}
