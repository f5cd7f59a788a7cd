"""HVD5xx: Limits of time, and stalls.

Each block is a code: its title, what raises it, cause and remedy (row.py says how a page is read). What Python tells
comes first, then what the core tells. Tests find the texts with these codes, and fail if a code is not here or a row
is not used.
"""

from .row import family

_PYTHON = """
HVD501 A process did not end in time
raises: a line of hvdlite-run
cause: The job is over, and a process that a rank had started could not be killed: it hangs in the kernel (a network
file system, a driver) or belongs to somebody else.
remedy: Look at the process that is named on its host (`ps -o pid,stat,wchan`). State D means that it waits for a device
or a file system.

HVD502 The timeout of one call is over
raises: HvdTimeoutError
cause: `timeout=` seconds of a collective, of `synchronize` or of `monitored_barrier` have passed. The text says which
ranks are missing and what they do instead; or which ranks had given up on a barrier before this one came.
remedy: Look where the missing ranks stand, or give more time. The job goes on: wait for a collective again with
`hvd.synchronize(error.handle)`; the next monitored barrier is a new one for all ranks.

HVD503 Not a time to wait
raises: TypeError, ValueError
cause: A `timeout` is no positive, finite number of seconds and no `datetime.timedelta`.
remedy: Give seconds, such as `timeout=30`, or None to wait without a limit of the call's own; `hvd.poll(handle)` asks
without waiting.

HVD504 The timeout of one call inside of a graph of TensorFlow
raises: HvdNotYetError
cause: A collective with `timeout=` was traced by `tf.function` (or by Keras). Of a graph that is given up halfway
nobody knows which of its collectives have begun on this rank, so the next run would not meet the other ranks.
remedy: Leave `timeout=` away there, or make the call in eager mode. `HVDLITE_COLLECTIVE_TIMEOUT` bounds what graphs
wait for.

HVD505 Some ranks have ended well, and others still run
raises: a line of hvdlite-run
cause: `HVDLITE_STALL_CHECK_TIME` seconds (60) after the last rank that ended, others have not. They save or evaluate,
which is right, or they hang after their last collective, where no other rank misses them: a process that is stopped, a
thread that never ends, a worker of a DataLoader.
remedy: If they work, nothing. Else look where they stand (`py-spy dump`, `ps -o pid,stat,wchan`).
"""

# From 550 on, what the core tells.
_CORE = """
HVD550 Nothing has moved for the whole limit
raises: HvdTimeoutError
cause: Ranks have waited for `HVDLITE_COLLECTIVE_TIMEOUT` seconds for tensors that others have not submitted. The text
says which tensors, who has them, who has not, and what those ranks do instead.
remedy: Look where the missing ranks stand; their Python stacks are in the stall report before. Mostly ranks take
different branches, or one waits for data, a checkpoint or a lock. Raise the limit (`--collective-timeout`, 0: none)
where a rank may truly be that late.

HVD551 A collective was not done in time, and who is missing is not known
raises: HvdTimeoutError
cause: The limit `HVDLITE_COLLECTIVE_TIMEOUT` has passed on this rank, and the rank that would say who is missing has
not answered, or the collective waits in a graph.
remedy: Look at rank 0 and the rank that is named first: they may be stopped. Then as for HVD550.

HVD552 Collectives wait for ranks that have not submitted them, or do not get on
raises: a warning
cause: A tensor has waited longer than `HVDLITE_STALL_CHECK_TIME` seconds (60): not all ranks have submitted it, or it
does not get on, on a GPU or between hosts. The lines that follow say who has not, and where its Python stands.
remedy: If the rank is only slow (a checkpoint, an evaluation on one rank), wait, or raise
`HVDLITE_STALL_CHECK_TIME`. If it will never come, ranks run different code: make the call on all of them.

HVD553 A collective was launched on GPUs and does not end there
raises: HvdTimeoutError
cause: NCCL's kernel waits on the GPU for a peer, longer than `HVDLITE_COLLECTIVE_TIMEOUT` seconds, and has been ended.
A rank is stopped, a host or its network is lost, or NCCL hangs. What the script itself computes on this GPU before
does not count.
remedy: Look at the ranks that the text names. If all are alive, look at the network (`NCCL_DEBUG=INFO`), and whether a
rank computes for that long on its GPU before it begins the collective; then raise the limit (`--collective-timeout`).
"""

FAMILY = family(5, "Limits of time, and stalls", _PYTHON + _CORE)
