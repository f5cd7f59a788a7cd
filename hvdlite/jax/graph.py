"""Collectives of functions that JAX traces: one call of XLA's FFI for a tree, with its gradient.

XLA runs calls without a data dependency in any order, and ranks must not differ in it. So each call takes the token of
the call before in the same trace, and gives one. A body of scan, cond or an inner jit is a trace of its own: its calls
are in order among themselves, and in the order of data with others. The handler refuses what could be confused then.

Large trees are several calls: XLA compiles one of very many operands in quadratic time.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Sequence
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
_TRACES = 4  # whose last token is kept
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
    first: bool = False  # no token of another call


class _Last(threading.local):
    """The last token of a trace, and how many collectives without a name it has."""

    def __init__(self) -> None:
        self.tokens: dict[int, tuple[Any, Any]] = {}
        self.unnamed: dict[int, tuple[Any, int]] = {}


_last = _Last()


def run(
    kind: int, tree: Named, name: str | None, process_set: ProcessSet, op: int = 0, root: int = 0,
    prescale: float = 1.0, postscale: float = 1.0, step: bool = False
) -> list[Any]:  # fmt: skip
    """The results of a collective of a tree, leaf by leaf. kind and op: the core's; root: a rank in the set."""
    _require_one_device()
    native.attend()
    number = number_of(process_set)
    verb = _VERBS[kind]
    more = _another(tree.leaves) if name is None else ""
    names = tuple(f"{verb}.{each}{more}" for each in tree.names)
    terms = Terms(
        kind, op, names, number, native.serial_of(number), process_set.size(), root, process_set.rank(),
        float(prescale), float(postscale), 0 if tree.bare else len(names), digest(names), f"{verb} of {tree.name}",
        step,
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
    """The calls of a tree, after those that were traced before."""
    _, token = _token_before(leaves)
    done: list[Any] = []
    for at in range(0, len(leaves), _LEAVES_A_CALL):
        part = terms._replace(names=terms.names[at : at + _LEAVES_A_CALL], first=token is None)
        if at:
            part = part._replace(leaves=0, step=False)
        out, token = _exchange(part, tuple(leaves[at : at + _LEAVES_A_CALL]), _given(token))
        done += out
        token = _traced(token, batch=True)
    if isinstance(token, jax.core.Tracer):
        _kept(_last.tokens, token._trace, token)
    return done


def _given(token: Any) -> Any:
    return jnp.zeros((1,), jnp.uint8) if token is None else token


def _traced(value: Any, batch: bool = False) -> Any:
    """What a value is to jit, below the tracers of grad and vmap. batch: of a batch, the first."""
    while isinstance(value, jax.core.Tracer):
        inner = getattr(value, "primal", getattr(value, "val", None))
        if not isinstance(inner, (jax.Array, np.ndarray)):
            break
        value = inner[0] if batch and getattr(value, "batch_dim", None) is not None else inner
    return value


def _token_before(leaves: Sequence[Any]) -> tuple[Any, Any]:
    """The trace that jit makes of these, and the token of the last call in it; None: there is none."""
    for traced in map(_traced, leaves):
        if isinstance(traced, jax.core.Tracer):
            return traced._trace, _last.tokens.get(id(traced._trace), (None, None))[1]
    return None, None


def _kept(kept: dict[int, tuple[Any, Any]], trace: Any, value: Any) -> None:
    """The trace is kept with it, so that no other one gets its id."""
    kept.pop(id(trace), None)
    kept[id(trace)] = (trace, value)
    while len(kept) > _TRACES:
        kept.pop(next(iter(kept)))


def _another(leaves: Sequence[Any]) -> str:
    """What makes the name of a call without one unique in its trace."""
    trace, _ = _token_before(leaves)
    if trace is None:
        return ""
    count = _last.unnamed.get(id(trace), (None, 0))[1]
    _kept(_last.unnamed, trace, count + 1)
    return f" ({count})" if count else ""


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


def _call(terms: Terms, leaves: tuple[Any, ...], token: Any) -> tuple[list[Any], Any]:
    """The call. Leaves that keep their shape are reduced where they lie, if XLA lets it."""
    same = terms.kind not in _ROWS
    results = [jax.ShapeDtypeStruct(_shape(terms, name, leaf), leaf.dtype) for name, leaf in zip(terms.names, leaves)]
    results.append(jax.ShapeDtypeStruct((1,), np.uint8))
    whole = same and terms.op != Adasum  # the collective of a batch is the batch of the collectives
    call = native.ffi.ffi_call(
        native.TARGET, results, has_side_effect=True, vmap_method="broadcast_all" if whole else "sequential",
        input_output_aliases={i: i for i in range(len(results)) if same or i == len(leaves)},
    )  # fmt: skip
    numbers = {
        "kind": terms.kind, "op": terms.op, "root": terms.root, "set": terms.number, "serial": terms.serial,
        "size": terms.size, "leaves": terms.leaves, "hash": terms.digest, "step": terms.step, "first": terms.first,
        "sum": Sum,
    }  # fmt: skip
    out = call(
        *leaves, token, names="\n".join((*terms.names, terms.tree)), pre=np.float64(terms.prescale),
        post=np.float64(terms.postscale), **{key: np.int32(value) for key, value in numbers.items()},
    )  # fmt: skip
    return list(out[:-1]), out[-1]


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _exchange(terms: Terms, leaves: tuple[Any, ...], token: Any) -> tuple[list[Any], Any]:
    return _call(terms, leaves, token)


def _forward(terms: Terms, leaves: tuple[Any, ...], token: Any) -> Any:
    return _exchange(terms, leaves, token), None  # so that it has a second derivative


def _backward(terms: Terms, _: Any, gradients: Any) -> Any:
    """The exact gradient of the sum of all ranks' losses."""
    grads, none = list(gradients[0]), np.zeros((1,), jax.dtypes.float0)
    places = [i for i, each in enumerate(grads) if each.dtype != jax.dtypes.float0]  # integers have none
    if terms.kind in (_core.ALLREDUCE, _core.REDUCESCATTER) and terms.op not in (Average, Sum):
        raise NotImplementedError(
            f"'{terms.names[0]}': a reduction with op {_core.op_name(terms.op)} has no gradient: use hvd.Average or "
            "hvd.Sum, or jax.lax.stop_gradient [HVD207]"
        )
    if not places:
        return tuple(grads), none
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
    return tuple(grads), none


_exchange.defvjp(_forward, _backward)
