"""A transformation of optax that averages gradients, and the start and the comparison of replicas.

The exchange is a part of `update`, so it is compiled where the script compiles its step. There is one for each step,
after backward: XLA gives no place in the midst of it.

With `backward_passes_per_step` the sums of an unfinished window are this rank's own, in the optimizer's state. Rank 0's
must not stand for those of all: where a state is broadcast, the window restarts, with a warning.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from ..errors.user_warning import warn
from ..ops import Average, op_of
from ..ops.arguments import NoneCompressor, compress
from ..process_sets.process_set import ProcessSet, global_process_set
from ..training import consistency
from ..training.gradient_tracker import check_passes
from .ops import broadcast, reduced
from .tree import in_graph, movable, named


class Window(NamedTuple):
    """The state of a transformation with several passes per step. sums: of this rank, since the last step."""

    inner: Any
    sums: Any
    passes: Any  # int32, how many passes they have


def DistributedGradientTransformation(
    optimizer: Any, name: str = "gradients", compression: Any = NoneCompressor, op: int = Average,
    backward_passes_per_step: int = 1, process_set: ProcessSet = global_process_set
) -> Any:  # fmt: skip
    """Return a transformation of optax that averages the gradients over all ranks before ``optimizer`` gets them.

    Its ``update`` makes one exchange of the whole tree, inside ``jax.jit`` or outside. All ranks of the set must call
    it equally often. Chain what changes gradients, such as clipping, into ``optimizer``, so that it sees the averages.

    Args:
        optimizer (optax.GradientTransformation): the transformation.
        name (str): begins the names of gradients, such as ``gradients['w']``. Give two optimizers different names.
        compression (Compressor): the form in which gradients travel, such as ``hvd.Compression.bf16``. Default: none.
        op (int): ``hvd.Average`` (default), ``Sum`` or ``Adasum``.
        backward_passes_per_step (int): the number of calls per step. Gradients are added up on this rank. The last call
            exchanges their mean, and the others return zeros. Default: 1.
        process_set (ProcessSet): the ranks that take part. Default: all.

    Returns:
        optax.GradientTransformationExtraArgs: its state has the state of ``optimizer`` inside.

    Raises:
        ImportError: optax is not installed.
        ValueError: ``op`` or ``backward_passes_per_step`` is invalid. The errors of ``update`` are those of
            ``allreduce``.

    Example:
        >>> import optax
        >>> optimizer = hvd.DistributedGradientTransformation(optax.sgd(1.0))
        >>> params = jnp.zeros(2)
        >>> state = optimizer.init(params)
        >>> updates, state = jax.jit(optimizer.update)(jnp.ones(2) * hvd.rank(), state, params)
        >>> updates.tolist()
        [-0.5, -0.5]
    """
    try:
        import optax
    except ImportError as error:
        raise ImportError(
            'DistributedGradientTransformation needs optax: pip install "hvdlite[jax]" [HVD807]'
        ) from error
    check_passes(backward_passes_per_step)
    count, reduces, inner = backward_passes_per_step, op_of(None, op), optax.with_extra_args_support(optimizer)

    def averages(grads: Any) -> Any:
        given = named(grads, name)
        pairs = [compress(compression, leaf) for leaf in given.leaves]
        sent = given._replace(leaves=[small for small, _ in pairs])
        done = reduced(sent, name, reduces, process_set, step=True)
        return given.rebuilt([compression.decompress(each, ctx) for each, (_, ctx) in zip(done, pairs)])

    def init(params: Any) -> Any:
        state = inner.init(params)
        return state if count == 1 else Window(state, jax.tree.map(jnp.zeros_like, params), jnp.zeros((), jnp.int32))

    def update(grads: Any, state: Any, params: Any = None, **more: Any) -> Any:
        if count == 1:
            return inner.update(averages(grads), state, params, **more)
        sums = jax.tree.map(jnp.add, state.sums, grads)

        def step(_: Any) -> Any:
            mean = jax.tree.map(lambda each: each / count, sums)
            updates, after = inner.update(averages(mean), state.inner, params, **more)
            return updates, Window(after, jax.tree.map(jnp.zeros_like, sums), jnp.zeros((), jnp.int32))

        def wait(_: Any) -> Any:
            return jax.tree.map(jnp.zeros_like, grads), Window(state.inner, sums, state.passes + 1)

        return jax.lax.cond(state.passes + 1 >= count, step, wait, None)

    return optax.GradientTransformationExtraArgs(init, update)


def broadcast_parameters(tree: Any, root_rank: int = 0, process_set: ProcessSet = global_process_set) -> Any:
    """Return one rank's parameters, optimizer state and keys of random numbers on every rank.

    All ranks of the set must call it. Arrays of JAX do not change, so use what it returns. An unfinished window of
    ``backward_passes_per_step`` restarts on all ranks, because each rank has sums of its own.

    Args:
        tree (pytree of arrays): the same structure, shapes and dtypes on all ranks.
        root_rank (int): the global rank whose values are returned. Default: 0.
        process_set (ProcessSet): the ranks that take part. Default: all.

    Returns:
        pytree of jax.Array: a new tree.

    Raises:
        HvdMismatchError: the trees of the ranks differ. The other errors are those of ``broadcast``.

    Example:
        >>> params = {"w": jnp.array([1.0 + hvd.rank()])}
        >>> params = hvd.broadcast_parameters(params)
        >>> params["w"].tolist()
        [1.0]
    """
    received = broadcast(tree, root_rank, "broadcast_parameters", process_set)
    of_window = lambda each: isinstance(each, Window)  # noqa: E731
    windows = [each for each in jax.tree.leaves(received, is_leaf=of_window) if of_window(each)]
    passes = max((int(each.passes) for each in windows if not in_graph([each.passes])), default=0)
    if passes:
        warn(
            f"a window of backward_passes_per_step restarts. The state that is broadcast has {passes} of its passes, "
            "with the sums of one rank: broadcast it at the end of a window [HVD243]"
        )
    return jax.tree.map(_restarted, received, is_leaf=of_window)


def _restarted(each: Any) -> Any:
    if not isinstance(each, Window):
        return each
    return Window(each.inner, jax.tree.map(jnp.zeros_like, each.sums), jnp.zeros_like(each.passes))


def check_consistency(tree: Any, process_set: ProcessSet = global_process_set) -> None:
    """Compare trees of arrays over all ranks, and raise an error on all ranks if any bit differs.

    All ranks of the set must call it, outside of jit. It compares bits: 0.0 and -0.0 differ.

    Args:
        tree (pytree of arrays): what to compare, such as parameters and optimizer state.
        process_set (ProcessSet): ranks to compare. Default: all.

    Raises:
        HvdMismatchError: a rank differs. The text is the same on all ranks. It names the first leaf that differs and
            the ranks that differ from the first rank of the set.
        RuntimeError: it is called inside jit, where arrays have no values.

    Example:
        >>> hvd.check_consistency({"w": jnp.array([1.0, 2.0])})
        >>> try:
        ...     hvd.check_consistency({"w": jnp.array([1.0, 2.0 + hvd.rank()])})
        ... except hvd.HvdMismatchError as error:
        ...     print(error.ranks)
        (1,)
    """
    if in_graph(jax.tree.leaves(tree)):
        raise RuntimeError("check_consistency compares values: call it outside of jit [HVD247]")
    given = named(tree, "")
    sent, _ = movable(given)
    found = {name or "tree": np.asarray(leaf) for name, leaf in zip(sent.names, sent.leaves)}
    remedy = "Start all ranks from one state with hvd.broadcast_parameters; change it on all alike."
    consistency.compare(lambda: consistency.named_leaves(found), lambda _: None, process_set, remedy)
