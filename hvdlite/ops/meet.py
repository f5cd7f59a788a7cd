"""Where nobody gets a tensor: barrier, at which all ranks meet, and join: a rank has no more data.

A barrier has no name, so several may be open at once (from several threads): they are matched by order.
Joining is of the whole job: the other ranks go on with allreduces, to which the joined ones give nothing (zeros to a
sum, ones to a product), and with barriers; until all have joined, every other collective is refused with an error.
"""

from __future__ import annotations

from .. import _core
from ..process_set import ProcessSet, global_process_set, number_of


def barrier(process_set: ProcessSet = global_process_set) -> None:
    """Returns when every rank of the set has called it. Raises HvdPeerLostError."""
    _core.request(_core.BARRIER, 0, 0, None, (), process_set=number_of(process_set)).run(0, 0, None)


def join(device: int = -1) -> int:
    """This rank has no more data: blocks until all ranks have joined; the rank that joined last.

    `device` is Horovod's and not needed here. Raises HvdPeerLostError.
    """
    if isinstance(device, bool) or not isinstance(device, int):
        raise TypeError(f"device must be the number of a device or -1 for the CPU, not {device!r}")
    pending = _core.submit(_core.JOIN, 0, 0, None, (), 0, 0, None, quiet=_core.QUIET)
    pending.wait(bounded=False)
    last = pending.gathered().rows
    pending.release()
    return last
