"""Names of variables that agree on all ranks: the last part of Keras's name, without numbers.

Keras numbers layers of one class in the order in which a process makes them, and a layer's path depends on how it was
built: the kernel that is `time_distributed_1/dense_3/kernel` where a model was made is `dense/kernel` where it was
loaded from a file. What a layer calls its own variable is the same everywhere. A collective with this
name and an index in a list is matched with its like on all ranks; most lists in another order still differ.
"""

from __future__ import annotations

import re
from typing import Any

_COUNTED = re.compile(r"_\d+(?=_|$)")


def everywhere(variable: Any) -> str:
    """The last part of the name of a variable (or layer) of Keras or TensorFlow, without the numbers in it."""
    path = getattr(variable, "path", None) or getattr(variable, "name", None) or "gradient"
    return _COUNTED.sub("", str(path).removesuffix(":0").rpartition("/")[2])
