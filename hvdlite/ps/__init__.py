"""Tables that no worker can hold: `hvd.ps`. Rows lie on servers; ranks pull what a batch needs and push gradients.

For embeddings of recommendation models; the dense layers stay on allreduce in the same step:

    import hvdlite.torch as hvd
    hvd.init()                                       # hvdlite-run -np 4 --servers 2 python train.py
    table = hvd.ps.Table("users", rows=50_000_000, dim=64, optimizer=hvd.ps.Adagrad(lr=0.05))
    embedding = hvd.ps.Embedding(table)
    ...
        loss.backward()                              # pushes rows while allreduce averages the tower's gradients
        optimizer.step()
        table.step()

It is the parameter server of Li et al. (OSDI 2014) with the consistency models BSP, SSP and ASP. Messages go over
ZeroMQ, encrypted; `pip install "hvdlite[ps]"`. Names are imported when they are used.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .cluster import serve
    from .optimizers import Adagrad, Adam, Add, Ftrl, Sgd, uniform
    from .table import Table, stats, step
    from .table_group import TableGroup

_NAMES = {
    "table_group": ("TableGroup",),
    "optimizers": ("Adagrad", "Adam", "Add", "Ftrl", "Sgd", "uniform"),
    "cluster": ("serve",),
    "table": ("Table", "stats", "step"),
}
_MODULE_OF = {name: module for module, names in _NAMES.items() for name in names}

__all__ = ["Adagrad", "Adam", "Add", "Ftrl", "Sgd", "Table", "TableGroup", "serve", "stats", "step", "uniform"]


def __getattr__(name: str) -> Any:
    if name not in _MODULE_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(f"{__name__}.{_MODULE_OF[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
