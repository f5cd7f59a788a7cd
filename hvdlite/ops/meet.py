"""Where nobody gets a tensor: barrier, at which all ranks meet, monitored_barrier, which says who is missing, and join:
a rank has no more data.

A barrier has no name, so several may be open at once (from several threads): they are matched by order.
Joining is of the whole job: the other ranks go on with allreduces, to which the joined ones give nothing (zeros to a
sum, ones to a product), and with barriers; until all have joined, every other collective is refused with an error.

Who loses patience at a monitored barrier cannot take back that he came to it, so those that come later would pass it,
and wait for him at the next one, when he is elsewhere. Therefore it is a sum in which each rank has a place of its own:
zero, or one once it has given up, which is read when the last one comes. So at each barrier either all ranks pass or
all raise, the late ones at once, and the next barrier is the next for all. It is a group of one, since what is in no
group may travel with the votes, before its time (csrc/engine/rounds/guess.c).
"""

from __future__ import annotations

from array import array
from typing import Any

from .. import _core
from .._coded import coded
from ..errors import HvdTimeoutError
from ..process_set import ProcessSet, global_process_set, number_of, on_new_life, rank_in
from .handle import Handle
from .terms import full_name

_joins: list[_core.Pending] = []  # at most one, which a signal handler's exception has left
on_new_life(_joins.clear)


def barrier(process_set: ProcessSet = global_process_set, *, timeout: Any = None) -> None:
    """Returns when every rank of the set has called it. Raises HvdPeerLostError.

    timeout: as `synchronize` has it; `monitored_barrier` is for those that want to go on after it.
    """
    seconds = _core.seconds_of(timeout)
    request = _core.request(_core.BARRIER, 0, 0, None, (), process_set=number_of(process_set))
    if seconds is None:
        request.run(0, 0, None)
    else:
        Handle([_core.Pending(request).start(0, 0, _core.QUIET, None)], lambda _: None).wait(seconds)


def monitored_barrier(
    timeout: Any = None, process_set: ProcessSet = global_process_set, name: str | None = None
) -> None:
    """A barrier that raises, on every rank that waits, who has not come in time; it never ends the job.

    timeout: seconds or a datetime.timedelta; None: those of HVDLITE_COLLECTIVE_TIMEOUT, and without a limit where that
    is 0. Ranks may give different ones. Barriers of one name are matched by their order, those without one likewise.

    Raises HvdTimeoutError: ranks are missing after that time. It names each of them, with host, pid, state and the last
    collective that it submitted, and takes up to some seconds more if a rank does not answer. All can go on as they
    like, and the next barrier is a new one. Ranks that come to this one when another has given up hear that at once, as
    an HvdTimeoutError that names those that have: so either all ranks pass a barrier, or all raise, and a loop that
    tries again meets the others again. (torch.distributed.monitored_barrier names missing ranks on its rank 0 only, and
    the late ones wait for their own time-out.) Only a rank that is stopped in the instant in which all have come may
    leave others that gave up with an error while the rest pass.

    Raises HvdPeerLostError, ValueError for no time to wait and on ranks outside process_set, TypeError for a timeout
    that is no number and a name that is no text.
    """
    seconds = _core.seconds_of(timeout) or _core.asked() or None
    number, mine, size = number_of(process_set), rank_in(process_set, _core.rank()), process_set.size()
    base = full_name("monitored_barrier.", name) or "monitored_barrier"
    full = f"{base}.{_core.unnamed(base, number)}"
    gave_up, seen = array("B", bytes(size)), array("B", bytes(size))
    pending = _core.submit(
        _core.ALLREDUCE, _core.OPS["sum"], _core.DTYPES["uint8"], full, (size,), gave_up.buffer_info()[0],
        seen.buffer_info()[0], (gave_up, seen), process_set=number, group=_core.group_number(full, number),
        group_count=1, quiet=_core.QUIET,
    )  # fmt: skip
    _core.excuse(pending.native)
    if not _core.within(pending.native, seconds):
        gave_up[mine] = 1
        who = _core.missing(pending.native)
        if not pending.done():
            pending.release()  # now: the exception's traceback holds it
            raise HvdTimeoutError(
                coded("HVD502", f"rank {_core.rank()} has waited {seconds:g} s at the barrier {full!r}: {who}")
            )
    pending.wait(bounded=False)
    pending.release()
    if any(seen):
        early = [rank for place, rank in enumerate(process_set.ranks or range(size)) if seen[place]]
        raise HvdTimeoutError(
            coded(
                "HVD502",
                f"rank {_core.rank()} came to the barrier {full!r} when rank{'s' if len(early) > 1 else ''} "
                f"{', '.join(map(str, early))} had given up on it (timeout=): all ranks are at the end of it now",
            )
        )


def join(device: int = -1) -> int:
    """This rank has no more data: blocks until all ranks have joined; the rank that joined last.

    That may take long while the others train. When they carry out nothing either, the time of the stall report and
    HVDLITE_COLLECTIVE_TIMEOUT run here, too. When a signal handler has raised meanwhile, this rank has joined all the
    same: join() again goes on waiting. `device` is Horovod's and not needed here. Raises HvdPeerLostError,
    HvdTimeoutError.
    """
    if isinstance(device, bool) or not isinstance(device, int):
        raise TypeError(f"device must be the number of a device or -1 for the CPU, not {device!r} [HVD219]")
    pending = _joins.pop() if _joins else _core.Pending(_core.request(_core.JOIN, 0, 0, None, ()))
    try:
        if not pending.native:
            pending.start(0, 0, _core.QUIET, None)
        pending.wait(bounded=False)
        last = pending.gathered().rows
    except BaseException:
        if pending.native:
            _joins.append(pending)
        raise
    pending.release()
    _core.begin_again()  # what the others numbered meanwhile
    return last
