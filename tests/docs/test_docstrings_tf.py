"""As test_docstrings, for TensorFlow and Keras."""

import docstrings
import language
import pytest
from ranks import as_ranks, needs

import hvdlite

needs("tensorflow")

PATIENCE_S = 120.0
THEIRS = [each for each in docstrings.MODULES if "tensorflow" in each or "keras" in each]


@pytest.mark.parametrize("module", THEIRS)
def test_every_public_name_has_its_sections_in_plain_words(module):
    wrong = [f"{name}: {each}" for name, thing in docstrings.public(module) for each in docstrings.faults(name, thing)]
    wrong += language.of_docstrings(module)
    assert not wrong, "\n".join(wrong)


@as_ranks(2)
@pytest.mark.parametrize("module", THEIRS)
def test_the_examples_print_what_they_show(module):
    reports = docstrings.tried(module, hvdlite.rank())
    assert not reports, "\n".join(reports)
