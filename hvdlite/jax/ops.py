"""Collectives of trees of arrays: outside of jit by the NumPy collectives, inside as a part of the program.

A tree is what JAX takes for one: nested dicts, lists, tuples, and classes that are registered. Each leaf is a tensor of
its own for the core, named by its path. With it goes one comparison of the tree itself: a leaf that only one rank has
would wait for ever, and None is no leaf.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import numpy as np

from .. import _core, metrics
from ..errors import HvdArgumentError, HvdMismatchError, is_outcome
from ..ops import Average, Collectives, Sum, op_of, synchronize
from ..ops.arguments import NoneCompressor, compress
from ..process_sets.process_set import ProcessSet, global_process_set, rank_in
from . import graph
from .adapter import JaxAdapter
from .tree import Named, digest, in_graph, movable, named, require_dtypes

_ops: Collectives[Any] = Collectives(JaxAdapter())


def _named(tree: Any, name: str | None) -> Named:
    if name is not None and not isinstance(name, str):
        raise TypeError(f"name must be a str or None, not {type(name).__name__} [HVD204]")
    return named(tree, "tree" if name is None else name)


def _eager(verb: str, tree: Named, name: str | None, process_set: ProcessSet, start: Callable[..., Any]) -> list[Any]:
    """The results, all on their way before the first is waited for. start: of an array and its name."""
    names = [None] if tree.bare and name is None else tree.names
    if not tree.bare:
        _require_same(f"{verb} of {tree.name}", tree, process_set)
    handles, results, failure = [], [], None
    try:
        for leaf, each in zip(tree.leaves, names):
            handles.append(start(leaf, each))
    except Exception as error:  # those before it are waited for, or their names would be in flight
        failure = error
    for handle in handles:
        try:
            result = synchronize(handle)
            results.append(result[0] if isinstance(result, tuple) else result)  # of alltoall, also who sent how much
        except Exception as error:
            if not is_outcome(error):
                raise
            failure = failure or error
    if failure is not None:
        raise failure
    return [jnp.asarray(each) for each in results]


def _require_same(what: str, tree: Named, process_set: ProcessSet) -> None:
    """HvdMismatchError on all ranks whose trees have other leaves: one that only some have would wait for ever."""
    shape = np.empty((len(tree.leaves), digest(tree.names), 0), np.uint8)
    try:
        _ops.allreduce(shape, name=what, op=Sum, process_set=process_set)
    except HvdMismatchError as error:
        raise HvdMismatchError(
            f"{what}: the ranks gave trees of different leaves; None is no leaf. Give the same structure on all "
            f"ranks. ({str(error).rpartition(' [')[0]} Numbers are of leaves, and of their names.) [HVD301]"
        ) from None


def allreduce(
    tree: Any, average: bool | None = None, name: str | None = None, compression: Any = NoneCompressor,
    op: int | None = None, prescale_factor: float = 1.0, postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set
) -> Any:  # fmt: skip
    """Reduce a tree of arrays over all ranks and return the result on every rank.

    All ranks of the set must call it with trees of the same structure. Inside ``jax.jit`` the tree is one call of the
    compiled program. ``Average`` and ``Sum`` have the gradient of the sum of all ranks' losses. Others have none.

    Args:
        tree (pytree of arrays): shapes and dtypes are the same on all ranks.
        op (int, optional): ``hvd.Average`` (default), ``Sum``, ``Adasum``, ``Min``, ``Max`` or ``Product``.
        name (str, optional): the same on all ranks. A leaf is called by it and its path. Default: calls without a name
            are matched by their order in the program.
        compression (Compressor): the form in which arrays travel, such as ``hvd.Compression.bf16``. Default: none.
        prescale_factor (float): multiplies the arrays before the reduction. Default: 1.0.
        postscale_factor (float): multiplies the result. Default: 1.0.
        process_set (ProcessSet): the ranks that take part. Default: all.
        average (bool, optional): Horovod's old form of ``op``: True is Average, False is Sum.

    Returns:
        pytree of jax.Array: a new tree of the same structure.

    Raises:
        HvdMismatchError: the ranks disagree about structure, shape, dtype, op or factors. Inside jit it and the
            following are the cause of a ``jax.errors.JaxRuntimeError``; see ``translate_errors``.
        HvdPeerLostError: a rank has left or died.
        HvdArgumentError: a dtype is not supported, or this process has several devices.
        HvdNotYetError: inside jit, JAX does not run on CPUs.
        NotImplementedError: JAX differentiates a reduction that has no gradient.

    Example:
        >>> mean = jax.jit(lambda tree: hvd.allreduce(tree, name="mean"))
        >>> mean({"w": jnp.array([1.0, 2.0]) * (hvd.rank() + 1)})["w"].tolist()
        [1.5, 3.0]
    """
    given, reduces = _named(tree, name), op_of(average, op)
    pairs = [compress(compression, leaf) for leaf in given.leaves]
    sent = given._replace(leaves=[small for small, _ in pairs])
    done = reduced(sent, name, reduces, process_set, prescale_factor, postscale_factor)
    return given.rebuilt([compression.decompress(each, ctx) for each, (_, ctx) in zip(done, pairs)])


def reduced(
    tree: Named, name: str | None, op: int, process_set: ProcessSet, prescale: float = 1.0, postscale: float = 1.0,
    step: bool = False
) -> list[Any]:  # fmt: skip
    """The leaves of an allreduce. step: it makes a training step."""
    require_dtypes(tree)
    if in_graph(tree.leaves):
        return graph.run(_core.ALLREDUCE, tree, name, process_set, op, 0, prescale, postscale, step)
    done = _eager("allreduce", tree, name, process_set, lambda array, each: _ops.allreduce_async(
        array, name=each, op=op, prescale_factor=prescale, postscale_factor=postscale, process_set=process_set,
    ))  # fmt: skip
    if step:
        metrics.step(reduced)
    return done


def broadcast(
    tree: Any, root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Any:  # fmt: skip
    """Return the tree of one rank on every rank.

    All ranks of the set must call it. Keys of random numbers and unsigned integers are moved as well. The gradient is
    exact: the root gets the sum of all ranks' gradients, and the other ranks get zeros.

    Args:
        tree (pytree of arrays): shapes and dtypes are the same on all ranks. The values matter on the root only.
        root_rank (int): the global rank of the root, a member of the set.
        name (str, optional): as in ``allreduce``.
        process_set (ProcessSet): the ranks that take part. Default: all.

    Returns:
        pytree of jax.Array: a new tree with the values of the root.

    Raises:
        HvdMismatchError: structure, shape, dtype or root differ. The other errors are those of ``allreduce``.
        ValueError: ``root_rank`` is not a member of the set.

    Example:
        >>> hvd.broadcast({"x": jnp.array([hvd.rank(), 7])}, root_rank=1)["x"].tolist()
        [1, 7]
    """
    given = _named(tree, name)
    sent, back = movable(given)
    if in_graph(sent.leaves):
        done = graph.run(_core.BROADCAST, sent, name, process_set, root=rank_in(process_set, root_rank))
    else:
        done = _eager("broadcast", sent, name, process_set, lambda array, each: _ops.broadcast_async(
            array, root_rank, name=each, process_set=process_set
        ))  # fmt: skip
    return given.rebuilt(back(done))


def allgather(tree: Any, name: str | None = None, process_set: ProcessSet = global_process_set) -> Any:
    """Concatenate the arrays of all ranks along the first dimension and return the result on every rank.

    All ranks of the set must call it. Outside of jit the ranks may give different numbers of rows. Inside, every rank
    gives the same number. The gradient is exact: this rank's rows of the sum of all ranks' gradients.

    Args:
        tree (pytree of arrays): each of at least one dimension. Only the first may differ between ranks.
        name (str, optional): as in ``allreduce``.
        process_set (ProcessSet): the ranks that take part. Default: all.

    Returns:
        pytree of jax.Array: all rows in rank order.

    Raises:
        HvdArgumentError: an array has no dimensions.
        HvdMismatchError: dtypes or the other dimensions differ. The other errors are those of ``allreduce``.

    Example:
        >>> hvd.allgather(jnp.array([hvd.rank(), 7])).tolist()
        [0, 7, 1, 7]
    """
    given = _named(tree, name)
    sent, back = movable(given)
    if in_graph(sent.leaves):
        done = graph.run(_core.ALLGATHER, sent, name, process_set)
    else:
        done = _eager("allgather", sent, name, process_set, lambda array, each: _ops.allgather_async(
            array, name=each, process_set=process_set
        ))  # fmt: skip
    return given.rebuilt(back(done))


def reducescatter(
    tree: Any, op: int = Average, name: str | None = None, process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0, postscale_factor: float = 1.0
) -> Any:  # fmt: skip
    """Reduce arrays over all ranks and return this rank's rows of the result.

    All ranks of the set must call it. Rows are divided in rank order. Outside of jit, of the rest the first ranks get
    one row each. Inside, they must divide evenly. The gradient is exact.

    Args:
        tree (pytree of arrays): each of at least one dimension. Shapes and dtypes are the same on all ranks.
        op (int): ``hvd.Average`` (default), ``Sum``, ``Min``, ``Max`` or ``Product``.
        name (str, optional): as in ``allreduce``.
        process_set (ProcessSet): the ranks that take part. Default: all.
        prescale_factor, postscale_factor (float): as in ``allreduce``.

    Returns:
        pytree of jax.Array: this rank's rows.

    Raises:
        HvdArgumentError: an array has no dimensions, or inside jit its rows do not divide evenly. The other errors are
            those of ``allreduce``.

    Example:
        >>> hvd.reducescatter(jnp.array([1, 2]) * (hvd.rank() + 1), op=hvd.Sum).tolist()
        [3]  # rank 0
        [6]  # rank 1
    """
    given = _named(tree, name)
    require_dtypes(given)
    if in_graph(given.leaves):
        done = graph.run(
            _core.REDUCESCATTER, given, name, process_set, op_of(None, op), 0, prescale_factor, postscale_factor
        )
    else:
        done = _eager("reducescatter", given, name, process_set, lambda array, each: _ops.reducescatter_async(
            array, op=op, name=each, process_set=process_set, prescale_factor=prescale_factor,
            postscale_factor=postscale_factor,
        ))  # fmt: skip
    return given.rebuilt(done)


def alltoall(
    tree: Any, splits: Any = None, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Any:  # fmt: skip
    """Send each rank its part of the rows, and return the rows that the ranks have sent to this one.

    All ranks of the set must call it. The gradient is exact: the gradients travel back.

    Args:
        tree (pytree of arrays): each of at least one dimension. The rows for each rank in rank order, in equal parts.
        splits (list of int, optional): the number of rows for each rank. Then ``tree`` is one array, outside of jit.
        name (str, optional): as in ``allreduce``.
        process_set (ProcessSet): the ranks that take part. Default: all.

    Returns:
        pytree of jax.Array: the received rows in rank order. With ``splits`` a pair, whose second is the number of rows
        from each rank, int32.

    Raises:
        HvdArgumentError: ``splits`` is given inside jit or with a tree, or rows do not divide evenly. The other errors
            are those of ``allreduce``.

    Example:
        >>> hvd.alltoall(jnp.array([0, 1]) + 10 * hvd.rank()).tolist()
        [0, 10]  # rank 0
        [1, 11]  # rank 1
    """
    given = _named(tree, name)
    sent, back = movable(given)
    traced = in_graph(sent.leaves)
    if splits is None and traced:
        return given.rebuilt(back(graph.run(_core.ALLTOALL, sent, name, process_set)))
    if splits is None:
        return given.rebuilt(back(_eager("alltoall", sent, name, process_set, lambda array, each: _ops.alltoall_async(
            array, name=each, process_set=process_set
        ))))  # fmt: skip
    if traced or in_graph([splits]) or not given.bare:
        raise HvdArgumentError(
            "alltoall with splits takes one array, and has a result whose size is not known to a compiler: call it "
            "outside of jit [HVD268]"
        )
    array, rows = _ops.alltoall(
        sent.leaves[0], np.asarray(splits), None if name is None else name, process_set=process_set
    )
    return back([jnp.asarray(array)])[0], jnp.asarray(np.asarray(rows), jnp.int32)
