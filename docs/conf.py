"""Settings of the documentation site: `pip install ".[docs]" && sphinx-build docs site`, then open site/index.html.

Pages are Markdown (MyST). Reference pages take their text from docstrings (Google style), so the build imports hvdlite,
PyTorch and, where they are installed, TensorFlow, Keras and JAX. docs/_ext/pages.py has the directives of our own. The
check builds with warnings as errors: tests/docs/test_site.py.
"""

import os
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE / "_ext"))
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import hvdlite  # noqa: E402

project = "hvdlite"
author = "the hvdlite authors"
copyright = author
version = release = hvdlite.__version__

extensions = [
    "myst_parser",
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",
    "sphinx_copybutton",
    "pages",
]
exclude_patterns = ["_ext"]
myst_enable_extensions = ["colon_fence"]
myst_heading_anchors = 3
suppress_warnings = ["misc.highlighting_failure"]
smartquotes = False  # else --mpi becomes a dash
nitpicky = True
_LISTED = (
    r"(?!hvdlite\.(torch|numpy|tensorflow|keras|jax|data|elastic)\b).*"
)
nitpick_ignore_regex = [("py:.*", _LISTED), ("py:.*", ".*Compressor")]

autodoc_typehints = "none"  # the docstrings say types in words
autodoc_preserve_defaults = True
autodoc_member_order = "bysource"
napoleon_numpy_docstring = False
napoleon_use_rtype = False
add_module_names = False
python_use_unqualified_type_names = True
toc_object_entries = False

html_theme = "furo"
html_title = f"hvdlite {version}"
html_static_path = ["_static"]
html_css_files = ["site.css"]
html_copy_source = False
html_show_sourcelink = False
pygments_style = (
    "default"  # furo's own gives the added lines of a diff no color
)
copybutton_prompt_text = "$ "
copybutton_only_copy_prompt_lines = True
