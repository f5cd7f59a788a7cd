"""`horovod.tensorflow.util` and its like: small functions that scripts have come to import from Horovod.

They are no part of Horovod's documented surface, and frameworks on top of it use them nevertheless: what is kept here
means what it meant there. Names that begin with an underscore are shown as well.
Nothing here is used by hvdlite itself.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from importlib import import_module
from typing import Any

from ..tensorflow import optimizer
from .small_functions import handle_average_backwards_compatibility, num_rank_is_power_2

__all__ = ["check_num_rank_power_of_2", "handle_average_backwards_compatibility", "refs_to_vars", "vars_to_refs"]

optimizer.made_in = "horovod.tensorflow"  # as of_torch
_has_eager = True
check_num_rank_power_of_2 = num_rank_is_power_2


def _executing_eagerly() -> bool:
    """Whether TensorFlow runs what it is given at once."""
    return bool(import_module("tensorflow").executing_eagerly())


def _make_subgraph(f: Callable[..., Any]) -> Any:
    """tf.function(f)."""
    return import_module("tensorflow").function(f)


def _cache(f: Callable[..., Any]) -> Callable[..., Any]:
    """f, called once for the same arguments in each mode."""
    found: dict[Any, Any] = {}

    @functools.wraps(f)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        key = (args, tuple(sorted(kwargs.items())), _executing_eagerly())
        if key not in found:
            found[key] = f(*args, **kwargs)
        return found[key]

    return wrapper


def vars_to_refs(vars: Any) -> Any:
    """Hashable references to variables, in a tuple; nested lists stay nested."""
    if isinstance(vars, (list, tuple)):
        return tuple(vars_to_refs(each) for each in vars)
    return vars.ref() if hasattr(vars, "ref") else vars


def refs_to_vars(refs: Iterable[Any]) -> Any:
    """The variables of such references, as lists."""
    if isinstance(refs, (list, tuple)):
        return [refs_to_vars(each) for each in refs]
    return refs.deref() if hasattr(refs, "deref") else refs
