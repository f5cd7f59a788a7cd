"""The Python blocks of pages that use TensorFlow or Keras, on two ranks; and the names of all pages."""

import functools
import importlib.util
import re

import pages
import pytest
from ranks import as_ranks, needs
from test_pages import in_a_folder

needs("tensorflow")
PATIENCE_S = 120.0


@as_ranks(2)
@pytest.mark.parametrize("page", [page for page in pages.PAGES if pages.frameworks(page)])
def test_python_runs_on_two_ranks(page):
    in_a_folder(page)


def test_every_name_of_the_pages_exists():
    jax = ["jax"] if importlib.util.find_spec("jax") else []
    modules = [importlib.import_module(f"hvdlite.{name}") for name in ("torch", "tensorflow", "keras", "numpy", *jax)]
    names = {
        (page, name)
        for page in filter(pages.runs_here, pages.PAGES)
        for name in re.findall(r"\bhvd\.([A-Za-z_]\w*(?:\.[A-Za-z_]\w*)*)", (pages.ROOT / page).read_text())
        if name != "py"
    }
    assert len(names) > 200
    nothing = object()
    get = functools.partial(functools.reduce, lambda thing, part: getattr(thing, part, nothing))
    lacks = [(page, name) for page, name in names if all(get(name.split("."), m) is nothing for m in modules)]
    assert not sorted(lacks)
