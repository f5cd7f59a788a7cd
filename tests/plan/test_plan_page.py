"""docs/guides/plans.md and predictions.md: commands and Python run as they stand there, and draw the pictures.

The picture of a prediction is drawn from a job that is recorded here, so it is another one each time.
"""

import os
import re
import shlex
from pathlib import Path

import pytest
from launching import launch

from hvdlite.plan import cli as plan
from hvdlite.plan import registry
from hvdlite.trace import cli as trace

ROOT = Path(__file__).resolve().parents[2]
GUIDES = ROOT / "docs/guides"
PAGE = "".join((GUIDES / page).read_text(encoding="utf-8") for page in ("predictions.md", "plans.md"))
MEASURED = "plans-predicted.svg"


def blocks(language):
    return re.findall(rf"^```{language}[^\n]*\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)


def test_commands_and_python_of_the_page(tmp_path, monkeypatch):
    pytest.importorskip("scipy", reason="`hvdlite-plan network` needs it: pip install hvdlite[plan]")
    pytest.importorskip("sklearn", reason="the example that is recorded reads its digits")
    monkeypatch.chdir(tmp_path)
    os.symlink(ROOT / "examples", "examples")
    drawn = set()
    for line in "\n".join(blocks("sh")).replace("\\\n", " ").splitlines():
        words = shlex.split(line, comments=True)
        if not words:
            continue
        program, *words = words
        drawn |= {word for word in words if word.endswith(".svg")}
        if program == "hvdlite-run":
            code, _, err = launch(*words)
            assert code == 0, err
        else:
            assert {"hvdlite-plan": plan, "hvdlite-trace": trace}[program].main(words) == 0, line
    assert drawn == set(re.findall(r"\((plans-[a-z-]+\.svg)\)", PAGE))
    for name in drawn - {MEASURED}:
        assert Path(name).read_bytes() == (GUIDES / name).read_bytes(), name
    assert Path(MEASURED).read_text().startswith("<svg")
    registry.names()
    monkeypatch.setattr(registry, "_known", dict(registry._known))  # what the page registers is gone after it
    for program in blocks("python"):
        exec(compile(program, "docs/guides", "exec"), {})
