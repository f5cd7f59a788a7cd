"""Collectives of functions that JAX traces: one call of XLA's FFI for a tree, with its gradient.

Calls run in the order in which they are traced, also those of inner functions (order.py): the same one on all ranks. A
tree is compared as a whole, since a leaf that only one rank has would wait for ever.

Large trees are several calls: XLA compiles one of very many operands in quadratic time.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from importlib import import_module
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from .. import _core
from ..errors import HvdArgumentError, HvdNotYetError
from ..ops import Adasum, Average, Sum
from ..process_sets.process_set import ProcessSet, number_of
from . import native
from .tree import Named, digest

_LEAVES_A_CALL = 512
_ROWS = (_core.ALLGATHER, _core.REDUCESCATTER, _core.ALLTOALL)


class Terms(NamedTuple):
    """What is compiled into a call."""

    kind: int
    op: int
    names: tuple[str, ...]
    number: int  # of the process set
    serial: int
    size: int
    root: int = 0
    member: int = 0  # this rank in the set
    prescale: float = 1.0
    postscale: float = 1.0
    leaves: int = 0  # of the whole tree, compared with its digest; 0: not here
    digest: int = 0
    tree: str = ""  # what that comparison is called
    step: bool = False  # a training step


def run(
    kind: int, tree: Named, name: str | None, process_set: ProcessSet, op: int = 0, root: int = 0,
    prescale: float = 1.0, postscale: float = 1.0, step: bool = False
) -> list[Any]:  # fmt: skip
    """The results of a collective of a tree, leaf by leaf. kind and op: the core's; root: a rank in the set."""
    _require_one_device()
    native.attend()
    number = number_of(process_set)
    verb = _VERBS[kind]
    names = tuple(f"{verb}.{each}" for each in tree.names)
    terms = Terms(
        kind, op, names, number, native.serial_of(number), process_set.size(), root, process_set.rank(),
        float(prescale), float(postscale), 0 if tree.bare else len(names), digest(tree.names),
        f"allreduce.{verb} of {tree.name}", step,
    )  # fmt: skip
    return _in_turn(terms, tree.leaves)


_VERBS = {
    _core.ALLREDUCE: "allreduce", _core.ALLGATHER: "allgather", _core.BROADCAST: "broadcast",
    _core.ALLTOALL: "alltoall", _core.REDUCESCATTER: "reducescatter",
}  # fmt: skip


def _require_one_device() -> None:
    if jax.default_backend() != "cpu":
        raise HvdNotYetError(
            f"hvdlite cannot communicate inside jit on {jax.default_backend()} yet: set JAX_PLATFORMS=cpu, or call the "
            "collective outside of jit [HVD246]"
        )
    if jax.local_device_count() > 1:
        raise HvdArgumentError(
            f"this process has {jax.local_device_count()} devices, and inside jit hvdlite supports one: start a rank "
            "for each device, without --xla_force_host_platform_device_count [HVD203]"
        )


def _in_turn(terms: Terms, leaves: Sequence[Any]) -> list[Any]:
    """The calls of a tree."""
    done: list[Any] = []
    for at in range(0, len(leaves), _LEAVES_A_CALL):
        part = terms._replace(names=terms.names[at : at + _LEAVES_A_CALL])
        done += _exchange(
            part if not at else part._replace(leaves=0, step=False), tuple(leaves[at : at + _LEAVES_A_CALL])
        )
    return done


def _shape(terms: Terms, name: str, leaf: Any) -> tuple[int, ...]:
    shape = tuple(leaf.shape)
    if terms.kind not in _ROWS:
        return shape
    if not shape:
        raise HvdArgumentError(f"'{name}' has no dimensions: its first one is cut or joined [HVD210]")
    if len(shape) > 8:
        raise HvdArgumentError(f"'{name}' has {len(shape)} dimensions, and at most 8 are supported [HVD203]")
    if terms.kind == _core.ALLGATHER:
        return (shape[0] * terms.size, *shape[1:])
    if shape[0] % terms.size:
        raise HvdArgumentError(
            f"'{name}' has {shape[0]} rows for {terms.size} ranks: inside jit they must divide evenly. Pad the array, "
            "or call it outside of jit [HVD268]"
        )
    return (shape[0] // terms.size, *shape[1:]) if terms.kind == _core.REDUCESCATTER else shape


@functools.cache
def _ordering() -> Any:
    """order.order, which uses names that JAX may change."""
    try:
        return import_module("hvdlite.jax.order").order
    except (ImportError, AttributeError, TypeError) as error:
        raise HvdNotYetError(
            f"this hvdlite cannot communicate inside jit with JAX {jax.__version__} ({error}): call collectives "
            "outside of jit, or install JAX 0.10.2 [HVD246]"
        ) from error


def _call(terms: Terms, leaves: tuple[Any, ...]) -> list[Any]:
    """The call. Leaves that keep their shape are reduced where they lie, if XLA lets it."""
    same = terms.kind not in _ROWS
    results = [jax.ShapeDtypeStruct(_shape(terms, name, leaf), leaf.dtype) for name, leaf in zip(terms.names, leaves)]
    results.append(jax.ShapeDtypeStruct((1,), np.uint8))
    whole = same and terms.op != Adasum  # the collective of a batch is the batch of the collectives
    order = _ordering()
    call = native.ffi.ffi_call(
        native.TARGET, results, has_side_effect=True, vmap_method="broadcast_all" if whole else "sequential",
        input_output_aliases={i: i for i in range(len(results)) if same or i == len(leaves)},
    )  # fmt: skip
    numbers = {
        "kind": terms.kind, "op": terms.op, "root": terms.root, "set": terms.number, "serial": terms.serial,
        "size": terms.size, "leaves": terms.leaves, "hash": terms.digest, "step": terms.step, "sum": Sum,
    }  # fmt: skip
    out = call(
        *leaves, order(jnp.zeros((1,), jnp.uint8)), names="\n".join((*terms.names, terms.tree)),
        pre=np.float64(terms.prescale), post=np.float64(terms.postscale),
        **{key: np.int32(value) for key, value in numbers.items()},
    )  # fmt: skip
    order(out[-1])
    return list(out[:-1])


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _exchange(terms: Terms, leaves: tuple[Any, ...]) -> list[Any]:
    return _call(terms, leaves)


def _forward(terms: Terms, leaves: tuple[Any, ...]) -> Any:
    return _exchange(terms, leaves), None  # so that it has a second derivative


def _backward(terms: Terms, _: Any, gradients: Any) -> Any:
    """The exact gradient of the sum of all ranks' losses."""
    grads = list(gradients)
    places = [i for i, each in enumerate(grads) if each.dtype != jax.dtypes.float0]  # integers have none
    if terms.kind in (_core.ALLREDUCE, _core.REDUCESCATTER) and terms.op not in (Average, Sum):
        raise NotImplementedError(
            f"'{terms.names[0]}': a reduction with op {_core.op_name(terms.op)} has no gradient: use hvd.Average or "
            "hvd.Sum, or jax.lax.stop_gradient [HVD207]"
        )
    if not places:
        return (tuple(grads),)
    sent = [grads[i] for i in places]
    names = tuple(f"{terms.names[i]}.backward" for i in places)
    back = terms._replace(names=names, leaves=terms.leaves and len(names), digest=digest(names), step=False,
                          tree=f"{terms.tree}.backward")  # fmt: skip
    if terms.kind == _core.BROADCAST:  # the root has what all gradients of its value add up to, others nothing
        back = back._replace(kind=_core.ALLREDUCE, op=Sum)
    elif terms.kind == _core.ALLGATHER:
        back = back._replace(kind=_core.REDUCESCATTER, op=Sum)
    elif terms.kind == _core.REDUCESCATTER:
        back = back._replace(kind=_core.ALLGATHER, prescale=1.0, postscale=1.0)
        factor = terms.prescale * terms.postscale / (terms.size if terms.op == Average else 1)
        sent = [each * jnp.asarray(factor, each.dtype) for each in sent]
    done = _in_turn(back, sent)
    if terms.kind == _core.BROADCAST and terms.member != terms.root:
        done = [jnp.zeros_like(each) for each in done]
    for i, each in zip(places, done):
        grads[i] = each
    return (tuple(grads),)


_exchange.defvjp(_forward, _backward)
