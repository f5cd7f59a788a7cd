"""Every option there is, in one table: where it is read, what it may be, what it is for.

A row of OPTIONS gives an option its name, its environment variable HVDLITE_X (and Horovod's HOROVOD_X where that means
the same), the launcher's flag, type, default and help. Flags, validation and documentation come from the row, so a new
option is one row. Horovod's other variables are in superseded.py, with the reason why nothing is to be set any more.

`agreed` marks what must be the same on all ranks; init compares those and names the ranks that differ. config.py reads
the table against the environment; _option.py says what a row is.
"""

from __future__ import annotations

from . import _option
from ._option import ALIAS_PREFIX as ALIAS_PREFIX
from ._option import PREFIX as PREFIX
from ._option import SECRET as SECRET
from ._option import WANTED as WANTED
from ._option import Option as Option
from ._option import finite_number as finite_number

_check, _file_name, _guard, _has_folder = _option.check, _option.file_name, _option.guard, _option.has_folder
_job, _key, _link_cost, _memory = _option.job, _option.key, _option.link_cost, _option.memory
_power_of_two, _signal, _switch, _whole = _option.power_of_two, _option.signal_number, _option.switch, _option.whole

OFF = ("off", "0", "")  # of HVDLITE_TRACE_DIR: no records
DYNAMIC = "DYNAMIC"  # of HVDLITE_TIMELINE: room for one, begun later
_SERVERS = "Servers that hold the tables of hvd.ps, beside the ranks."
_CYCLES = "1: the timeline shows each agreement of the ranks."


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
    Option("secret_key", _key, None, "Proves that a connection belongs to the job.", scope="rank", alias=None),
    Option("secret_file", _file_name, None, "Holds HVDLITE_SECRET_KEY; mode 0600.", "rank", alias=None, is_path=bool),
    Option("host_id", str, None, "Tells this host from others, where its name and boot do not.", "rank", alias=None),
    Option("restart_count", _whole, 0, "How often the launcher has started the job again.", scope="rank", alias=None),
    Option("job_id", _job, None, "Tells this job from others.", scope="rank", alias=None),
    Option("member", _whole, None, "Number of this process in an elastic job.", scope="rank", alias=None, low=0),
    Option(
        "expected_place", str, None, "What a process that comes later takes for its place.", scope="rank", alias=None
    ),
    Option("agent", str, None, "The connection to this rank's agent (hvdlite-run --mpi).", scope="rank", alias=None),
    Option("server", _whole, None, "Number of this server of tables, which is no rank.", "rank", alias=None, low=0),
    Option("servers", _whole, 0, _SERVERS, alias=None, flag="--servers", agreed=True, low=0, high=64),
    Option("ps_curve", _switch, True, "0: messages of hvd.ps are not encrypted.", alias=None, agreed=True),
    Option("wire_auth", _switch, False, "1: tensors are signed.", alias=None, flag="--wire-auth", agreed=True),
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
        is_path=bool,
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
        600.0,
        "Seconds that a collective may wait for ranks, or stand still, before the job fails; 0: without limit.",
        alias="STALL_SHUTDOWN_TIME_SECONDS",
        flag="--collective-timeout",
        low=0,
        high=1e6,
    ),
    Option(
        "stall_check_time",
        finite_number,
        60.0,
        "Seconds after which rank 0 reports which ranks a collective waits for, and what they do; 0: never.",
        alias="STALL_CHECK_TIME_SECONDS",
        flag="--stall-check-time",
        low=0,
        high=1e6,
    ),
    Option("stall_check_disable", _switch, False, "1: no report, no limit but HVDLITE_COLLECTIVE_TIMEOUT, if set."),
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
        "What moves tensors: shm (one host's memory), hier (that, and streams between hosts), p2p (streams), mpi.",
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
    _library("cuda_library", "The file to take for CUDA's driver instead of libcuda.so.1."),
    _library("nccl_library", "The NCCL to use, unless one is in the process already."),
    _library("mpi_library", "The MPI library (a path, or a name) instead of the one that is found."),
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
    Option(
        "trace_dir",
        str,
        None,
        "Folder for flight records, what each rank did last; off: none. By default only failed jobs leave them, in "
        "hvdlite-trace-UID of the folder for temporary files.",
        alias=None,
        flag="--trace-dir",
        is_path=lambda text: text not in OFF,
    ),
    Option("trace_signal", _signal, None, "A signal on which a rank writes its flight record.", alias=None),
    Option(
        "timeline",
        _file_name,
        None,
        "File that gets the timeline of rank 0, other ranks' are beside it; DYNAMIC: room for hvd.start_timeline().",
        flag="--timeline-filename",
        is_path=lambda text: text != DYNAMIC,
    ),
    Option("timeline_mark_cycles", _switch, False, _CYCLES, flag="--timeline-mark-cycles"),
    Option(
        "trace_steps",
        _switch,
        False,
        "1: what each training step cost is written to rank-K.steps.jsonl in the folder of HVDLITE_TRACE_DIR.",
        alias=None,
        flag="--trace-steps",
    ),
    Option(
        "trace_every",
        _whole,
        50,
        "Of so many steps one is written with its buckets and with memory.",
        alias=None,
        flag="--trace-every",
        low=1,
        high=1 << 30,
    ),
    Option(
        "metrics_port",
        _whole,
        None,
        "Rank 0 serves the job's numbers to Prometheus on this port, /metrics; 0: on a free one, which it prints.",
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
        "Address that the port of HVDLITE_METRICS_PORT is bound to; 0.0.0.0: all of rank 0's host.",
        alias=None,
        flag="--metrics-host",
    ),
    Option(
        "metrics_interval",
        finite_number,
        2.0,
        "Seconds after which ranks send their numbers to rank 0 for HVDLITE_METRICS_PORT.",
        alias=None,
        flag="--metrics-interval",
        low=0.1,
        high=3600,
    ),
    Option(
        "nan_guard",
        _guard,
        0,
        "When a rank gives NaN or infinities to be reduced: off; warn; raise (or 1), an error on all ranks that names "
        "the tensor and the rank; nan, the same for NaN alone. With a loss scale use warn.",
        alias=None,
        flag="--nan-guard",
        agreed=True,
    ),
    Option(
        "check_start",
        _check,
        "warn",
        "When ranks of a DistributedOptimizer differ in the first two steps: off; warn; raise, an error.",
        alias=None,
        flag="--check-start",
        agreed=True,
    ),
    Option("check_data", _switch, False, "1: hvd.data warns of identical first batches.", alias=None, agreed=True),
    _of_launcher(
        "failure_grace",
        1.0,
        "Seconds that the other ranks get to fail by themselves after the first failure, before SIGTERM.",
    ),
    _of_launcher("term_grace", 0.5, "Seconds that they then get to end (to save) after SIGTERM, before SIGKILL."),
    _of_launcher(
        "signal_grace",
        None,
        "Seconds that ranks get to end (to save) after a signal to the launcher, before SIGKILL; unset: 30 after "
        "SIGTERM, 5 after SIGINT (Ctrl-C) and SIGHUP.",
    ),
    _of_launcher("agent_timeout", 5.0, "Seconds without an answer of its agent after which a host is lost.", low=1),
    _of_launcher("elastic_timeout", 600.0, "Seconds to wait for --min-np ranks.", low=1)._replace(alias=""),
    _of_launcher("rendezvous_timeout", 300.0, "Seconds that a rank gets to come when the others meet anew.", low=1),
)
