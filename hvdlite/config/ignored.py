"""Variables of Horovod that have no effect here, and why.

A rank that finds one of them in its environment says so, once a job (__init__.py): a setting that is passed over in
silence is a lie. Some need no successor, because what they asked for happens anyway or is chosen at run time; others
wait for a later version. One that gets a meaning moves to options.OPTIONS. Names are without HOROVOD_; QUIET_ALIASES
are those that the launcher itself sets, whole.
"""

SUPERSEDED = {
    "CYCLE_TIME": "there is no cycle: rounds are driven by events",
    "HIERARCHICAL_ALLREDUCE": "chosen at run time",
    "HIERARCHICAL_ALLGATHER": "chosen at run time",
    "TORUS_ALLREDUCE": "chosen at run time",
    "AUTOTUNE_GAUSSIAN_PROCESS_NOISE": "the noise is measured",
    "CONTROLLER": "chosen at run time",
    "CPU_OPERATIONS": "chosen at run time",
    "HOSTNAME": "set by the launcher for scripts that read it",
    "GLOO_IFACE": "there is no Gloo",
    "GLOO_TIMEOUT_SECONDS": "there is no Gloo",
    "GLOO_RENDEZVOUS_ADDR": "ranks meet in the store of hvdlite-run",
    "GLOO_RENDEZVOUS_PORT": "ranks meet in the store of hvdlite-run",
    "BATCH_D2D_MEMCOPIES": "always on where it applies",
    "ENABLE_ASYNC_COMPLETION": "always on where it applies",
    "DYNAMIC_PROCESS_SETS": "process sets can be added at any time",
    "MPI_THREADS_DISABLE": "MPI is started for threads anyway",
    "NUM_NCCL_STREAMS": "chosen at run time",
    "THREAD_AFFINITY": "the engine's thread runs on the CPUs of its rank, which --bind-to sets",
    "LOG_LEVEL": "log levels come with a later version",
    "LOG_HIDE_TIME": "log levels come with a later version",
    "SECRET_KEY": "hvdlite-run makes a secret of its own",
}
QUIET_ALIASES = {"HOROVOD_HOSTNAME"}
