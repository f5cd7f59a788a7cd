"""HVD4xx: Ranks that are lost or have left.

Each block is a code: its title, what raises it, cause and remedy (row.py says how a page is read). What Python tells
comes first, then what the core tells. Tests find the texts with these codes, and fail if a code is not here or a row
is not used.
"""

from .row import family

_PYTHON = """
HVD401 A rank failed, or ended while others needed it
raises: HvdPeerLostError, a line of hvdlite-run
cause: The process of a rank ended: by an exception, by `sys.exit`, or because its script was over while others still
had collectives to do.
remedy: Read the output of the rank that is named; its traceback says what happened, and the other ranks failed because
of it. If it ended with code 0, ranks have different numbers of steps: give all the same, or use `hvd.join()`.

HVD402 A rank was killed by a signal
raises: HvdPeerLostError, a line of hvdlite-run
cause: SIGKILL mostly comes from the kernel (out of memory), from a container's or scheduler's limit, or from a user.
SIGSEGV, SIGBUS and SIGABRT are crashes of native code; SIGBUS also means that /dev/shm is full. SIGTERM is a
scheduler's.
remedy: SIGKILL: look at `dmesg` and the limits of memory; use smaller batches or fewer ranks or workers. SIGSEGV: set
`PYTHONFAULTHANDLER=1` to see where. SIGBUS: make /dev/shm larger (`docker run --shm-size=2g`).

HVD403 A host, an agent or the calling process is gone
raises: ConnectionError, a line of hvdlite-run
cause: The connection to a host has ended or nothing was heard of it for too long, the agent that looks after the ranks
there has ended, or the program that called `hvd.run` has.
remedy: Look at that host: is it up, does it have memory, was `hvdlite` killed there? `--agent-timeout` sets how long
silence is suffered.
"""

# From 450 on, what the core tells.
_CORE = """
HVD450 The process of a rank is gone
raises: HvdPeerLostError
cause: The process ended without leaving the job: it was killed (often for memory), crashed, or called `os._exit`; or
its connection ended, as when its host goes down.
remedy: Look at the last output of the rank that is named, at `dmesg` of its host for the kernel's killer, and at the
batch system's log. Elastic training (`hvd.elastic.run`) goes on without it.
example: rank 3 (pid 77, host b) is lost: its process ended without leaving the job; its own last output says why

HVD451 A rank left while others still needed it
raises: HvdPeerLostError
cause: The script of that rank ended, or it called `hvd.shutdown()`, before the others had done their last collective.
remedy: Let all ranks make the same number of steps: drop the last batches that not all have, or use `hvd.join()`. A
`sys.exit` or `return` that only one rank takes is the other frequent reason.

HVD452 A rank ended before its agreed collectives were done
raises: HvdPeerLostError
cause: All ranks had agreed on a collective, and one did not take part in it within the time that a rank waits at its
end.
remedy: Synchronize handles before the script ends. If the others are only slow, raise `HVDLITE_LEAVE_TIMEOUT`.

HVD453 A rank is silent
raises: HvdPeerLostError
cause: The rank has answered nothing for `HVDLITE_PEER_TIMEOUT` seconds, though its engine needs no help of the script
to answer: the process is stopped (SIGSTOP, a debugger), its machine hangs or swaps, or the network is cut.
remedy: Look at the process and its host (`ps`: state T is stopped). Where machines do pause for longer, for snapshots
say, raise `HVDLITE_PEER_TIMEOUT`.

HVD454 A host acknowledges nothing
raises: HvdPeerLostError
cause: What was sent to the host has not been acknowledged for `HVDLITE_PEER_TIMEOUT` seconds: it is down, or a firewall
or cable cuts the way of tensors.
remedy: See whether the host answers (`ping`), and whether connections between the two are dropped when they are idle or
old.

HVD455 The launcher of this job has ended
raises: HvdPeerLostError
cause: The process of `hvdlite-run` (or the rank that kept the store) is gone, so nobody watches the job any more.
remedy: See why it ended: a closed terminal (use `nohup` or `tmux`), a limit of the login node, a signal of the batch
system.

HVD456 Another rank ended the job
raises: HorovodInternalError, HvdPeerLostError
cause: A rank gave up, and its reason did not come along.
remedy: The first error in the output of the rank that is named is the cause; the launcher prints it last.

HVD457 hvdlite was shut down while this was pending
raises: HvdNotInitializedError
cause: `hvd.shutdown()` was called, perhaps by another thread or at the end of the script, before the collective was
done.
remedy: Synchronize all handles before `hvd.shutdown()`, and end threads that communicate first.

HVD458 What came from a rank, or from the store, was changed on its way
raises: HvdPeerLostError, HvdInitError, a line of hvdlite-run
cause: Ranks, the store and the launcher sign what they send with keys that only the two ends of a connection know, and
objects that are to be unpickled with a key that only the ranks of the job know. What came does not carry its tag:
somebody on the way changed, repeated or left out something, or has taken over the connection; or, more rarely, the
memory or the network of a host is broken in a way that checksums do not see. Nothing of it was used.
A connection that is cut off within a frame, or before the output of its ranks has ended, is told likewise: then a host
or a process at its other end may as well have been stopped.
remedy: Look for who can reach the network between the two hosts, and at users of these hosts; launcher/README.md says
what is promised to whom. If it is the same host again and again, test its memory and its network card.
example: the votes from rank 3 (host b) were changed on their way, or are not its: record 17 does not carry its tag
"""

FAMILY = family(4, "Ranks that are lost or have left", _PYTHON + _CORE)
