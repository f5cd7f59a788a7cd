"""Structures that pass between layers: tensors, and tuples, lists and dictionaries of them, beside plain values.

A value is taken apart into its tensors and a form, which JSON can write. In a form a number stands for a tensor, by its
place among them, and everything else is a dictionary with one key:

    (h, {"mask": m, "scale": 2})    {"tuple": [0, {"dict": {"mask": 1, "scale": {"value": 2}}}]}

Plain values (None, bool, int, float, str) are part of the form.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

_PLAIN = (bool, int, float, str, type(None))


def taken_apart(value: Any, strict: bool = True) -> tuple[list[torch.Tensor], Any]:
    """The tensors of a value, and its form. TypeError, with the type's name, for what JSON cannot write, since tensors
    in it would be overlooked; not strict: it is part of the form as it is."""
    tensors: list[torch.Tensor] = []

    def form(part: Any) -> Any:
        if isinstance(part, torch.Tensor):
            tensors.append(part)
            return len(tensors) - 1
        if type(part) in (tuple, list):
            return {type(part).__name__: [form(each) for each in part]}
        if type(part) is dict and all(type(key) is str for key in part):
            return {"dict": {key: form(each) for key, each in part.items()}}
        if strict and type(part) not in _PLAIN:
            raise TypeError(type(part).__name__)
        return {"value": part}

    return tensors, form(value)


def put_together(tensors: Sequence[torch.Tensor], form: Any) -> Any:
    """The value of this form."""
    if isinstance(form, int):
        return tensors[form]
    ((kind, inside),) = form.items()
    if kind == "value":
        return inside
    if kind == "dict":
        return {key: put_together(tensors, each) for key, each in inside.items()}
    parts = [put_together(tensors, each) for each in inside]
    return tuple(parts) if kind == "tuple" else parts


def joined(values: Sequence[Any]) -> Any:
    """Values of one form as one: rows behind each other; tensors without dimensions become the rows of one. ValueError
    for values of different forms."""
    apart = [taken_apart(value) for value in values]
    if any(form != apart[0][1] for _, form in apart):
        raise ValueError(
            f"predict joins outputs of one form, but micro-batches have {[form for _, form in apart][:2]} and so on "
            "[HVD014]"
        )
    rows = [torch.cat(row) if row[0].dim() else torch.stack(row) for row in zip(*(tensors for tensors, _ in apart))]
    return put_together(rows, apart[0][1])


def copied(value: Any) -> Any:
    """In memory of its own."""
    tensors, form = taken_apart(value)
    return put_together([t.clone() for t in tensors], form)
