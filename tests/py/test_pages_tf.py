"""The Python blocks of pages that use TensorFlow or Keras, on two ranks."""

import pages
import pytest
from ranks import as_ranks
from test_pages import in_a_folder

pytest.importorskip("tensorflow")
PATIENCE_S = 120.0


@as_ranks(2)
@pytest.mark.parametrize("page", [page for page in pages.PAGES if pages.frameworks(page)])
def test_python_runs_on_two_ranks(page):
    in_a_folder(page)
