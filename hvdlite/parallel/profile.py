"""Profile of layers for `partition`: seconds and bytes of each, measured on one micro-batch.

    found = parallel.profile(layers, x)
    balance = parallel.partition(found.costs, 4)
    balance = parallel.partition(found.costs, 4, [a + w for a, w in zip(found.activations, found.weights)], limit)

Layers are measured as they train: dropout drops, BatchNorm counts. What that would change is put back: gradients,
buffers and random numbers. Functions that make a layer are called one after the other, and each layer goes before the
next one comes: so a model that does not fit one process can be measured in one. Measure before the optimizer is made:
one that exchanges gradients would exchange these.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from statistics import median
from typing import Any, NamedTuple

import torch
from torch import nn

from .stage import Layer, as_arguments, made
from .structure import put_together, taken_apart


class Profile(NamedTuple):
    """By layer."""

    forward: list[float]  # seconds, the median
    backward: list[float]
    activations: list[int]  # bytes of its output
    weights: list[int]  # bytes of its parameters and buffers
    stash: list[int]  # bytes that it keeps for its backward

    @property
    def costs(self) -> list[float]:
        """Seconds of forward and backward."""
        return [f + b for f, b in zip(self.forward, self.backward)]


def profile(layers: Sequence[Layer], x: Any, repeats: int = 5) -> Profile:
    """Measure the cost of each layer on one micro-batch, for ``partition``.

    Each layer runs ``repeats`` times in training mode on the output of the layer before it. Gradients, buffers and
    random numbers are restored. Functions that make a layer are called one after the other, so a model that does not
    fit one process can be measured. Measure before the optimizer is made: one that exchanges gradients would exchange
    these.

    Args:
        layers (list): modules, or functions without arguments that make one.
        x (torch.Tensor or tuple): the input, a micro-batch.
        repeats (int): the number of runs, of which the median counts. Default: 5.

    Returns:
        Profile: lists by layer. ``forward``, ``backward`` and ``costs`` in seconds; ``activations``, ``weights`` and
        ``stash`` (kept for backward) in bytes.

    Raises:
        ValueError: an entry of ``layers`` is not a module and makes none.

    Example:
        >>> from hvdlite import parallel
        >>> found = parallel.profile([torch.nn.Linear(2, 2), torch.nn.ReLU()], torch.ones(1, 2))
        >>> found.weights, len(found.costs)
        ([24, 0], 2)
    """
    found = Profile([], [], [], [], [])
    values = as_arguments(x)
    with torch.random.fork_rng(_devices(values)):
        for number, layer in enumerate(layers):
            module = made(layer, number)
            with _unchanged(module):
                # The first run's time is not counted: it fills caches and allocates.
                found.stash.append(_kept(module, values))
                runs = [_run(module, values) for _ in range(max(repeats, 1))]
            values = runs[-1][2]
            found.forward.append(median(forward for forward, *_ in runs))
            found.backward.append(median(backward for _, backward, _ in runs))
            found.activations.append(_bytes(values))
            found.weights.append(_bytes([*module.parameters(), *module.buffers()]))
            del module  # a name would keep it while the next one is made
    return found


def _kept(module: nn.Module, values: tuple[Any, ...]) -> int:
    """Bytes that one forward keeps for its backward, besides the layer's own weights."""
    kept: dict[int, torch.UntypedStorage] = {}  # a storage is one however many tensors look at it

    def pack(t: torch.Tensor) -> torch.Tensor:
        kept[t.untyped_storage().data_ptr()] = t.untyped_storage()
        return t

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        _run(module, values)
    own = {t.untyped_storage().data_ptr() for t in [*module.parameters(), *module.buffers()]}
    return sum(storage.nbytes() for at, storage in kept.items() if at not in own)


def _run(module: nn.Module, values: tuple[Any, ...]) -> tuple[float, float, tuple[Any, ...]]:
    """One forward and backward: how long each took, and the output."""
    # Copies, since a layer may work in place: on a leaf that is an error, and the next run needs the values again.
    tensors, form = taken_apart(values, strict=False)
    tensors = [t.detach().requires_grad_(t.is_floating_point()).clone() for t in tensors]
    own = put_together(tensors, form)
    _wait(own)
    start = time.perf_counter()
    outputs = as_arguments(module(*own))
    _wait(outputs)
    tensors, form = taken_apart(outputs, strict=False)
    middle = time.perf_counter()
    learns = [t for t in tensors if t.requires_grad]
    if learns:
        torch.autograd.backward(learns, [torch.ones_like(v) for v in learns])
    _wait(outputs)
    end = time.perf_counter()
    return middle - start, end - middle, put_together([t.detach() for t in tensors], form)


@contextmanager
def _unchanged(module: nn.Module) -> Iterator[None]:
    """In training mode within; afterwards modes, gradients and buffers are what they were."""
    modes = [(each, each.training) for each in module.modules()]
    gradients = [(p, p.grad) for p in module.parameters()]
    buffers = [(each, name, b, b.clone()) for each, _ in modes for name, b in each.named_buffers(recurse=False)]
    module.train()
    for p, _ in gradients:
        p.grad = None
    try:
        yield
    finally:
        for each, training in modes:
            each.training = training
        for p, gradient in gradients:
            p.grad = gradient
        for each, name, b, kept in buffers:
            setattr(each, name, b.copy_(kept))


def _devices(values: Any) -> list[int]:
    return sorted({t.device.index for t in taken_apart(values, strict=False)[0] if t.is_cuda})


def _wait(values: Any) -> None:
    """Until the GPU, if the tensors are on one, is done: its work is only queued by a call."""
    for device in _devices(values):
        torch.cuda.synchronize(device)


def _bytes(values: Any) -> int:
    return sum(t.numel() * t.element_size() for t in taken_apart(values, strict=False)[0])
