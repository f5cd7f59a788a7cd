"""Checks of the arguments of optimizers, tapes, layers and callbacks.

Checked when it is made, and by all of them here, for every backend of Keras: later the error would come out of fit,
from the middle of a step, on whichever rank is there first, and would speak of an attribute that an int does not have.

Each check raises the error of the collective that would have refused the same, with its code.
"""

from __future__ import annotations

from numbers import Real
from typing import Any

from ..ops.arguments import Quantized
from ..process_sets.process_set import ProcessSet, number_of
from .backend import keras


def check_process_set(process_set: Any) -> None:
    """TypeError, that of every collective, for what is no process set. This rank need not be a member."""
    if not isinstance(process_set, ProcessSet):
        number_of(process_set)


def check_terms(compression: Any, gradient_predivide_factor: Any, process_set: Any) -> None:
    """TypeError or ValueError for what cannot be an optimizer's or a tape's."""
    check_process_set(process_set)
    known = isinstance(compression, Quantized)
    if not known and not all(callable(getattr(compression, name, None)) for name in ("compress", "decompress")):
        raise TypeError(
            "compression must be hvd.Compression.none, .fp16, .bf16, .int8, .int4 or a class with compress and "
            f"decompress, not {compression!r} [HVD208]"
        )
    factor = gradient_predivide_factor
    if not isinstance(factor, Real) or isinstance(factor, bool) or not float(factor) > 0:
        raise ValueError(f"gradient_predivide_factor={factor!r} must be a number above 0 [HVD222]")


def check_number(owner: Any, name: str, value: Any, least: float | None = None, otherwise: str = "") -> None:
    """TypeError for an argument of a callback that is no number, ValueError for one below `least`; in their texts
    `otherwise` is what else it may be."""
    try:
        number = None if isinstance(value, (bool, str, bytes)) else float(value)  # NumPy's numbers, too, and a variable
    except (TypeError, ValueError):
        number = None
    if number is None:
        raise TypeError(f"{type(owner).__name__}: {name} must be a number{otherwise}, not {value!r} [HVD238]")
    if least is not None and not number >= least:
        raise ValueError(f"{type(owner).__name__}: {name}={value!r} must be at least {least:g} [HVD238]")


def check_built(layer: Any) -> None:
    """ValueError for a layer whose variables are still to be made, itself or in a layer inside: they could not be known
    as local, and would be averaged without a word. Layers that make none in `build` are not looked at."""
    for each in layer._flatten_layers():
        if not each.built and type(each).build is not keras.layers.Layer.build:
            inside = "" if each is layer else f" in {layer.name!r}"
            raise ValueError(
                f"local_layers: layer {each.name!r}{inside} is not built, and has no variables yet: build the model "
                "(model.build(input_shape) or one batch) before you create the distributed optimizer [HVD239]"
            )


__all__ = ["check_built", "check_number", "check_process_set", "check_terms"]
