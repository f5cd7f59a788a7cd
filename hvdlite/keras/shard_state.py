"""State of a sharded optimizer of Keras 3: optimizers like it on other variables, a trial, and the whole state.

An optimizer like another one is made from its config, as Keras copies optimizers. `built` notes which variable of its
state belongs to which of the variables it steps on: so a share of the state finds its place in the whole state, whose
order is that of Keras's files.

The trial: three steps on a tensor and on its pieces. Where values or state differ in a bit, a step on one part of the
tensor depends on the rest of it, and the optimizer cannot be sharded.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from ..ops.objects import allgather_object
from . import backend
from .backend import keras

ALIGNED = 64  # elements: pieces begin at multiples of it, since vector instructions round unlike the rest of a tensor
_SHAPE, _CUTS, _STEPS = (43, 25), (64, 192, 512, 1024), 3
_OWN = ("built", "_built", "_lock", "name", "_name")  # not taken over from an optimizer by one like it


class Built(NamedTuple):
    """An optimizer, its state for each variable that it steps on, and the state that is for none of them."""

    optimizer: Any
    states: list[list[Any]]
    others: list[Any]


def class_of(optimizer: Any) -> Any:
    """The class that the optimizer had before it was distributed."""
    kind = type(optimizer)
    return kind.__bases__[-1] if hasattr(kind, "_hvd_terms") else kind


def follow(made: Any, optimizer: Any) -> None:
    """Gives it the present values of the optimizer's numbers and flags, some of which no config may have."""
    for name, value in vars(optimizer).items():
        plain = isinstance(value, (bool, int, float, str, type(None)))
        if plain and name not in _OWN and not name.startswith(("_hvd", "_self_", "_obj_")):
            made.__dict__[name] = value


def like(optimizer: Any) -> Any:
    """An optimizer of the same class and config, not built."""
    base, rate = class_of(optimizer), optimizer.__dict__["_learning_rate"]
    config = dict(base.get_config(optimizer))
    if isinstance(config.get("learning_rate"), dict):  # a schedule, which need not be registered
        config["learning_rate"] = rate
    made = base.from_config(config)
    follow(made, optimizer)
    return made


def built(optimizer: Any, references: Sequence[Any]) -> Built:
    """An optimizer like it, on these variables."""
    made = like(optimizer)
    numbers = {made._var_key(each): number for number, each in enumerate(references)}
    states: list[list[Any]] = [[] for _ in references]
    add = made.add_variable_from_reference

    def noted(reference_variable: Any, *args: Any, **more: Any) -> Any:
        variable = add(reference_variable, *args, **more)
        states[numbers[made._var_key(reference_variable)]].append(variable)
        return variable

    made.__dict__["add_variable_from_reference"] = noted
    with keras.name_scope(made.name):
        made.build(list(references))
    made.built = True
    del made.__dict__["add_variable_from_reference"]
    known = {id(made._iterations), id(made._learning_rate), *(id(each) for state in states for each in state)}
    return Built(made, states, [each for each in made.variables if id(each) not in known])


def array(variable: Any) -> np.ndarray:
    """Its value."""
    return np.asarray(keras.ops.convert_to_numpy(keras.ops.convert_to_tensor(variable)))


def variable_of(value: np.ndarray, name: str, dtype: Any) -> Any:
    """A variable that is not a weight of a model."""
    return keras.Variable(keras.ops.convert_to_tensor(value, dtype=dtype), dtype=dtype, trainable=False, name=name)


def why_not(optimizer: Any) -> str:
    """Why it cannot be sharded; empty: it can."""
    try:
        with backend.outside_graph():
            found = [_trial(optimizer, kind) for kind in backend.functions()]
    except Exception as error:
        return f"a trial step failed ({type(error).__name__}: {error})"
    return next(filter(None, found), "")


def _trial(optimizer: Any, kind: Any) -> str:
    """Why pieces of a tensor, or their state, do not become what the tensor does; empty: they do."""
    random = np.random.RandomState(1)

    def values() -> np.ndarray:
        return (random.randn(*_SHAPE) * 10.0 ** random.randint(-4, 3, _SHAPE)).astype("float32")

    def cut(value: np.ndarray) -> list[np.ndarray]:
        return np.split(value.reshape(-1), _CUTS)

    start = values()
    whole = variable_of(start, "whole", "float32")
    pieces = [variable_of(each, f"piece_{i}", "float32") for i, each in enumerate(cut(start))]
    one, many = built(optimizer, [whole]), built(optimizer, pieces)
    if any(np.ptp(array(each)) for each in one.states[0]):
        return "its state begins with the weights, which are not the same on all ranks then"

    steps = [kind(lambda *gradients: one.optimizer.apply(list(gradients), [whole])),
             kind(lambda *gradients: many.optimizer.apply(list(gradients), pieces))]  # fmt: skip
    for _ in range(_STEPS):
        gradient = values()
        for step, parts in zip(steps, ([gradient], cut(gradient))):
            step(*map(keras.ops.convert_to_tensor, parts))
    if len({len(state) for state in (*one.states, *many.states)}) > 1 or len(one.others) != len(many.others):
        return "its state depends on the shape of a tensor"
    pairs: list[tuple[Any, list[Any]]] = [(whole, pieces), *((a, [b]) for a, b in zip(one.others, many.others))]
    pairs += [(state, [each[i] for each in many.states]) for i, state in enumerate(one.states[0])]
    same = all(array(a).tobytes() == b"".join(array(part).tobytes() for part in parts) for a, parts in pairs)
    return "" if same else "its step on one part of a tensor depends on the rest of it"


def gathered(shards: Any) -> Any:
    """The plain optimizer with the whole state on the first rank of the set, None elsewhere. All ranks must call it."""
    optimizer, members = shards.optimizer, shards.process_set
    whole = built(optimizer, optimizer._trainable_variables) if shards.me == 0 else None
    for index, bucket in enumerate(shards.buckets):
        mine = {
            piece.number: [array(each) for each in shards.states[piece.number]] for piece in shards.pieces_of(bucket)
        }
        parts = allgather_object(mine, f"{shards.prefix}.state.{index}", members)
        for number in bucket.numbers[:-1] if whole is not None else ():
            for k, state in enumerate(whole.states[number]):  # type: ignore[union-attr]
                value = np.concatenate([part[number][k] for part in parts if number in part])
                state.assign(keras.ops.convert_to_tensor(value.reshape(tuple(state.shape)), dtype=state.dtype))
    if whole is None:
        return None
    for other, mine_ in zip(whole.others, shards.inner.others):
        other.assign(mine_.value)
    whole.optimizer._iterations.assign(optimizer._iterations.value)
    if isinstance(optimizer._learning_rate, keras.Variable):
        whole.optimizer._learning_rate.assign(optimizer._learning_rate.value)
    return whole.optimizer


def take(shards: Any, values: Sequence[Any]) -> None:
    """This rank's share of a whole state, in the order of Keras's files. ValueError if it is of another model."""
    optimizer = shards.optimizer
    whole = built(optimizer, optimizer._trainable_variables)
    shapes = [tuple(each.shape) for each in whole.optimizer.variables]
    if [tuple(np.shape(value)) for value in values] != shapes:
        raise ValueError(
            f"the saved state of {class_of(optimizer).__name__} has {len(values)} variables, which do not match the "
            f"{len(shapes)} of this optimizer and model: build the model as it was when it was saved [HVD239]"
        )
    value_of = {id(each): np.asarray(value) for each, value in zip(whole.optimizer.variables, values)}
    for number, (piece, _) in shards.pieces.items():
        for state, mine in zip(whole.states[number], shards.states[number]):
            part = value_of[id(state)].reshape(-1)[piece.begin : piece.end]
            mine.assign(keras.ops.convert_to_tensor(part, dtype=mine.dtype))
    for other, mine in zip(whole.others, shards.inner.others):
        mine.assign(keras.ops.convert_to_tensor(value_of[id(other)], dtype=mine.dtype))
    optimizer._iterations.assign(int(value_of[id(whole.optimizer._iterations)]))
    if isinstance(optimizer._learning_rate, keras.Variable):
        optimizer._learning_rate.assign(float(value_of[id(whole.optimizer._learning_rate)]))
