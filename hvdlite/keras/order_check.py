"""Check that the variables of all ranks are in the same order, before values are sent by index.

Layers that are made in a loop over a set come in another order in each process. Where their shapes agree, a rank would
get the value of another variable. So names are compared: it is an error if all ranks have the same names in different
orders. Where the names differ, as those of a model that one rank has loaded from a file may, places and shapes decide.

Numbers that Keras gives by itself are left out. They count the layers of a class as a process makes them, so layers
that were made in another order may be in their right places nevertheless.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from importlib import import_module
from typing import Any

from ..training.digest import digest
from .list_check import Listed

_NUMBER = re.compile(r"_\d+(?=[_/]|$)")
_SAME_ORDER = (
    "Make the layers and variables in the same order on all ranks: loop over a list or sorted(names), not over a set, "
    "whose order is another one in each process."
)


class VariableOrder:
    """The names of a list of variables, in their order.

    what: whose list it is. forms: of each variable its dtype and shape, as errors show them.
    """

    def __init__(self, what: str, variables: Sequence[Any], forms: Sequence[str]) -> None:
        self._names = _names_of(variables)
        shown = [f"{name} {form}" for name, form in zip(self._names, forms)]
        self.what = f"{what}.order"
        self.listed = Listed(self.what, len(shown), "variables", self._names, shown, _SAME_ORDER)

    @property
    def of_names(self) -> list[int]:
        """A digest of the names in any order, and its negative: the ranks' maxima show whether all are equal."""
        number = int.from_bytes(digest(["\n".join(sorted(self._names)).encode()])[:7], "little")
        return [number, -number]


def _names_of(variables: Sequence[Any]) -> list[str]:
    """Only Keras 3's variables have a path, and only there is it known which numbers are Keras's own."""
    classes = _classes() if any(hasattr(each, "path") for each in variables) else frozenset()

    def number(found: re.Match[str]) -> str:
        before = found.string[: found.start()].rpartition("/")[2].split("_")
        own = any("".join(before[i:]) in classes for i in range(len(before)))
        return "" if own else found.group()

    names = []
    for each in variables:
        path = getattr(each, "path", None)
        name = str(getattr(each, "name", "")).removesuffix(":0")
        names.append(_NUMBER.sub("", name) if path is None else _NUMBER.sub(number, path))
    return names


def _classes() -> frozenset[str]:
    """The classes whose objects Keras names and counts, as they are called without underscores in such a name."""
    keras = import_module("keras")
    found: set[type] = set()
    queue = [keras.layers.Layer, keras.optimizers.Optimizer, keras.metrics.Metric, keras.Variable]
    queue.append(keras.random.SeedGenerator)
    while queue:
        kind = queue.pop()
        if kind not in found:
            found.add(kind)
            queue += kind.__subclasses__()
    return frozenset(re.sub(r"[\W_]", "", kind.__name__).lower() for kind in found)
