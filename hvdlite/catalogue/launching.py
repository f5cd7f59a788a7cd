"""HVD7xx: hvdlite-run, hvd.run and the other programs.

Each block is a code: its title, what raises it, cause and remedy (row.py says how a page is read). What Python tells
comes first, then what the core tells. Tests find the texts with these codes, and fail if a code is not here or a row
is not used.
"""

from .row import family

_PYTHON = """
HVD701 A flag that hvdlite-run does not have
raises: a line of hvdlite-run
cause: A flag is misspelt, lacks its value, or belongs to a part of Horovod that comes with a later version.
remedy: The text names the nearest flag. `hvdlite-run --help` lists all; flags of the script go behind the command.

HVD702 No command, or no number of ranks
raises: a line of hvdlite-run
cause: `hvdlite-run` needs to know what to run and how often.
remedy: For example: `hvdlite-run -np 2 python train.py`.

HVD703 Flags that exclude or need each other
raises: a line of hvdlite-run
cause: Two flags say different things, or one has a meaning beside another only.
remedy: Leave one out, or add the one that the text names.

HVD704 A flag with a value that cannot be
raises: a line of hvdlite-run or hvdlite-trace
cause: The value is no number, lies outside of its bounds, or is none of the words that the flag takes.
remedy: The text names the flag and what it takes; `hvdlite-run --help` has all of them, ERRORS.md all codes for
`--explain`.

HVD705 The command cannot be run
raises: a line of hvdlite-run
cause: There is no such program on PATH, it is a folder, or it is not executable.
remedy: Put the interpreter before a script: `hvdlite-run -np 2 python train.py`; give a path with a slash to a program
in this folder.

HVD706 The ranks' output cannot be written
raises: a line of hvdlite-run
cause: The folder of `--output-filename` or `--log-dir` cannot be made or written, or a file there stopped taking lines,
mostly because the disk is full. A job that runs goes on without.
remedy: Name a folder that may be written, on a disk with room; `--output-file-mb` bounds the files.

HVD707 The working folder cannot be used
raises: a line of hvdlite-run
cause: The current folder is gone, or that of `--wdir` is missing or may not be entered.
remedy: Go to a folder that exists, on all hosts of the job.

HVD708 A list or file of hosts that cannot be read
raises: a line of hvdlite-run, ValueError
cause: `-H` takes `name:slots,...`, a hostfile `name slots=N` a line; names must be hosts, slots whole numbers of at
least 1, and the file must be there.
remedy: Correct the entry that the text shows.

HVD709 More ranks than there are slots
raises: a line of hvdlite-run, ValueError
cause: `-np` asks for more ranks than the hosts, or the scheduler's allocation, have slots.
remedy: Ask the scheduler for more tasks, give hosts more slots (`-H a:4,b:4`), or lower `-np`.

HVD710 More ranks than this version supports
raises: a line of hvdlite-run
cause: A job, or the ranks on one host, are more than hvdlite can serve.
remedy: Use fewer ranks, or spread them over more hosts; the text has the limits.

HVD711 What the batch system says does not fit
raises: a line of hvdlite-run
cause: `hvdlite-run` takes hosts from the scheduler's variables or files. They cannot be read, contradict each other, or
`srun` has started `hvdlite-run` itself several times.
remedy: Start `hvdlite-run` once per job, without `srun`; check the variables that are named, or give hosts by `-H`.

HVD712 No address of this host that others could use
raises: a line of hvdlite-run
cause: A host's name leads nowhere or to itself alone, or there is no interface of the name that was given.
remedy: Give `--network-interface NAME` of the interface that joins the hosts (`ip addr` shows them).

HVD713 Hosts that meet by themselves lack something
raises: a line of hvdlite-run
cause: With `--nnodes` one `hvdlite-run` is started on every host. They need the address of node 0, each its own number,
the same counts, and one secret.
remedy: Give all `--nnodes N --rdzv-endpoint HOST:PORT` and each its `--node-rank`; export the same `HVDLITE_SECRET_KEY`
on all.

HVD714 The file of --config-file
raises: a line of hvdlite-run
cause: It cannot be read, is no YAML, has unknown sections or keys, or a value that cannot be.
remedy: The text names the key and, if there is one, the nearest that is known; the format is Horovod's.

HVD715 Ranks could not be started
raises: a line of hvdlite-run
cause: A host could not be reached, refused the login, has no hvdlite, has not reported in time, or the program cannot
be run there.
remedy: The text has a line per host with what was said there. Try `ssh HOST true` and `hvdlite-run doctor -H ...`;
`--start-timeout` sets the limit.

HVD716 An mpirun that cannot be used
raises: a line of hvdlite-run
cause: `--mpi` needs the `mpirun` of Open MPI, MPICH or Intel MPI on PATH; none is there, it is of another kind, or it
cannot do what flags ask.
remedy: Install one (`pip install mpich`), put it first on PATH, or leave `--mpi` out: `hvdlite-run` needs no MPI.

HVD717 Fewer cores than ranks to bind
raises: a line of hvdlite-run
cause: `--bind-to core` gives each rank cores of its own, and there are not enough here.
remedy: Start fewer ranks on this host, use `--bind-to socket`, or leave the flag out.

HVD718 A port for the dashboard or for metrics cannot be had
raises: a line of hvdlite-run, a line of a rank
cause: Another program listens there, the number is none of a port, or the page lacks what it shows. A job that runs
goes on.
remedy: Choose another port; 0 takes a free one.

HVD719 A variable to pass on that is not there
raises: a line of hvdlite-run
cause: `-x NAME` passes a variable of this environment on, and there is none of this name.
remedy: Export it first, or say `-x NAME=value`.

HVD720 The doctor has lost a host
raises: a line of hvdlite-run doctor
cause: While hosts were examined, the connection to one ended.
remedy: Look at that host, and try `ssh HOST true`; then run the doctor again.

HVD721 A job of hvd.run failed
raises: HvdRunError
cause: A rank raised an exception, or ended without an answer. If the exception had a code, the text ends with that one.
remedy: The text has the traceback of the rank that is named; `error.__cause__` is the exception itself,
`error.exit_code` the job's code.

HVD723 A file that is no record, timeline or file of steps
raises: a line of hvdlite-trace
cause: `hvdlite-trace` was given a file that hvdlite has not written, that another version has written, or of which only
a part is there; something that is no plain file, such as a pipe; or a file where a folder belongs.
remedy: Give the folder or files of one job; remove those that the text names.

HVD724 No steps to report on
raises: a line of hvdlite-trace
cause: The folder has no files of steps.
remedy: Run the job with `hvdlite-run --trace-dir DIR --trace-steps`, and give that folder.

HVD725 A record or timeline cannot be written now
raises: OSError, ValueError, a line of a rank
cause: The folder cannot be made or written, or a timeline is being recorded already.
remedy: Name a folder that may be written (`HVDLITE_TRACE_DIR`, `hvd.dump_trace(folder)`); call `hvd.stop_timeline()`
before the next `start_timeline`.
"""

# From 750 on, what the core tells.
_CORE = """
"""

FAMILY = family(7, "hvdlite-run, hvd.run and the other programs", _PYTHON + _CORE)
