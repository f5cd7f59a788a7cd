"""The order of collectives in a compiled program: that in which they were traced, on all ranks.

XLA runs calls without a data dependency in any order, and at once; which one may depend on shapes, and ranks that wait
in different calls would wait for ever. So each call stands between two calls of a primitive with an ordered effect,
whose tokens JAX hands through inner functions, loops and branches. Its lowering is a call that does nothing but take
and give a token of XLA's and one of data, on which the collective depends.

JAX would hand the last token of a program to the next one, which costs more than a small collective, and with which all
programs after a failed one fail. Programs run in the order in which they are dispatched anyway. So each gets the same
token, which is there from the beginning.

There is no public way to make an effect: the names below are JAX's own.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

import jax

from . import native

_effects: Any = import_module("jax._src.effects")
_dispatch: Any = import_module("jax._src.dispatch")
_core: Any = import_module("jax._src.core")
_mlir: Any = import_module("jax._src.interpreters.mlir")
_batching: Any = import_module("jax._src.interpreters.batching")


class _Ordered(_effects.Effect):  # type: ignore[misc]
    def __str__(self) -> str:
        return "hvdlite"

    def __hash__(self) -> int:
        return hash(_Ordered)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Ordered)


_effect = _Ordered()
_primitive: Any = _core.Primitive("hvdlite_order")
_first: dict[Any, Any] = {}  # the token of a program, by its devices
# Before JAX 0.5 a token ends the process in a call of XLA's newer interface; nothing is read in this one.
_API = 4 if jax.__version_info__ >= (0, 5) else 2


def order(token: Any) -> Any:
    """The token, uint8 of shape (1,), after all that was traced before; what depends on the result comes after it."""
    return _primitive.bind(token)


class _Tokens(type(_dispatch.runtime_tokens)):  # type: ignore[misc]
    def get_token_input(self, effect: Any, devices: Any) -> Any:
        if effect != _effect:
            return super().get_token_input(effect, devices)
        if tuple(devices) not in _first:
            _first[tuple(devices)] = super().get_token_input(effect, devices)
            del self.current_tokens[effect]
        return _first[tuple(devices)]

    def set_token_result(self, effect: Any, token: Any) -> None:
        if effect != _effect:
            super().set_token_result(effect, token)


def _lower(context: Any, token: Any) -> Any:
    made = _mlir.custom_call(
        native.ORDER, result_types=[_mlir.token_type(), token.type],
        operands=[context.tokens_in.get(_effect), token], api_version=_API, has_side_effect=True,
        backend_config={} if _API == 4 else "",
    )  # fmt: skip
    context.set_tokens_out(_mlir.TokenSet({_effect: made.results[0]}))
    return [made.results[1]]


def _batched(arguments: Any, dims: Any) -> Any:
    """Tokens of a batch are one after all of them."""
    return _primitive.bind(arguments[0] if dims[0] is None else arguments[0][0]), None


_dispatch.runtime_tokens.__class__ = _Tokens
for name in ("ordered", "lowerable", "control_flow_allowed", "custom_derivatives_allowed", "remat_allowed"):
    getattr(_effects, f"{name}_effects").add_type(_Ordered)
_primitive.def_effectful_abstract_eval(lambda token: (_core.ShapedArray(token.shape, token.dtype), {_effect}))
_primitive.def_impl(lambda token: _dispatch.apply_primitive(_primitive, token))
_mlir.register_lowering(_primitive, _lower, platform="cpu")
_batching.primitive_batchers[_primitive] = _batched
