"""Collectives without a tensor: barrier, monitored_barrier, which names the missing ranks, and join: a rank has no
more data.

A barrier has no name, so several may be open at once (from several threads): they are matched by order.
Joining is of the whole job: the other ranks go on with allreduces, to which the joined ones give nothing (zeros to a
sum, ones to a product), and with barriers; until all have joined, every other collective is refused with an error.

A rank that gives up at a monitored barrier cannot withdraw from it. Later ranks would pass it, and wait for that rank
at the next one, when it is elsewhere. Therefore a monitored barrier is a sum in which each rank has an element of its
own: zero, or one once it has given up, which is read when the last rank comes. So at each barrier either all ranks pass
or all raise, the late ones at once, and the next barrier is the next for all. It is a group of one, since what is in no
group may travel with the votes, before its time (csrc/engine/host_votes/speculation.c).
"""

from __future__ import annotations

from array import array
from typing import Any

from .. import _core
from ..errors import HvdTimeoutError
from ..errors.codes import coded
from ..process_sets.process_set import ProcessSet, global_process_set, number_of, on_new_incarnation, rank_in
from .arguments import full_name
from .handle import Handle

_joins: list[_core.Pending] = []  # at most one, which a signal handler's exception has left
on_new_incarnation(_joins.clear)


def barrier(process_set: ProcessSet = global_process_set, *, timeout: Any = None) -> None:
    """Block until every rank of the set has called it.

    Barriers have no name; they are matched by their order in each set.

    Args:
        process_set (ProcessSet): ranks that take part. Default: all ranks.
        timeout (float or datetime.timedelta, optional): seconds to wait, above 0, as in ``synchronize``. Default: no
            limit of this call.

    Raises:
        HvdPeerLostError: if a rank dies or leaves the job.
        HvdTimeoutError: if ``timeout`` passes first. The job can continue. ``monitored_barrier`` also names the
            missing ranks.
        HvdNotInitializedError: before ``init``.
        ValueError: on a rank outside ``process_set``, and for a timeout that is not positive.
        TypeError: if an argument has a wrong type.

    Example:
        >>> hvd.barrier()
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
    """Block until every rank of the set has called it, or raise an error that names the missing ranks.

    A timeout does not end the job. Either all ranks pass a barrier, or all ranks raise: a rank that arrives after
    another one has given up raises at once. A loop that tries again therefore meets the other ranks again. There is one
    exception: if a rank is stopped in the instant in which the last rank arrives, some ranks may raise while the rest
    pass. ``torch.distributed.monitored_barrier`` names missing ranks on rank 0 only.

    Args:
        timeout (float or datetime.timedelta, optional): seconds to wait, above 0; it may differ between ranks. Default:
            ``HVDLITE_COLLECTIVE_TIMEOUT``, or no limit if that is 0.
        process_set (ProcessSet): ranks that take part. Default: all ranks.
        name (str, optional): name of the barrier. Barriers of one name are matched by their order. Default: barriers
            without a name are matched by their order.

    Raises:
        HvdTimeoutError: if ranks are missing after ``timeout``. The text names each with host, pid, state and its last
            collective. It may take some seconds more if a rank does not answer.
        HvdPeerLostError: if a rank dies or leaves the job.
        HvdNotInitializedError: before ``init``.
        ValueError: on a rank outside ``process_set``, and for a timeout that is not positive.
        TypeError: if an argument has a wrong type.

    Example:
        >>> hvd.monitored_barrier(timeout=60, name="epoch")
    """
    seconds = _core.seconds_of(timeout) or _core.core_limit() or None
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
        missing = _core.missing(pending.native)
        if not pending.done():
            pending.release()  # now: the exception's traceback holds it
            raise HvdTimeoutError(
                coded("HVD502", f"rank {_core.rank()} has waited {seconds:g} s at the barrier {full!r}: {missing}")
            )
    pending.wait(bounded=False)
    pending.release()
    if any(seen):
        early = [rank for position, rank in enumerate(process_set.ranks or range(size)) if seen[position]]
        raise HvdTimeoutError(
            coded(
                "HVD502",
                f"rank {_core.rank()} reached the barrier {full!r} after rank{'s' if len(early) > 1 else ''} "
                f"{', '.join(map(str, early))} had given up on it (timeout=): the barrier is over on all ranks",
            )
        )


def join(device: int = -1) -> int:
    """Report that this rank has no more data, and block until all ranks have joined.

    Meanwhile the other ranks go on with ``allreduce``, ``reduce`` and ``barrier``. A rank that has joined contributes
    zeros to a sum and ones to a product. Every other collective is refused until all ranks have joined. The limit of
    ``HVDLITE_COLLECTIVE_TIMEOUT`` applies only while the other ranks complete nothing. If a signal handler raises while
    it blocks, this rank has joined all the same; call ``join`` again to go on waiting.

    Args:
        device (int): not used; Horovod's argument. Default: -1.

    Returns:
        int: the rank that joined last.

    Raises:
        HvdPeerLostError: if a rank dies or leaves the job.
        HvdTimeoutError: if the job's limit passes.
        HvdNotInitializedError: before ``init``.
        TypeError: if ``device`` is not an integer.

    Example:
        >>> if hvd.rank() == 1:  # rank 0 has fewer batches
        ...     print(hvd.allreduce(np.array([2.0]), op=hvd.Sum).tolist())
        [2.0]  # rank 1
        >>> hvd.join()
        1
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
