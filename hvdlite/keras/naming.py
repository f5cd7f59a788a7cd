"""What is a variable called on every rank? By the name that Keras gave it, without what Keras has counted.

Keras numbers layers of one class in the order in which a process makes them, so a rank that has made a model more, or
has loaded its model from a file, has `dense_3` where the others have `dense_1`. Who names a collective by it and its
place in a list meets its like on all ranks; lists in another order are still told apart by most names.
"""

from __future__ import annotations

import re
from typing import Any

_COUNTED = re.compile(r"_\d+(?=[/_]|$)")


def everywhere(variable: Any) -> str:
    """The name of a variable of Keras or TensorFlow without the numbers in it."""
    path = getattr(variable, "path", None) or getattr(variable, "name", None) or "gradient"
    return _COUNTED.sub("", str(path).removesuffix(":0"))
