"""Specification of a table: its arguments, checked before anything is sent.

The description is JSON, the same on all ranks: coordination.py compares it, and a server makes its shard by it.

Nothing here knows how many servers there are.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from . import optimizers

ROWS_MAX, DIM_MAX = 1 << 40, 65535


def described(
    name: str, rows: int, dim: int, *, optimizer: Any, staleness: int | None, replicas: int, order: str, reduce: str,
    init: optimizers.Uniform | None
) -> dict[str, Any]:  # fmt: skip
    """ValueError naming the first argument that cannot be."""
    first = optimizers.Uniform(0.0) if init is None else init
    whole = [isinstance(each, (int, np.integer)) and not isinstance(each, bool) for each in (rows, dim, replicas)]
    wrong = (
        f"rows={rows!r}: 1 to 2**40" if not whole[0] or not 1 <= rows <= ROWS_MAX
        else f"dim={dim!r}: 1 to 65,535" if not whole[1] or not 1 <= dim <= DIM_MAX
        else f"staleness={staleness!r}: 0 (synchronous), a number of steps, or None (nobody waits)"
        if staleness is not None and not (isinstance(staleness, int) and 0 <= staleness < 1 << 31)
        else f"order={order!r}: 'hash' or 'range'" if order not in ("hash", "range")
        else f"reduce={reduce!r}: 'mean' or 'sum'" if reduce not in ("mean", "sum")
        else f"init={init!r}: hvd.ps.uniform(scale, seed), or None for zeros"
        if not isinstance(first, optimizers.Uniform)
        else f"replicas={replicas!r}: 1 or 2" if not whole[2] or replicas not in (1, 2)
        else None
    )  # fmt: skip
    if wrong is not None:
        raise ValueError(f"table {name!r}: {wrong} [HVD025]")
    return {
        "name": str(name), "rows": int(rows), "dim": int(dim), **optimizers.described(optimizer),
        "staleness": staleness, "replicas": int(replicas), "order": order, "reduce": reduce,
        "scale": first.scale, "seed": first.seed,
    }  # fmt: skip


def described_group(name: str, tables: Mapping[str, int], dim: int, *, init: Any, **more: Any) -> dict[str, Any]:
    """The description of one table that has the rows of several. ValueError as `described`."""
    if not isinstance(tables, Mapping) or not tables or not all(isinstance(each, str) for each in tables):
        raise ValueError(f"table group {name!r}: tables={tables!r}: a dictionary of numbers of rows by name [HVD025]")
    if isinstance(init, Mapping) and set(init) != set(tables):
        raise ValueError(f"table group {name!r}: init has {sorted(init)}, but the tables are {sorted(tables)} [HVD025]")
    each = [
        described(f"{name}.{table}", rows, dim, init=init[table] if isinstance(init, Mapping) else init, **more)
        for table, rows in tables.items()
    ]
    whole = described(name, sum(spec["rows"] for spec in each), dim, init=None, **more)
    first = {key: [spec[key] for spec in each] for key in ("scale", "seed")}
    return {**whole, **first, "tables": [[table, spec["rows"]] for table, spec in zip(tables, each)]}


def new_rate(spec: dict[str, Any], value: Any) -> float:
    """The learning rate that a table of this description is set to. ValueError where it cannot be."""
    if optimizers.RULES[spec["rule"]] not in optimizers.RATED:
        raise ValueError(
            f"table {spec['name']!r}: the learning rate of optimizer {spec['rule']} cannot change, only that of Sgd, "
            "Adagrad and Adam [HVD025]"
        )
    try:
        rate = math.nan if isinstance(value, bool) else float(value)
    except (TypeError, ValueError):
        rate = math.nan
    if not 0 <= rate <= optimizers.MOST:
        raise ValueError(f"table {spec['name']!r}: lr={value!r} must be a finite number, 0 or more [HVD025]")
    return rate
