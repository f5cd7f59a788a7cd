"""Every option there is, in one table: where it is read, what it may be, what it is for.

A row of OPTIONS gives an option its name, its environment variable HVDLITE_X (and Horovod's HOROVOD_X where that means
the same), the launcher's flag, type, default and help. Flags, validation and documentation come from the row, so a new
option is one row. Horovod's other variables are in ignored.py, with the reason why nothing is to be set any more.

`agreed` marks what must be the same on all ranks; init compares those and names the ranks that differ. __init__.py
reads the table against the environment; types.py says what a row is.
"""

from __future__ import annotations

from . import types
from .types import ALIAS_PREFIX as ALIAS_PREFIX
from .types import PREFIX as PREFIX
from .types import SECRET as SECRET
from .types import WANTED as WANTED
from .types import Option as Option
from .types import finite_number as finite_number

_check, _file_name, _guard, _has_folder = types.check, types.file_name, types.guard, types.has_folder
_job, _key, _link_cost, _memory = types.job, types.key, types.link_cost, types.memory
_power_of_two, _signal, _switch, _whole = types.power_of_two, types.signal_number, types.switch, types.whole
_modules, _slots, _wire = types.modules, types.slots, types.wire

OFF = ("off", "0", "")  # of HVDLITE_TRACE_DIR: no records
DYNAMIC = "DYNAMIC"  # of HVDLITE_TIMELINE: room for one, begun later
_SERVERS = "Number of servers that hold the tables of hvd.ps."
_AGGREGATORS = "Number of processes that add as a switch would (hvd.aggregation)."
_KIND = "pool: one job owns the slots of its aggregators; hashed: jobs share them."
_AGGREGATOR = "Address HOST:PORT of an aggregator that hvdlite-aggregator has started."
_AGGREGATOR_KEY = "File with the key of that aggregator."
_EVERY = "Number of steps of which one is written with its buckets and memory."
_WIRE = "Compression of optimizers whose script names none: fp16, bf16, int8, int4; none."
_PRELOAD = "Modules to import once for all ranks of a host; auto: torch where that is safe; off."
_ALLOCATOR = "0: new gradients of PyTorch are not allocated in memory that ranks share."
_CYCLES = "1: the timeline marks each vote of the ranks."


def _of_launcher(name: str, default: float | None, help: str, low: float = 0) -> Option:
    flag = "--" + name.replace("_", "-")
    return Option(name, finite_number, default, help, scope="launcher", alias=None, flag=flag, low=low, high=1e6)


def _library(name: str, help: str) -> Option:
    return Option(name, str, None, help, alias=None, is_path=_has_folder)


OPTIONS = (
    Option("rank", _whole, None, "Number of this rank in the job.", scope="rank", low=0),
    Option("size", _whole, None, "Number of ranks in the job.", scope="rank", low=1),
    Option("local_rank", _whole, None, "Number of this rank on its host.", scope="rank", low=0),
    Option("local_size", _whole, None, "Number of ranks on this host.", scope="rank", low=1),
    Option("cross_rank", _whole, None, "Number of this host.", scope="rank", low=0),
    Option("cross_size", _whole, None, "Number of hosts.", scope="rank", low=1),
    Option("store_addr", str, None, "Address of the launcher's rendezvous store.", scope="rank", alias=None),
    Option("store_port", _whole, None, "Port of the store.", scope="rank", alias=None, low=1, high=65535),
    Option("secret_key", _key, None, "Secret that authenticates connections of the job.", scope="rank", alias=None),
    Option("secret_file", _file_name, None, "File with the secret key; mode 0600.", "rank", alias=None, is_path=bool),
    Option("host_id", str, None, "Host id; default: host name and boot id.", "rank", alias=None),
    Option("restart_count", _whole, 0, "Number of restarts by the launcher so far.", scope="rank", alias=None),
    Option("job_id", _job, None, "Name of this job.", scope="rank", alias=None),
    Option("member", _whole, None, "Number of this process in an elastic job.", scope="rank", alias=None, low=0),
    Option("expected_place", str, None, "Place that a process assumes if it joins later.", scope="rank", alias=None),
    Option("agent", str, None, "Connection to this rank's agent (hvdlite-run --mpi).", scope="rank", alias=None),
    Option("server", _whole, None, "Number of this parameter server.", "rank", alias=None, low=0),
    Option("servers", _whole, 0, _SERVERS, alias=None, flag="--servers", agreed=True, low=0, high=64),
    Option("aggregators", _whole, 0, _AGGREGATORS, alias=None, flag="--aggregators", agreed=True, low=0, high=1),
    Option("aggregator_kind", _slots, "pool", _KIND, alias=None, flag="--aggregator-kind", agreed=True),
    Option("aggregator", str, None, _AGGREGATOR, alias=None, flag="--aggregator"),
    Option("aggregator_key", _file_name, None, _AGGREGATOR_KEY, alias=None, flag="--aggregator-key", is_path=bool),
    Option("ps_curve", _switch, True, "0: messages of hvd.ps are not encrypted.", alias=None, agreed=True),
    Option("wire_auth", _switch, False, "1: tensors are signed.", alias=None, flag="--wire-auth", agreed=True),
    Option("wire", _wire, "none", _WIRE, alias=None, flag="--wire", agreed=True),
    Option(
        "fusion_threshold",
        _whole,
        128 << 20,
        "Largest size of a bucket of tensors that travel together; 0: each tensor travels alone.",
        flag="--fusion-threshold-mb",
        flag_unit=1 << 20,
        agreed=True,
        low=0,
    ),
    Option(
        "cache_capacity",
        _whole,
        8192,
        "Number of tensors that the cache holds (later steps send one bit for each); also the largest group.",
        flag="--cache-capacity",
        agreed=True,
        low=1,
        high=1 << 20,
    ),
    Option(
        "deterministic",
        _switch,
        False,
        "1: sums of floats have the same bits in every run, independent of arrival order and fusion.",
        alias=None,
        flag="--deterministic",
        agreed=True,
    ),
    Option(
        "autotune",
        _switch,
        False,
        "1: search the fusion threshold with the shortest training step during training, within 50 steps.",
        flag="--autotune",
    ),
    Option(
        "autotune_log",
        str,
        None,
        "CSV file with a row for every trial of the search.",
        flag="--autotune-log-file",
        is_path=bool,
    ),
    Option(
        "autotune_warmup_samples",
        _whole,
        3,
        "Number of samples at the start of the search that do not count.",
        flag="--autotune-warmup-samples",
        low=0,
    ),
    Option(
        "autotune_steps_per_sample",
        _whole,
        1,
        "Training steps of one sample; fewer if the search cannot end within 50 steps otherwise.",
        flag="--autotune-steps-per-sample",
        low=1,
    ),
    Option(
        "autotune_max_samples",
        _whole,
        45,
        "Largest number of samples of the search; at least 16.",
        alias="AUTOTUNE_BAYES_OPT_MAX_SAMPLES",
        flag="--autotune-bayes-opt-max-samples",
        low=16,
    ),
    Option(
        "start_timeout",
        finite_number,
        30.0,
        "Seconds within which all ranks must call init().",
        flag="--start-timeout",
        low=0.1,
        high=1e6,
    ),
    Option(
        "collective_timeout",
        finite_number,
        600.0,
        "Seconds that a collective may wait for ranks, or make no progress, before the job fails; 0: no limit.",
        alias="STALL_SHUTDOWN_TIME_SECONDS",
        flag="--collective-timeout",
        low=0,
        high=1e6,
    ),
    Option(
        "stall_check_time",
        finite_number,
        60.0,
        "Seconds after which rank 0 reports the ranks that a collective waits for, and their state; 0: never.",
        alias="STALL_CHECK_TIME_SECONDS",
        flag="--stall-check-time",
        low=0,
        high=1e6,
    ),
    Option("stall_check_disable", _switch, False, "1: no stall reports; HVDLITE_COLLECTIVE_TIMEOUT applies, if set."),
    Option(
        "leave_timeout",
        finite_number,
        2.0,
        "Seconds that shutdown() waits for acknowledgements of the others, and then for sent data to arrive.",
        alias=None,
        flag="--leave-timeout",
        low=0,
        high=1e6,
    ),
    Option(
        "shared_memory",
        _memory,
        0,
        "Memory that ranks of a host share. auto: memfds, without a limit; dev_shm: /dev/shm, limited by its size.",
        alias=None,
        flag="--shared-memory",
    ),
    Option(
        "plane",
        str,
        None,
        "Transport of tensors: shm (memory of one host), hier (shm and streams between hosts), p2p (streams), mpi.",
        alias=None,
        flag="--plane",
        agreed=True,
    ),
    Option("votes", str, "auto", "Transport of votes of hosts under an MPI: tcp, mpi, auto.", alias=None, agreed=True),
    Option(
        "algo",
        str,
        None,
        "Algorithm that plane p2p uses where possible: ring, direct, ... By default the cheapest.",
        alias=None,
        flag="--algo",
        agreed=True,
    ),
    Option(
        "link_cost",
        _link_cost,
        None,
        "Cost of a message between hosts as ALPHA,BETA: latency in microseconds, and nanoseconds for each byte "
        "(8 at 1 Gbit/s). By default measured when the job begins.",
        alias=None,
        flag="--link-cost",
        agreed=True,
    ),
    Option(
        "peer_timeout",
        finite_number,
        30.0,
        "Seconds that an awaited rank of another host may be silent before it counts as lost.",
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
        "Microseconds that a waiting rank spins before it sleeps; -1: chosen from the number of CPUs and ranks.",
        alias=None,
        flag="--spin-us",
        low=-1,
        high=1_000_000,
    ),
    _library("cuda_library", "CUDA driver library to load instead of libcuda.so.1."),
    _library("nccl_library", "NCCL library to load, unless the process already has one."),
    _library("mpi_library", "MPI library (a path or a name) instead of the one that is found."),
    Option(
        "trace_events",
        _power_of_two,
        4096,
        "Number of events in the trace ring of a rank, a power of two.",
        alias=None,
        flag="--trace-events",
        low=64,
        high=1 << 24,
    ),
    Option(
        "trace_dir",
        str,
        None,
        "Folder for flight records, the last events of each rank; off: none. By default only failed jobs write them, "
        "to hvdlite-trace-UID in the folder for temporary files.",
        alias=None,
        flag="--trace-dir",
        is_path=lambda text: text not in OFF,
    ),
    Option("trace_signal", _signal, None, "Signal on which a rank writes its flight record.", alias=None),
    Option(
        "timeline",
        _file_name,
        None,
        "File for the timeline of rank 0, with those of other ranks beside it; DYNAMIC: for hvd.start_timeline().",
        flag="--timeline-filename",
        is_path=lambda text: text != DYNAMIC,
    ),
    Option("timeline_mark_cycles", _switch, False, _CYCLES, flag="--timeline-mark-cycles"),
    Option(
        "trace_steps",
        _switch,
        False,
        "1: write the cost of each training step to rank-K.steps.jsonl in the folder of HVDLITE_TRACE_DIR.",
        alias=None,
        flag="--trace-steps",
    ),
    Option("trace_every", _whole, 50, _EVERY, alias=None, flag="--trace-every", low=1, high=1 << 30),
    Option(
        "metrics_port",
        _whole,
        None,
        "Port on which rank 0 serves metrics to Prometheus (/metrics); 0: a free port, which rank 0 prints.",
        alias=None,
        flag="--metrics-port",
        low=0,
        high=65535,
        agreed=True,
    ),
    Option(
        "metrics_host",
        str,
        "127.0.0.1",
        "Address that the metrics port is bound to; 0.0.0.0: all addresses of rank 0's host.",
        alias=None,
        flag="--metrics-host",
    ),
    Option(
        "metrics_interval",
        finite_number,
        2.0,
        "Seconds between two reports of a rank to rank 0 for HVDLITE_METRICS_PORT.",
        alias=None,
        flag="--metrics-interval",
        low=0.1,
        high=3600,
    ),
    Option(
        "nan_guard",
        _guard,
        0,
        "Reaction to NaN or infinities in a reduction: off; warn; raise (or 1), an error on all ranks that names the "
        "tensor and the rank; nan, the same for NaN alone. With a loss scale use warn.",
        alias=None,
        flag="--nan-guard",
        agreed=True,
    ),
    Option(
        "check_start",
        _check,
        "warn",
        "Reaction if ranks differ in weights or optimizer state, or read the same data: off; warn; raise (an error).",
        alias=None,
        flag="--check-start",
        agreed=True,
    ),
    Option("gradient_allocator", _switch, True, _ALLOCATOR, alias=None),
    Option("check_data", _switch, False, "1: warn if ranks have the same first batch.", alias=None, agreed=True),
    _of_launcher(
        "failure_grace",
        1.0,
        "Seconds that the other ranks have after the first failure to fail by themselves, before SIGTERM.",
    ),
    _of_launcher("term_grace", 0.5, "Seconds that ranks have to end (to save) from SIGTERM to SIGKILL."),
    _of_launcher(
        "signal_grace",
        None,
        "Seconds that ranks have to end (to save) between a signal to the launcher and SIGKILL; unset: 30 after "
        "SIGTERM, 5 after SIGINT (Ctrl-C) and SIGHUP.",
    ),
    _of_launcher("agent_timeout", 5.0, "Seconds of an agent's silence after which its host is lost.", low=1),
    Option("preload", _modules, "auto", _PRELOAD, "launcher", alias=None, flag="--preload"),
    _of_launcher("elastic_timeout", 600.0, "Seconds to wait for --min-np ranks.", low=1)._replace(alias=""),
    _of_launcher("rendezvous_timeout", 300.0, "Seconds that a rank has to join a new meeting.", low=1),
)
