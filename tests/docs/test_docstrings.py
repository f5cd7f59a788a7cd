"""The docstrings of public names: sections that fit the signature, and examples that two ranks run."""

import importlib.util

import docstrings
import language
import pytest
from ranks import as_ranks

torch = pytest.importorskip("torch")

import hvdlite  # noqa: E402

LACKS = [each for each in ("jax", "optax") if importlib.util.find_spec(each) is None]
THEIRS = ("tensorflow", "keras", *["jax"] * bool(LACKS))
PLAIN = [each for each in docstrings.MODULES if not any(name in each for name in THEIRS)]


@pytest.mark.parametrize("module", PLAIN)
def test_every_public_name_has_its_sections_in_plain_words(module):
    wrong = [f"{name}: {each}" for name, thing in docstrings.public(module) for each in docstrings.faults(name, thing)]
    wrong += language.of_docstrings(module)
    assert not wrong, "\n".join(wrong)


@as_ranks(2)
@pytest.mark.parametrize("module", PLAIN)
def test_the_examples_print_what_they_show(module):
    reports = docstrings.tried(module, hvdlite.rank())
    assert not reports, "\n".join(reports)
