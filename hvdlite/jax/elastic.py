"""Elastic training with JAX: `@hvd.elastic.run`, and a state of trees of arrays.

Arrays that a compiled step donates are gone, so a state keeps copies of its own. Structures stay each rank's, since
they hold functions; only leaves are sent. After the ranks have changed, compiled functions are forgotten: shapes and
the number of ranks are compiled into them.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from .. import _core
from ..elastic import ObjectState, State, reset, run_fn
from ..errors import HvdStateError
from ..ops.objects import broadcast_object
from .errors import translate_errors
from .native import drain
from .optimizer import broadcast_parameters
from .tree import Named, named


def run(func: Callable[..., Any]) -> Callable[..., Any]:
    """Decorate a training function so that it survives lost ranks and uses new ones. See ``hvdlite.elastic.run``.

    This form recognizes a lost rank inside a compiled function, and has functions compiled again when the ranks have
    changed.

    Args:
        func (callable): the training function, ``func(state, *args, **kwargs)``. All ranks must call it.

    Returns:
        callable: a function with the arguments and the result of ``func``.

    Raises:
        HvdMismatchError: when called, the states of the ranks have different attributes or parts.
        HvdNotYetError: when called, a rank was lost in a job that is not elastic. The other errors are those of
            ``hvdlite.elastic.run``.

    Example:
        >>> @hvd.elastic.run
        ... def train(state):
        ...     while state.step < 3:
        ...         state.params = jax.jit(hvd.allreduce)(state.params + 1)
        ...         state.step += 1
        ...         state.commit()
        >>> state = hvd.elastic.JaxState(params=jnp.zeros(1), step=0)
        >>> train(state)
        >>> state.params.tolist()
        [3.0]
    """

    @functools.wraps(func)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        with translate_errors():
            return jax.block_until_ready(func(*args, **kwargs))

    def again() -> None:
        drain()
        reset()
        jax.clear_caches()

    return run_fn(wrapper, again)


class JaxState(ObjectState):
    """State of trees of arrays and of any other objects, which are kept as attributes.

    A value with an array of JAX in it is a tree: rank 0's leaves are sent, and each rank keeps its own structure.

    Args:
        kwargs: trees, such as ``params=params, opt_state=opt_state``, and objects, by the name of the attribute.

    Raises:
        HvdMismatchError: from ``sync``, the trees of the ranks differ.

    Example:
        >>> state = hvd.elastic.JaxState(params={"w": jnp.zeros(2)}, epoch=0)
        >>> state.params = {"w": jnp.ones(2)}
        >>> state.restore()
        >>> state.params["w"].tolist()
        [0.0, 0.0]
    """

    def __init__(self, **kwargs: Any) -> None:
        trees = {name: value for name, value in kwargs.items() if _has_arrays(value)}
        for name, value in trees.items():
            setattr(self, name, value)
        self._trees = {name: _copied(name, value) for name, value in trees.items()}
        objects = {name: value for name, value in kwargs.items() if name not in trees}
        super().__init__(bcast_object=broadcast_object, get_rank=_core.rank, **objects)

    def save(self) -> None:
        """Keep a copy of everything in the memory of the host."""
        trees = {name: _copied(name, getattr(self, name)) for name in self._trees}
        super().save()
        self._trees = trees

    def restore(self) -> None:
        """Go back to the copy that was saved last."""
        for name, tree in self._trees.items():
            setattr(self, name, tree.rebuilt([_array(leaf) for leaf in tree.leaves]))
        super().restore()

    def sync(self) -> None:
        """Give every rank the state of rank 0. All ranks must call it.

        Raises:
            HvdMismatchError: the trees of the ranks differ.
            HvdPeerLostError: a rank has left or died. The copies stay as they were.
        """
        received = {name: broadcast_parameters(getattr(self, name)) for name in self._trees}
        copies = {name: _copied(name, value) for name, value in received.items()}
        super().sync()
        self._trees = copies
        for name, value in received.items():
            setattr(self, name, value)

    def _form(self) -> dict[str, str]:
        trees = {name: f"a tree of {len(tree.leaves)} leaves" for name, tree in self._trees.items()}
        return {**super()._form(), **trees}

    def state_dict(self) -> dict[str, Any]:
        """Return what was saved last.

        Returns:
            dict: ``{"objects": {name: value}, "trees": {name: [array]}}``.
        """
        trees = {name: [leaf.data for leaf in tree.leaves] for name, tree in self._trees.items()}
        return {**super().state_dict(), "trees": trees}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go back to a state that ``state_dict`` has returned.

        Args:
            state_dict (dict): the value of ``state_dict``, from this job or another one.

        Raises:
            HvdStateError: the names of the attributes, or the shapes or dtypes of leaves, differ.
        """
        loaded = {}
        for name, tree in self._trees.items():
            found = state_dict["trees"].get(name, [])
            theirs, own = map(_form_of, found), [_form_of(leaf.data) for leaf in tree.leaves]
            differs = [each for each in zip(tree.names, theirs, own) if each[1] != each[2]]
            if len(found) != len(own) or differs:
                leaf, has, wanted = differs[0] if differs else (name, f"{len(found)} leaves", f"{len(own)} leaves")
                raise HvdStateError(f"{leaf}: {has} where this state has {wanted} [HVD425]")
            loaded[name] = tree._replace(leaves=[x._replace(data=data) for x, data in zip(tree.leaves, found)])
        super().load_state_dict(state_dict)
        self._trees = loaded
        self.restore()


def _has_arrays(value: Any) -> bool:
    return any(isinstance(leaf, jax.Array) for leaf in jax.tree_util.tree_leaves(value))


class _Kept(NamedTuple):
    """A leaf, as it was saved: in the memory of the host, and of a key of random numbers its kind."""

    data: Any
    key: Any = None


def _copied(name: str, tree: Any) -> Named:
    """Copies of the leaves of a tree. A number is an array, as it is after a broadcast."""
    found = named(tree, name)
    return found._replace(leaves=[_kept(leaf) for leaf in found.leaves])


def _kept(leaf: Any) -> _Kept:
    if jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        return _Kept(np.array(jax.random.key_data(leaf)), jax.random.key_impl(leaf))
    return _Kept(np.array(leaf))


def _array(kept: _Kept) -> Any:
    return jnp.array(kept.data) if kept.key is None else jax.random.wrap_key_data(jnp.array(kept.data), impl=kept.key)


def _form_of(data: Any) -> str:
    return f"{data.dtype}{list(data.shape)}"


__all__ = ["JaxState", "ObjectState", "State", "run", "run_fn"]
