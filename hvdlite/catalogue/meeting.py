"""HVD1xx: init() and how ranks meet.

Each block is a code: its title, what raises it, cause and remedy (row.py says how a page is read). What Python tells
comes first, then what the core tells. Tests find the texts with these codes, and fail if a code is not here or a row
is not used.
"""

from .row import family

_PYTHON = """
HVD101 hvdlite has not been initialized
raises: HvdNotInitializedError
cause: A function that needs the job, such as `hvd.rank()` or a collective, was called before `hvd.init()` or after
`hvd.shutdown()`.
remedy: Call `hvd.init()` once, near the top of the script, before anything else of hvdlite. After `hvd.shutdown()` call
`hvd.init()` again.
example: hvdlite has not been initialized; use hvd.init().

HVD102 hvd.init() was called again with other process sets
raises: ValueError
cause: `hvd.init()` runs once per life of a job; a later call does nothing, so it cannot register new process sets.
remedy: Give all process sets to the first `hvd.init(process_sets=[...])`, or register later ones by
`hvd.add_process_set()` on all ranks.

HVD103 A rank does not know where the others are
raises: HvdInitError
cause: The environment says which rank this is, but lacks the address of the rendezvous: variables of the launcher were
lost on the way, for example by `sudo`, `env -i` or a container.
remedy: Start the job with `hvdlite-run -np N python train.py`, and pass its `HVDLITE_*` variables on to where the rank
runs.

HVD104 Ranks are not alike: other versions, or other options that must agree
raises: HvdInitError
cause: At `hvd.init()` ranks compare the version of hvdlite and the options that all must share. On some rank they
differ, or it sent what only another version sends.
remedy: The text names the rank and what differs. Install the same hvdlite on all hosts (`hvdlite-run doctor -H ...`
compares them) and set options once for the job, by flags of `hvdlite-run` or `-x NAME`.

HVD105 The environment of a rank is not whole, or contradicts itself
raises: HvdInitError
cause: Variables that a launcher sets for each rank (rank, size, local rank, names of nodes) are missing, are no
numbers, or do not fit each other. Often some of them were exported by hand or are left over from another job.
remedy: The text shows the variables. Unset those you have set yourself, and start the script by one launcher only.

HVD106 A launcher that hvdlite does not know, or cannot start under
raises: HvdInitError, a line of hvdlite-run
cause: Variables say that this process is a rank of a job, but not in a way that hvdlite can read.
remedy: Start the job with `hvdlite-run`, or set `HVDLITE_RANK` and `HVDLITE_SIZE` (and `HVDLITE_STORE_ADDR`) for every
rank yourself.

HVD107 MPI tells of another job than the launcher
raises: HvdInitError
cause: The launcher started N ranks, but `MPI_COMM_WORLD` has another number, mostly 1: the MPI library that was loaded
is not the one that `mpirun` belongs to, or `srun` was given another `--mpi`.
remedy: Use `mpirun` and the library of one installation; name the library in `HVDLITE_MPI_LIBRARY` if several are
installed. Under Slurm choose what that MPI was built for (`srun --mpi=list`). `hvdlite-run --check-build` shows what is
found.

HVD109 The comm argument of hvd.init() or a process set does not fit
raises: ValueError, TypeError
cause: `comm` is no communicator of mpi4py and no list of ranks, does not contain this process, names a rank twice, or
ranks gave different ones; or `hvd.init(comm=...)` is used where no MPI started the job.
remedy: Give each process a communicator that it is in (or the same list of ranks on all), and call `hvd.init()` on
members only. Without MPI use `hvd.ProcessSet`.

HVD110 The rendezvous does not answer, or its launcher is gone
raises: HvdInitError, a line of hvdlite-run
cause: The place where ranks meet is kept by `hvdlite-run` (or by rank 0). It could not be reached, closed the
connection, or did not answer in time: the launcher has ended, is stopped, or a firewall stands between.
remedy: Look at the launcher's own output first. Check that it still runs, that its host is reachable from the rank's
(`hvdlite-run doctor -H ...`), and that the address is one that all hosts reach (`--network-interface`,
`HVDLITE_STORE_ADDR`). `--start-timeout` sets the limit.

HVD111 The secret of another job
raises: HvdInitError, ValueError
cause: Ranks prove to each other that they belong to one job. What answered has another secret, or the secret is too
short: mostly a second job on the same port, or `HVDLITE_SECRET_KEY` differs between hosts.
remedy: Give all hosts the same `HVDLITE_SECRET_KEY` (64 hexadecimal digits: `openssl rand -hex 32`) and each job a port
of its own.

HVD112 What came over a connection is not what hvdlite sends
raises: HvdInitError
cause: Something else than hvdlite listens at that port, or answers came in an order that cannot be.
remedy: Choose another port (`--rdzv-endpoint HOST:PORT`, `HVDLITE_STORE_PORT`). If it is hvdlite on both sides, compare
versions; if those are equal, please report it.

HVD113 Ranks are waited for, and do not come to hvd.init()
raises: HvdInitError, a line of a rank
cause: `MPI_Init` or `hvd.init()` waits for all ranks, and some have not called it within the start timeout: they failed
earlier, still import or load something, or MPI tries a network that does not join the hosts.
remedy: Look at the output of the ranks that are missing. If they are merely slow, raise `HVDLITE_START_TIMEOUT`
(`--start-timeout`). On several hosts name the network interface, as the text says.

HVD114 No address that others reach
raises: HvdInitError
cause: This host has no route to the rendezvous, cannot listen at the address from which it reaches it, or is known by a
loopback address only.
remedy: Set `HVDLITE_STORE_ADDR` (or `--network-interface NAME`) to an address that all hosts reach; look at `ip route`,
and at what /etc/hosts says about the host's own name.

HVD115 Ranks on different hosts cannot connect to each other
raises: HvdInitError
cause: Every rank connects to ranks on other hosts directly. Some connections were refused or not made in time: a
firewall between the hosts, an interface that is down, or a rank that has gone.
remedy: The text names ranks, addresses and reasons. Open TCP ports between the hosts, or name the interface that joins
them (`--network-interface`); `hvdlite-run doctor -H a,b --measure` tries each pair.

HVD116 Rank 0's rendezvous cannot be opened or found
raises: HvdInitError
cause: Under `srun` and `torchrun` rank 0 opens the rendezvous itself. It could not, or other ranks did not find it at
the first node.
remedy: Check that rank 0 reaches `hvd.init()`, that `MASTER_ADDR` or `HVDLITE_STORE_ADDR` leads to its node, and that
all nodes share the home directory or the same `HVDLITE_SECRET_KEY`.

HVD117 The secret that keeps strangers out cannot be used
raises: HvdInitError
cause: Where no launcher gives a secret, ranks take it from the file that `HVDLITE_SECRET_FILE` names, or else from a
key in the user's folder of configuration. It cannot be read or made, others may read it, or it holds something else.
remedy: `chmod 600` the file that is named, or remove it; or give the job a secret of its own: `export
HVDLITE_SECRET_KEY=$(openssl rand -hex 32)` in the job file, or a file of mode 0600 with such a key that all hosts have.

HVD118 A second process says that it is the same rank
raises: HvdInitError
cause: A child process inherited the environment of a rank and called `hvd.init()` too, or a script was started twice
within one rank.
remedy: Only one process of a rank may call `hvd.init()`. In children (subprocess, spawn) do not call it; protect the
main part of the script by `if __name__ == "__main__":`.

HVD119 A rank that this job does not have
raises: HvdInitError
cause: A process came with a rank or a number of ranks that is not the launcher's: it belongs to another job, or
`HVDLITE_RANK` or `HVDLITE_SIZE` were changed.
remedy: Do not set these variables under a launcher; start the script once per rank by one launcher.

HVD120 Too few files may be open
raises: HvdInitError
cause: Each rank needs a descriptor for every other rank, and the hard limit of open files of this process is lower.
remedy: Raise the hard limit: `ulimit -Hn`, `LimitNOFILE` of a service, `--ulimit nofile=65536` of a container.

HVD121 A rank was refused, or ended, while ranks met
raises: HvdInitError
cause: The launcher refused what a rank said, or saw the end of a rank that others were waiting for in `hvd.init()`.
remedy: Read the output of the rank that is named: its own error comes first. If several jobs run on one host, check
that they do not share a port.

HVD122 hvdlite is used in a forked child of a rank
raises: HvdForkError
cause: A process that a rank has forked, such as a worker of a DataLoader, called hvdlite. A fork has no engine of its
own, and must not touch its parent's.
remedy: Call collectives in the rank's own process only. For `rank()` and `size()` in workers, pass the numbers as
arguments.

HVD124 Votes or tensors over MPI in a job without MPI
raises: HvdInitError
cause: `HVDLITE_VOTES=mpi` was set for a job that no MPI has started.
remedy: Leave the variable out, or start the job with `mpirun` or `mpiexec`.

HVD125 MPI cannot be used again in this process
raises: HvdInitError
cause: An earlier `hvd.init()` of this process gave up while MPI was being started or used, or MPI has been finalized;
MPI can be started once.
remedy: Start the script anew; call `hvd.init()` once, and leave `MPI_Finalize` to the end of the process.

HVD126 hvd.init(comm=...) needs a job over MPI
raises: HvdNotYetError
cause: A list of ranks or a communicator that is not the whole job was given to `hvd.init()`, and the job was not
started by MPI.
remedy: Leave `comm` out and use `hvd.ProcessSet` for some of the ranks, or start the job with `mpirun`.

HVD127 A connection is not direct
raises: HvdInitError, a line of hvdlite-run
cause: Both ends of a connection prove that they belong to the job, and say which addresses and ports they see. They see
different ones, so something stands between them: somebody else's program that passes on what is said, so as to change
it later, or what translates addresses: NAT, a container's mapped port, a proxy, an ssh tunnel.
remedy: Let ranks and hosts reach each other at their own addresses: containers with `--network=host` or an overlay
network, and `HVDLITE_STORE_ADDR`, `--rdzv-endpoint` and `--network-interface` that name those. If nothing of that kind
is there, look at who listens at the port that is named.
example: rank 1: the store at 10.0.0.5:29401: the connection is not direct: here it leads from 10.0.0.6:41022 to
10.0.0.5:29401, at its other end from 10.0.0.5:51200 to 10.0.0.5:12877. Somebody passes it on: a relay of another user,
or what translates addresses (NAT, a container's mapped port, a proxy), which is not supported: let ranks and hosts
reach each other at their own addresses (containers: --network=host)
"""

# From 150 on, what the core tells.
_CORE = """
HVD153 Ranks of one host cannot reach each other
raises: HvdInitError
cause: The ranks of a host meet by a unix socket and share memory. The socket could not be made or connected, or what
was handed over is not the same memory: the ranks run in different network namespaces (containers), or as different
users.
remedy: Run the ranks of a host in one container and as one user, or let the containers share the network (`docker run
--network=host`). If each container is to be a host of its own, give each a host name of its own.
"""

FAMILY = family(1, "init() and how ranks meet", _PYTHON + _CORE)
