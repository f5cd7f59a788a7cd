"""Trees of arrays: what their leaves are called, and in which form a leaf travels that the core does not have.

A leaf is called by its path, as JAX prints it. Keys of random numbers travel as their data, and unsigned words as
signed ones where they are only moved: bits are bits. Values that are no arrays become what JAX makes of them, unless
that is another value.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from .. import _core
from ..errors import HvdArgumentError

_MOVED_AS = {"uint32": "int32", "uint64": "int64"}


class Named(NamedTuple):
    """The leaves of a tree. names: of collectives, without the kind."""

    leaves: list[Any]
    names: list[str]
    structure: Any
    bare: bool  # the tree is one array
    name: str  # what the names begin with

    def rebuilt(self, leaves: Sequence[Any]) -> Any:
        """A tree of the same structure."""
        return jax.tree_util.tree_unflatten(self.structure, list(leaves))


def named(tree: Any, name: str) -> Named:
    """The leaves of a tree as arrays. TypeError: it is none. HvdArgumentError: JAX would change its value."""
    found, structure = jax.tree_util.tree_flatten_with_path(tree)
    names = [f"{name}{jax.tree_util.keystr(path)}".replace("\n", " ") for path, _ in found]
    leaves = [_array(leaf, each) for (_, leaf), each in zip(found, names)]
    return Named(leaves, names, structure, len(found) == 1 and not found[0][0], name)


def _array(leaf: Any, name: str) -> Any:
    if isinstance(leaf, jax.Array):
        return leaf
    try:
        made = jnp.asarray(leaf)
    except (TypeError, ValueError) as error:
        why = str(error).partition("\n")[0]
        raise TypeError(f"'{name}' is not an array that JAX supports, but {type(leaf)}: {why} [HVD201]") from error
    if (
        getattr(leaf, "dtype", made.dtype) != made.dtype
        and made.dtype.kind in "iu"
        and (np.asarray(made) != leaf).any()
    ):
        raise HvdArgumentError(
            f"'{name}': its {leaf.dtype} values do not fit {made.dtype}, which JAX makes of them: set "
            'jax.config.update("jax_enable_x64", True) [HVD202]'
        )
    return made


def in_graph(leaves: Sequence[Any]) -> bool:
    """Whether JAX traces a function: these have no values yet, or are differentiated."""
    return any(isinstance(leaf, jax.core.Tracer) for leaf in leaves)


def digest(names: Sequence[str]) -> int:
    """31 bits, not 0, that are the same on all ranks."""
    return zlib.crc32("\n".join(names).encode()) & 0x7FFFFFFF or 1


def require_dtypes(tree: Named) -> None:
    """HvdArgumentError naming the first leaf of a dtype that the core does not have."""
    for leaf, name in zip(tree.leaves, tree.names):
        if str(leaf.dtype) not in _core.DTYPES:
            raise HvdArgumentError(
                f"'{name}': Tensor type {leaf.dtype} is not supported; supported: {', '.join(_core.DTYPES)} [HVD202]"
            )


def movable(tree: Named) -> tuple[Named, Callable[[Sequence[Any]], list[Any]]]:
    """The tree in dtypes of the core, for what only moves it, and the way back."""
    keys = [
        jax.random.key_impl(leaf) if jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key) else None
        for leaf in tree.leaves
    ]
    data = [leaf if key is None else jax.random.key_data(leaf) for leaf, key in zip(tree.leaves, keys)]
    dtypes = [str(leaf.dtype) for leaf in data]
    sent = [_as(leaf, _MOVED_AS.get(dtype)) for leaf, dtype in zip(data, dtypes)]
    names = [name if key is None else f"{name} ({key})" for name, key in zip(tree.names, keys)]
    moved = tree._replace(leaves=sent, names=names)  # keys of other kinds are other leaves
    require_dtypes(moved)

    def back(received: Sequence[Any]) -> list[Any]:
        words = [_as(leaf, dtype if dtype in _MOVED_AS else None) for leaf, dtype in zip(received, dtypes)]
        return [word if key is None else jax.random.wrap_key_data(word, impl=key) for word, key in zip(words, keys)]

    return moved, back


def _as(leaf: Any, dtype: str | None) -> Any:
    return leaf if dtype is None else jax.lax.bitcast_convert_type(leaf, dtype)
