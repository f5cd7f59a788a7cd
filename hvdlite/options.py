"""Every option there is, in one table: where it is read, what it may be, what it is for.

A row of OPTIONS gives an option its name, its environment variable HVDLITE_X (and Horovod's HOROVOD_X where that means
the same), the launcher's flag, type, default and help. Flags, validation and documentation come from the row, so a new
option is one row. An option is here only when it does something; Horovod's other variables are in superseded.py, with
the reason why nothing is to be set any more, until they get a row.

`agreed` marks what must be the same on all ranks; init compares those and names the ranks that differ. config.py reads
the table against the environment.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

PREFIX = "HVDLITE_"
ALIAS_PREFIX = "HOROVOD_"


class Option(NamedTuple):
    """One row. `low` and `high` bound numbers; the value of `flag` times `flag_unit` is the value of the variable."""

    name: str
    type: Callable[[str], Any]
    default: Any
    help: str
    scope: str = "engine"  # engine: read by init; rank: set for each rank by the launcher; launcher: read by it alone
    alias: str | None = ""  # HOROVOD_ name without the prefix; "": the same name; None: Horovod has no such variable
    flag: str | None = None
    flag_unit: int = 1
    agreed: bool = False
    low: float | None = None
    high: float | None = None

    @property
    def variable(self) -> str:
        """The environment variable."""
        return PREFIX + self.name.upper()

    @property
    def alias_variable(self) -> str | None:
        """Horovod's environment variable of the same meaning, if there is one."""
        return None if self.alias is None else ALIAS_PREFIX + (self.alias or self.name.upper())

    @property
    def is_switch(self) -> bool:
        """Whether it is on or off; its flag is --x or --no-x then."""
        return self.type is _switch


def _whole(text: str) -> int:
    return int(text, 10)


def finite_number(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(text)
    return value


def _power_of_two(text: str) -> int:
    value = int(text, 10)
    if value < 1 or value & (value - 1):
        raise ValueError(text)
    return value


def _switch(text: str) -> bool:
    return bool(("0", "1").index(text))


def _memory(text: str) -> int:
    return ("auto", "dev_shm").index(text)


def _key(text: str) -> bytes:
    value = bytes.fromhex(text)
    if len(value) != 32:
        raise ValueError(text)
    return value


def _link_cost(text: str) -> list[int]:
    """Nanoseconds, and picoseconds for each byte."""
    alpha, beta = (finite_number(part) for part in text.split(","))
    cost = [round(alpha * 1000), round(beta * 1000)]
    if not all(1 <= number <= 10**12 for number in cost):
        raise ValueError(text)
    return cost


def _job(text: str) -> int:
    value = int(text, 16)
    if len(text) != 16 or value < 0:
        raise ValueError(text)
    return value


WANTED = {
    _whole: "a whole number",
    finite_number: "a number",
    _power_of_two: "a power of two",
    _switch: "0 or 1",
    _memory: "auto or dev_shm",
    _link_cost: "two numbers greater than zero, not beyond all measure, with a comma between, as in 50,8",
    _key: "64 hexadecimal digits",
    _job: "16 hexadecimal digits",
    str: "text",
}
SECRET = {"secret_key"}


def _of_launcher(name: str, default: float | None, help: str, low: float = 0) -> Option:
    flag = "--" + name.replace("_", "-")
    return Option(name, finite_number, default, help, scope="launcher", alias=None, flag=flag, low=low, high=1e6)


OPTIONS = (
    Option("rank", _whole, None, "Number of this rank in the job.", scope="rank", low=0),
    Option("size", _whole, None, "Number of ranks in the job.", scope="rank", low=1),
    Option("local_rank", _whole, None, "Number of this rank on its host.", scope="rank", low=0),
    Option("local_size", _whole, None, "Number of ranks on this host.", scope="rank", low=1),
    Option("cross_rank", _whole, None, "Number of this host.", scope="rank", low=0),
    Option("cross_size", _whole, None, "Number of hosts.", scope="rank", low=1),
    Option("store_addr", str, None, "Address of the launcher's rendezvous store.", scope="rank", alias=None),
    Option("store_port", _whole, None, "Port of the store.", scope="rank", alias=None, low=1, high=65535),
    Option("secret_key", _key, None, "Proves that a connection belongs to the job.", scope="rank", alias=None),
    Option(
        "host_id",
        str,
        None,
        "What tells this host from others, where its name, boot and namespaces do not tell rightly.",
        scope="rank",
        alias=None,
    ),
    Option("restart_count", _whole, 0, "How often the launcher has started the job again.", scope="rank", alias=None),
    Option("job_id", _job, None, "Tells this job from others.", scope="rank", alias=None),
    Option(
        "fusion_threshold",
        _whole,
        128 << 20,
        "Size of a bucket of tensors that travel together, at most; 0: each travels alone.",
        flag="--fusion-threshold-mb",
        flag_unit=1 << 20,
        agreed=True,
        low=0,
    ),
    Option(
        "cache_capacity",
        _whole,
        8192,
        "Tensors that are remembered, so that later steps say one bit for each, and members of a group at most.",
        flag="--cache-capacity",
        agreed=True,
        low=1,
        high=1 << 20,
    ),
    Option(
        "deterministic",
        _switch,
        False,
        "1: sums of floats have the same bits in every run, whatever arrives first and however tensors are fused.",
        alias=None,
        flag="--deterministic",
        agreed=True,
    ),
    Option(
        "autotune",
        _switch,
        False,
        "1: search the fusion threshold with the shortest training step while training, within 50 steps.",
        flag="--autotune",
    ),
    Option(
        "autotune_log",
        str,
        None,
        "File that gets a row (CSV) for every trial of the search.",
        flag="--autotune-log-file",
    ),
    Option(
        "autotune_warmup_samples",
        _whole,
        3,
        "Samples at the start of the search that do not count.",
        flag="--autotune-warmup-samples",
        low=0,
    ),
    Option(
        "autotune_steps_per_sample",
        _whole,
        1,
        "Training steps of one sample; fewer where the search would not end within 50 steps.",
        flag="--autotune-steps-per-sample",
        low=1,
    ),
    Option(
        "autotune_max_samples",
        _whole,
        45,
        "Samples of the search at most; with fewer than 16 it could tell nothing.",
        alias="AUTOTUNE_BAYES_OPT_MAX_SAMPLES",
        flag="--autotune-bayes-opt-max-samples",
        low=16,
    ),
    Option(
        "start_timeout",
        finite_number,
        30.0,
        "Seconds in which all ranks must have called init().",
        flag="--start-timeout",
        low=0.1,
        high=1e6,
    ),
    Option(
        "collective_timeout",
        finite_number,
        None,
        "Seconds that a rank waits for a collective at most, before the job fails.",
        alias=None,
        flag="--collective-timeout",
        low=0.1,
        high=1e6,
    ),
    Option(
        "leave_timeout",
        finite_number,
        2.0,
        "Seconds that shutdown() waits at most for the others to acknowledge, and then for what was sent to arrive.",
        alias=None,
        flag="--leave-timeout",
        low=0,
        high=1e6,
    ),
    Option(
        "shared_memory",
        _memory,
        0,
        "Where ranks of a host share memory. auto: memfds, which no mount limits; dev_shm: /dev/shm, whose size does.",
        alias=None,
        flag="--shared-memory",
    ),
    Option(
        "plane",
        str,
        None,
        "What moves the tensors, by name: shm (memory of one host), hier (that, and streams of ours between hosts), "
        "p2p (streams only), mpi. By default the best. For tensors on GPUs NCCL, and with hier on several hosts NCCL "
        "inside each and streams of ours between them.",
        alias=None,
        flag="--plane",
        agreed=True,
    ),
    Option("votes", str, "auto", "How hosts that an MPI has joined agree: tcp, mpi, auto.", alias=None, agreed=True),
    Option(
        "algo",
        str,
        None,
        "The algorithm that plane p2p uses wherever it can: ring, direct, ... By default the cheapest.",
        alias=None,
        flag="--algo",
        agreed=True,
    ),
    Option(
        "link_cost",
        _link_cost,
        None,
        "What a message between hosts costs, as ALPHA,BETA: microseconds until it is there, nanoseconds for each of "
        "its bytes (8 at 1 Gbit/s). By default it is measured when the job begins.",
        alias=None,
        flag="--link-cost",
        agreed=True,
    ),
    Option(
        "peer_timeout",
        finite_number,
        30.0,
        "Seconds that a rank of another host may be silent while it is waited for, before it counts as lost.",
        alias=None,
        flag="--peer-timeout",
        low=0.5,
        high=1e6,
        agreed=True,
    ),
    Option(
        "spin_us",
        _whole,
        -1,
        "Microseconds that a waiting rank spins before it sleeps; -1: decided from CPUs and ranks.",
        alias=None,
        flag="--spin-us",
        low=-1,
        high=1_000_000,
    ),
    Option("cuda_library", str, None, "The file to take for CUDA's driver instead of libcuda.so.1.", alias=None),
    Option(
        "nvtx", str, None, "1: collectives are ranges in NVIDIA's profilers; or the library of NVTX to use.", alias=None
    ),
    Option("nccl_library", str, None, "The NCCL to use, unless one is in the process already.", alias=None),
    Option(
        "mpi_library", str, None, "The MPI library (a path, or a name) instead of the one that is found.", alias=None
    ),
    Option(
        "trace_events",
        _power_of_two,
        4096,
        "Events that the trace ring of a rank remembers, a power of two.",
        alias=None,
        flag="--trace-events",
        low=64,
        high=1 << 24,
    ),
    Option("check_data", _switch, False, "1: hvd.data warns when all ranks read identical first batches.", alias=None),
    _of_launcher(
        "failure_grace",
        1.0,
        "Seconds that the other ranks get to fail by themselves after the first failure, before SIGTERM.",
    ),
    _of_launcher(
        "term_grace",
        0.5,
        "Seconds that the other ranks then get to end (to save) after SIGTERM, before SIGKILL.",
    ),
    _of_launcher(
        "signal_grace",
        None,
        "Seconds that ranks get to end (to save) after a signal to the launcher, before SIGKILL; unset: 30 after "
        "SIGTERM, 5 after SIGINT (Ctrl-C) and SIGHUP.",
    ),
    _of_launcher(
        "agent_timeout",
        5.0,
        "Seconds without an answer of a host's agent (it is stopped, or its host) after which the host counts as lost.",
        low=1,
    ),
)
