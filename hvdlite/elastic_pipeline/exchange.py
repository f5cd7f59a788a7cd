"""Layers from rank to rank, in one alltoall of their bytes.

A layer is a dictionary by the names that one process gives: tensors in host memory, and plain values. What describes
them (names, shapes, dtypes, plain values) travels before, as objects; tensors follow as bytes, so that no pickle of
them is made.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch

import hvdlite.torch as hvd

Layers = dict[int, dict[str, Any]]  # by the layer's number, by name


def size_of(layer: Mapping[str, Any]) -> int:
    """Bytes of its tensors."""
    return sum(t.numel() * t.element_size() for t in layer.values() if isinstance(t, torch.Tensor))


def exchanged(to: Sequence[Layers], name: str) -> Layers:
    """Send layers to each rank. Returns what all ranks have sent to this one. All ranks call it."""
    outlines = [[(number, _outline(layer)) for number, layer in layers.items()] for layers in to]
    everyone = hvd.allgather_object(outlines, name=f"{name}.outlines")
    parts = [[_bytes(t) for t in _tensors(layers)] for layers in to]
    splits = [sum(part.numel() for part in each) for each in parts]
    flat = [part for each in parts for part in each]
    sent = torch.cat(flat) if flat else torch.empty(0, dtype=torch.uint8)
    rows, _ = hvd.alltoall(sent, splits=splits, name=name)
    found, at = Layers(), 0
    for outline in (theirs[hvd.rank()] for theirs in everyone):
        for number, entries in outline:
            layer = found.setdefault(number, {})
            for key, dtype, value in entries:
                if dtype is None:
                    layer[key] = value
                    continue
                length = math.prod(value) * torch.empty((), dtype=dtype).element_size()
                layer[key] = rows[at : at + length].clone().view(dtype).view(value)
                at += length
    return found


def _outline(layer: Mapping[str, Any]) -> list[tuple[str, torch.dtype | None, Any]]:
    """(name, dtype, shape) of tensors, (name, None, value) of the rest."""
    return [
        (key, value.dtype, tuple(value.shape)) if isinstance(value, torch.Tensor) else (key, None, value)
        for key, value in layer.items()
    ]


def _tensors(layers: Layers) -> list[torch.Tensor]:
    return [value for layer in layers.values() for value in layer.values() if isinstance(value, torch.Tensor)]


def _bytes(t: torch.Tensor) -> torch.Tensor:
    return t.contiguous().view(-1).view(torch.uint8)
