"""Every collective, written once for all frameworks. A framework's module binds them to its adapter:

    _ops = Collectives(adapter)
    allreduce, allreduce_, ... = _ops.allreduce, _ops.allreduce_, ...

Each collective has up to four forms: plain (a new tensor), `_` (in place), and `_async` of both, which return a Handle
for `poll` and `synchronize`. Arguments and names are Horovod's. A tensor named x travels as `allreduce.x`, so that an
allreduce and a broadcast of one name are not matched; unnamed calls are matched by the order in which ranks make them.

One file for each idea: `handle` (what is in flight), `arguments` (of the call), `tensors` (from a tensor to an
address and back), then the collectives: `reduce`, `broadcast` (all ranks get the same rows), `alltoall` (each rank gets
its own), `barriers` (no rank gets data: barrier and join).

Non-contiguous tensors are copied to contiguous memory and, in place, back when the handle is synchronized.
Errors that this process can see alone (a wrong argument) are raised at the call, all others by `synchronize`.
"""

from __future__ import annotations

from .adapter import Adapter, T
from .alltoall import Exchanges
from .arguments import Adasum, Average, Max, Min, Product, Sum, Terms, op_of
from .barriers import barrier, join, monitored_barrier
from .broadcast import Shares
from .handle import Handle, poll, synchronize
from .reduce import Reductions


class Collectives(Reductions[T], Shares[T], Exchanges[T]):
    """The collectives of one framework."""


__all__ = [
    "Adapter",
    "Adasum",
    "Average",
    "Collectives",
    "Handle",
    "Max",
    "Min",
    "Product",
    "Sum",
    "Terms",
    "barrier",
    "join",
    "monitored_barrier",
    "op_of",
    "poll",
    "synchronize",
]
