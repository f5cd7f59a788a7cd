"""The site is built without a warning; every public name and every error code can be found in it."""

import ast
import importlib
import inspect
import re
import subprocess
import sys
from pathlib import Path

import docstrings
import pages
import pytest
from ranks import needs

needs("sphinx", "torch", "tensorflow")
ROOT = Path(__file__).resolve().parents[2]
WORDS = 1500


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "sphinx", "-W", "--keep-going", "-n", "-q", "-j", "auto", "docs", folder]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return folder


def test_the_search_knows_all_codes(site):
    index = (site / "searchindex.js").read_text().lower()
    codes = re.findall(r"^### (HVD\d{3})", (ROOT / "hvdlite/ERRORS.md").read_text(), re.MULTILINE)
    assert len(codes) > 150 and not [code for code in codes if code.lower() not in index]


def test_every_public_name_is_on_one_reference_page():
    listed = [
        (module, name)
        for page in (ROOT / "docs/reference").glob("*.md")
        for module, names in re.findall(r"^```{names} ([\w.]+)\n(.*?)^```", page.read_text(), re.MULTILINE | re.DOTALL)
        for line in names.splitlines()
        for name in line.partition(": ")[0].split()
    ]
    assert len(listed) == len(set(listed)) > 200
    things = [getattr(importlib.import_module(module), name) for module, name in listed]
    documented = [inspect.getdoc(thing) for thing in things if callable(thing)]
    lacks = [
        f"{module}.{name}"
        for module in docstrings.MODULES
        for name, thing in docstrings.public(module)
        if "." not in name and (module, name) not in listed and thing not in things
        if inspect.getdoc(thing) not in documented  # a builtin of hvdlite.torch has the docstring of Python's function
    ]
    assert not lacks


def test_what_is_not_there_yet_is_on_its_page():
    """Each code of a HvdNotYetError, and of a line of the launcher that begins "not yet"."""
    codes = set()
    for path in [*(ROOT / "hvdlite").rglob("*.py"), *(ROOT / "launcher").rglob("*.py")]:
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if not isinstance(node, (ast.Call, ast.JoinedStr)):
                continue
            text = ast.unparse(node)
            if re.match(r"""HvdNotYet\w*Error\(|f['"]not yet: """, text):
                found = re.findall(r"HVD\d{3}", text)
                assert found or isinstance(node, ast.JoinedStr), f"{path}:{node.lineno}: the code stands elsewhere"
                codes.update(found)
    page = (ROOT / "docs/not-yet.md").read_text(encoding="utf-8")
    assert len(codes) > 3 and not [code for code in sorted(codes) if f"[{code}]" not in page]


def test_no_page_is_too_long():
    texts = {page: (ROOT / page).read_text(encoding="utf-8") for page in pages.PAGES}
    assert not {page: len(text.split()) for page, text in texts.items() if len(text.split()) > WORDS}
    assert texts["README.md"].count("\n") <= 120


def test_no_path_of_the_machine_is_in_the_site(site):
    assert not [p for p in site.rglob("*.html") if str(ROOT) in p.read_text() or str(Path.home()) in p.read_text()]
