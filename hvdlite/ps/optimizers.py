"""Optimizers of servers: the update of a row by its gradient, and the row before its first one. Pure NumPy.

A rule keeps `columns` numbers of state beside each number of a row, and `extra` for the row as a whole, all zeros at
first. `update(rows, state, grads)` changes `rows` and `state` in place: float32 arrays [n, dim], [n, dim * columns +
extra], [n, dim], of n different rows. The order of operations is fixed, and there are only those that IEEE 754 rounds
(+, -, *, /, sqrt; a power's bits depend on the processor), so the bits are the same wherever it runs.

`rate` of Sgd, Adagrad and Adam is the learning rate: a server sets it before an update. The state of Ftrl is made of
its rate, so a change would scale all rows; the others have no rate of ours.

Rules are lazy: a row without a gradient does not move, nor does its state. For Sgd and Adagrad that is what dense
training does; Adam and Ftrl differ there (dense Adam also moves rows by their momentum).
"""

from __future__ import annotations

import importlib
import math
import os
import sys
from collections.abc import Callable
from typing import Any, Union

import numpy as np

from .placement import U64, hashed

F32 = np.float32
MOST = float(np.finfo(F32).max)


class Sgd:
    """Servers apply ``row -= lr * grad``.

    Args:
        lr (float): the learning rate.

    Example:
        >>> rows, grads = np.ones((1, 2), np.float32), np.ones((1, 2), np.float32)
        >>> hvd.ps.Sgd(lr=0.5).update(rows, rows[:, :0], grads)
        >>> rows.tolist()
        [[0.5, 0.5]]
    """

    columns, extra = 0, 0

    def __init__(self, lr: float) -> None:
        self.options = {"lr": float(lr)}
        self.rate = F32(lr)

    def update(self, rows: Any, state: Any, grads: Any) -> None:
        """Apply gradients to rows in place. Servers call it.

        Args:
            rows (array): float32 of shape (n, dim), of n different rows.
            state (array): float32 of shape (n, columns * dim + extra).
            grads (array): float32 of shape (n, dim).
        """
        rows -= self.rate * grads


class Adagrad:
    """Servers apply ``row -= lr * grad / (sqrt(sum of squares) + eps)`` (Duchi, Hazan and Singer, 2011).

    Args:
        lr (float): the learning rate.
        eps (float): added to the divisor. Default: 1e-10.

    Example:
        >>> rows, grads = np.ones((1, 1), np.float32), np.full((1, 1), 2, np.float32)
        >>> hvd.ps.Adagrad(lr=0.5).update(rows, np.zeros((1, 1), np.float32), grads)
        >>> rows.tolist()
        [[0.5]]
    """

    columns, extra = 1, 0

    def __init__(self, lr: float, eps: float = 1e-10) -> None:
        self.options = {"lr": float(lr), "eps": float(eps)}
        self.rate, self._eps = F32(lr), F32(eps)

    def update(self, rows: Any, state: Any, grads: Any) -> None:
        """Apply gradients to rows in place. Servers call it.

        Args:
            rows (array): float32 of shape (n, dim), of n different rows.
            state (array): float32 of shape (n, dim), the sums of squares.
            grads (array): float32 of shape (n, dim).
        """
        state += grads * grads
        rows -= self.rate * grads / (np.sqrt(state) + self._eps)


class Adam:
    """Servers apply lazy Adam (Kingma and Ba, 2015): moments and step count belong to a row.

    A row without a gradient does not change, nor do its moments. ``torch.optim.SparseAdam`` is the same but for the
    step count, which it keeps for the whole table.

    Args:
        lr (float): the learning rate. Default: 1e-3.
        betas (tuple of float): decay rates of both moments. Default: (0.9, 0.999).
        eps (float): added to the divisor. Default: 1e-8.

    Example:
        >>> rows, grads = np.ones((1, 1), np.float32), np.ones((1, 1), np.float32)
        >>> hvd.ps.Adam(lr=0.5).update(rows, np.zeros((1, 4), np.float32), grads)
        >>> rows.round(3).tolist()
        [[0.5]]
    """

    columns, extra = 2, 2  # both moments; both divisors

    def __init__(self, lr: float = 1e-3, betas: tuple[float, float] = (0.9, 0.999), eps: float = 1e-8) -> None:
        self.options = {"lr": float(lr), "betas": (float(betas[0]), float(betas[1])), "eps": float(eps)}
        self.rate, self._eps = F32(lr), F32(eps)
        self._first, self._second = F32(betas[0]), F32(betas[1])

    def update(self, rows: Any, state: Any, grads: Any) -> None:
        """Apply gradients to rows in place. Servers call it.

        Args:
            rows (array): float32 of shape (n, dim), of n different rows.
            state (array): float32 of shape (n, 2 * dim + 2): both moments, and 1 - beta ** t for both.
            grads (array): float32 of shape (n, dim).
        """
        dim = rows.shape[1]
        mean, square, divisors = state[:, :dim], state[:, dim : 2 * dim], state[:, 2 * dim :]
        mean[:] = self._first * mean + (F32(1) - self._first) * grads
        square[:] = self._second * square + (F32(1) - self._second) * grads * grads
        betas = np.array([self._first, self._second])
        divisors[:] = betas * divisors + (F32(1) - betas)
        step = self.rate * np.sqrt(divisors[:, 1:]) / divisors[:, :1]
        rows -= step * mean / (np.sqrt(square) + self._eps)


class Ftrl:
    """Servers apply FTRL-Proximal with L1 and L2 (McMahan et al., 2013). Rows become exactly 0 where ``|z| <= l1``.

    Args:
        lr (float): the learning rate.
        l1 (float): the strength of L1. Default: 0.0.
        l2 (float): the strength of L2. Default: 0.0.
        beta (float): the smoothing of the learning rate. Default: 1.0.

    Example:
        >>> rows, grads = np.zeros((1, 1), np.float32), np.ones((1, 1), np.float32)
        >>> hvd.ps.Ftrl(lr=1.0).update(rows, np.zeros((1, 2), np.float32), grads)
        >>> rows.tolist()
        [[-0.5]]
    """

    columns, extra = 2, 0

    def __init__(self, lr: float, l1: float = 0.0, l2: float = 0.0, beta: float = 1.0) -> None:
        self.options = {"lr": float(lr), "l1": float(l1), "l2": float(l2), "beta": float(beta)}
        self._lr, self._l1, self._l2, self._beta = F32(lr), F32(l1), F32(l2), F32(beta)

    def update(self, rows: Any, state: Any, grads: Any) -> None:
        """Apply gradients to rows in place. Servers call it.

        Args:
            rows (array): float32 of shape (n, dim), of n different rows.
            state (array): float32 of shape (n, 2 * dim): z, and the sums of squares.
            grads (array): float32 of shape (n, dim).
        """
        dim = rows.shape[1]
        z, n = state[:, :dim], state[:, dim:]
        more = n + grads * grads
        z += grads - (np.sqrt(more) - np.sqrt(n)) / self._lr * rows
        n[:] = more
        shrunk = np.sign(z) * np.maximum(np.abs(z) - self._l1, F32(0))
        rows[:] = -shrunk / ((self._beta + np.sqrt(n)) / self._lr + self._l2)


class Add:
    """Servers apply ``row += grad``: for counters and sums.

    Example:
        >>> rows, grads = np.ones((1, 1), np.float32), np.full((1, 1), 2, np.float32)
        >>> hvd.ps.Add().update(rows, rows[:, :0], grads)
        >>> rows.tolist()
        [[3.0]]
    """

    columns, extra = 0, 0

    def __init__(self) -> None:
        self.options: dict[str, Any] = {}

    def update(self, rows: Any, state: Any, grads: Any) -> None:
        """Add gradients to rows in place. Servers call it.

        Args:
            rows (array): float32 of shape (n, dim), of n different rows.
            state (array): not used.
            grads (array): float32 of shape (n, dim).
        """
        rows += grads


class Custom:
    """A function of the user's, update(rows, state, grads), which servers import by its name.

    It stands in a module that can be imported (not in the script itself); `function.columns` says how many numbers of
    state it keeps beside each number of a row (0 where it does not say).
    """

    extra = 0

    def __init__(self, function: str, columns: int, folder: str = "") -> None:
        self.options = {"function": function, "columns": columns, "folder": folder}
        self.columns = columns
        module, _, name = function.partition(":")
        if folder and folder not in sys.path:  # the script's, where its own modules lie
            sys.path.append(folder)
        self._update: Callable[[Any, Any, Any], None] = getattr(importlib.import_module(module), name)

    def update(self, rows: Any, state: Any, grads: Any) -> None:
        self._update(rows, state, grads)


Optimizer = Union[Sgd, Adagrad, Adam, Ftrl, Add, Custom]
RULES: dict[str, Any] = {each.__name__: each for each in (Sgd, Adagrad, Adam, Ftrl, Add, Custom)}
RATED = (Sgd, Adagrad, Adam)  # whose learning rate may change


def described(optimizer: Any) -> dict[str, Any]:
    """The rule as JSON for servers: {"rule": name, "options": {...}}. ValueError naming what cannot be."""
    if type(optimizer) in RULES.values():
        numbers = [n for each in optimizer.options.values() for n in (each if isinstance(each, tuple) else [each])]
        if not all(isinstance(n, str) or (isinstance(n, (int, float)) and abs(n) <= MOST) for n in numbers):
            raise ValueError(
                f"optimizer={type(optimizer).__name__}({optimizer.options}): options must be finite numbers [HVD025]"
            )
        return {"rule": type(optimizer).__name__, "options": dict(optimizer.options)}
    module, name = getattr(optimizer, "__module__", None), getattr(optimizer, "__qualname__", "")
    columns = getattr(optimizer, "columns", 0)
    is_function = callable(optimizer) and not isinstance(optimizer, type) and isinstance(columns, int) and columns >= 0
    if not is_function or not name.isidentifier() or module in (None, "__main__"):
        raise ValueError(
            f"optimizer={optimizer!r} must be Sgd, Adagrad, Adam, Ftrl or Add of hvd.ps, or a function update(rows, "
            "state, grads). A function needs 0 or more columns, and a module that servers can import (not the script "
            "itself) [HVD025]"
        )
    folder = os.path.abspath(sys.path[0]) if sys.path[0] and os.path.isdir(sys.path[0]) else ""
    return {"rule": "Custom", "options": {"function": f"{module}:{name}", "columns": columns, "folder": folder}}


def made(rule: str, options: dict[str, Any]) -> Optimizer:
    """The inverse of `described`."""
    rule_of: Optimizer = RULES[rule](**options)
    return rule_of


class Uniform:
    """First values of a row: uniform in [-scale, scale), a function of seed, row and column alone, so it does not
    matter which server makes the row, or when."""

    def __init__(self, scale: float, seed: int = 0) -> None:
        if not (math.isfinite(scale) and scale >= 0 and 0 <= seed < 1 << 63):
            raise ValueError(
                f"uniform({scale!r}, seed={seed!r}): scale must be finite and >= 0, seed must be >= 0 [HVD025]"
            )
        self.scale, self.seed = float(scale), int(seed)

    def rows(self, ids: Any, dim: int) -> Any:
        """float32 [len(ids), dim]."""
        if not self.scale:
            return np.zeros((len(ids), dim), F32)
        return uniform_rows(ids, dim, np.full(1, self.seed), F32(self.scale))


def uniform_rows(ids: Any, dim: int, seeds: Any, scales: Any) -> Any:
    """Uniform in [-scale, scale): float32 [len(ids), dim]. seeds, scales: one, or [len(ids), 1]."""
    numbers = ids.astype(U64)[:, None] * U64(dim) + np.arange(dim, dtype=U64)[None, :]
    unit = (hashed(numbers, seeds) >> U64(40)).astype(F32) * F32(2.0**-24)
    return (unit * F32(2) - F32(1)) * scales


def uniform(scale: float, seed: int = 0) -> Uniform:
    """Return first values for a table: uniform in [-scale, scale), for ``Table(init=...)``.

    A value depends only on seed, row and column. So it does not matter which server makes the row, or when.

    Args:
        scale (float): the bound, 0 or more.
        seed (int): the seed, 0 or more. Default: 0.

    Returns:
        Uniform: the value for ``init``.

    Raises:
        ValueError: an argument is negative or not finite.

    Example:
        >>> rows = hvd.ps.uniform(0.5, seed=1).rows(np.array([7]), 4)
        >>> rows.shape, bool((abs(rows) <= 0.5).all())
        ((1, 4), True)
    """
    return Uniform(scale, seed)
