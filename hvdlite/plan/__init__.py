"""Planning of collectives, networks and parallel training: `from hvdlite import plan`.

A collective is data here: a table of moves. Tables are made by generators, proved (every rank ends with the right sum,
and with the same bits), timed on links that need not exist, drawn, and run in a real job:

    table = plan.make("ring", size=8)
    plan.time(table, 16 << 20, plan.Links.uniform(8, "20us", "1GB/s"))      # ns
    plan.run(table, array)                                                   # inside a job

Another package brings its own behind the entry point `hvdlite.plans`: a module that uses `plan.algorithm`.
Planners stand beside, as modules: where to cut a model (`search`; `auto`: for hvdlite.parallel; `layout`: for any
number of ranks), what its layers cost (`profile`, `layers`), how to split a network's bandwidth (`network`), which
collectives a step needs (`rewrite`). The program hvdlite-plan does all of it. Everything needs NumPy alone; `network`
needs SciPy, `profile` PyTorch. Planners are imported when they are used.

    chain = plan.Chain(layers.read("layers.json"), beta=1e-7, micro=8, memory=16e9)
    plan.best(chain, 8).stages                         # of all plans
    plan.choose(chain, 8).write("parallel.json")       # of those that hvdlite.parallel runs: parallel.planned reads it
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from .draft import Draft
from .links import Links
from .proof import Proof, prove  # now, not when it is asked for: importing the module would take the function's name
from .registry import algorithm, make
from .simulator import time_of as time
from .table import PlanError, Table

if TYPE_CHECKING:
    from .auto import choose
    from .execution import run
    from .layout import Layout, layout_for
    from .profile import profiles
    from .search import Chain, Layer, best

_LATER = {
    "Chain": "search", "Layer": "search", "Layout": "layout", "best": "search", "choose": "auto",
    "layout_for": "layout", "profiles": "profile", "run": "execution",
}  # fmt: skip

__all__ = [
    "Chain",
    "Draft",
    "Layer",
    "Layout",
    "Links",
    "PlanError",
    "Proof",
    "Table",
    "algorithm",
    "best",
    "choose",
    "layout_for",
    "make",
    "profiles",
    "prove",
    "run",
    "time",
]


def __getattr__(name: str) -> Any:
    if name not in _LATER:
        raise AttributeError(f"module 'hvdlite.plan' has no attribute {name!r}")
    value = getattr(import_module(f".{_LATER[name]}", __name__), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
