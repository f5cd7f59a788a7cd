"""Division of a bandwidth budget over the dimensions of a network, the problem of LIBRA.

A collective over dimensions of n_1, n_2, ... ranks (inner first) moves 2 S (n_d - 1) / n_d / (n_1 ... n_(d-1)) bytes of
each rank in dimension d. Its parts follow each other closely, so it takes as long as its busiest dimension. Looked for
are b_d > 0 with sum cost_d b_d = budget for which the sum over collectives of max_d v_cd / b_d is least. That is
convex: with one t_c for each collective, t_c b_d >= v_cd. SciPy's SLSQP solves it from three starts.

Source: LIBRA (Won et al., ISPASS 2024, arXiv 2109.11762).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]


def volumes(size: float, dims: Sequence[int], used: Sequence[int] | None = None) -> Array:
    """Bytes of each rank in each dimension, for an allreduce; used: the dimensions that it spans, None: all."""
    if not dims or min(dims) < 1 or not 0 < size < float("inf") or not set(used or ()) <= set(range(len(dims))):
        raise ValueError(
            f"an allreduce of {size} bytes over {used} of the dimensions {list(dims)} is not possible [HVD008]"
        )
    found, left = np.zeros(len(dims)), float(size)
    for d in range(len(dims)) if used is None else used:
        found[d] = 2 * left * (dims[d] - 1) / dims[d]
        left /= dims[d]
    return found


def step_time(load: Any, rates: Any) -> float:
    """load: by collective and dimension, bytes. rates: by dimension, bytes in a unit of time."""
    return float((np.asarray(load, float) / np.asarray(rates, float)).max(1).sum())


def split(load: Any, budget: float, cost: Sequence[float] | None = None) -> Array:
    """The rate of each dimension. load: as for `step_time`. cost: of a unit of rate in each dimension, None: 1."""
    try:
        from scipy.optimize import minimize
    except ModuleNotFoundError:
        raise ModuleNotFoundError(
            "splitting a network needs the package SciPy: pip install scipy (or hvdlite[plan]) [HVD807]", name="scipy"
        ) from None
    load = np.asarray(load, float)
    if load.ndim != 2 or not np.isfinite(load).all() or load.min(initial=0) < 0 or not load.max(initial=0) > 0:
        raise ValueError(
            "the load must be a table of bytes, with a row for each collective and a value above zero [HVD008]"
        )
    count, dims = load.shape
    each = np.ones(dims) if cost is None else np.asarray(cost, float)
    if each.shape != (dims,) or not each.min() > 0 or not 0 < budget < float("inf"):
        raise ValueError(f"the budget and the costs of {dims} dimensions must be above zero [HVD008]")
    w = load / load.max()
    heavy = w.sum(0)

    def solved(start: Array) -> Array:
        x0 = np.concatenate([start, (w / start).max(1)])
        slope = np.concatenate([np.zeros(dims), np.ones(count)])
        found = minimize(
            lambda x: x[dims:].sum(), x0, jac=lambda x: slope, method="SLSQP",
            bounds=[(1e-4, None)] * dims + [(0, None)] * count, options={"maxiter": 500, "ftol": 1e-10},
            constraints=[
                {"type": "eq", "fun": lambda x: (each * x[:dims]).sum() - 1},
                {"type": "ineq", "fun": lambda x: (x[dims:, None] * x[None, :dims] - w).ravel()},
            ],
        )  # fmt: skip
        rates: Array = np.maximum(found.x[:dims], 1e-4)
        return rates / (each * rates).sum()

    shares = (1 / each, np.sqrt(heavy + 1e-9), heavy + 1e-3)
    starts = [share / (each * share).sum() for share in shares]
    best = min([*starts, *map(solved, starts)], key=lambda rates: step_time(w, rates))
    return best * budget
