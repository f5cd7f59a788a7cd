"""Rank of this process, read from the environment that a launcher leaves behind.

`discover` is a pure function of a mapping. The first source that is present decides, in this order:

    HVDLITE_*  (each with its HOROVOD_* alias)      hvdlite-run, or set by hand; HVDLITE_SIZE alone with
                                                    JOB_COMPLETION_INDEX: an indexed Job of Kubernetes, a rank per pod
    RANK, WORLD_SIZE, ... with TORCHELASTIC_RUN_ID  torchrun
    OMPI_COMM_WORLD_*                               Open MPI
    PMI_RANK, PMI_SIZE with MPI_LOCALRANKID         MPICH and Intel MPI (hydra)
    SLURM_*                                         srun, only with SLURM_STEP_ID: an sbatch script has a rank, too
    RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT      set by hand, by Kubeflow's PyTorchJob, Ray Train, DeepSpeed
    PET_NNODES, PET_NODE_RANK, PET_MASTER_*         Kubeflow's TrainJob, a rank per pod
    nothing                                         rank 0 of 1

Why MPI stands before Slurm: under mpirun inside an allocation every rank has SLURM_PROCID=0, and under hydra it is the
number of the node. A source that is present but incomplete (a rank without a size) is an error, because the alternative
is a job of ones that trains n times the same. So is a job of one beside a variable of a larger job: a rank above 0 or a
count above 1 (`_SEVERAL`, TF_CONFIG). Two exceptions: the user asks for HVDLITE_SIZE=1, and beside a complete
assignment by MPI the variables of Slurm and PMI are those of its daemons. Host numbers that a launcher does not set are
None: ranks compute them at the rendezvous, and never from host names.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from .. import config
from ..errors import HvdInitError
from . import slurm


class Place(NamedTuple):
    """The rank assignment of this process. `source` names the launcher; None is what that launcher does not set."""

    rank: int
    size: int
    local_rank: int | None
    local_size: int | None
    cross_rank: int | None
    cross_size: int | None
    source: str


SINGLE = Place(0, 1, 0, 1, 0, 1, "single process")
OWN = "HVDLITE_ variables"
BY_HAND = "RANK and WORLD_SIZE"  # a source: these, or PET_ variables, without torchrun
_WHOLE = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
_NUMBERS = ("rank", "size", "local_rank", "local_size", "cross_rank", "cross_size")
_STEP = ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_NTASKS", "SLURM_LOCALID", "SLURM_NODEID")
_PODS = ("PET_NNODES", "PET_NPROC_PER_NODE", "PET_NODE_RANK", "PET_MASTER_ADDR", "PET_MASTER_PORT")
_TRAINS = ("chief", "master", "worker")  # tasks of TF_CONFIG that would be ranks
_LIGHTNING = ' Where Lightning starts the ranks, DDPStrategy(process_group_backend="hvdlite") makes the job.'


class _Source(NamedTuple):
    title: str
    needs: str | None  # the variable without which this source is not believed
    rank: str
    size: str
    local_rank: str
    local_size: str
    cross_rank: str | None = None
    cross_size: str | None = None


_FOREIGN = (
    _Source(
        "torchrun",
        "TORCHELASTIC_RUN_ID",
        "RANK",
        "WORLD_SIZE",
        "LOCAL_RANK",
        "LOCAL_WORLD_SIZE",
        "GROUP_RANK",
        "GROUP_WORLD_SIZE",
    ),
    _Source(
        "Open MPI",
        None,
        "OMPI_COMM_WORLD_RANK",
        "OMPI_COMM_WORLD_SIZE",
        "OMPI_COMM_WORLD_LOCAL_RANK",
        "OMPI_COMM_WORLD_LOCAL_SIZE",
    ),
    _Source("MPICH or Intel MPI", "MPI_LOCALRANKID", "PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"),
    _Source(
        "MVAPICH",
        None,
        "MV2_COMM_WORLD_RANK",
        "MV2_COMM_WORLD_SIZE",
        "MV2_COMM_WORLD_LOCAL_RANK",
        "MV2_COMM_WORLD_LOCAL_SIZE",
    ),
    _Source(
        "jsrun",
        None,
        "JSM_NAMESPACE_RANK",
        "JSM_NAMESPACE_SIZE",
        "JSM_NAMESPACE_LOCAL_RANK",
        "JSM_NAMESPACE_LOCAL_SIZE",
    ),
)

# A number above this means that the process is one of several.
_SEVERAL = {
    **{name: 0 for each in _FOREIGN for name in (each.rank, each.local_rank, each.cross_rank) if name},
    **{name: 1 for each in _FOREIGN for name in (each.size, each.local_size, each.cross_size) if name},
    **dict.fromkeys(("NODE_RANK", "PET_NODE_RANK", "PMIX_RANK", "SLURM_PROCID", "SLURM_LOCALID"), 0),
    **dict.fromkeys(("PET_NNODES", "SLURM_STEP_NUM_TASKS"), 1),
}
_DAEMONS = ("SLURM_", "PMI_", "PMIX_")  # set for the daemons of an MPI, and inherited by its ranks


def discover(environ: Mapping[str, str]) -> Place:
    """The rank assignment of a process with this environment. Raises HvdInitError naming variables and values."""
    place = _own(environ)
    if place is not None:
        return place
    for source in _FOREIGN:
        if place is None:
            place = _foreign(environ, source)
    place = place or _step(environ) or _by_hand(environ)
    if place is not None and place.size > 1:
        return place
    several = _several(environ, place)
    if place is None:
        _refuse_unsupported(environ)
        _refuse_half(environ, several)
        return SINGLE
    if several:
        raise HvdInitError(
            f"{described(place, environ)} says a job of one rank, but {_shown(environ, several)} that this process is "
            "one of several: correct or unset what is wrong. HVDLITE_RANK=0 and HVDLITE_SIZE=1 make a job of one in "
            "any case. [HVD105]"
        )
    return place


def _several(environ: Mapping[str, str], place: Place | None) -> list[str]:
    """The variables of a job of several ranks. place: what was found."""
    source = None if place is None else place.source
    outer = () if source in (None, "torchrun", BY_HAND) else ("SLURM_",) if source == "Slurm" else _DAEMONS
    found = []
    for name, most in _SEVERAL.items():
        last = environ.get(name, "").rpartition(":")[2]  # PET_NNODES=1:4
        if last and not name.startswith(outer) and _number({name: last}, name, 0) > most:
            found.append(name)
    return [*found, "TF_CONFIG"] if environ.get("TF_CONFIG") and _workers(environ["TF_CONFIG"]) > 1 else found


def _workers(text: str) -> int:
    """How many tasks of TensorFlow's cluster train."""
    import json  # here, because a rank that is alone needs none

    try:
        content = json.loads(text)
        cluster, task = content.get("cluster") or {}, content.get("task") or {}
        count = sum(len(cluster.get(kind, ())) for kind in _TRAINS)
        return max(count, int(task.get("index", 0)) + 1 if task.get("type") in _TRAINS else 0)
    except (ValueError, TypeError, AttributeError, ArithmeticError, RecursionError):
        raise HvdInitError(f"TF_CONFIG={text[:80]!r}: is no cluster in JSON: correct or unset it. [HVD105]") from None


def _refuse_unsupported(environ: Mapping[str, str]) -> None:
    """Raises for ranks of an MPI that hvdlite does not know."""
    if _number(environ, "PMI_SIZE", 1) > 1:
        raise HvdInitError(
            f"PMI_RANK={environ.get('PMI_RANK')!r} and PMI_SIZE={environ.get('PMI_SIZE')!r} are set, but neither "
            "MPI_LOCALRANKID nor SLURM_STEP_ID: this MPI launcher is not supported. Start the job with hvdlite-run. "
            "[HVD106]"
        )
    for name in ("PMIX_RANK", "PMI_RANK"):
        if name in environ and "PMI_SIZE" not in environ:
            raise HvdInitError(
                f"{name}={environ[name]} marks this process as a rank of a job, but the size of the job is unknown: "
                "this launcher is not supported. Start the job with hvdlite-run, or set HVDLITE_RANK, HVDLITE_SIZE "
                "and HVDLITE_STORE_ADDR (the host of rank 0) on all ranks. [HVD106]"
            )


def _refuse_half(environ: Mapping[str, str], several: list[str]) -> None:
    """Raises where only a part of a rank assignment was found: the rest was forgotten, or lost on the way."""
    # Lightning's launcher sets no RANK, and takes WORLD_SIZE away at the end.
    of_lightning = "NODE_RANK" in environ and "LOCAL_RANK" in environ
    found = [name for name in _WHOLE if environ.get(name)]
    index = ["JOB_COMPLETION_INDEX"] if "JOB_COMPLETION_INDEX" in environ else []
    sizeless = "MASTER_ADDR" in found and "WORLD_SIZE" not in found and ("RANK" in found or index or of_lightning)
    if several or sizeless:
        shown = _shown(environ, list(dict.fromkeys([*found, *several, *index])))
        missing = ", ".join(name for name in _WHOLE if name not in found)
        raise HvdInitError(
            f"{shown} without {missing}: this process is a rank of a job, but its environment is incomplete. Set "
            f"{', '.join(_WHOLE)} on all ranks, or start the job with hvdlite-run or "
            f"torchrun.{_LIGHTNING * of_lightning} [HVD105]"
        )
    store = config.option_of("store_addr").variable
    if environ.get(store) and config.option_of("member").variable not in environ:  # of an elastic job
        raise HvdInitError(
            f"{_shown(environ, [store, *index])} without HVDLITE_RANK, HVDLITE_SIZE: set both on all ranks (in an "
            f"indexed Job of Kubernetes HVDLITE_SIZE alone), or unset {store} for a job of one rank. [HVD105]"
        )


def described(place: Place, environ: Mapping[str, str]) -> str:
    """The variables that were found, as text: `RANK=1, WORLD_SIZE=2 (set by hand, or by an operator of Kubernetes)`."""
    by, names = place.source, [name for each in _FOREIGN if each.title == place.source for name in each[2:] if name]
    if by == BY_HAND:
        by, names = "set by hand, or by an operator of Kubernetes", [*_WHOLE, *_PODS]
    elif by == OWN:
        mine = [name.upper() for name in (*_NUMBERS, "store_addr")]
        names = [prefix + name for prefix in (config.PREFIX, config.ALIAS_PREFIX) for name in mine]
        by, names = "set by hvdlite-run, or by hand", [*names, "JOB_COMPLETION_INDEX"]
    return f"{_shown(environ, [name for name in names or _STEP if environ.get(name)])} ({by})"


def _own(environ: Mapping[str, str]) -> Place | None:
    """The rank assignment by HVDLITE_ or HOROVOD_ variables: rank and size at least, the rest where it follows."""
    found, names = dict[str, int](), list[str]()
    for name in _NUMBERS:
        option = config.option_of(name)
        for variable in (option.variable, option.alias_variable):
            if variable is not None and variable in environ and name not in found:
                found[name] = config.parse(option, environ[variable], variable)
                names.append(variable)
    if not found:
        return None
    if "rank" not in found and "size" in found and "JOB_COMPLETION_INDEX" in environ:
        found["rank"] = _number(environ, "JOB_COMPLETION_INDEX", 0)
        names.append("JOB_COMPLETION_INDEX")
    shown = _shown(environ, names)
    if "rank" not in found or "size" not in found:
        missing = "HVDLITE_SIZE" if "rank" in found else "HVDLITE_RANK"
        raise HvdInitError(f"{shown} without {missing}: set both, or neither for a job of one rank. [HVD105]")
    for mine, of in (("local_rank", "local_size"), ("cross_rank", "cross_size")):
        if (mine in found) != (of in found):
            absent = "HVDLITE_" + (of if mine in found else mine).upper()
            raise HvdInitError(f"{shown} without {absent}: set both or neither. [HVD105]")
    if found["size"] == 1:
        found = {"local_rank": 0, "local_size": 1, "cross_rank": 0, "cross_size": 1, **found}
    elif found.get("local_size") == found["size"]:
        found = {"cross_rank": 0, "cross_size": 1, **found}
    return _checked(_place([found.get(name) for name in Place._fields[:6]], OWN), shown)


def _place(numbers: list[int | None], source: str) -> Place:
    rank, size, local_rank, local_size, cross_rank, cross_size = numbers
    assert rank is not None and size is not None  # looked for by the callers
    return Place(rank, size, local_rank, local_size, cross_rank, cross_size, source)


def _foreign(environ: Mapping[str, str], source: _Source) -> Place | None:
    if source.needs is not None and source.needs not in environ:
        return None
    if source.needs is None and source.rank not in environ and source.size not in environ:
        return None
    shown = _shown(environ, [name for name in source[1:] if name is not None and name in environ])
    for name in (source.rank, source.size):
        if name not in environ:
            raise HvdInitError(
                f"{source.title}: {shown} without {name}: the environment of the launcher is incomplete. Start the "
                "script with one launcher only. [HVD105]"
            )
    numbers = [None if name is None or name not in environ else _number(environ, name, 0) for name in source[2:]]
    return _checked(_place(numbers, source.title), shown)


def _step(environ: Mapping[str, str]) -> Place | None:
    if "SLURM_STEP_ID" not in environ:
        return None
    shown = _shown(environ, [name for name in _STEP if name in environ])
    # The step's own number comes first: in an interactive step SLURM_NTASKS is that of the whole allocation.
    size_name = "SLURM_STEP_NUM_TASKS" if "SLURM_STEP_NUM_TASKS" in environ else "SLURM_NTASKS"
    size = _number(environ, size_name, 1)
    if "SLURM_PROCID" not in environ and size == 1:
        return None
    missing = "SLURM_PROCID" if "SLURM_PROCID" not in environ else "" if size_name in environ else "SLURM_NTASKS"
    if missing:
        raise HvdInitError(
            f"Slurm: {shown} without {missing}: the environment of the step is incomplete. Start the script with "
            "srun, or unset the SLURM_ variables. [HVD105]"
        )
    node = _number(environ, "SLURM_NODEID", 0)
    tasks = slurm.tasks_per_node(environ.get("SLURM_STEP_TASKS_PER_NODE", ""))
    place = Place(
        _number(environ, "SLURM_PROCID", 0),
        size,
        _number(environ, "SLURM_LOCALID", 0) if "SLURM_LOCALID" in environ else None,
        tasks[node] if node < len(tasks) else None,
        node if "SLURM_NODEID" in environ else None,
        _number(environ, "SLURM_STEP_NUM_NODES", 1) if "SLURM_STEP_NUM_NODES" in environ else None,
        "Slurm",
    )
    return _checked(place, shown)


def _by_hand(environ: Mapping[str, str]) -> Place | None:
    """The rank assignment that scripts of torch.distributed read (env://), or that an operator of Kubernetes sets
    for torchrun, where no torchrun runs. Local and cross numbers are computed at the rendezvous."""
    environ = {name: environ[name] for name in (*_WHOLE, *_PODS) if environ.get(name)}  # manifests leave some empty
    shown = _shown(environ, list(environ))
    per_pod, pods = environ.get("PET_NPROC_PER_NODE", ""), environ.get("PET_NNODES", "")
    if pods and per_pod.isdecimal() and int(per_pod) > 1:
        several = f"--nnodes {pods} --node-rank $PET_NODE_RANK --rdzv-endpoint $PET_MASTER_ADDR:29400 --nproc-per-node"
        raise HvdInitError(
            f"{shown}: each pod must run {per_pod} ranks, and this process is not one of them: start the script with "
            f"torchrun, or with hvdlite-run {('-np' if pods == '1' else several)} {per_pod}. [HVD105]"
        )
    if all(name in environ for name in _WHOLE):
        _number(environ, "MASTER_PORT", 0)
        numbers = [_number(environ, "RANK", 0), _number(environ, "WORLD_SIZE", 1)]
        return _checked(_place([*numbers, None, None, None, None], BY_HAND), shown)
    if pods.rpartition(":")[2] not in ("", "1"):
        missing = ", ".join(name for name in _PODS[2:] if name not in environ)
        if missing or not pods.isdecimal():  # 1:4 is a number for torchrun's elastic agents
            raise HvdInitError(
                f"{shown}{f' without {missing}' * bool(missing)}: this process runs in a pod of a job, but has no "
                "rank number: start the script with torchrun. [HVD105]"
            )
        numbers = [_number(environ, "PET_NODE_RANK", 0), int(pods)]
        return _checked(_place([*numbers, None, None, None, None], BY_HAND), shown)
    return None


def _number(environ: Mapping[str, str], name: str, absent: int) -> int:
    text = environ.get(name)
    if text is None:
        return absent
    try:
        return int(text, 10)
    except ValueError:
        raise HvdInitError(f"{name}={text!r}: must be a whole number. [HVD105]") from None


def _shown(environ: Mapping[str, str], names: list[str]) -> str:
    """`A=1, B=2` for error texts."""
    return ", ".join(f"{name}={environ[name][:80]}" for name in names)


def _checked(place: Place, shown: str) -> Place:
    pairs = (
        ("rank", place.rank, place.size),
        ("local rank", place.local_rank, place.local_size),
        ("cross rank", place.cross_rank, place.cross_size),
    )
    for what, number, of in pairs:
        if number is not None and (number < 0 or (of is not None and number >= of)):
            raise HvdInitError(f"{place.source}: {shown}: {what} {number} must be at least 0 and below {of}. [HVD105]")
    if place.local_size is not None and place.local_size > place.size:
        raise HvdInitError(f"{place.source}: {shown}: more ranks on this host than in the job. [HVD105]")
    return place
